"""Evaluate an attack's objective and its gradient for many candidate batches at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from flwr_leakage.attacks.inversion.objectives import Objective, Prior, PriorContext
from flwr_leakage.attacks.labels.assumed import AssumedTargets
from flwr_leakage.attacks.problem import Problem, simulate_gradient
from flwr_leakage.params import Params
from flwr_leakage.records import Batch

Batching = Literal["vmap", "loop"]

Seen = tuple[Params, Params, Params, Params]
"""The parameters, the buffers, the observed pseudo-gradient, and the BatchNorm statistics that the
threat model grants, of one round of federated learning."""


@dataclass(frozen=True)
class Candidates:
    """The layout of an optimizer's variables: each row of D numbers is one candidate batch.

    Attributes:
        shape: shape (B, C, H, W) of one candidate's inputs, which come first in a row.
        num_classes: number K of classes.
        joint_labels: whether labels are optimised, too. Then B · K label logits follow in a row.
    """

    shape: tuple[int, ...]
    num_classes: int
    joint_labels: bool

    def split(self, row: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs (B, C, H, W) and the targets of one candidate, a row (D,) of variables.

        The targets are the given ones, or the softmax (B, K) of label logits in the row.
        """
        size = torch.Size(self.shape).numel()
        inputs = row[:size].reshape(self.shape)
        if not self.joint_labels:
            return inputs, targets
        return inputs, row[size:].reshape(self.shape[0], self.num_classes).softmax(dim=1)


