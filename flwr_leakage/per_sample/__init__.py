"""Compute gradients, Jacobians and perturbations of single samples of a client's round."""

from flwr_leakage.per_sample.client import ClientSamples, Precision
from flwr_leakage.per_sample.perturbation import Point, update_perturbation
from flwr_leakage.per_sample.problem import SampleProblem
from flwr_leakage.per_sample.replay import Explanation, explain_update
from flwr_leakage.per_sample.route import differentiable
from flwr_leakage.per_sample.samples import Samples, separate

__all__ = [
    "ClientSamples",
    "Explanation",
    "Point",
    "Precision",
    "SampleProblem",
    "Samples",
    "differentiable",
    "explain_update",
    "separate",
    "update_perturbation",
]
