"""Metrics of reconstructions against the private samples, and of the trained model's accuracy."""

from typing import TYPE_CHECKING

from flwr_leakage._lazy import lazy

if TYPE_CHECKING:
    from flwr_leakage.metrics.evaluator import Evaluation, Evaluator
    from flwr_leakage.metrics.identification import Reference, identification_ranks
    from flwr_leakage.metrics.labels import label_accuracy
    from flwr_leakage.metrics.matching import match_samples
    from flwr_leakage.metrics.perceptual import BackboneUnavailableError, Lpips
    from flwr_leakage.metrics.pixel import mse, psnr, rmse, ssim
    from flwr_leakage.metrics.text import match_texts, rouge_l, text_grade, token_accuracy
    from flwr_leakage.metrics.utility import Utility, classifier_utility, utility_of

__all__ = [
    "BackboneUnavailableError",
    "Evaluation",
    "Evaluator",
    "Lpips",
    "Reference",
    "Utility",
    "classifier_utility",
    "identification_ranks",
    "label_accuracy",
    "match_samples",
    "match_texts",
    "mse",
    "psnr",
    "rmse",
    "rouge_l",
    "ssim",
    "text_grade",
    "token_accuracy",
    "utility_of",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "flwr_leakage.metrics.evaluator": ("Evaluation", "Evaluator"),
        "flwr_leakage.metrics.identification": ("Reference", "identification_ranks"),
        "flwr_leakage.metrics.labels": ("label_accuracy",),
        "flwr_leakage.metrics.matching": ("match_samples",),
        "flwr_leakage.metrics.perceptual": ("BackboneUnavailableError", "Lpips"),
        "flwr_leakage.metrics.pixel": ("mse", "psnr", "rmse", "ssim"),
        "flwr_leakage.metrics.text": ("match_texts", "rouge_l", "text_grade", "token_accuracy"),
        "flwr_leakage.metrics.utility": ("Utility", "classifier_utility", "utility_of"),
    },
)
