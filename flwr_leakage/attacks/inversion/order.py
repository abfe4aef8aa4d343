"""Search for the order in which several local steps use the samples.

The order of a client's samples shows in an update only to second order in the learning rate η:
exchanging samples i and j of neighbouring steps changes the sum of their gradients by η times the
commutator ``H_i g_j − H_j g_i``, with g the gradients and H the Hessians of their losses. So
samples found under a wrong order are nearly right. With them, exchanges can be tried. Each costs
one replay of local training, and the attack's objective shows whether it is an improvement.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Int
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.inversion.evaluation import Evaluator, Rows
from flwr_leakage.attacks.optimizers.base import Optimizer, Report
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.values import require

Values = Callable[[Tensor, Tensor], Tensor]
"""A map from M orders (M, N) of N samples, and M assignments of labels to them, to the attack's
objectives (M,) at the inputs of one candidate batch."""


def local_steps_of(problem: Problem) -> Int[Tensor, " N"]:
    """Return the number of the local step that uses the sample at each of the N places.

    The places are those of the clients' sequences of samples, one client after another. Steps are
    counted over all clients from 0; −1 stands for none. A client takes its samples in the same
    order in all epochs, and of several steps that use a place the last one counts.
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
    """A search for the order of the samples, which alternates between exchanges and short fits.

    A *move* exchanges two samples between two local steps, or gives a sample another label. A turn
    tries all moves and makes the best one, and repeats this as long as it lowers the objective.
    Then the inputs are fitted by a few iterations of the optimizer. Several starts compete. Every
    second one keeps the inferred labels in its first turn; in the others labels may change before
    the first fit. Only the start with the least objective is later fitted in full.

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
        rows: Rows,
        evaluator: Callable[[Rows], Evaluator],
        optimizer: Optimizer,
        project: Callable[[Tensor], Tensor] | None,
        report: Report | None,
        budget: Budget = UNLIMITED,
    ) -> Rows:
        """Return for each observed update the best of its starts, with the labels and order found.

        Args:
            rows: the candidate batches, ``starts`` for each observed update, one update after
                another.
            evaluator: a map from candidate batches to an evaluator of their objective.
            optimizer: the minimiser, of which each fit takes a few iterations.
            project: a map of points to valid ones, or ``None``.
            report: a callback for the optimizer's progress, or ``None``.
            budget: the limit of CPU time.
        """
        quick = replace(optimizer, iterations=self.iterations)  # type: ignore[type-var]
        num_classes = rows.problems[0].spec.num_classes if rows.assumed.may_change else None
        values = rows.points.new_zeros(len(rows.points))
        for turn in range(self.turns + 1):
            evaluate = evaluator(rows)
            targets, orders = rows.targets.clone(), rows.orders.clone()
            for row, point in enumerate(rows.points):
                trusts = turn == 0 and row % self.starts % 2 == 0
                orders[row], targets[row], values[row] = self.improve(
                    orders[row],
                    targets[row],
                    rows.steps,
                    None if trusts else num_classes,
                    partial(evaluate.moves, point, row),
                    rows.streams[row // self.starts],
                    budget,
                )
            rows = replace(rows, targets=targets, orders=orders)
            if turn < self.turns:
                found = quick(evaluator(rows), rows.points, project, report, budget)
                rows = replace(rows, points=found.points)
        groups = values.reshape(-1, self.starts).nan_to_num(nan=torch.inf)
        firsts = torch.arange(0, len(values), self.starts, device=values.device)
        best = firsts + groups.argmin(dim=1)
        return replace(
            rows, points=rows.points[best], targets=rows.targets[best], orders=rows.orders[best]
        )

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
        """Return the order, the labels and the objective when no move improves them further.

        A move exchanges two samples or gives one another label; the generator chooses among more
        than ``max_moves``. The order (N,) holds the index of the sample at each place of the
        clients' sequences, and ``steps`` (N,) the local step of each place, −1 for none.
        ``targets`` are labels (N,) or their probabilities (N, K). ``num_classes`` is K if labels
        may change, else ``None``. ``values`` maps M orders and labels to their objectives (M,).
        """
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
    """Return all M pairs of an order (M, N) and labels (M, …) that one exchange or one new label
    makes. Labels have the shape of ``targets``.

    Only samples of different local steps are exchanged; ``steps`` (N,) is that of each place. The
    order (N,) holds the index of the sample at each place of the clients' sequences. ``targets``
    are labels (N,) or their probabilities (N, K). ``num_classes`` is K if labels may change, else
    ``None``.
    """
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
