"""The linear systems of a fading's steps, solved in the coordinates of the prior."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.mask_equations import LinearisedMasks
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.low_rank import LowRank


@dataclass(frozen=True)
class StepSettings:
    """How the linear system of a step is solved.

    The preconditioner is a low-rank approximation, made from some columns of the system's matrix.
    A column costs as much as an iteration of conjugate gradients.

    Attributes:
        tolerance: relative residual at which conjugate gradients stop, in (0, 1).
        rank: columns in a preconditioner, ≥ 1.
        block: columns that are computed at once, ≥ 1.
        many_iterations: a step of more iterations than this is slow, and a preconditioner is made
            for the next one, ≥ 1.
        patience: a preconditioner is kept for this many iterations per column at least, ≥ 0,
            before a slow step may lead to another.
    """

    tolerance: float = 3e-2
    rank: int = 500
    block: int = 32
    many_iterations: int = 100
    patience: float = 2

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must lie in (0, 1), got {self.tolerance}.")
        for name in ("rank", "block", "many_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.patience < 0:
            raise ValueError(f"patience must be at least 0, got {self.patience}.")


@dataclass(frozen=True)
class FadingSolver:
    """Solves the linear systems of successive steps by conjugate gradients, in single precision.

    Conjugate gradients fit the strong directions first, and those that the prior prefers. So
    ending them early regularises. Once a step takes long, the largest eigenvalues of the next
    step's matrix are approximated. A preconditioner takes them out of that step's system and of
    the following ones', whose matrices differ little. So every step returns the solver for the
    next one.

    Attributes:
        prior: the prior of the inputs, x = μ + L s.
        settings: how one system is solved.
        low_rank: the largest eigenvalues of an earlier step's matrix; ``None`` before the first
            slow step.
        spent: iterations since ``low_rank`` was computed; ``None`` where there is none.
        is_slow: whether the last step took so long that ``low_rank`` is to be computed anew.
    """

    prior: ImagePrior
    settings: StepSettings
    low_rank: LowRank | None = None
    spent: int | None = None
    is_slow: bool = False

    def step(
        self, system: LinearisedMasks, slope: Tensor, weight: float, iterations: int
    ) -> tuple[Tensor, "FadingSolver"]:
        """The step −(LᵀJᵀJL + αI)⁻¹ slope, and the solver for the next one.

        Args:
            system: J, the derivative of the residuals by x, in single precision.
            slope: half the objective's derivative by the coordinates s, (C, H, W).
            weight: α of the prior.
            iterations: most iterations of conjugate gradients.
        """
        settings, spent, low_rank = self.settings, self.spent, self.low_rank
        single = self.prior.single()
        if self.is_slow:
            spent, low_rank = 0, approximate(system, self.prior, settings.rank, settings.block)
        product = _normal_product(system, single, batch=1)
        step, taken = conjugate_gradients(
            lambda vector: product(vector.reshape(1, *slope.shape)).flatten() + weight * vector,
            -slope.flatten().float(),
            settings.tolerance,
            iterations,
            torch.clone if low_rank is None else low_rank.preconditioner(weight),
        )
        if spent is not None:
            spent += taken
        is_due = spent is None or spent > settings.patience * settings.rank
        is_slow = is_due and taken > settings.many_iterations
        following = replace(self, low_rank=low_rank, spent=spent, is_slow=is_slow)
        return step.to(slope.dtype).reshape(slope.shape), following


def approximate(system: LinearisedMasks, prior: ImagePrior, rank: int, block: int) -> LowRank:
    """The largest eigenvalues of LᵀJᵀJL, from its columns for which the prior varies most.

    Args:
        system: J, in single precision.
        prior: the prior with L.
        rank: the number of columns, or all of them where the matrix has fewer.
        block: columns that are computed at once.
    """
    smoothest = prior.deviations.flatten().argsort(descending=True)[:rank]
    units = torch.zeros(len(smoothest), math.prod(system.shape))
    units[torch.arange(len(units)), smoothest] = 1
    single = prior.single()
    columns = [
        _normal_product(system, single, len(part))(part.reshape(-1, *system.shape))
        for part in units.split(block)
    ]
    return LowRank.from_columns(torch.cat(columns).flatten(1), smoothest)


def _normal_product(
    system: LinearisedMasks, prior: ImagePrior, batch: int
) -> Callable[[Tensor], Tensor]:
    """The product with LᵀJᵀJL, for batches of vectors (batch, C, H, W)."""
    pull = system.pull_back(batch)
    return lambda steps: prior.pull(pull(system.push(prior.push(steps))))
