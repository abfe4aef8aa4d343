"""Turn an observation into the problem of an attack.

The observation is checked, and limited to the knowledge that the threat model grants.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from flwr_leakage.attacks.dropout_masks import read_masks
from flwr_leakage.attacks.loss_check import check_loss
from flwr_leakage.attacks.network.trace import Trace
from flwr_leakage.dropout import Dropouts
from flwr_leakage.gradient_map import GradientMap, local_update, repeat_training
from flwr_leakage.normalization import derive_statistics
from flwr_leakage.params import Params, ravel
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, ThreatModel


@dataclass(frozen=True)
class Problem:
    """The problem of an attack: find samples whose update equals the observed one.

    Parameters, buffers and gradients are mappings from names to tensors.

    Attributes:
        gradient_map: the model and loss, with which the attacker computes gradients of candidates,
            in the BatchNorm mode that the attacker's knowledge allows.
        spec: the public facts about the data.
        params: the global parameters θ_t.
        buffers: the buffers with which the attacker runs the model, such as BatchNorm statistics.
        gradient: the observed pseudo-gradient g*, which is −(θ_local − θ_t) / learning rate.
        schedule: the client's local schedule. One step has no weight decay here, as it has been
            taken out of ``gradient``.
        num_samples: number B of samples that the schedule's steps use; further samples of the
            client leave no trace.
        known_targets: the true targets, (B,) class indices or (B, K) probabilities, if the
            threat model grants them, else ``None``.
        statistics: BatchNorm statistics that the threat model grants, and that a prior of an attack
            may compare with those of a candidate; or empty.
        masks: a text on how many masks of dropout the update showed, or empty. The gradient map
            applies these masks in place of dropout.
        own_statistics: the statistics of the private batch, by which the client normalised. They
            are known if the threat model grants them, or if the buffers in the update tell them;
            else empty. See :attr:`held`.
        members: the number of examples of each client if the update is the mean of several
            clients, else empty. The samples stand one client after another.
        earlier: the problems that earlier rounds pose about the same samples.
        scale: the factor by which the client scaled its update, such as by clipping, if it has been
            inferred, else 1; ``gradient`` is already divided by it.
    """

    gradient_map: GradientMap
    spec: InputSpec
    params: Params
    buffers: Params
    gradient: Params
    schedule: LocalSchedule
    num_samples: int
    known_targets: Tensor | None
    statistics: Params
    members: tuple[int, ...] = ()
    earlier: "tuple[Problem, ...]" = ()
    scale: float = 1.0
    masks: str = ""
    own_statistics: Params = field(default_factory=dict)

    @property
    def is_single_gradient(self) -> bool:
        """Whether the update is one client's gradient of one step, without weight decay."""
        plain = self.schedule.num_steps == 1 and not self.schedule.weight_decay
        return plain and not self.members

    @property
    def rounds(self) -> "tuple[Problem, ...]":
        """The problem of this round, followed by those of earlier rounds on the same samples."""
        return (self, *self.earlier)

    @property
    def gradient_weight(self) -> float:
        """The sum Σ_t w_t of the weights of local steps in the pseudo-gradient Σ_t w_t g_t.

        g_t is the gradient of step t. With momentum m, step t = 1 … n has the weight
        w_t = (1 − m^(n−t+1)) / (1 − m), which is 1 without momentum.
        """
        m, n = self.schedule.momentum, self.schedule.num_steps
        return sum((1 - m**j) / (1 - m) for j in range(1, n + 1))

    def normalized_by(self, known: Literal["granted", "running"]) -> "Problem":
        """Return the same problem with BatchNorm normalising candidates by known constants.

        ``granted`` are the statistics that the threat model grants, and ``running`` the server's
        own. A client in train mode normalises by statistics of its own batch, and differentiates
        through them. With constants this part of the gradient is missing, even at the true samples.

        Raises:
            ValueError: the threat model grants no statistics.
        """
        if known == "granted" and not self.statistics:
            raise ValueError(
                "the candidate is to be normalised by the private statistics, but the threat model "
                "grants none: set batch_norm to exact or derived, or normalize_by to candidate."
            )
        return replace(
            self,
            gradient_map=self.gradient_map.with_batch_norm("running"),
            buffers={**self.buffers, **self.statistics} if known == "granted" else self.buffers,
            earlier=tuple(problem.normalized_by(known) for problem in self.earlier),
        )

    @property
    def held(self) -> "Problem":
        """The same problem with BatchNorm normalising by the private batch's known statistics.

        These constants are :attr:`own_statistics`. The loss gets an additional term, which restores
        the part of the gradient that comes through the statistics
        (:func:`flwr_leakage.normalization.held_loss`). So the private samples keep their gradient,
        while that of other samples changes. The gradient then also depends on the contrast of a
        sample, to which a network that normalises by the sample's own statistics is blind. The
        problem itself is returned if the statistics are not known, if the update is not one plain
        step, if there are earlier rounds, or if the weight and bias of a BatchNorm layer are not
        trained.
        """
        if not (self.own_statistics and self.is_single_gradient) or self.earlier:
            return self
        try:
            gradient_map = self.gradient_map.with_statistics_held(self.params, self.gradient)
        except ValueError:
            return self
        buffers = {**self.buffers, **self.own_statistics}
        return replace(self, gradient_map=gradient_map, buffers=buffers, own_statistics={})

    @property
    def like(self) -> Tensor:
        """A parameter of the model, which has the device and precision that inputs must have."""
        return next(iter(self.params.values()))

    def zeros(self, count: int) -> Tensor:
        """Return ``count`` inputs of zeros; for a model of text, of one token that is repeated."""
        if self.spec.is_text:
            return self.spec.blank(count, self.like)
        return self.like.new_zeros(count, *self.spec.shape)

    def replay(self, batch: Batch, optimizer: str = "SGD") -> Params:
        """Return the pseudo-gradient that the client would send for a batch without scaling it.

        ``optimizer`` is the name of the client's optimizer; see :func:`simulate_gradient`.
        """
        return simulate_gradient(
            self.gradient_map,
            self.params,
            self.buffers,
            self.schedule,
            batch,
            self.members,
            optimizer,
        )

    def gradient_of(self, names: Sequence[str], batch: Batch) -> Params:
        """Return the pseudo-gradient that a batch would cause, by name, at least for ``names``.

        For one plain step, only these are in the result, which saves time; else all are.
        """
        if not self.is_single_gradient:
            return self.replay(batch)
        wanted = {name: self.params[name] for name in names}
        batch = batch[: self.schedule.batch_size]
        return self.gradient_map.gradient_of(wanted, self.params, batch, self.buffers)

    def logits(self, inputs: Tensor) -> Tensor:
        """Return the logits (B, K) for inputs (B, C, H, W), at the parameters before training."""
        return self.gradient_map.logits(self.params, inputs, self.buffers)

    def divided(self, scale: float) -> "Problem":
        """Return the same problem with the gradient divided by a factor ``scale`` > 0.

        The client has multiplied its update by this factor, such as by clipping.
        """
        gradient = {name: value / scale for name, value in self.gradient.items()}
        return replace(self, gradient=gradient, scale=self.scale * scale)

    def to(self, dtype: torch.dtype) -> "Problem":
        """Return the same problem with all floating-point tensors in ``dtype``."""

        def cast(tensors: Params) -> Params:
            return {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}

        return replace(
            self,
            params=cast(self.params),
            buffers=cast(self.buffers),
            gradient=cast(self.gradient),
            statistics=cast(self.statistics),
            own_statistics=cast(self.own_statistics),
            earlier=tuple(problem.to(dtype) for problem in self.earlier),
        )


