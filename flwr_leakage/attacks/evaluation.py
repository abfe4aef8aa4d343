"""Objectives and gradients of many candidates at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flwr_leakage.attacks.objectives.base import Objective
from flwr_leakage.attacks.priors.base import Prior, PriorContext
from flwr_leakage.attacks.problem import Problem, simulate_gradient
from flwr_leakage.params import Params
from flwr_leakage.records import Batch

Batching = Literal["vmap", "loop"]


@dataclass(frozen=True)
class Candidates:
    """How rows of D variables stand for batches.

    Attributes:
        shape: (B, C, H, W) of one candidate's inputs.
        num_classes: classes K.
        joint_labels: whether label logits (B, K) follow the inputs in a row.
    """

    shape: tuple[int, ...]
    num_classes: int
    joint_labels: bool

    def split(self, row: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets of one row; ``targets`` where labels are not variables."""
        size = torch.Size(self.shape).numel()
        inputs = row[:size].reshape(self.shape)
        if not self.joint_labels:
            return inputs, targets
        return inputs, row[size:].reshape(self.shape[0], self.num_classes).softmax(dim=1)


class Evaluator:
    """(rows of candidates) ↦ (objectives, gradients), for problems of one shape.

    Args:
        problems: one a target, alike in model, shapes, schedule and dtype.
        targets: (R, B) or (R, B, K), of every row.
        owner: (R,) which problem a row belongs to.
        candidates: how rows stand for batches.
        objective: distance of gradients.
        priors: penalties of the inputs.
        batching: ``vmap`` evaluates all rows in one pass, ``loop`` one by one.
    """

    def __init__(
        self,
        problems: Sequence[Problem],
        targets: Tensor,
        owner: Tensor,
        candidates: Candidates,
        objective: Objective,
        priors: Sequence[Prior],
        batching: Batching,
    ) -> None:
        self.problems = problems
        self.targets = targets
        self.owner = owner
        self.candidates = candidates
        self.objective = objective
        self.priors = priors
        self.batching = batching
        first = problems[0]
        self.shared_params = all(_same(p.params, first.params) for p in problems)
        self.shared_buffers = all(_same(p.buffers, first.buffers) for p in problems)
        self._gathered: tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]] | None = None

    def __call__(self, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Values (A,) and gradients (A, D) of ``points`` (A, D) that belong to ``rows`` (A,)."""
        if self.batching == "loop" or len(rows) == 1:
            results = [
                self._single(self.problems[int(self.owner[row])], point, self.targets[row])
                for point, row in zip(points, rows, strict=True)
            ]
            return torch.stack([r[0] for r in results]), torch.stack([r[1] for r in results])
        if self._gathered is None or not torch.equal(self._gathered[0], rows):
            self._gathered = (rows, self._gather(rows))
        return self._gathered[1](points)

    def _value(
        self,
        row: Tensor,
        params: Params,
        buffers: Params,
        observed: Params,
        statistics: Params,
        targets: Tensor,
    ) -> Tensor:
        problem = self.problems[0]
        inputs, targets = self.candidates.split(row, targets)
        candidate = simulate_gradient(
            problem.gradient_map, params, buffers, problem.schedule, Batch(inputs, targets)
        )
        value = self.objective(candidate, observed)
        context = PriorContext(problem.gradient_map, problem.spec, params, buffers, statistics)
        for prior in self.priors:
            value = value + prior(inputs, context)
        return value

    def _single(self, problem: Problem, point: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = torch.func.grad_and_value(self._value)(
            point, problem.params, problem.buffers, problem.gradient, problem.statistics, targets
        )
        return value.detach(), gradient.detach()

    def _gather(self, rows: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Stack what differs between the rows; share what does not, which is far faster."""
        chosen = [self.problems[i] for i in self.owner[rows].tolist()]

        def stack(field: str) -> Params:
            first: Params = getattr(chosen[0], field)
            return {k: torch.stack([getattr(p, field)[k] for p in chosen]) for k in first}

        params = chosen[0].params if self.shared_params else stack("params")
        buffers = chosen[0].buffers if self.shared_buffers else stack("buffers")
        rest = (stack("gradient"), stack("statistics"), self.targets[rows])
        dims = (0, None if self.shared_params else 0, None if self.shared_buffers else 0, 0, 0, 0)
        batched = torch.func.vmap(torch.func.grad_and_value(self._value), in_dims=dims)

        def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
            gradients, values = batched(points, params, buffers, *rest)
            return values.detach(), gradients.detach()

        return evaluate


def _same(left: Params, right: Params) -> bool:
    return left is right or all(torch.equal(left[k], right[k]) for k in right)
