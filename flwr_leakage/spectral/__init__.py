"""Estimators of eigenvalues, ranks, traces and damped least squares of AᵀA from products with A.

A linear operator holds S matrices A of equal shape P × N, its *blocks*, all treated at once.
"""

from flwr_leakage.spectral.choose import choose_smallest_eigenvalue, route_bytes
from flwr_leakage.spectral.dense import dense_spectrum, gram_spectrum, inverse_sum
from flwr_leakage.spectral.estimate import Estimate
from flwr_leakage.spectral.lanczos import EigenPairs, Lanczos, random_start
from flwr_leakage.spectral.largest import (
    LargestEigenvalue,
    TopPairs,
    gradient_start,
    largest_eigenvalue,
    last_layer_start,
)
from flwr_leakage.spectral.lsqr import DampedSolution, least_squares_growth, solve_damped
from flwr_leakage.spectral.quadrature import CONFIDENCE, Trace, sampling_error, spectral_sum
from flwr_leakage.spectral.rank import NumericalRank, numerical_rank, rows_needed
from flwr_leakage.spectral.smallest import smallest_eigenvalue

__all__ = [
    "CONFIDENCE",
    "DampedSolution",
    "EigenPairs",
    "Estimate",
    "Lanczos",
    "LargestEigenvalue",
    "NumericalRank",
    "TopPairs",
    "Trace",
    "choose_smallest_eigenvalue",
    "dense_spectrum",
    "gradient_start",
    "gram_spectrum",
    "inverse_sum",
    "largest_eigenvalue",
    "last_layer_start",
    "least_squares_growth",
    "numerical_rank",
    "random_start",
    "route_bytes",
    "rows_needed",
    "sampling_error",
    "smallest_eigenvalue",
    "solve_damped",
    "spectral_sum",
]
