"""Defenses of batches and updates, alone and chained."""

from flwr_leakage.defenses.base import Defense, LocalRound
from flwr_leakage.defenses.chain import Chain
from flwr_leakage.defenses.clipping import Clipping, clip_update
from flwr_leakage.defenses.no_defense import NoDefense
from flwr_leakage.defenses.noise import (
    GaussianNoise,
    LaplacianNoise,
    add_gaussian_noise,
    add_laplacian_noise,
)
from flwr_leakage.defenses.pruning import GradientPruning, prune_update
from flwr_leakage.defenses.withhold_buffers import WithholdBuffers

__all__ = [
    "Chain",
    "Clipping",
    "Defense",
    "GaussianNoise",
    "GradientPruning",
    "LaplacianNoise",
    "LocalRound",
    "NoDefense",
    "WithholdBuffers",
    "add_gaussian_noise",
    "add_laplacian_noise",
    "clip_update",
    "prune_update",
]
