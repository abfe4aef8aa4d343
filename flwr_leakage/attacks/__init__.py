"""Reconstruct private samples from model updates.

Attacks are combined from parts, such as an objective, a prior, an optimizer and a start.
"""

from flwr_leakage.attacks.base import Attack, AttackProgress
from flwr_leakage.attacks.exact.analytic import Analytic
from flwr_leakage.attacks.exact.batch_linear import ExactBatch
from flwr_leakage.attacks.exact.feature_matching import FeatureMatching
from flwr_leakage.attacks.exact.feature_recursion import FeatureRecursion
from flwr_leakage.attacks.inversion.dense_gauss_newton import DenseGaussNewton
from flwr_leakage.attacks.inversion.gauss_newton import GaussNewton
from flwr_leakage.attacks.inversion.gradient_inversion import GradientInversion
from flwr_leakage.attacks.inversion.objectives import Cosine, Euclidean, TotalVariation
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.labels.assumed import AutomaticLabels
from flwr_leakage.attacks.optimizers.base import Adam
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.attacks.problem import pose
from flwr_leakage.attacks.starts import Grey, Normal
from flwr_leakage.attacks.strongest import Strongest
from flwr_leakage.attacks.text.read_text import ReadText
from flwr_leakage.attacks.whole_batch.batch_images import BatchImages

__all__ = [
    "LBFGS",
    "Adam",
    "Analytic",
    "Attack",
    "AttackJob",
    "AttackProgress",
    "AutomaticLabels",
    "BatchImages",
    "Cosine",
    "DenseGaussNewton",
    "Euclidean",
    "ExactBatch",
    "FeatureMatching",
    "FeatureRecursion",
    "GaussNewton",
    "GradientInversion",
    "Grey",
    "Normal",
    "Parallel",
    "ReadText",
    "Strongest",
    "TotalVariation",
    "pose",
]
