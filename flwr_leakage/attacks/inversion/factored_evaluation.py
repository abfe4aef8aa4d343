"""Objectives and gradients of candidates by products of gradients; see ``factored``."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from flwr_leakage.attacks.inversion.evaluation import Candidates
from flwr_leakage.attacks.inversion.factored import GradientProducts, UnsupportedError, each
from flwr_leakage.attacks.inversion.objectives import Objective, ProductObjective
from flwr_leakage.attacks.inversion.priors import Prior, PriorContext
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.params import Params


class FactoredEvaluator:
    """The objectives of rows of candidates and their gradients, by one network pass for all.

    Args:
        problems: the problems of the targets, each of one plain gradient, with the same parameters
            and buffers.
        targets: (R, B) or (R, B, K) targets of every row.
        owner: (R,) index of each row's problem.
        candidates: the map from rows to batches; labels must not be variables.
        objective: a function of products of gradients.
        priors: penalties of the inputs.
        together: whether the weight gradients of all rows are formed in one pass; see
            ``GradientProducts``.

    Raises:
        UnsupportedError: an argument does not meet these conditions.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        targets: Tensor,
        owner: Tensor,
        candidates: Candidates,
        objective: Objective,
        priors: Sequence[Prior],
        together: bool,
    ) -> None:
        first = problems[0]
        if not isinstance(objective, ProductObjective):
            raise UnsupportedError(f"{type(objective).__name__} is no function of products.")
        if candidates.joint_labels:
            raise UnsupportedError("label logits are optimised with the inputs.")
        if any(not p.is_single_gradient or len(p.rounds) > 1 or p.members for p in problems):
            raise UnsupportedError("an update is not one plain gradient.")
        for problem in problems[1:]:
            for one, other in ((problem.params, first.params), (problem.buffers, first.buffers)):
                if any(not torch.equal(one[name], other[name]) for name in other):
                    raise UnsupportedError("parameters or buffers differ between targets.")
        self.targets = targets
        self.owner = owner
        self.candidates = candidates
        self.objective: ProductObjective = objective
        self.priors = priors
        self.problems = problems
        self.products = GradientProducts(
            first.gradient_map,
            first.params,
            first.buffers,
            [p.gradient for p in problems],
            together,
        )

    def __call__(self, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return values (A,) and gradients (A, D) of ``points`` (A, D) of the ``rows`` (A,)."""
        points = points.detach().requires_grad_()
        inputs = points.reshape(len(rows), *self.candidates.shape)
        chosen = self.owner[rows].tolist()
        inner, squared = self.products(inputs.flatten(0, 1), self.targets[rows], chosen)
        values = self.objective.of_products(inner, squared, self.products.observed_squared[chosen])
        first = self.problems[0]
        statistics = [self.problems[target].statistics for target in chosen]
        stacked = {k: torch.stack([s[k] for s in statistics]) for k in statistics[0]}

        def penalty(candidate: Tensor, statistics: Params) -> Tensor:
            context = PriorContext(
                first.gradient_map, first.spec, first.params, first.buffers, statistics, candidate
            )
            return torch.stack([prior(candidate, context) for prior in self.priors]).sum()

        if self.priors:
            values = values + each(penalty, inputs, stacked)
        (gradients,) = torch.autograd.grad(values.sum(), points)
        return values.detach(), gradients


def supports(make: Callable[[], FactoredEvaluator], points: Tensor) -> bool:
    """Return whether problem, objective and model can be evaluated by products.

    A random row is evaluated alone, and together with as many rows as ``points`` has. If the values
    differ, the model mixes samples, as normalisation by a batch's statistics does. Then one pass
    for all targets would mix the targets.
    """
    rows = torch.arange(len(points))
    points = torch.randn(points.shape, generator=torch.Generator().manual_seed(0)).to(points)
    try:
        evaluate = make()
        alone, _ = evaluate(points[:1], rows[:1])
    except UnsupportedError:
        return False
    among, _ = evaluate(points, rows)
    return torch.allclose(alone, among[:1], rtol=1e-3, atol=1e-6, equal_nan=True)
