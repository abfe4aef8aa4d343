"""Invert gradients by optimisation: search for samples whose update equals the observed one.

A target is one observed update. A row holds the variables of one candidate batch for a target.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flwr_leakage.attacks.base import ProgressCallback, Reporter, failure, require_kind
from flwr_leakage.attacks.budget import Budget, Stopwatch, stop_mark
from flwr_leakage.attacks.inversion.evaluation import Batching, Evaluator, Rows
from flwr_leakage.attacks.inversion.objectives import Euclidean, Objective, Prior
from flwr_leakage.attacks.inversion.order import OrderSearch, local_steps_of
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.labels.assumed import (
    AssumedTargets,
    AutomaticLabels,
    LabelInference,
    answer,
    assume_targets,
)
from flwr_leakage.attacks.one_by_one import unscaled
from flwr_leakage.attacks.optimizers.base import FirstValues, Minimum, Optimizer
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.starts import Grey, Initialisation
from flwr_leakage.records import Reconstruction
from flwr_leakage.values import require


@dataclass(frozen=True)
class GradientInversion:
    """An attack that minimises ``objective(∇L(x), observed) + Σ priors(x)`` over inputs x.

    Observed updates of equal shape and schedule are solved together. Each has its own optimizer
    state and its own random stream, so that the result equals that of solving it alone. The
    iterate with the least objective is returned. ``stats["initial_objective"]`` of a result is the
    objective at the start, with penalties, so that its decrease can be computed.

    Attributes:
        objective: distance of a candidate's pseudo-gradient from the observed one.
        priors: penalties of a candidate's inputs, by name.
        labels: the inference of labels, or ``joint`` to optimise label logits with the inputs
            (DLG). It is not used if the threat model grants the labels.
        initialisation: the inputs at which the search starts.
        optimizer: the minimiser, with its schedule and stopping rules.
        order: the search for the order in which several local steps use the samples; ``None`` takes
            them in the order of their inferred labels. It is not used if the threat model grants
            the labels, which come in the order of the steps.
        normalize_by: the statistics by which BatchNorm normalises a candidate, for clients in
            train mode. ``candidate``: those of its own batch, or those that the threat model
            states, as the client does. ``granted``: the private statistics that the threat model
            grants, as constants (BN_exact of Huang et al. 2021, section 3). ``running``: the
            server's buffers (BN_proxy).
        box: whether pixels are kept within [0, 1].
        dtype: precision of the computation.
        batching: ``vmap`` evaluates all candidates in one pass, ``loop`` one by one. ``auto`` takes
            ``vmap`` unless there is one candidate only, or the gradients of all candidates together
            would have more than ``max_entries`` entries.
        max_rows: largest number of candidates that are solved together, ≥ 1, which limits memory.
        max_entries: largest number of entries of gradients under ``auto``, ≥ 1. In float32, 1e8
            entries take 0.4 GB.
    """

    objective: Objective = field(default_factory=Euclidean)
    priors: Mapping[str, Prior] = field(default_factory=dict)
    labels: LabelInference | Literal["joint"] = field(default_factory=AutomaticLabels)
    initialisation: Initialisation = field(default_factory=Grey)
    optimizer: Optimizer = field(default_factory=LBFGS)
    order: OrderSearch | None = None
    normalize_by: Literal["candidate", "granted", "running"] = "candidate"
    box: bool = True
    dtype: Literal["float32", "float64"] = "float32"
    batching: Literal["vmap", "loop", "auto"] = "auto"
    max_rows: int = 64
    max_entries: int = 100_000_000

    def __post_init__(self) -> None:
        require(self, "be at least 1", "max_rows", "max_entries")
        if not isinstance(self.priors, Mapping):
            raise ValueError(
                f"priors must be a mapping by name, got a {type(self.priors).__name__}."
            )
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be 'float32' or 'float64', got {self.dtype!r}.")
        if self.batching not in ("vmap", "loop", "auto"):
            raise ValueError(f"batching must be vmap, loop or auto, got {self.batching!r}.")
        if self.normalize_by not in ("candidate", "granted", "running"):
            raise ValueError(
                f"normalize_by must be candidate, granted or running, got {self.normalize_by!r}."
            )
        if isinstance(self.labels, str) and self.labels != "joint":
            raise ValueError(f"labels must be a label attack or 'joint', got {self.labels!r}.")

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """Return one reconstruction of the private samples for each observed update of a job."""
        results: list[Reconstruction | None] = [None] * len(job.observations)
        groups: dict[tuple[Any, ...], list[Rows]] = {}
        for index in range(len(job.observations)):
            try:
                target = self._prepare(job, index)
            except (ValueError, RuntimeError) as error:
                results[index] = failure(error)
                continue
            groups.setdefault(target.kind, []).append(target)
        done = sum(result is not None for result in results)
        for group in groups.values():
            size = max(1, self.max_rows // len(group[0].points))
            for begin in range(0, len(group), size):
                chunk = group[begin : begin + size]
                report = Reporter(progress, done, len(results), self.optimizer.iterations)
                # Each target has a budget of its own; targets that are solved together add theirs
                # up.
                seconds = job.max_seconds
                budget = Budget.of(None if seconds is None else seconds * len(chunk))
                solved = self._solve_safely(chunk, report, budget)
                for target, found in zip(chunk, solved, strict=True):
                    results[target.indices[0]] = found
                done += len(chunk)
        return [result for result in results if result is not None]

    def _prepare(self, job: AttackJob, index: int) -> Rows:
        """Return the candidate batches with which the attack on observation ``index`` starts.

        There is one batch, or several with inputs and an order of their own if the order of the
        samples is searched.
        """
        require_kind(self, job.spec)
        problem = unscaled(job.problem(index))
        if self.normalize_by != "candidate" and job.gradient_map.uses_batch_statistics:
            problem = problem.normalized_by(self.normalize_by)
        problem = problem.to(getattr(torch, self.dtype))
        like = problem.like
        assumed = assume_targets(problem, self.labels, job.generator(index, "labels"))
        steps = local_steps_of(problem)
        ordered = self._searches_order(assumed) and len(set(steps.tolist()) - {-1}) > 1
        if self.order and self.order.required and not ordered:
            raise ValueError("the order of the samples is known, or makes no difference.")
        stream = job.generator(index, "inversion")
        search = self.order if self._searches_order(assumed) else None
        num_starts = search.starts if search else 1
        starts, orders = [], []
        for start in range(num_starts):
            number = job.restart(index) * num_starts + start
            starts.append(self._start(problem, assumed, number, stream).to(like))
            count = problem.num_samples
            drawn = torch.randperm(count, generator=stream) if search else torch.arange(count)
            orders.append(drawn)
        targets = assumed.values
        return Rows(
            [index],
            [problem],
            assumed,
            steps,
            [stream],
            torch.stack(starts),
            targets.expand(len(starts), *targets.shape).clone(),
            torch.stack(orders).to(like.device),
        )

    def _start(
        self, problem: Problem, assumed: AssumedTargets, number: int, stream: torch.Generator
    ) -> Tensor:
        """Return the variables (D,) of a start: the inputs, then label logits if these vary.

        ``assumed`` holds the labels, and whether they are variables. The first start has the number
        0.
        """
        inputs = self.initialisation(problem.spec, problem.num_samples, number, stream)
        if self.box:
            inputs = problem.spec.clamp(inputs)
        if assumed.origin != "variables":
            return inputs.reshape(-1)
        logits = torch.randn(problem.num_samples * problem.spec.num_classes, generator=stream)
        return torch.cat([inputs.reshape(-1), logits])

    def _searches_order(self, assumed: AssumedTargets) -> bool:
        """Return whether the attack searches for the order in which local steps use the samples.

        It does not if the threat model grants the labels, as these come in the order of the steps.
        """
        return self.order is not None and assumed.origin != "granted"

    def _solve_safely(
        self, chunk: list[Rows], report: Reporter, budget: Budget
    ) -> list[Reconstruction]:
        """Return the result of each observed update of a chunk, some updates of equal shape.

        All are solved together. If this raises an error, each half is solved by itself, so that no
        update harms another. An update that raises an error alone has a result with that error.
        """
        try:
            return self._solve(chunk, report, budget)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            if len(chunk) == 1:
                return [failure(error)]
        half = len(chunk) // 2
        first = self._solve_safely(chunk[:half], report, budget)
        return first + self._solve_safely(chunk[half:], report, budget)

    def _solve(self, chunk: list[Rows], report: Reporter, budget: Budget) -> list[Reconstruction]:
        """Return the results of observed updates of equal shape and schedule, solved together."""
        watch = Stopwatch()
        rows = Rows.joined(chunk)
        bounds = rows.project if self.box else None
        batching = self.batching
        if batching == "auto":  # rows share one pass unless their gradients take too much memory
            size = sum(value.numel() for value in rows.problems[0].params.values())
            batching = "vmap" if 1 < len(rows.points) <= self.max_entries / size else "loop"
        if self.order is not None and self._searches_order(rows.assumed):
            evaluator = partial(self._evaluator, batching=batching)
            rows = self.order.search(rows, evaluator, self.optimizer, bounds, report, budget)
        evaluate = self._evaluator(rows, batching)
        begun = FirstValues(evaluate, len(rows.points))
        found = self.optimizer(begun, rows.points, bounds, report, budget)
        share = watch.seconds / len(rows.points)
        stats = {"cpu_seconds": share, "batching": batching, **stop_mark(found.stopped)}
        return [
            _reconstruction(rows, found, row, {**stats, "initial_objective": begun.values[row]})
            for row in range(len(rows.points))
        ]

    def _evaluator(self, rows: Rows, batching: Batching) -> Evaluator:
        given = (rows.problems, rows.targets, rows.orders, rows.owner, rows.candidates)
        return Evaluator(*given, self.objective, tuple(self.priors.values()), batching)


def _reconstruction(rows: Rows, found: Minimum, row: int, stats: dict[str, Any]) -> Reconstruction:
    """Return one row's candidate batch as a reconstruction, in the order of the first local steps.

    ``found`` holds the minimum that the optimizer found for each of the ``rows`` that were solved
    together. ``stats`` are further entries for the reconstruction's stats.
    """
    objective = float(found.values[row])
    if not math.isfinite(objective):
        return failure("the objective was never finite.")
    inputs, targets = rows.candidates.split(found.points[row], rows.targets[row])
    inputs, targets = inputs[rows.orders[row]], targets[rows.orders[row]]
    if rows.assumed.origin == "variables":
        targets = targets.argmax(dim=1)
    counts = {"iterations": int(found.iterations[row]), "gradients": int(found.evaluations[row])}
    return Reconstruction(answer(inputs, targets), objective, {**counts, **stats})
