"""Define defenses, which change a client's training samples or its update, alone or in a chain."""

from flwr_leakage.defenses.accounting import canary, canary_epsilon, dp_epsilon, gaussian_epsilon
from flwr_leakage.defenses.base import Defense, LocalRound
from flwr_leakage.defenses.censor import Censor
from flwr_leakage.defenses.chain import Chain
from flwr_leakage.defenses.clipping import Clipping
from flwr_leakage.defenses.compression import (
    QSGD,
    RandomSubset,
    SignSGD,
    TruncatedSVD,
)
from flwr_leakage.defenses.dp_sgd import DPSGD
from flwr_leakage.defenses.error_feedback import ErrorFeedback, with_error_feedback
from flwr_leakage.defenses.fairness import protection_report
from flwr_leakage.defenses.influence_noise import InfluenceNoise
from flwr_leakage.defenses.instahide import InstaHide, load_public_images
from flwr_leakage.defenses.mixup import MixUp
from flwr_leakage.defenses.no_defense import NoDefense
from flwr_leakage.defenses.noise import GaussianNoise, LaplacianNoise
from flwr_leakage.defenses.nvflare import PercentilePrivacy, SVTPrivacy
from flwr_leakage.defenses.pruning import GradientPruning
from flwr_leakage.defenses.soteria import Soteria
from flwr_leakage.defenses.target_risk import TargetRisk
from flwr_leakage.defenses.withhold_buffers import WithholdBuffers

__all__ = [
    "DPSGD",
    "QSGD",
    "Censor",
    "Chain",
    "Clipping",
    "Defense",
    "ErrorFeedback",
    "GaussianNoise",
    "GradientPruning",
    "InfluenceNoise",
    "InstaHide",
    "LaplacianNoise",
    "LocalRound",
    "MixUp",
    "NoDefense",
    "PercentilePrivacy",
    "RandomSubset",
    "SVTPrivacy",
    "SignSGD",
    "Soteria",
    "TargetRisk",
    "TruncatedSVD",
    "WithholdBuffers",
    "canary",
    "canary_epsilon",
    "dp_epsilon",
    "gaussian_epsilon",
    "load_public_images",
    "protection_report",
    "with_error_feedback",
]