def require_arguments(spec: object, num_examples: object) -> None:
    """Raise ``ValueError`` unless the arguments are an ``InputSpec`` and a positive integer."""
    if not isinstance(spec, InputSpec):
        raise ValueError(
            f"spec must be an InputSpec of shape (C, H, W) and classes, got {type(spec).__name__}."
        )
    if not isinstance(num_examples, Integral) or num_examples < 1:
        raise ValueError(f"num_examples must be a positive integer, got {num_examples!r}.")


def simulate_gradient(
    gradient_map: GradientMap,
    params: Params,
    buffers: Params,
    schedule: LocalSchedule,
    batch: Batch,
    members: Sequence[int] = (),
    optimizer: str = "SGD",
) -> Params:
    """Return the pseudo-gradient −(θ_local − θ_t)/η that a client with ``batch`` would cause.

    One plain SGD step gives the gradient itself. For other schedules, ``local_update``, which
    defines local training, is replayed. For the mean of several clients, each client is replayed on
    its own samples: ``Σ_c n_c/n · g_c``, with n_c = ``members[c]`` (McMahan et al. 2017).

    Another optimizer than SGD takes the same steps, and the result is not differentiable; see
    :func:`~flwr_leakage.gradient_map.repeat_training`.
    """
    if members:
        mean: Params = {}
        used = [schedule.num_samples_used(count) for count in members]
        for count, part in zip(members, _split(batch, used), strict=True):
            gradient = simulate_gradient(
                gradient_map, params, buffers, schedule, part, (), optimizer
            )
            weight = count / sum(members)
            mean = {k: mean.get(k, 0) + weight * value for k, value in gradient.items()}
        return mean
    if optimizer != "SGD":
        batches = (batch[window] for window in schedule.slices(len(batch)))
        delta = repeat_training(optimizer, gradient_map, params, batches, schedule, buffers)
    elif schedule.num_steps == 1 and not schedule.weight_decay:
        return gradient_map(params, batch[: schedule.batch_size], buffers)
    else:
        delta = local_update(gradient_map, params, batch, schedule, buffers)
    return {name: -value / schedule.learning_rate for name, value in delta.items()}


