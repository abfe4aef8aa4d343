"""One observation in the attacker's own terms: checked, and freed of what it may not know."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.normalization import StatelessBatchNorm, derive_statistics
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, ThreatModel


@dataclass(frozen=True)
class Problem:
    """What one attack solves: find samples whose update equals the observed one.

    Attributes:
        gradient_map: the model and loss, normalising as the attacker does.
        spec: the public facts about the data.
        params: θ_t.
        buffers: the statistics that the attacker normalises with.
        gradient: −delta / learning rate, the observed pseudo-gradient.
        schedule: the client's local schedule.
        num_samples: samples that the schedule's steps touch; the others leave no trace.
        known_targets: the true targets, where the threat model grants them, else ``None``.
        statistics: BatchNorm statistics of the private batch that the attacker holds, exact or
            derived, else empty.
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

    @property
    def is_single_gradient(self) -> bool:
        """Whether the update is one plain gradient: one step, no weight decay."""
        return self.schedule.num_steps == 1 and not self.schedule.weight_decay

    @property
    def gradient_weight(self) -> float:
        """Σ_t w_t where the pseudo-gradient is Σ_t w_t g_t over the local steps' gradients.

        With momentum m, step t of n counts (1 − m^(n−t+1)) / (1 − m) times.
        """
        m, n = self.schedule.momentum, self.schedule.num_steps
        return sum((1 - m**j) / (1 - m) for j in range(1, n + 1))

    def to(self, dtype: torch.dtype) -> "Problem":
        """The same problem with all floating-point tensors in ``dtype``."""

        def cast(tensors: Params) -> Params:
            return {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}

        return replace(
            self,
            params=cast(self.params),
            buffers=cast(self.buffers),
            gradient=cast(self.gradient),
            statistics=cast(self.statistics),
        )


def simulate_gradient(
    gradient_map: GradientMap,
    params: Params,
    buffers: Params,
    schedule: LocalSchedule,
    batch: Batch,
) -> Params:
    """The pseudo-gradient −(θ_local − θ_t)/η that a client with ``batch`` would cause.

    One plain SGD step gives the gradient itself; everything else replays ``local_update``, the
    function that defines local training.
    """
    if schedule.num_steps == 1 and not schedule.weight_decay:
        return gradient_map(params, batch[: schedule.batch_size], buffers)
    delta = local_update(gradient_map, params, batch, schedule, buffers)
    return {name: -value / schedule.learning_rate for name, value in delta.items()}


def pose(
    gradient_map: GradientMap, spec: InputSpec, observation: Observation, threat: ThreatModel
) -> Problem:
    """Check an observation and state the problem that it poses under a threat model.

    Raises:
        ValueError: entries are missing, of a wrong shape, not finite or all zero; the number of
            examples is not positive; the threat model grants what was not disclosed.
    """
    update = observation.update
    if update.num_examples < 1:
        raise ValueError(
            f"the update must stem from at least 1 example, got {update.num_examples}."
        )
    _check_update(gradient_map.params, observation)
    schedule = update.schedule
    touched = min(update.num_examples, schedule.num_steps * schedule.batch_size)
    known_map, buffers, statistics = _batch_norm_knowledge(
        gradient_map, spec, observation, threat, min(touched, schedule.batch_size)
    )
    targets = None
    if threat.labels == "known":
        targets = observation.disclosed.targets
        if targets is None:
            raise ValueError("labels are known to the attacker, but no targets were disclosed.")
        if len(targets) < touched:
            raise ValueError(f"{touched} targets must be disclosed, got {len(targets)}.")
        targets = targets[:touched]
        if (
            targets.ndim == 1
            and not 0 <= int(targets.min()) <= int(targets.max()) < spec.num_classes
        ):
            raise ValueError(
                f"targets must lie in [0, {spec.num_classes}), got "
                f"{int(targets.min())} to {int(targets.max())}."
            )
    return Problem(
        gradient_map=known_map,
        spec=spec,
        params={name: value.detach() for name, value in observation.params.items()},
        buffers=buffers,
        gradient={name: v.detach() for name, v in update.pseudo_gradient().items()},
        schedule=schedule,
        num_samples=touched,
        known_targets=targets,
        statistics=statistics,
    )


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
    """The map, buffers and private statistics that the threat model leaves the attacker."""
    sent = dict(observation.buffers)
    has_batch_norm = any(isinstance(m, StatelessBatchNorm) for m in gradient_map.model.modules())
    if not has_batch_norm or gradient_map.batch_norm == "running" or threat.batch_norm == "none":
        return gradient_map, sent, {}
    running = gradient_map.with_batch_norm("running")
    if threat.batch_norm == "running":
        return running, sent, {}
    if threat.batch_norm == "exact":
        statistics = observation.disclosed.statistics
        if statistics is None:
            raise ValueError(
                "BatchNorm statistics are known to the attacker, but none were disclosed."
            )
    else:
        dummy = torch.zeros(batch_size, *spec.shape)
        layer_inputs = running.batch_norm_inputs(observation.params, dummy, sent)
        statistics = derive_statistics(
            running.model,
            sent,
            observation.update.buffers,
            observation.update.schedule.num_steps,
            layer_inputs,
        )
    return running, {**sent, **statistics}, dict(statistics)
