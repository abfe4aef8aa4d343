"""Reconstruct the samples behind updates by a single function call, without Flower."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd

from flwr_leakage._conf import DEFAULT_ATTACK
from flwr_leakage.attacks.base import Attack, ProgressCallback
from flwr_leakage.attacks.by_fit import by_fit
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.loss_check import check_loss
from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.attacks.presets import load_preset
from flwr_leakage.attacks.problem import require_arguments
from flwr_leakage.dropout import functional_dropout
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.losses import Loss
from flwr_leakage.normalization import BatchNormMode, mode_of, with_stateless_batch_norm
from flwr_leakage.params import Params, on_cpu, scale, subtract
from flwr_leakage.records import (
    BatchNormKnowledge,
    Disclosure,
    InputSpec,
    LocalSchedule,
    Observation,
    Reconstruction,
    ThreatModel,
    Update,
)


@dataclass(frozen=True)
class ParameterChange:
    """A model's state before and after local training.

    Attributes:
        before: the model's parameters, and buffers if there are any, as in a ``state_dict``.
        after: the same entries after training.
        server_learning_rate: the server's learning rate η_s, if ``before`` and ``after`` are the
            server's states around an aggregation ``θ ← θ + η_s · mean Δ`` of the clients' changes
            Δ; 1 for a client's own states.
    """

    before: Mapping[str, Tensor] = field(repr=False)
    after: Mapping[str, Tensor] = field(repr=False)
    server_learning_rate: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.server_learning_rate < math.inf:
            raise ValueError(
                f"server_learning_rate must be positive, got {self.server_learning_rate}."
            )


Gradients = Mapping[str, Tensor] | tuple[Tensor | None, ...]
"""Gradients by parameter name, or a tuple of them in the order of ``model.parameters()``, for all
parameters or for the trained ones."""

OneKind = TypeVar("OneKind", bound=Gradients | ParameterChange)
"""The kind of the updates in a list. Type checkers do not accept a ``list`` of one kind as a
``list`` of several kinds, and a ``Sequence`` would accept a tuple, which is one update."""


P = ParamSpec("P")


@runtime_checkable
class _OneOrSeveral(Protocol[P]):
    """A function that returns one reconstruction for one update, and a list of them for a list."""

    @overload
    def __call__(
        self,
        model: nn.Module,
        update: Gradients | ParameterChange,
        *args: P.args,
        **settings: P.kwargs,
    ) -> Reconstruction: ...
    @overload
    def __call__(
        self,
        model: nn.Module,
        update: list[Gradients | ParameterChange],
        *args: P.args,
        **settings: P.kwargs,
    ) -> list[Reconstruction]: ...
    @overload
    def __call__(
        self, model: nn.Module, update: list[OneKind], *args: P.args, **settings: P.kwargs
    ) -> list[Reconstruction]: ...


def _one_or_several(call: Callable[Concatenate[nn.Module, Any, P], Any]) -> _OneOrSeveral[P]:
    """Return ``call`` itself, with overloaded types for one update and for a list of updates.

    For type checkers, one update gives one reconstruction, and a list of updates gives a list.
    """
    return cast(_OneOrSeveral[P], call)


@_one_or_several
def attack(
    model: nn.Module,
    update: Gradients | ParameterChange | list[Gradients | ParameterChange],
    *,
    spec: InputSpec,
    preset: str | Attack = DEFAULT_ATTACK,
    num_examples: int = 1,
    schedule: LocalSchedule | None = None,
    targets: Tensor | Sequence[Tensor] | None = None,
    members: Sequence[int] = (),
    same_samples: bool = False,
    loss: Loss = F.cross_entropy,
    batch_norm: BatchNormMode | None = None,
    batch_norm_knowledge: BatchNormKnowledge = "none",
    seed: int = 0,
    workers: int = 1,
    folder: str | None = None,
    max_seconds: float | None = None,
    progress: ProgressCallback | None = None,
) -> Reconstruction | list[Reconstruction]:
    """Reconstruct the samples behind one update, or behind each of a list of updates.

    Args:
        model: the network; gradients belong to its present parameters. Parameters that require no
            gradient are frozen. If the update shows masks of dropout, they are used. Other dropout
            is left out, with a warning if a module or a function applies it.
        update: gradients, or parameters before and after training. A list of updates is attacked
            together.
        spec: input shape, number of classes and normalisation. If the normalisation is unknown
            (``known=False``), all public ones are tried, and the fit decides. A model of token ids
            takes ``InputSpec.text``, and ``flwr_leakage.losses.NextToken`` as the loss if it
            predicts the next token.
        preset: the name of a preset in ``conf/attack``, or an attack.
        num_examples: number of samples behind each update.
        schedule: the local training of each update; one step of all samples by default. It is
            required for parameters before and after, as the learning rate scales the change.
        targets: the true labels if the attacker knows them, one tensor for each update; otherwise
            they are inferred from the update.
        members: the number of examples of each client if each update is the mean of several
            clients' updates, weighted by these numbers. They sum to ``num_examples``.
        same_samples: whether all updates stem from the same samples, the latest update last. They
            are then attacked jointly, with one reconstruction.
        loss: the client's loss, a map (logits, targets) ↦ scalar; class weights of a module may be
            in single precision.
        batch_norm: whether the client normalised with ``batch`` or ``running`` statistics. The
            default follows the model's mode: ``batch`` in train mode.
        batch_norm_knowledge: the attacker's knowledge of ``batch`` statistics; ``exact`` ones
            cannot be passed here.
        seed: seed of the attack's random draws, ≥ 0.
        workers: number of processes that share the updates; see ``flwr_leakage.attacks.Parallel``.
        folder: the folder for finished updates, from which an interrupted call can continue.
        max_seconds: CPU seconds that the attack may take for each update. It then ends with its
            best result, and sets ``stats["stopped"]``.
        progress: a callback that is called from time to time.

    Returns:
        One reconstruction, or a list of them for a list of updates (with one entry for
        ``same_samples``).

    Raises:
        ValueError: the preset is unknown; parameters before and after come without a schedule, or
            with other names than the model's; a tuple of gradients has another length than the
            parameters; an update is none of the above; the number of an update's targets is not
            that of its samples; the loss does not take logits and class ids in float64.
    """
    require_arguments(spec, num_examples)
    updates = update if isinstance(update, list) else [update]
    for given in updates:
        if not isinstance(given, tuple | Mapping | ParameterChange):
            raise ValueError(
                "update must be a tuple of gradients, a mapping of them by parameter name, a "
                f"ParameterChange, or a list of such updates, got {_describe(update)}."
            )
    if targets is None:
        labels: list[Tensor | None] = [None] * len(updates)
    else:
        labels = _labels(targets)
    if len(labels) != len(updates):
        raise ValueError(
            f"targets must hold one tensor for each of {len(updates)} updates, got {len(labels)}."
        )
    gradient_map = GradientMap(model, loss, batch_norm or mode_of(model))
    _warn_of_dropout(model, spec, gradient_map.batch_norm)
    labels = [None if label is None else label.cpu() for label in labels]
    first, positions = labels[0] if labels else None, spec.output_shape[:-1]
    check_loss(gradient_map.loss, num_examples, spec.num_classes, first, positions=positions)
    observations = [
        as_observation(gradient_map, given, num_examples, schedule, label, index, tuple(members))
        for index, (given, label) in enumerate(zip(updates, labels, strict=True))
    ]
    if same_samples:
        *earlier, latest = observations
        observations = [replace(latest, earlier=tuple(earlier))]
    threat = ThreatModel(
        labels="inferred" if targets is None else "known",
        batch_norm=batch_norm_knowledge,
        view="aggregate" if members else "single",
        rounds=len(updates) if same_samples else 1,
    )
    chosen = load_preset(preset) if isinstance(preset, str) else preset
    if workers > 1 or folder is not None:
        chosen = Parallel(chosen, workers, folder=folder)
    job = AttackJob(gradient_map, spec, observations, threat, seed, max_seconds=max_seconds)
    # A model may draw from the global generator, whose state is restored after the attack.
    with torch.random.fork_rng(devices=[]):
        results = by_fit(chosen, job, progress)
    return results if isinstance(update, list) else results[0]


def _describe(update: object) -> str:
    if not isinstance(update, list):
        return type(update).__name__
    kinds = sorted({type(entry).__name__ for entry in update})
    hint = "; the gradients of one update go into a tuple" if kinds == ["Tensor"] else ""
    return f"a list of {', '.join(kinds)}{hint}"


def _labels(targets: object) -> list[Tensor | None]:
    """Return the targets of each update as a list, given one tensor, or a list of them.

    Raises:
        ValueError: an entry is no tensor, or is a scalar.
    """
    given: list[Any] = list(targets) if isinstance(targets, list | tuple) else [targets]
    for each in given:
        if not isinstance(each, Tensor) or each.ndim == 0:
            shown = "a tensor of shape ()" if isinstance(each, Tensor) else repr(each)
            raise ValueError(
                "targets must be a tensor of class ids (B,) or probabilities (B, K), for a list of "
                f"updates a list of such tensors, got {shown}; torch.tensor([7]) is one id."
            )
    return given


def _require_tensors(what: str, entries: Mapping[str, object]) -> None:
    wrong = {name: value for name, value in entries.items() if not isinstance(value, Tensor)}
    for name, value in wrong.items():
        raise ValueError(
            f"{what}[{name!r}] must be a torch.Tensor, got {type(value).__module__}."
            f"{type(value).__qualname__}; torch.as_tensor makes one of an array."
        )


def as_observation(
    gradient_map: GradientMap,
    given: Gradients | ParameterChange,
    num_examples: int,
    schedule: LocalSchedule | None,
    targets: Tensor | None,
    index: int,
    members: tuple[int, ...],
) -> Observation:
    """Return one update as an observation of a server in round 0.

    ``given`` is the gradients by name or in the order of the parameters, or the parameters before
    and after training. The schedule ``None`` is one step of all samples with learning rate 1. The
    targets are the true labels if the attacker knows them. ``index`` becomes the client's id.
    ``members`` are the numbers of examples of clients if the update is their mean.

    Raises:
        ValueError: parameters before and after came without a schedule, or with other names than
            the model's; gradients are too few or no tensors; targets are not one for each sample.
    """
    params, buffers = gradient_map.params, gradient_map.buffers
    buffers_after: Params = {}
    if isinstance(given, ParameterChange):
        if schedule is None:
            raise ValueError("parameters before and after need the local schedule.")
        for when, state in (("before", given.before), ("after", given.after)):
            if not params.keys() <= state.keys():
                raise ValueError(
                    f"update.{when} must hold the model's parameters {sorted(params)}, "
                    f"got {sorted(state)}."
                )
        buffers = {name: given.before.get(name, value) for name, value in buffers.items()}
        buffers_after = {name: given.after[name] for name in buffers if name in given.after}
        after = {name: given.after[name] for name in params}
        params = {name: given.before[name] for name in params}
        _require_tensors("update.before", {**params, **buffers})
        _require_tensors("update.after", {**after, **buffers_after})
        params, after = on_cpu(params), on_cpu(after)
        buffers, buffers_after = on_cpu(buffers), on_cpu(buffers_after)
        delta = scale(subtract(after, params), 1 / given.server_learning_rate)
    else:
        schedule = schedule or LocalSchedule(1.0, batch_size=num_examples)
        found = on_cpu(_by_name(gradient_map, given))
        delta = {name: -schedule.learning_rate * value for name, value in found.items()}
    if targets is not None:
        _check_targets(len(targets), num_examples, members, schedule)
    return Observation(
        server_round=0,
        client_id=index,
        params=params,
        buffers=buffers,
        update=Update(delta, buffers_after, schedule, num_examples),
        disclosed=Disclosure(targets=targets),
        members=members,
    )


def _by_name(gradient_map: GradientMap, given: Gradients) -> Params:
    """Return the gradients by parameter name, with zeros for frozen parameters that have none.

    The gradients are given by name, or as a tuple in the model's order, for all parameters or for
    the trained ones. Entries of the tuple may be ``None``.

    Raises:
        ValueError: a tuple has another length, or an entry is no tensor.
    """
    params, trained = gradient_map.params, gradient_map.trained
    if isinstance(given, tuple):
        learned = [name for name in params if name in trained]
        names = learned if len(given) == len(learned) else list(params)
        if len(given) != len(names):
            frozen = f" ({len(learned)} of them trained)" if len(learned) < len(params) else ""
            raise ValueError(
                f"{len(params)} gradients must be given for the model's parameters{frozen}, "
                f"got {len(given)}."
            )
        pairs = list(zip(names, given, strict=True))
    elif isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        raise ValueError(
            f"update must be gradients by name or a tuple of them, or a ParameterChange, got "
            f"{type(given).__name__}."
        )
    found = {name: value for name, value in pairs if value is not None}
    _require_tensors("update", found)
    zeros = {name: torch.zeros_like(v) for name, v in params.items() if name not in trained}
    merged = {**zeros, **found}
    # The order is that of the parameters. Unknown names are kept, so that an error can name them.
    return {name: merged[name] for name in [*params, *merged] if name in merged}


def _warn_of_dropout(model: nn.Module, spec: InputSpec, mode: BatchNormMode) -> None:
    """Warn if the model applies dropout, as not every update shows the masks that a client drew.

    The model is in the mode in which the client trained. One pass of an input of the shape in
    ``spec`` finds dropout that functions apply; ``mode`` tells BatchNorm's statistics in it.
    """
    active = [
        f"{name or type(layer).__name__} (p={layer.p:g})"
        for name, layer in model.named_modules()
        if isinstance(layer, _DropoutNd) and layer.training and layer.p > 0
    ]
    active += [
        f"{name or type(layer).__name__} (dropout={layer.dropout:g})"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.RNNBase) and layer.training and layer.dropout > 0
    ]
    own = with_stateless_batch_norm(model, mode)
    for layer in own.modules():
        if isinstance(layer, _DropoutNd):
            layer.eval()  # the warning already names this layer
    active += _functions_that_drop(own, spec)
    always = _functions_that_drop(own.eval(), spec)
    if not active and not always:
        return
    kept = f" {', '.join(always[:3])} drops in eval mode, too." if always else ""
    where = "the model is in train mode and has dropout" if model.training else "the model drops"
    advice = "" if always else " If the client trained without, pass model.eval()."
    warnings.warn(
        f"{where}: {', '.join(active[:3])}.{kept} The attack reads the client's masks off the "
        "update of one sample where a linear layer follows. It leaves other dropout out, and "
        f"matches an update that was computed with it only roughly.{advice}",
        stacklevel=3,
    )


def _functions_that_drop(model: nn.Module, spec: InputSpec) -> list[str]:
    like = next(model.parameters())
    inputs = spec.blank(2, like) if spec.is_text else like.new_zeros(2, *spec.shape)
    try:
        return functional_dropout(model, inputs)
    except (RuntimeError, IndexError, TypeError, AssertionError, ValueError):
        return []  # reading the update reports that the model takes no such inputs


def _check_targets(
    count: int, num_examples: int, members: tuple[int, ...], schedule: LocalSchedule
) -> None:
    """Raise ``ValueError`` unless there are as many targets (``count``) as samples trained on.

    For a single client, targets of all ``num_examples`` may be given, too. ``members`` are the
    numbers of samples of the clients over which the update is a mean, or empty. The schedule tells
    how many samples its steps use.
    """
    used = sum(schedule.num_samples_used(examples) for examples in members or (num_examples,))
    # The targets of several clients follow one another. A target of a sample that no step uses
    # would shift those of the next client, so that it is refused.
    allowed = {used} if members else {used, num_examples}
    if count not in allowed:
        raise ValueError(
            f"targets must hold one entry for each of {' or '.join(map(str, sorted(allowed)))} "
            f"samples of an update, got {count}."
        )