def simulate_rounds(problem: Problem, batch: Batch) -> Tensor:
    """Return the pseudo-gradients (P,) that a batch would cause in the rounds of a problem.

    They stand one after another, the latest round first.
    """
    found = []
    for p in problem.rounds:
        gradient = p.replay(batch)
        found.append(ravel({name: gradient[name] for name in p.gradient}))
    # Concatenating a single round would copy it: a gigabyte for 129 million parameters.
    return found[0] if len(found) == 1 else torch.cat(found)


def _split(batch: Batch, counts: Sequence[int]) -> list[Batch]:
    ends = torch.tensor(counts).cumsum(0).tolist()
    return [batch[end - count : end] for end, count in zip(ends, counts, strict=True)]


def pose(
    gradient_map: GradientMap, spec: InputSpec, observation: Observation, threat: ThreatModel
) -> Problem:
    """Return the problem that an attack must solve for an observation, which is checked before.

    Args:
        gradient_map: the public model and loss, in the BatchNorm mode of the clients.
        spec: the public facts about the data.
        observation: the update that the server received, and the parameters before it.
        threat: the further knowledge of the attacker, such as labels or BatchNorm statistics.

    Raises:
        ValueError: entries are missing, of a wrong shape, not finite or all zero; the number of
            examples is not positive; the model takes other inputs or has another number of outputs
            than classes; the loss cannot be computed; the threat model grants facts that were not
            disclosed, or in another shape; rounds differ in their samples or granted targets.
    """
    update = observation.update
    counts = observation.members or (update.num_examples,)
    if min(counts) < 1:
        raise ValueError(f"the update must stem from at least 1 example, got {min(counts)}.")
    if sum(counts) != update.num_examples:
        raise ValueError(
            f"members must sum to the update's {update.num_examples} examples, got {counts}."
        )
    _check_update(gradient_map.params, observation)
    observation = _without_decay(gradient_map, observation)
    update = observation.update
    bare = gradient_map
    gradient_map = as_met(gradient_map, spec, observation.params, observation.buffers)
    schedule = update.schedule
    touched = sum(schedule.num_samples_used(count) for count in counts)
    if observation.members and threat.batch_norm in ("exact", "derived"):
        raise ValueError(
            f"batch_norm={threat.batch_norm!r} describes one client's batch, the update is the "
            f"mean of {len(counts)} clients'."
        )
    known_map, buffers, statistics = _batch_norm_knowledge(
        gradient_map, spec, observation, threat, min(touched, schedule.batch_size)
    )
    targets = _granted_targets(spec, observation, threat, touched)
    device = next(iter(observation.params.values())).device
    positions = spec.output_shape[:-1]
    check_loss(gradient_map.loss, touched, spec.num_classes, targets, device, positions)
    earlier = tuple(pose(gradient_map, spec, other, threat) for other in observation.earlier)
    if any(other.num_samples != touched for other in earlier):
        raise ValueError(
            f"all rounds must hold the same {touched} samples, got "
            f"{[other.num_samples for other in earlier]}."
        )
    if targets is not None and any(
        other.known_targets is None or not torch.equal(other.known_targets, targets)
        for other in earlier
    ):
        raise ValueError("all rounds hold the same samples: their granted targets must be equal.")
    masks = ""
    is_plain = schedule.num_steps == 1 and not observation.members
    if touched == 1 and is_plain and not earlier and not spec.is_text:
        known_map, masks = _with_masks(known_map, bare, spec, observation, buffers)
    return Problem(
        masks=masks,
        gradient_map=known_map,
        spec=spec,
        params=gradient_map.turned({k: v.detach() for k, v in observation.params.items()}),
        buffers=buffers,
        gradient=gradient_map.turned({k: v.detach() for k, v in update.pseudo_gradient().items()}),
        schedule=schedule,
        num_samples=touched,
        known_targets=targets,
        statistics=statistics,
        members=observation.members,
        earlier=earlier,
        own_statistics=_own_statistics(known_map, spec, observation, threat, touched),
    )


