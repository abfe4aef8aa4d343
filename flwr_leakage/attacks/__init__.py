"""Gradient inversion attacks made of parts."""

from flwr_leakage.attacks.analytic import Analytic
from flwr_leakage.attacks.base import Attack, AttackProgress, ProgressCallback
from flwr_leakage.attacks.feature_matching import FeatureMatching
from flwr_leakage.attacks.gradient_inversion import GradientInversion
from flwr_leakage.attacks.initialisation import Grey, Initialisation, Normal
from flwr_leakage.attacks.labels.automatic import AutomaticLabels
from flwr_leakage.attacks.labels.base import LabelInference
from flwr_leakage.attacks.labels.counts import ClassCounts, class_counts, mean_feature
from flwr_leakage.attacks.labels.idlg import SignOfGradient, idlg_label
from flwr_leakage.attacks.levenberg_marquardt import LevenbergMarquardt
from flwr_leakage.attacks.objectives.base import Objective
from flwr_leakage.attacks.objectives.cosine import Cosine, cosine_distance
from flwr_leakage.attacks.objectives.euclidean import Euclidean, squared_distance
from flwr_leakage.attacks.optimizers.adam import Adam
from flwr_leakage.attacks.optimizers.base import Minimum, Optimizer
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.priors.base import Prior, PriorContext
from flwr_leakage.attacks.priors.total_variation import TotalVariation, total_variation
from flwr_leakage.attacks.problem import Problem, pose, simulate_gradient
from flwr_leakage.attacks.strongest import Strongest

__all__ = [
    "LBFGS",
    "Adam",
    "Analytic",
    "Attack",
    "AttackProgress",
    "AutomaticLabels",
    "ClassCounts",
    "Cosine",
    "Euclidean",
    "FeatureMatching",
    "GradientInversion",
    "Grey",
    "Initialisation",
    "LabelInference",
    "LevenbergMarquardt",
    "Minimum",
    "Normal",
    "Objective",
    "Optimizer",
    "Prior",
    "PriorContext",
    "Problem",
    "ProgressCallback",
    "SignOfGradient",
    "Strongest",
    "TotalVariation",
    "class_counts",
    "cosine_distance",
    "idlg_label",
    "mean_feature",
    "pose",
    "simulate_gradient",
    "squared_distance",
    "total_variation",
]
