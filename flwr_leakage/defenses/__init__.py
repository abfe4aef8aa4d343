"""Defenses: changes to the training samples or to the update, alone or in a row."""

from flwr_leakage.defenses.accounting import (
    ADJACENCIES,
    Adjacency,
    CanaryEstimate,
    canary,
    canary_epsilon,
    dp_epsilon,
    gaussian_delta,
    gaussian_epsilon,
)
from flwr_leakage.defenses.base import Defense, LocalRound
from flwr_leakage.defenses.chain import Chain
from flwr_leakage.defenses.clipping import Clipping, clip_update
from flwr_leakage.defenses.dp_sgd import DPSGD, clipped_mean_gradient
from flwr_leakage.defenses.fairness import GroupProtection, ProtectionReport, protection_report
from flwr_leakage.defenses.influence_noise import InfluenceNoise
from flwr_leakage.defenses.instahide import (
    InstaHide,
    flip_signs,
    instahide_batch,
    load_public_images,
)
from flwr_leakage.defenses.mixing import Mixing, draw_mixing
from flwr_leakage.defenses.mixup import MixUp, mixup_batch
from flwr_leakage.defenses.no_defense import NoDefense
from flwr_leakage.defenses.noise import (
    GaussianNoise,
    LaplacianNoise,
    add_gaussian_noise,
    add_laplacian_noise,
)
from flwr_leakage.defenses.pruning import GradientPruning, prune_update
from flwr_leakage.defenses.soteria import Soteria, representation_sensitivity
from flwr_leakage.defenses.spectrum import SampleSpectra
from flwr_leakage.defenses.target_risk import RiskPlan, TargetRisk
from flwr_leakage.defenses.withhold_buffers import WithholdBuffers

__all__ = [
    "ADJACENCIES",
    "DPSGD",
    "Adjacency",
    "CanaryEstimate",
    "Chain",
    "Clipping",
    "Defense",
    "GaussianNoise",
    "GradientPruning",
    "GroupProtection",
    "InfluenceNoise",
    "InstaHide",
    "LaplacianNoise",
    "LocalRound",
    "MixUp",
    "Mixing",
    "NoDefense",
    "ProtectionReport",
    "RiskPlan",
    "SampleSpectra",
    "Soteria",
    "TargetRisk",
    "WithholdBuffers",
    "add_gaussian_noise",
    "add_laplacian_noise",
    "canary",
    "canary_epsilon",
    "clip_update",
    "clipped_mean_gradient",
    "dp_epsilon",
    "draw_mixing",
    "flip_signs",
    "gaussian_delta",
    "gaussian_epsilon",
    "instahide_batch",
    "load_public_images",
    "mixup_batch",
    "protection_report",
    "prune_update",
    "representation_sensitivity",
]