def _without_decay(gradient_map: GradientMap, observation: Observation) -> Observation:
    """Return an observation of one step without the weight decay, which depends on no sample.

    A step of SGD with learning rate η and weight decay λ moves the trained parameters θ by
    ``−η (g + λθ)``, and the server knows all but the gradient g. An observation of several steps,
    each of which decays other weights, is returned as it is.
    """
    update = observation.update
    if update.schedule.num_steps > 1 or not update.schedule.weight_decay:
        return observation
    factor = update.schedule.learning_rate * update.schedule.weight_decay
    delta = dict(update.delta)
    for name in gradient_map.trained & delta.keys():
        change = delta[name].double()
        rest = change + factor * observation.params[name].double()
        # What is left without the decay is set to zero within the rounding of the change, so that
        # rows of unused tokens have no gradient.
        is_rounding = rest.abs() <= 2 * torch.finfo(delta[name].dtype).eps * change.abs()
        delta[name] = rest.masked_fill(is_rounding, 0.0).to(delta[name].dtype)
    schedule = replace(update.schedule, weight_decay=0.0)
    return replace(observation, update=replace(update, delta=delta, schedule=schedule))


def _granted_targets(
    spec: InputSpec, observation: Observation, threat: ThreatModel, num_samples: int
) -> Tensor | None:
    """Return the true targets of the samples that training uses, if the threat model grants them.

    Otherwise the result is ``None``. ``num_samples`` counts the samples that the steps use.

    Raises:
        ValueError: targets are granted, but were not disclosed, or have a wrong shape or range.
    """
    if threat.labels != "known":
        return None
    targets = observation.disclosed.targets
    if targets is None:
        raise ValueError("labels are known to the attacker, but no targets were disclosed.")
    if len(targets) < num_samples:
        raise ValueError(f"{num_samples} targets must be disclosed, got {len(targets)}.")
    targets = targets[:num_samples]
    soft = targets.is_floating_point()
    # Class probabilities have the shape of the logits. Class ids lack the axis of the classes.
    expected = (num_samples, *(spec.output_shape if soft else spec.output_shape[:-1]))
    if targets.shape != expected:
        raise ValueError(
            f"{'soft' if soft else 'hard'} targets must have shape {expected}, got "
            f"{tuple(targets.shape)}."
        )
    if not soft and not 0 <= int(targets.min()) <= int(targets.max()) < spec.num_classes:
        raise ValueError(
            f"targets must lie in [0, {spec.num_classes}), got "
            f"{int(targets.min())} to {int(targets.max())}."
        )
    return targets


