"""Risk scores of a client's samples, computed without an attack."""

from flwr_leakage.scores.base import Score, compute_scores
from flwr_leakage.scores.gradient_norm import GradientNorm
from flwr_leakage.scores.influence_lower_bound import InfluenceLowerBound
from flwr_leakage.scores.inversion_influence import InversionInfluence
from flwr_leakage.scores.lambda_max import LambdaMax

__all__ = [
    "GradientNorm",
    "InfluenceLowerBound",
    "InversionInfluence",
    "LambdaMax",
    "Score",
    "compute_scores",
]
