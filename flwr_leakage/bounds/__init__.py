"""Bounds on what any attacker of a class can reach: pure formulas, each with its conditions.

A score says where an attack is likely to end; a bound says where none of its class can. All of
them assume noise on the update. Without noise they say nothing.
"""

from flwr_leakage.bounds.fisher import (
    bayesian_mse,
    cramer_rao_mse,
    fisher_leakage,
    posterior_variance,
)
from flwr_leakage.bounds.privacy import guess_bound, image_psnr, psnr_chance

__all__ = [
    "bayesian_mse",
    "cramer_rao_mse",
    "fisher_leakage",
    "guess_bound",
    "image_psnr",
    "posterior_variance",
    "psnr_chance",
]
