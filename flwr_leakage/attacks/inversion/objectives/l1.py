"""Objectives with the absolute distance between the candidate's gradient and the observed one."""

from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.attacks.inversion.objectives.euclidean import Euclidean
from flwr_leakage.params import Params


def absolute_distance(candidate: Params, observed: Params) -> Tensor:
    """Return ``‖g − g*‖₁``, a scalar, over all parameters' entries.

    Args:
        candidate: the candidate's gradient g, by parameter name.
        observed: the observed gradient g*, by the same names.
    """
    terms = [(candidate[k] - observed[k]).abs().sum() for k in observed]
    return sum(terms[1:], start=terms[0])


@dataclass(frozen=True)
class L1:
    """``‖g − g*‖₁ / ‖g*‖₁``, with the candidate's gradient g and the observed gradient g*.

    Up to its scale, it is the negative log-likelihood of g under Laplacian noise on g*.
    """

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        terms = [value.abs().sum() for value in observed.values()]
        return absolute_distance(candidate, observed) / sum(terms[1:], start=terms[0])


@dataclass(frozen=True)
class Tag:
    """``‖g − g*‖² / ‖g*‖² + l1_weight · ‖g − g*‖₁ / ‖g*‖₁``, the objective of TAG.

    g is the candidate's gradient and g* the observed one (Deng et al. 2021, eq. 4, with both terms
    made scale-free). For the paper's weights, which are larger for layers nearer to the input, wrap
    it in ``LayerWeighted``.

    Attributes:
        l1_weight: the paper's α, ≥ 0.
    """

    l1_weight: float = 0.1

    def __post_init__(self) -> None:
        if self.l1_weight < 0:
            raise ValueError(f"l1_weight must be ≥ 0, got {self.l1_weight}.")

    def __call__(self, candidate: Params, observed: Params) -> Tensor:
        """Return the distance of the candidate's gradient from the observed one, a scalar."""
        squared = Euclidean()(candidate, observed)
        return squared + self.l1_weight * L1()(candidate, observed)
