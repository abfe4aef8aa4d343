"""Check whether the training that scores assume explains the client's update."""

from dataclasses import dataclass

import torch

from flwr_leakage.capture import TOLERANCE
from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.measurements import NOT_CHECKED
from flwr_leakage.params import ravel, subtract
from flwr_leakage.per_sample.route import differentiable
from flwr_leakage.records import Exposure


@dataclass(frozen=True)
class Explanation:
    """The distance between the client's update and that of the training that scores assume.

    Attributes:
        distance: ‖repeated − made‖/‖made‖, for the repeated update and the one that the client
            made; ``None`` if the training was not repeated.
        sentence: the result in words.
    """

    distance: float | None
    sentence: str

    @property
    def fails(self) -> bool:
        """Return whether the repeated update differs from the client's by more than ``TOLERANCE``,
        relative to the client's; false if the training was not repeated.
        """
        return self.distance is not None and not self.distance <= TOLERANCE


def explain_update(gradient_map: GradientMap, exposure: Exposure) -> Explanation:
    """Return how far the update of a repeated local training is from the client's own.

    The training is repeated as scores assume it, and the client's update is taken before any
    defense. Every hidden difference shows, such as another mode of BatchNorm, dropout, loss,
    optimizer or order of the samples. The comparison costs one local training.

    Args:
        gradient_map: the gradient map with which scores are computed.
        exposure: the private data of the whole round.
    """
    raw = exposure.raw
    used = raw.schedule.num_samples_used(raw.num_examples)
    if len(exposure.defended) < used:
        return Explanation(
            None,
            f"whether the scored model {NOT_CHECKED}of its {used:,} samples "
            f"{len(exposure.defended):,} were kept, the whole batches that reach max_samples",
        )
    samples = exposure.defended[:used]
    params, buffers = exposure.params, exposure.buffers
    gradient_map = differentiable(gradient_map, params, buffers, samples)
    try:
        replayed = local_update(gradient_map, params, samples, raw.schedule, buffers)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        return Explanation(None, f"whether the scored model {NOT_CHECKED}{reason}")
    length = float(ravel(raw.delta).double().norm())
    gap = float(ravel(subtract(replayed, raw.delta)).detach().double().norm())
    distance = gap / length if length else (0.0 if gap == 0 else torch.inf)
    if distance <= TOLERANCE:
        return Explanation(distance, f"the scored model explains the update to {distance:.0e}")
    return Explanation(
        distance,
        f"the scored model does not explain the update (relative distance {distance:.2g}): the "
        f"scores are of another training than the one that took place",
    )