def as_met(
    gradient_map: GradientMap, spec: InputSpec, params: Params, buffers: Params
) -> GradientMap:
    """Return the gradient map with all linear weights as (outputs, inputs), and without dropout.

    A pass of two dummy inputs shows which weights the model uses in the shape (inputs, outputs),
    and whether it calls dropout. These weights are transposed, and the calls are left out. There
    are two dummy inputs, as BatchNorm does not take a single one.

    Raises:
        ValueError: the model does not take such inputs, or does not have one output for each class.
    """
    like = next(iter(params.values()))
    dummy = spec.blank(2, like) if spec.is_text else like.new_zeros(2, *spec.shape)
    walk, trace = Dropouts(skip=False), Trace(params, records=False)
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), walk, trace:
            logits = gradient_map.logits(params, dummy, buffers)
    except (RuntimeError, IndexError, TypeError, AssertionError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"the model must take inputs of spec.shape {tuple(spec.shape)}, got "
            f"{type(error).__name__} for two of them: {first}"
        ) from error
    if spec.next_token and logits.shape != (2, *spec.output_shape):
        raise ValueError(
            f"a model of the next token must return logits (B, T, V) = (B, "
            f"{', '.join(map(str, spec.output_shape))}), got {tuple(logits.shape)}."
        )
    if logits.shape != (2, *spec.output_shape):
        raise ValueError(
            f"the model must have one output for each of {spec.num_classes} classes, got "
            f"{logits[0].numel()}."
        )
    gradient_map = gradient_map.without_dropout() if walk.found else gradient_map
    return gradient_map.with_transposed(trace.turned)


def _check_update(expected: Params, observation: Observation) -> None:
    delta, params = observation.update.delta, observation.params
    for kind, tensors in (("params", params), ("update", delta)):
        if tensors.keys() != expected.keys():
            wrong = sorted(tensors.keys() ^ expected.keys())
            raise ValueError(f"{kind} must have the model's entries; missing or unknown: {wrong}.")
        for name, value in tensors.items():
            if value.shape != expected[name].shape:
                raise ValueError(
                    f"{kind}[{name!r}] must have shape {tuple(expected[name].shape)}, "
                    f"got {tuple(value.shape)}."
                )
            if not bool(torch.isfinite(value).all()):
                raise ValueError(f"{kind}[{name!r}] holds NaN or infinite entries.")
    if not any(bool(value.any()) for value in delta.values()):
        raise ValueError("the update is zero everywhere: it tells nothing about the data.")


def _batch_norm_knowledge(
    gradient_map: GradientMap,
    spec: InputSpec,
    observation: Observation,
    threat: ThreatModel,
    batch_size: int,
) -> tuple[GradientMap, Params, Params]:
    """Return the BatchNorm mode, buffers and statistics that the attacker's knowledge allows.

    The gradient map has the mode of the clients. The observation holds the buffers before the
    update and disclosed statistics. ``batch_size`` is the number of samples in a step of training.

    Returns:
        The gradient map in the mode in which the attacker normalises; the buffers for this; and the
        statistics that a prior may compare with those of candidates, or an empty mapping.
    """
    sent = dict(observation.buffers)
    if not gradient_map.uses_batch_statistics or threat.batch_norm == "none":
        return gradient_map, sent, {}
    running = gradient_map.with_batch_norm("running")
    if threat.batch_norm == "running":
        return running, sent, sent
    if threat.batch_norm == "final":
        if observation.disclosed.statistics is None:
            raise ValueError(
                "batch_norm='final' takes the buffers of the finished model as the observation's "
                "disclosed.statistics, got none: keep the updates and attack them after training."
            )
        final = {**sent, **observation.disclosed.statistics}
        return running, final, final
    # A client in train mode differentiates through its batch statistics. The same statistics as
    # constants give another gradient, even at the true samples. So granted statistics only serve as
    # a prior.
    if threat.batch_norm == "exact":
        if observation.disclosed.statistics is None:
            raise ValueError(
                "BatchNorm statistics are known to the attacker, but none were disclosed."
            )
        return gradient_map, sent, dict(observation.disclosed.statistics)
    return gradient_map, sent, _derived(gradient_map, spec, observation, batch_size)


