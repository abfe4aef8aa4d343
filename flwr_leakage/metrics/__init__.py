"""Distances between reconstructions and the truth, correlations, and utility."""

from flwr_leakage.metrics.correlation import Correlation, pearson, spearman
from flwr_leakage.metrics.evaluator import Evaluation, Evaluator
from flwr_leakage.metrics.labels import label_accuracy
from flwr_leakage.metrics.matching import match_samples
from flwr_leakage.metrics.perceptual import BackboneUnavailableError, Lpips
from flwr_leakage.metrics.pixel import mse, psnr, rmse, ssim
from flwr_leakage.metrics.utility import Utility, classifier_utility

__all__ = [
    "BackboneUnavailableError",
    "Correlation",
    "Evaluation",
    "Evaluator",
    "Lpips",
    "Utility",
    "classifier_utility",
    "label_accuracy",
    "match_samples",
    "mse",
    "pearson",
    "psnr",
    "rmse",
    "spearman",
    "ssim",
]
