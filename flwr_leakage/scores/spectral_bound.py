"""What the bounds from the eigenvalues of JJᵀ share: noise level, dense or iterative route."""

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.per_sample import Precision, SampleProblem
from flwr_leakage.randomness import Draws
from flwr_leakage.scores.base import FLAT, Column, SampleScore, first_notes, notes_where
from flwr_leakage.scores.eigenvalue_mean import EigenvalueMean, eigenvalue_mean, fits
from flwr_leakage.scores.noise_level import check_noise_std, noise_level
from flwr_leakage.spectral.dense import dense_bytes


@dataclass(frozen=True)
class SpectralBound(SampleScore):
    """A lower bound of an attacker's RMSE that is √ of a mean over the eigenvalues of JJᵀ.

    Attributes:
        noise_std: σ of the noise on the pseudo-gradient; ``None`` reads it from δ, where δ is
            independent Gaussian noise of one size (see ``noise_level``).
        max_dense_inputs: N up to which J is formed, where ``memory_bytes`` allows: N products and
            an SVD. Beyond, Lanczos quadrature bounds the bound from below.
        num_probes: random vectors of the quadrature, ≥ 2.
        max_steps: most Lanczos steps for each, of two products.
        rank_cutoff: relative size of singular values that count as zero.
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

    def extra_bytes(self, num_inputs: int, num_parameters: int) -> int:
        """Memory of the dense route, for one sample."""
        if not fits(num_inputs, num_parameters, self.max_dense_inputs, self.memory_bytes):
            return 0
        return dense_bytes(num_inputs, num_parameters, torch.float64)

    @abstractmethod
    def name(self) -> str:
        """Of the quantity."""

    @abstractmethod
    def squared_error(
        self, eigenvalues: Float[Tensor, "S k"], noise_std: Float[Tensor, "S 1"]
    ) -> Float[Tensor, "S k"]:
        """What each eigenvalue adds to the squared error: completely monotone in it."""

    def unbounded(self, mean: EigenvalueMean, num_inputs: int) -> list[str]:
        """For each sample why there is no finite bound, or nothing."""
        return []

    def measure(self, problem: SampleProblem, draws: Draws) -> list[Column]:
        """One bound of the RMSE, in model input units."""
        operator = problem.operator
        level, silent = noise_level(problem, self.noise_std)
        known = level.isfinite()
        if not bool(known.any()):
            return [self._column(torch.full_like(level, torch.nan), silent)]
        noise = torch.where(known, level, 1.0)[:, None]
        dense = fits(
            operator.num_inputs, operator.num_outputs, self.max_dense_inputs, self.memory_bytes
        )
        mean = eigenvalue_mean(
            problem,
            lambda values: self.squared_error(values, noise),
            draws,
            dense,
            self.num_probes,
            self.max_steps,
            self.rank_cutoff,
        )
        flat = notes_where((problem.operator.rmatvec(problem.gradients) == 0).all(1), FLAT)
        notes = first_notes(silent, flat, self.unbounded(mean, operator.num_inputs))
        error = mean.errors / mean.values / 2
        if not mean.exact:
            remarks = [
                f"at least this, but for a standard error of {e:.0%} over {self.num_probes} probes"
                for e in error.tolist()
            ]
            return [self._column(mean.values.sqrt(), first_notes(notes, remarks), notes)]
        return [self._column(mean.values.sqrt(), notes, notes)]

    def _column(
        self, values: Float[Tensor, " S"], notes: list[str], missing: list[str] | None = None
    ) -> Column:
        """Values where nothing is missing."""
        kept = torch.tensor([not note for note in missing or notes])
        shown = torch.where(kept, values, torch.nan)
        return Column(self.name(), shown, "model input", "larger is safer", notes)
