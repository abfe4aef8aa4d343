"""Compute the perturbation δ by which a defense changed an update."""

from typing import Literal

from jaxtyping import Float
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap, local_update
from flwr_leakage.params import ravel, subtract
from flwr_leakage.records import Exposure

Point = Literal["defended", "private"]


def update_perturbation(
    gradient_map: GradientMap, exposure: Exposure, point: Point = "defended"
) -> Float[Tensor, " P"]:
    """Return the perturbation δ (P,), the released pseudo-gradient minus the undefended one, in
    float64. It is zero for parameters that are not trained.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        exposure: the private data of the client's round, or of some samples of it.
        point: with ``defended``, the released update is compared with the update before the defense
            changed it. With ``private``, it is compared with the update of undefended training on
            the private samples, which is repeated here. Only the latter includes the effect of a
            defense that encodes samples.

    Raises:
        ValueError: ``point`` is ``private``, and not all samples of the training were kept.
    """
    released = exposure.released.pseudo_gradient()
    if point == "defended":
        reference = exposure.raw.pseudo_gradient()
    else:
        private = exposure.whole.private
        schedule = exposure.raw.schedule
        used = schedule.num_samples_used(exposure.raw.num_examples)
        if len(private) < used:
            raise ValueError(
                f"point='private' replays the training on its {used} samples, but only the first "
                f"{len(private)} were kept: raise max_samples."
            )
        delta = local_update(gradient_map, exposure.params, private, schedule, exposure.buffers)
        reference = {k: -v.detach() / schedule.learning_rate for k, v in delta.items()}
    difference = subtract(
        {name: value.double() for name, value in released.items()},
        {name: value.double() for name, value in reference.items()},
    )
    # The perturbation of a tensor that is not trained is set to zero: such a tensor reveals
    # nothing, so that its perturbation hides nothing.
    trained = gradient_map.trained
    return ravel({k: difference[k] * (k in trained) for k in exposure.params})


def scale_note(exposure: Exposure, weights: Float[Tensor, " B"]) -> str:
    """Return a note for the user that the perturbation of sample i's own gradient is δ/wᵢ, with the
    update's perturbation δ and the sample's weight wᵢ in the pseudo-gradient, ``weights``. The note
    is empty if the update was not changed.
    """
    raw, released = exposure.raw.delta, exposure.released.delta
    used = weights[weights > 0]
    if not len(used) or all(bool((raw[name] == released[name]).all()) for name in raw):
        return ""
    least, most = float(used.min()), float(used.max())
    if most - least <= 1e-6 * most:
        span, factor = f"w = {most:.4g}", f"{1 / most:.4g}"
    else:
        span, factor = f"w = {least:.4g} … {most:.4g}", f"{1 / most:.4g} to {1 / least:.4g}"
    return (
        f"a sample's own δ is δ/w with {span} its weight in the update: what is hidden in the "
        f"update counts {factor} times on a sample's own gradient"
    )
