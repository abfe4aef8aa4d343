"""Exact recovery of one sample through a first linear layer."""

import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from flwr_leakage.attacks.budget import Budget
from flwr_leakage.attacks.exact.applicability import (
    Applicability,
    ExactAttack,
    require_single_gradient,
)
from flwr_leakage.attacks.labels.assumed import answer, assume_targets
from flwr_leakage.attacks.labels.counts import mean_feature
from flwr_leakage.attacks.labels.idlg import SignOfGradient
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.records import Reconstruction


@dataclass(frozen=True)
class Analytic(ExactAttack):
    """``∂L/∂W = δ xᵀ`` and ``∂L/∂b = δ`` give x (Phong et al. 2017, section 3).

    δ is the error of the layer's outputs. Where ∂L/∂W and δ are exact, so is the least-squares
    solution ``x = (∂L/∂W)ᵀ δ / ‖δ‖²``.

    Takes an update of one sample in one plain step, and a model whose first layer is linear and
    has a bias.
    """

    purpose: ClassVar[str] = "analytic"

    def check(self, problem: Problem, generator: torch.Generator) -> Applicability:
        """See ``ExactAttack``."""
        name = _first_layer(problem)
        return Applicability(True, f"the first layer, {name!r}, is linear with bias: x is exact.")

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Attack one problem.

        Raises:
            ValueError: several samples or steps; no first linear layer with bias on the input.
        """
        began = time.process_time()
        name = _first_layer(problem)
        prefix = f"{name}." if name else ""
        errors = problem.gradient[f"{prefix}bias"]
        weight = problem.gradient[f"{prefix}weight"]
        if not bool(errors.any()):
            raise ValueError(
                "the first layer's bias has a zero gradient: it is frozen, or no unit was active."
            )
        inputs = mean_feature(weight, errors)
        misfit = (torch.outer(errors, inputs) - weight).square().sum() / weight.square().sum()
        targets = assume_targets(problem, SignOfGradient(), generator).values
        clamped = problem.spec.clamp(inputs.reshape(1, *problem.spec.shape))
        return Reconstruction(
            batch=answer(clamped, targets),
            objective=float(misfit),
            stats={"cpu_seconds": time.process_time() - began},
        )


def _first_layer(problem: Problem) -> str:
    """The name of the first layer.

    Raises:
        ValueError: it, or the update, does not allow the attack.
    """
    require_single_gradient(problem, "the analytic attack")
    modules = problem.gradient_map.model.named_modules()
    name, layer = next(
        ((n, m) for n, m in modules if isinstance(m, nn.Linear | nn.Conv2d)), ("", None)
    )
    size = torch.Size(problem.spec.shape).numel()
    if not isinstance(layer, nn.Linear) or layer.in_features != size or layer.bias is None:
        raise ValueError("the model's first layer must be linear, with bias, on the input.")
    return name
