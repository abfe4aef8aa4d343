"""Measure distances between gradients, by which attacks of any objective compare candidates."""

import torch
from torch import Tensor

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.params import Params
from flwr_leakage.records import Batch


def squared_distance(candidate: Params, observed: Params) -> Tensor:
    """Return the squared distance ``Σ_l ‖g_l − g*_l‖²`` of two gradients, a scalar.

    The sum is over the parameter tensors l. ``candidate`` is g, and ``observed`` is g* (Zhu, Liu,
    Han 2019, eq. 4).
    """
    terms = [(candidate[k] - observed[k]).square().sum() for k in observed]
    return sum(terms[1:], start=terms[0])


def relative_squared_distance(candidate: Params, observed: Params) -> Tensor:
    """Return the scalar ``‖g − g*‖² / ‖g*‖²`` of a candidate's gradient g and the observed g*."""
    return squared_distance(candidate, observed) / squared_norm(observed)


def squared_norm(gradient: Params) -> Tensor:
    """Return the squared norm ``‖g‖²`` of a gradient, a sum over the entries of all tensors."""
    terms = [value.square().sum() for value in gradient.values()]
    return sum(terms[1:], start=terms[0])


def gradient_distance(problem: Problem, batch: Batch) -> float:
    """Return ``‖g − g*‖² / ‖g*‖²`` of a candidate, averaged over the problem's rounds.

    g* is the gradient that the server observed in a round, and g that of ``batch`` there.
    """
    distances = []
    with torch.no_grad():
        for posed in problem.rounds:
            gradient = posed.replay(batch)
            distances.append(float(relative_squared_distance(gradient, posed.gradient)))
    return sum(distances) / len(distances)
