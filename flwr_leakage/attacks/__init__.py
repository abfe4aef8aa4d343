"""Gradient inversion attacks made of parts."""

from flwr_leakage.attacks.base import Attack, AttackProgress, ProgressCallback
from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.denoising import Denoising
from flwr_leakage.attacks.distance import squared_distance
from flwr_leakage.attacks.evidence import Evidence, Judgement
from flwr_leakage.attacks.exact.analytic import Analytic
from flwr_leakage.attacks.exact.batch_linear import ExactBatch, recover_batch
from flwr_leakage.attacks.exact.batch_search import SearchSettings
from flwr_leakage.attacks.exact.feature_matching import FeatureMatching
from flwr_leakage.attacks.exact.feature_recursion import FeatureRecursion
from flwr_leakage.attacks.exact.masks import MaskSearch
from flwr_leakage.attacks.exact.relu_fit import FadingPrior
from flwr_leakage.attacks.finish import Finish
from flwr_leakage.attacks.inversion.annealing import Annealing
from flwr_leakage.attacks.inversion.dense_gauss_newton import DenseGaussNewton
from flwr_leakage.attacks.inversion.gauss_newton import GaussNewton
from flwr_leakage.attacks.inversion.gradient_inversion import GradientInversion
from flwr_leakage.attacks.inversion.least_absolute import LeastAbsolute
from flwr_leakage.attacks.inversion.levenberg_marquardt import LevenbergMarquardt
from flwr_leakage.attacks.inversion.objectives.angular import Angular
from flwr_leakage.attacks.inversion.objectives.base import Objective
from flwr_leakage.attacks.inversion.objectives.cosine import Cosine, cosine_distance
from flwr_leakage.attacks.inversion.objectives.euclidean import Euclidean
from flwr_leakage.attacks.inversion.objectives.l1 import L1, Tag, absolute_distance
from flwr_leakage.attacks.inversion.objectives.layer_weighted import LayerWeighted
from flwr_leakage.attacks.inversion.objectives.masked import Masked
from flwr_leakage.attacks.inversion.objectives.noise_aware import NoiseAware
from flwr_leakage.attacks.inversion.order import OrderSearch
from flwr_leakage.attacks.inversion.priors.base import Prior, PriorContext
from flwr_leakage.attacks.inversion.priors.batch_norm_statistics import (
    BatchNormStatistics,
    statistics_distance,
)
from flwr_leakage.attacks.inversion.priors.group_consistency import GroupConsistency, aligned
from flwr_leakage.attacks.inversion.priors.mean_square import MeanSquare
from flwr_leakage.attacks.inversion.priors.total_variation import (
    TotalVariation,
    colour_differences,
    total_variation,
)
from flwr_leakage.attacks.inversion.settling import Settling
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.labels.assumed import AssumedTargets, assume_targets
from flwr_leakage.attacks.labels.automatic import AutomaticLabels
from flwr_leakage.attacks.labels.base import LabelInference
from flwr_leakage.attacks.labels.counts import ClassCounts, class_counts, mean_feature
from flwr_leakage.attacks.labels.idlg import SignOfGradient, idlg_label
from flwr_leakage.attacks.labels.llg import LabelImpact, labels_from_impact
from flwr_leakage.attacks.labels.nearest import NearestGradient
from flwr_leakage.attacks.labels.rehearsed import LabelEstimate, rehearse
from flwr_leakage.attacks.labels.yin import SmallestMinimum, smallest_columns
from flwr_leakage.attacks.optimizers.adam import Adam
from flwr_leakage.attacks.optimizers.base import Minimum, Optimizer
from flwr_leakage.attacks.optimizers.gradient_descent import GradientDescent
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.parallel import Parallel
from flwr_leakage.attacks.problem import Problem, pose, simulate_gradient
from flwr_leakage.attacks.restarts import Restarts
from flwr_leakage.attacks.starts.base import Initialisation
from flwr_leakage.attacks.starts.grey import Grey
from flwr_leakage.attacks.starts.normal import Normal
from flwr_leakage.attacks.strongest import Strongest
from flwr_leakage.attacks.text.read_text import ReadText
from flwr_leakage.attacks.text.sequences import Relaxation
from flwr_leakage.attacks.whole_batch.batch_images import BatchImages
from flwr_leakage.attacks.whole_batch.edges import Edges
from flwr_leakage.attacks.whole_batch.one_sample import OneSample
from flwr_leakage.attacks.whole_batch.sharp import Sharpening

__all__ = [
    "L1",
    "LBFGS",
    "Adam",
    "Analytic",
    "Angular",
    "Annealing",
    "AssumedTargets",
    "Attack",
    "AttackJob",
    "AttackProgress",
    "AutomaticLabels",
    "BatchImages",
    "BatchNormStatistics",
    "Budget",
    "ClassCounts",
    "Cosine",
    "Denoising",
    "DenseGaussNewton",
    "Edges",
    "Euclidean",
    "Evidence",
    "ExactBatch",
    "FadingPrior",
    "FeatureMatching",
    "FeatureRecursion",
    "Finish",
    "GaussNewton",
    "GradientDescent",
    "GradientInversion",
    "Grey",
    "GroupConsistency",
    "Initialisation",
    "Judgement",
    "LabelEstimate",
    "LabelImpact",
    "LabelInference",
    "LayerWeighted",
    "LeastAbsolute",
    "LevenbergMarquardt",
    "MaskSearch",
    "Masked",
    "MeanSquare",
    "Minimum",
    "NearestGradient",
    "NoiseAware",
    "Normal",
    "Objective",
    "OneSample",
    "Optimizer",
    "OrderSearch",
    "Parallel",
    "Prior",
    "PriorContext",
    "Problem",
    "ProgressCallback",
    "ReadText",
    "Relaxation",
    "Restarts",
    "SearchSettings",
    "Settling",
    "Sharpening",
    "SignOfGradient",
    "SmallestMinimum",
    "Strongest",
    "Tag",
    "TotalVariation",
    "absolute_distance",
    "aligned",
    "assume_targets",
    "class_counts",
    "colour_differences",
    "cosine_distance",
    "idlg_label",
    "labels_from_impact",
    "mean_feature",
    "pose",
    "recover_batch",
    "rehearse",
    "simulate_gradient",
    "smallest_columns",
    "squared_distance",
    "statistics_distance",
    "total_variation",
]