def _with_masks(
    known_map: GradientMap,
    bare: GradientMap,
    spec: InputSpec,
    observation: Observation,
    buffers: Params,
) -> tuple[GradientMap, str]:
    """Return the gradient map with the dropout masks that one sample's update shows.

    ``known_map`` is the map to which masks are added, without dropout. ``bare`` has the client's
    dropout, and locates its calls. ``buffers`` are those with which the attacker normalises.

    Returns:
        The map, and a text on how many masks were found. If there are none, the map is
        ``known_map`` and the text is empty.
    """
    params = known_map.turned(observation.params)
    gradient = known_map.turned(observation.update.pseudo_gradient())
    like = next(iter(params.values()))
    noise = torch.randn(1, *spec.shape, generator=torch.Generator().manual_seed(0)).to(like)
    drawing = bare.with_batch_norm(known_map.batch_norm).with_transposed(known_map.transposed)
    with torch.random.fork_rng(devices=[]):
        try:
            masks = read_masks(lambda: drawing.logits(params, noise, buffers), params, gradient)
        except ValueError:
            return known_map, ""  # BatchNorm in train mode refuses a single sample in some layer
    read = sum(mask is not None for mask in masks)
    if not read:
        return known_map, ""
    return known_map.with_masks(masks), f"{read} of {len(masks)} masks of dropout read off"


def _derived(
    gradient_map: GradientMap, spec: InputSpec, observation: Observation, batch_size: int
) -> Params:
    """Return the BatchNorm statistics of the private batch, by buffer name.

    They follow from the running statistics before and after training, which the observation holds.
    The samples in a step, ``batch_size``, set how many values a layer averages.
    """
    running = gradient_map.with_batch_norm("running")
    dummy = next(iter(observation.params.values())).new_zeros(batch_size, *spec.shape)
    layer_inputs = running.batch_norm_inputs(observation.params, dummy, observation.buffers)
    return derive_statistics(
        running.model,
        dict(observation.buffers),
        observation.update.buffers,
        observation.update.schedule.num_steps,
        layer_inputs,
    )


def _own_statistics(
    gradient_map: GradientMap,
    spec: InputSpec,
    observation: Observation,
    threat: ThreatModel,
    num_samples: int,
) -> Params:
    """Return the BatchNorm statistics by which a client in train mode normalised, by buffer name.

    The threat model may grant them. Otherwise they follow from the buffers before and after a
    single step, if the update contains these. If they are not known, or the client does not
    normalise by statistics of its batch, the result is empty.
    """
    after, before = observation.update.buffers, observation.buffers
    if not gradient_map.uses_batch_statistics or observation.members:
        return {}
    if threat.batch_norm == "exact":
        return dict(observation.disclosed.statistics or {})
    if observation.update.schedule.num_steps != 1:
        return {}
    try:
        found = _derived(gradient_map, spec, observation, num_samples)
    except (ValueError, RuntimeError):  # buffers are missing, or have another shape
        return {}
    moved = all(bool((after[name] != before[name]).any()) for name in found)
    known = all(bool(value.isfinite().all()) for value in found.values())
    return found if moved and known else {}
