"""Measure distances of gradients, by which attacks judge candidates of any objective."""

import torch
from torch import Tensor

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.params import Params
from flwr_leakage.records import Batch


def squared_distance(candidate: Params, observed: Params) -> Tensor:
    """Return ``Σ_l ‖g_l − g*_l‖²`` over all entries l (Zhu, Liu, Han 2019, eq. 4)."""
    terms = [(candidate[k] - observed[k]).square().sum() for k in observed]
    return sum(terms[1:], start=terms[0])


def relative_squared_distance(candidate: Params, observed: Params) -> Tensor:
    """Return ``‖g − g*‖² / ‖g*‖²``, a scalar."""
    return squared_distance(candidate, observed) / squared_norm(observed)


def squared_norm(gradient: Params) -> Tensor:
    """Return ``‖g‖²`` over all entries, a scalar."""
    terms = [value.square().sum() for value in gradient.values()]
    return sum(terms[1:], start=terms[0])


def gradient_distance(problem: Problem, batch: Batch) -> float:
    """Return ``‖g − g*‖² / ‖g*‖²`` of a candidate, the mean over the problem's rounds."""
    distances = []
    with torch.no_grad():
        for posed in problem.rounds:
            gradient = posed.replay(batch)
            distances.append(float(relative_squared_distance(gradient, posed.gradient)))
    return sum(distances) / len(distances)