@dataclass(frozen=True)
class Rows:
    """R candidate batches (rows) for several observed updates, which are solved together.

    Every update has the same number of rows. Those of the first one come first.

    Attributes:
        indices: the positions of the observations in the job.
        problems: the problem of each observation; all have equal shapes and schedules.
        assumed: the labels assumed for the first problem, and whether they are granted, inferred or
            optimised, which is the same for all problems.
        steps: (B,) for each place in the clients' sequences of samples, the number of the local
            step that uses it; −1 for none.
        streams: the random stream of each observation.
        points: (R, D) the variables: inputs, then label logits if labels vary.
        targets: (R, B) labels, or (R, B, K) label probabilities.
        orders: (R, B) the index of the sample at each place of the clients' sequences.
    """

    indices: list[int]
    problems: list[Problem]
    assumed: AssumedTargets
    steps: Tensor
    streams: list[torch.Generator]
    points: Tensor
    targets: Tensor
    orders: Tensor

    @classmethod
    def joined(cls, chunk: "Sequence[Rows]") -> "Rows":
        """Return the candidate batches for several observations of equal shape and schedule as one
        object.
        """
        return replace(
            chunk[0],
            indices=[index for rows in chunk for index in rows.indices],
            problems=[problem for rows in chunk for problem in rows.problems],
            streams=[stream for rows in chunk for stream in rows.streams],
            points=torch.cat([rows.points for rows in chunk]),
            targets=torch.cat([rows.targets for rows in chunk]),
            orders=torch.cat([rows.orders for rows in chunk]),
        )

    @property
    def kind(self) -> tuple[Any, ...]:
        """The properties, such as the number of samples, in which two observations must agree to be
        solved together.
        """
        problem = self.problems[0]
        return (
            tuple((p.schedule, p.members) for p in problem.rounds),
            problem.num_samples,
            self.assumed.origin,
            self.targets.shape,
            self.targets.dtype,
            tuple(problem.statistics),
        )

    @property
    def candidates(self) -> Candidates:
        """The layout of a candidate's optimised variables, as inputs and label logits."""
        problem = self.problems[0]
        shape = (problem.num_samples, *problem.spec.shape)
        return Candidates(shape, problem.spec.num_classes, self.assumed.origin == "variables")

    @property
    def num_inputs(self) -> int:
        """Number of a candidate's optimised variables that are inputs; they come first."""
        return torch.Size(self.candidates.shape).numel()

    @property
    def owner(self) -> Tensor:
        """(R,) the index of the observed update to which each of R candidates belongs."""
        every = torch.arange(len(self.problems), device=self.targets.device)
        return every.repeat_interleave(len(self.targets) // len(self.problems))

    def project(self, points: Tensor) -> Tensor:
        """Return the variables (A, D) of A candidates with their inputs clamped to valid pixels."""
        spec, size = self.problems[0].spec, self.num_inputs
        inputs = spec.clamp(points[:, :size].reshape(-1, *spec.shape))
        return torch.cat([inputs.reshape(len(points), size), points[:, size:]], dim=1)


@dataclass
class Evaluator:
    """An evaluator of the objective, and of its gradient, for R candidate batches (rows).

    Attributes:
        problems: the problem of each observed update, with the same model, shapes and schedule.
        targets: (R, B) labels or (R, B, K) label probabilities of every row.
        orders: (R, B) indices of every row's samples, in the order of their use in the local steps.
        owner: (R,) index of the problem that each row belongs to.
        candidates: the layout of a row's variables, as inputs and label logits.
        objective: the distance of a candidate's gradient from the observed one.
        priors: the penalties of a candidate's inputs.
        batching: ``vmap`` evaluates all rows in one pass, ``loop`` one by one.
    """

    problems: Sequence[Problem]
    targets: Tensor
    orders: Tensor
    owner: Tensor
    candidates: Candidates
    objective: Objective
    priors: Sequence[Prior]
    batching: Batching

    def __post_init__(self) -> None:
        self._gathered: tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]] | None = None
        in_order = torch.arange(self.candidates.shape[0], device=self.orders.device)
        self._reorders = not bool((self.orders == in_order).all())

    def __call__(self, points: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the objectives (A,) of candidates, and their gradients (A, D).

        ``points`` (A, D) are their variables. ``rows`` (A,) are their indices among all R, which
        tell their labels, the order of their samples, and the update that each is compared with.
        """
        if self.batching != "vmap" or len(rows) == 1:
            results = [
                self._single(point, int(row)) for point, row in zip(points, rows, strict=True)
            ]
            return torch.stack([r[0] for r in results]), torch.stack([r[1] for r in results])
        if self._gathered is None or not torch.equal(self._gathered[0], rows):
            self._gathered = (rows, self._gather(rows))
        return self._gathered[1](points)

    def moves(self, point: Tensor, row: int, orders: Tensor, targets: Tensor) -> Tensor:
        """Return the objectives (M,) of one candidate's inputs under M orders and labels.

        ``point`` (D,) holds the candidate's variables. ``row`` is its index among all R, which
        tells the update that it is compared with. ``orders`` (M, B) are indices of the samples in
        the order in which the local steps use them, and ``targets`` labels (M, B) or their
        probabilities (M, B, K).
        """
        rounds = _seen(self.problems[int(self.owner[row])])

        def value(order: Tensor, target: Tensor) -> Tensor:
            return self._value(point, rounds, target, order)

        with torch.no_grad():
            if self.batching == "vmap":
                return torch.func.vmap(value, chunk_size=64)(orders, targets)
            return torch.stack([value(o, t) for o, t in zip(orders, targets, strict=True)])

    def _value(
        self, row: Tensor, rounds: Sequence[Seen], targets: Tensor, order: Tensor | None
    ) -> Tensor:
        inputs, targets = self.candidates.split(row, targets)
        batch = Batch(inputs, targets)
        if order is not None:
            batch = Batch(inputs.index_select(0, order), targets.index_select(0, order))
        problem = self.problems[0]
        distances = []
        for posed, (params, buffers, observed, _) in zip(problem.rounds, rounds, strict=True):
            candidate = simulate_gradient(
                posed.gradient_map, params, buffers, posed.schedule, batch, posed.members
            )
            distances.append(self.objective(candidate, observed))
        value = torch.stack(distances).mean()
        params, buffers, _, statistics = rounds[0]
        first = batch.inputs[problem.schedule.slices(len(batch))[0]]
        context = PriorContext(
            problem.gradient_map, problem.spec, params, buffers, statistics, first
        )
        for prior in self.priors:
            value = value + prior(inputs, context)
        return value

    def _single(self, point: Tensor, row: int) -> tuple[Tensor, Tensor]:
        gradient, value = torch.func.grad_and_value(self._value)(
            point,
            _seen(self.problems[int(self.owner[row])]),
            self.targets[row],
            self.orders[row] if self._reorders else None,
        )
        return value.detach(), gradient.detach()

    def _gather(self, rows: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return a function that evaluates candidates of the given rows (A,) by one ``vmap``.

        It maps points (A, D) to objectives (A,) and gradients (A, D). Parameters and buffers that
        are equal for all rows are passed once, which is far faster than a stack of copies.
        """
        chosen = [_seen(self.problems[i]) for i in self.owner[rows].tolist()]
        rounds, dims = [], []
        for number in range(len(chosen[0])):
            fields, field_dims = [], []
            for field in range(len(chosen[0][number])):
                values = [seen[number][field] for seen in chosen]
                # Only parameters and buffers are passed once. Observed gradients and statistics are
                # always stacked, as a stack of equal ones costs little.
                shared = field < 2 and all(_same(value, values[0]) for value in values)
                first = values[0]
                if not shared:
                    first = {k: torch.stack([each[k] for each in values]) for k in first}
                fields.append(first)
                field_dims.append(None if shared else 0)
            rounds.append(tuple(fields))
            dims.append(tuple(field_dims))
        orders = self.orders[rows] if self._reorders else None
        rest: Any = (rounds, self.targets[rows], orders)
        batched = torch.func.vmap(
            torch.func.grad_and_value(self._value),
            in_dims=(0, dims, 0, 0 if self._reorders else None),
        )

        def evaluate(points: Tensor) -> tuple[Tensor, Tensor]:
            gradients, values = batched(points, *rest)
            return values.detach(), gradients.detach()

        return evaluate


def _seen(problem: Problem) -> list[Seen]:
    return [(p.params, p.buffers, p.gradient, p.statistics) for p in problem.rounds]


def _same(left: Params, right: Params) -> bool:
    return left is right or all(torch.equal(left[k], right[k]) for k in right)
