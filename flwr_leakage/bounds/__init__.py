"""Bounds on what any attacker of a given class can achieve: formulas, each with its conditions.

A score says how far an attack is likely to get; a bound says how far no attacker of its class can
get. All bounds here assume noise on the update. Without noise they say nothing.
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
