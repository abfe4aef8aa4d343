"""Estimators of spectral quantities; each says whether it converged and what it cost."""

from flwr_leakage.spectral.choose import choose_smallest_eigenvalue, route_bytes
from flwr_leakage.spectral.dense import dense_spectrum, gram_spectrum
from flwr_leakage.spectral.estimate import Estimate
from flwr_leakage.spectral.lanczos import (
    EigenPairs,
    Lanczos,
    LargestEigenvalue,
    largest_eigenvalue,
    random_start,
    smallest_eigenvalue,
)
from flwr_leakage.spectral.lsqr import DampedSolution, solve_damped
from flwr_leakage.spectral.quadrature import Trace, spectral_sum
from flwr_leakage.spectral.rank import NumericalRank, numerical_rank, rows_needed
from flwr_leakage.spectral.start import gradient_start, last_layer_start

__all__ = [
    "DampedSolution",
    "EigenPairs",
    "Estimate",
    "Lanczos",
    "LargestEigenvalue",
    "NumericalRank",
    "Trace",
    "choose_smallest_eigenvalue",
    "dense_spectrum",
    "gradient_start",
    "gram_spectrum",
    "largest_eigenvalue",
    "last_layer_start",
    "numerical_rank",
    "random_start",
    "route_bytes",
    "rows_needed",
    "smallest_eigenvalue",
    "solve_damped",
    "spectral_sum",
]
