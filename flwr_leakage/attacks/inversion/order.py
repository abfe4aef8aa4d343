"""Search for the sample of each local step, by the attacker's own objective.

The order of a client's samples shows in an update only to second order in the learning rate η:
exchanging samples i and j of neighbouring steps changes the sum of their gradients by η times the
commutator ``H_i g_j − H_j g_i``, with g the gradients and H the Hessians. So samples found under a
wrong order are nearly right. On them exchanges can be tried, at the cost of one replayed update
each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.inversion.evaluation import Evaluator
from flwr_leakage.attacks.optimizers.base import Optimizer, Report
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.settings import require

Values = Callable[[Tensor, Tensor], Tensor]
"""(orders (M, N), targets (M, N)) ↦ the objectives (M,) of one candidate's samples."""


def local_steps_of(problem: Problem) -> Int[Tensor, " N"]:
    """Return the number of the local step that uses each of the N places of a client's sequence.

    Steps are counted over all clients; −1 stands for none. The client takes its samples in the same
    order in all epochs.
    """
    schedule, count = problem.schedule, problem.num_samples
    step, first = torch.full((count,), -1), 0
    for number, examples in enumerate(problem.members or (count,)):
        used = schedule.num_samples_used(examples)
        for index, window in enumerate(schedule.slices(used)):
            step[first + window.start : first + window.stop] = number * schedule.num_steps + index
        first += used
    return step


@dataclass(frozen=True)
class OrderSearch:
    """Alternate between short fits and exchanges of samples between steps, from several starts.

    A *move* exchanges two samples between two steps, or gives a sample another label.
    A turn tries all moves and makes the best one, as long as it lowers the objective. Then a short
    fit follows. Every second start keeps the inferred labels in its first turn; in the others they
    may change before the first fit. The start with the least objective gets the optimizer's full
    fit.

    Attributes:
        starts: number of starts that compete, ≥ 1.
        turns: number of turns of each start, ≥ 0.
        iterations: largest number of iterations of the optimizer in the fit of a turn, ≥ 1.
        max_moves: largest number of moves that are tried at once, ≥ 1. If there are more, some are
            drawn at random.
        required: whether an update is refused if its order is known or makes no difference.
    """

    starts: int = 4
    turns: int = 3
    iterations: int = 30
    max_moves: int = 256
    required: bool = False

    def __post_init__(self) -> None:
        require(self, "be at least 0", "turns")
        require(self, "be at least 1", "starts", "iterations", "max_moves")

    def search(
        self,
        evaluator: Callable[[Tensor, Tensor], Evaluator],
        optimizer: Optimizer,
        points: Float[Tensor, "R D"],
        targets: Tensor,
        orders: Int[Tensor, "R N"],
        steps: Int[Tensor, " N"],
        streams: Sequence[torch.Generator],
        num_classes: int | None,
        project: Callable[[Tensor], Tensor] | None,
        report: Report | None,
        budget: Budget = UNLIMITED,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the best point, targets and order for each target, out of its ``starts`` rows."""
        quick = replace(optimizer, iterations=self.iterations)  # type: ignore[type-var]
        values = points.new_zeros(len(points))
        for turn in range(self.turns + 1):
            evaluate = evaluator(targets, orders)
            targets, orders = targets.clone(), orders.clone()
            for row in range(len(points)):
                trusts = turn == 0 and row % self.starts % 2 == 0
                orders[row], targets[row], values[row] = self.improve(
                    orders[row],
                    targets[row],
                    steps,
                    None if trusts else num_classes,
                    partial(evaluate.moves, points[row], row),
                    streams[row // self.starts],
                    budget,
                )
            if turn < self.turns:
                points = quick(evaluator(targets, orders), points, project, report, budget).points
        groups = values.reshape(-1, self.starts).nan_to_num(nan=torch.inf)
        firsts = torch.arange(0, len(points), self.starts, device=points.device)
        best = firsts + groups.argmin(dim=1)
        return points[best], targets[best], orders[best]

    def improve(
        self,
        order: Int[Tensor, " N"],
        targets: Tensor,
        steps: Int[Tensor, " N"],
        num_classes: int | None,
        values: Values,
        generator: torch.Generator,
        budget: Budget = UNLIMITED,
    ) -> tuple[Tensor, Tensor, float]:
        """Return order, targets and objective after the best moves, until no move improves them."""
        value = float(values(order[None], targets[None])[0])
        for _ in range(2 * len(order)):
            orders, labels = _moves(order, targets, steps, num_classes)
            if not len(orders) or budget.is_spent:
                break
            chosen = torch.randperm(len(orders), generator=generator)[: self.max_moves]
            orders, labels = orders[chosen], labels[chosen]
            found = values(orders, labels)
            best = int(torch.where(found.isfinite(), found, torch.inf).argmin())
            if not float(found[best]) < (1 - 1e-3) * value:
                break
            order, targets, value = orders[best], labels[best], float(found[best])
        return order, targets, value


def _moves(
    order: Tensor, targets: Tensor, steps: Tensor, num_classes: int | None
) -> tuple[Tensor, Tensor]:
    """Return all M orders and targets, (M, N) each, that one exchange or one new label makes."""
    size = len(order)
    i, j = torch.triu_indices(size, size, offset=1)
    apart = steps[i] != steps[j]
    i, j = i[apart], j[apart]
    orders = order.repeat(len(i), 1)
    rows = torch.arange(len(i))
    orders[rows, i], orders[rows, j] = order[j], order[i]
    labels = targets.expand(len(i), *targets.shape)
    if num_classes is None:
        return orders, labels
    sample = torch.arange(len(targets)).repeat_interleave(num_classes - 1)
    shift = torch.arange(1, num_classes, device=targets.device).repeat(len(targets))
    relabelled = targets.repeat(len(sample), 1)
    relabelled[torch.arange(len(sample)), sample] = (targets[sample] + shift) % num_classes
    return (torch.cat([orders, order.repeat(len(sample), 1)]), torch.cat([labels, relabelled]))
