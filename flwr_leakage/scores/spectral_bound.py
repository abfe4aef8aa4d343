"""Define the base class of error bounds from the singular values of a sample's Jacobian."""

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.per_sample import Precision, SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.records import State
from flwr_leakage.scores.base import FLAT, Column, first_notes, notes_where
from flwr_leakage.scores.eigenvalue_mean import DenseScore, eigenvalue_mean
from flwr_leakage.scores.noise_level import check_noise_std, noise_level

LACKING = (
    "J has rank {} of {}: no unbiased attacker has a finite error; what the update does not tell "
    "is only guessed"
)


@dataclass(frozen=True)
class SpectralBound(DenseScore):
    """A base class of lower bounds of an attacker's RMSE: √ of a mean over the eigenvalues of JJᵀ.

    J ∈ R^{N×P} is the Jacobian of a sample's gradient.

    Attributes:
        noise_std: the standard deviation σ of the noise on the pseudo-gradient; with ``None`` it is
            estimated from the defense's perturbation δ, if δ is independent Gaussian noise of one
            size (see ``noise_level``).
        max_dense_inputs: the largest N for which J is formed, if ``memory_bytes`` allows, by N
            products and an SVD. Otherwise Lanczos quadrature gives a number that is at most the
            bound, and so a weaker bound.
        num_probes: the number of random vectors of the quadrature, ≥ 2.
        max_steps: the largest number of Lanczos steps for each vector, of two products each.
        rank_cutoff: singular values below this share of the largest count as zero.
    """

    noise_std: float | None = None
    max_dense_inputs: int = 1024
    num_probes: int = 4
    max_steps: int = 100
    rank_cutoff: float = 1e-12
    precision: Precision = field(default="float64", kw_only=True)

    def __post_init__(self) -> None:
        check_noise_std(self.noise_std)
        if self.num_probes < 2 or self.max_steps < 1:
            raise ValueError(
                f"num_probes must be at least 2 and max_steps at least 1, got {self.num_probes}, "
                f"{self.max_steps}."
            )
        if self.precision != "float64":
            raise ValueError(f"precision must be 'float64' for small λ, got {self.precision!r}.")

    @abstractmethod
    def squared_error(
        self, eigenvalues: Float[Tensor, "S k"], noise_std: Float[Tensor, "S 1"]
    ) -> Float[Tensor, "S k"]:
        """Return the squared error along the singular direction of each eigenvalue λ (S, k) of JJᵀ,
        with J the Jacobian of a sample's gradient and noise of standard deviation (S, 1) on that
        gradient. A subclass must define a function that is completely monotone in λ, such as 1/λ.
        """

    def bound(
        self, name: str, problem: SampleProblem, draws: Draws, exact: State, full_rank: bool
    ) -> Column:
        """Return the column ``name`` of √ of the mean of ``squared_error`` over the eigenvalues of
        JJᵀ, in model input units. A value from the dense Jacobian J gets the state ``exact``. With
        ``full_rank`` there is no number if J lacks full rank, as the bound is infinite then.
        """
        operator = problem.operator
        level, silent = noise_level(problem, self.noise_std)
        known = level.isfinite()
        if not bool(known.any()):
            return Column(name, level, "model input", "larger is safer", silent, None, "unresolved")
        noise = torch.where(known, level, 1.0)[:, None]
        mean = eigenvalue_mean(
            problem,
            lambda values: self.squared_error(values, noise),
            draws,
            self.is_dense(operator),
            self.num_probes,
            self.max_steps,
            self.rank_cutoff,
        )
        missing = first_notes(silent, notes_where(mean.largest == 0, FLAT))
        if full_rank and mean.exact:
            lacking = [
                LACKING.format(rank, operator.num_inputs) if rank < operator.num_inputs else ""
                for rank in mean.rank.tolist()
            ]
            missing = first_notes(missing, lacking)
        bare = torch.tensor([bool(note) for note in missing])
        values = torch.where(bare, torch.nan, mean.values.sqrt())
        by_probes = f"a lower bound of it, by quadrature with {self.num_probes} probes"
        notes = first_notes(missing, ["" if mean.exact else by_probes] * len(problem))
        kind: State = exact if mean.exact else "lower bound"
        errors = mean.errors / values / 2
        return Column(name, values, "model input", "larger is safer", notes, errors, kind)
