"""Measure distances of gradients, by which attacks compare candidates of any objective."""

import torch
from torch import Tensor

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.params import Params
from flwr_leakage.records import Batch


def squared_distance(candidate: Params, observed: Params) -> Tensor:
    """Return ``Σ_l ‖g_l − g*_l‖²`` over all tensors l (Zhu, Liu, Han 2019, eq. 4), a scalar."""
    terms = [(candidate[k] - observed[k]).square().sum() for k in observed]
    return sum(terms[1:], start=terms[0])


def relative_squared_distance(candidate: Params, observed: Params) -> Tensor:
    """Return the relative squared distance ``‖g − g*‖² / ‖g*‖²`` of two gradients, a scalar."""
    return squared_distance(candidate, observed) / squared_norm(observed)


def squared_norm(gradient: Params) -> Tensor:
    """Return the squared norm ``‖g‖²`` of a gradient over all entries, a scalar."""
    terms = [value.square().sum() for value in gradient.values()]
    return sum(terms[1:], start=terms[0])


def gradient_distance(problem: Problem, batch: Batch) -> float:
    """Return the mean over a problem's rounds of a candidate's ``‖g − g*‖² / ‖g*‖²``."""
    distances = []
    with torch.no_grad():
        for posed in problem.rounds:
            gradient = posed.replay(batch)
            distances.append(float(relative_squared_distance(gradient, posed.gradient)))
    return sum(distances) / len(distances)
