"""Gradient inversion made of parts: find samples whose update equals the observed one."""

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flwr_leakage.attacks.base import ProgressCallback, Reporter, failure
from flwr_leakage.attacks.initialisation import Grey, Initialisation
from flwr_leakage.attacks.inversion.evaluation import Batching, Candidates, Evaluator, faster
from flwr_leakage.attacks.inversion.factored_evaluation import FactoredEvaluator, supports
from flwr_leakage.attacks.inversion.objectives.base import Objective
from flwr_leakage.attacks.inversion.objectives.euclidean import Euclidean
from flwr_leakage.attacks.inversion.order import OrderSearch, Slots, make_slots
from flwr_leakage.attacks.inversion.priors.base import Prior
from flwr_leakage.attacks.inversion.priors.group_consistency import GroupConsistency
from flwr_leakage.attacks.inversion.smoothing import SmoothedRelu
from flwr_leakage.attacks.labels.automatic import AutomaticLabels
from flwr_leakage.attacks.labels.base import LabelInference
from flwr_leakage.attacks.optimizers.base import Evaluate, Optimizer
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.problem import Problem, pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec, Observation, Reconstruction, ThreatModel

LARGE_NETWORK = 500_000
"""Parameters from which products of gradients spare arrays of that size where they can; below,
they take all targets' weight gradients in one pass."""


@dataclass(frozen=True)
class GradientInversion:
    """Minimise ``objective(∇L(x), observed) + Σ priors(x)`` over inputs x, many targets at once.

    Targets of equal shape and schedule are solved together; every one has its own optimizer
    state and its own random stream, so that the result equals solving it alone. The best iterate
    and the best restart are chosen by the attacker's own objective.

    Attributes:
        objective: distance of the candidate's pseudo-gradient from the observed one.
        priors: penalties of the candidate's inputs.
        group: penalty of a restart's distance from the mean of a target's restarts.
        labels: how labels are inferred, or ``joint`` to optimise label logits with the inputs
            (DLG). Not used where the threat model grants the labels.
        initialisation: the first candidate.
        optimizer: the minimiser, with its schedule and stopping rules.
        order: how the order of the samples over several local steps is found; without it,
            samples are taken in the order of their labels. Not used where the threat model grants
            the labels of every step, unless epochs are reshuffled.
        restarts: independent starts a target, ≥ 1.
        box: keep candidates within pixels [0, 1].
        dtype: precision of the computation.
        relu_sharpness: β of ReLU's smoothed second derivative (``inversion/smoothing.py``), > 0;
            ``None`` leaves it zero.
        batching: ``vmap`` (all rows in one pass), ``loop`` (one by one), ``products`` (one pass
            that yields products of gradients, ``inversion/factored.py``), or ``auto``: products
            where the parts allow them, as no other way was found faster on a CPU, else whichever
            of the first two a measurement of one evaluation at the start found faster.
        max_rows: rows solved together at most, ≥ 1; bounds memory.
    """

    objective: Objective = field(default_factory=Euclidean)
    priors: Sequence[Prior] = ()
    group: GroupConsistency | None = None
    labels: LabelInference | Literal["joint"] = field(default_factory=AutomaticLabels)
    initialisation: Initialisation = field(default_factory=Grey)
    optimizer: Optimizer = field(default_factory=LBFGS)
    order: OrderSearch | None = None
    restarts: int = 1
    box: bool = True
    dtype: Literal["float32", "float64"] = "float32"
    relu_sharpness: float | None = None
    batching: Literal["vmap", "loop", "products", "auto"] = "auto"
    max_rows: int = 64

    def __post_init__(self) -> None:
        for name in ("restarts", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be 'float32' or 'float64', got {self.dtype!r}.")
        if self.batching not in ("vmap", "loop", "products", "auto"):
            raise ValueError(
                f"batching must be vmap, loop, products or auto, got {self.batching!r}."
            )
        if self.relu_sharpness is not None and not self.relu_sharpness > 0:
            raise ValueError(f"relu_sharpness must be positive, got {self.relu_sharpness}.")
        if self.batching == "products" and self.order is not None:
            raise ValueError("products take one plain gradient, whose samples have no order.")
        if isinstance(self.labels, str) and self.labels != "joint":
            raise ValueError(f"labels must be a label attack or 'joint', got {self.labels!r}.")

    def __call__(
        self,
        gradient_map: GradientMap,
        spec: InputSpec,
        observations: Sequence[Observation],
        threat: ThreatModel,
        generator: torch.Generator,
        progress: ProgressCallback | None = None,
    ) -> list[Reconstruction]:
        """Attack all observations; see :class:`flwr_leakage.attacks.base.Attack`."""
        seed = int(torch.randint(2**31, (), generator=generator))
        results: list[Reconstruction | None] = [None] * len(observations)
        groups: dict[tuple[Any, ...], list[_Target]] = {}
        for index, observation in enumerate(observations):
            try:
                target = self._prepare(index, gradient_map, spec, observation, threat, seed)
            except (ValueError, RuntimeError) as error:
                results[index] = failure(error)
                continue
            groups.setdefault(target.kind, []).append(target)
        done = sum(result is not None for result in results)
        for group in groups.values():
            size = max(1, self.max_rows // len(group[0].starts))
            for begin in range(0, len(group), size):
                chunk = group[begin : begin + size]
                report = Reporter(progress, done, len(observations), self.optimizer.iterations)
                for target, result in zip(chunk, self._solve_safely(chunk, report), strict=True):
                    results[target.index] = result
                done += len(chunk)
        return [result for result in results if result is not None]

    def _prepare(
        self,
        index: int,
        gradient_map: GradientMap,
        spec: InputSpec,
        observation: Observation,
        threat: ThreatModel,
        seed: int,
    ) -> "_Target":
        problem = pose(gradient_map, spec, observation, threat).to(getattr(torch, self.dtype))
        like = next(iter(problem.params.values()))
        streams = [
            make_generator(
                seed,
                server_round=observation.server_round,
                client_id=max(observation.client_id, 0),
                purpose=f"restart {restart}",
            )
            for restart in range(self.restarts)
        ]
        joint = False
        if problem.known_targets is not None:
            targets = problem.known_targets
        elif isinstance(self.labels, str):
            targets, joint = torch.zeros(problem.num_samples, dtype=torch.int64), True
        else:
            targets = self.labels(problem, streams[0])
        slots = make_slots(problem, self.order.epochs if self.order else "repeated")
        searches = self._searches_order(problem)
        num_starts = self.order.starts if self.order and searches else 1
        starts, orders = [], []
        for restart, stream in enumerate(streams):
            for start in range(num_starts):
                number = restart * num_starts + start
                inputs = self.initialisation(spec, problem.num_samples, number, stream)
                if self.box:
                    inputs = spec.clamp(inputs)
                row = inputs.reshape(-1)
                if joint:
                    logits = torch.randn(problem.num_samples * spec.num_classes, generator=stream)
                    row = torch.cat([row, logits])
                starts.append(row.to(like))
                if self.order and searches:
                    orders.append(self.order.draw(slots, stream))
                else:
                    orders.append(torch.arange(problem.num_samples))
        if targets.is_floating_point():
            targets = targets.to(like.dtype)
        return _Target(
            index,
            problem,
            joint,
            slots,
            streams,
            torch.stack(starts),
            targets.to(like.device).expand(len(starts), *targets.shape).clone(),
            torch.stack(orders).to(like.device),
        )

    def _searches_order(self, problem: Problem) -> bool:
        if self.order is None:
            return False
        return problem.known_targets is None or self.order.epochs == "reshuffled"

    def _solve_safely(self, chunk: "list[_Target]", report: Reporter) -> list[Reconstruction]:
        """Solve together; where that fails, in halves, so that one target spoils no other."""
        sharpness = self.relu_sharpness
        try:
            with SmoothedRelu(sharpness) if sharpness else nullcontext():
                return self._solve(chunk, report)
        except (RuntimeError, ValueError, IndexError, MemoryError) as error:
            if len(chunk) == 1:
                return [failure(error)]
        half = len(chunk) // 2
        return self._solve_safely(chunk[:half], report) + self._solve_safely(chunk[half:], report)

    def _solve(self, chunk: "list[_Target]", report: Reporter) -> list[Reconstruction]:
        began = time.process_time()
        first = chunk[0]
        spec = first.problem.spec
        candidates = Candidates(
            (first.problem.num_samples, *spec.shape), spec.num_classes, first.joint
        )
        problems = [target.problem for target in chunk]
        points, targets, orders = (
            torch.cat([getattr(target, name) for target in chunk])
            for name in ("starts", "targets", "orders")
        )
        size = torch.Size(candidates.shape).numel()
        large = sum(value.numel() for value in first.problem.params.values()) >= LARGE_NETWORK

        def owner_of(targets: Tensor) -> Tensor:
            every = torch.arange(len(chunk), device=targets.device)
            return every.repeat_interleave(len(targets) // len(chunk))

        def evaluator(batching: Batching, targets: Tensor, orders: Tensor) -> Evaluator:
            used = orders[:, : first.slots.used]
            parts = (self.objective, self.priors, batching)
            return Evaluator(problems, targets, used, owner_of(targets), candidates, *parts)

        def by_products(targets: Tensor) -> FactoredEvaluator:
            parts = (self.objective, self.priors)
            return FactoredEvaluator(
                problems, targets, owner_of(targets), candidates, *parts, together=not large
            )

        def project(points: Tensor) -> Tensor:
            inputs = spec.clamp(points[:, :size].reshape(-1, *spec.shape))
            return torch.cat([inputs.reshape(len(points), size), points[:, size:]], dim=1)

        batching = self.batching
        if batching == "auto" and self.order is None:
            batching = "products" if supports(lambda: by_products(targets), points) else "auto"
        if batching == "auto":
            batching = faster(lambda way: evaluator(way, targets, orders), points)
        bounds = project if self.box else None
        if self.order is not None and self._searches_order(first.problem):
            given = first.problem.known_targets is not None or first.joint
            points, targets, orders = self.order.search(
                partial(evaluator, batching),
                self.optimizer,
                points,
                targets,
                orders,
                first.slots,
                [stream for target in chunk for stream in target.streams],
                None if given else spec.num_classes,
                bounds,
                report,
            )
        evaluate: Evaluate
        if batching == "products":
            evaluate = by_products(targets)
        else:
            evaluate = evaluator(batching, targets, orders)
        if self.group is not None:
            every = torch.arange(len(chunk), device=points.device)
            owner = every.repeat_interleave(self.restarts)
            labels = None if first.joint else targets
            evaluate = self.group.around(evaluate, owner, labels, candidates.shape[0], size)
        found = self.optimizer(evaluate, points, bounds, report)
        seconds = (time.process_time() - began) / len(chunk)
        results = []
        for position, target in enumerate(chunk):
            rows = torch.arange(self.restarts) + position * self.restarts
            best = int(rows[found.values[rows].argmin()])
            objective = float(found.values[best])
            if not math.isfinite(objective):
                results.append(failure("the objective was never finite."))
                continue
            inputs, labels = candidates.split(found.points[best], targets[best])
            in_order = orders[best, : len(inputs)]
            inputs, labels = inputs[in_order], labels[in_order]
            if target.joint:
                labels = labels.argmax(dim=1)
            results.append(
                Reconstruction(
                    batch=Batch(inputs.to(torch.get_default_dtype()), labels),
                    objective=objective,
                    stats={
                        "iterations": int(found.iterations[best]),
                        "gradients": int(found.evaluations[rows].sum()),
                        "cpu_seconds": seconds,
                        "restart": best - int(rows[0]),
                        "batching": batching,
                    },
                )
            )
        return results


@dataclass(frozen=True)
class _Target:
    """A problem ready to be solved, with a start, targets and an order in each of its R rows."""

    index: int
    problem: Problem
    joint: bool
    slots: Slots
    streams: list[torch.Generator]
    starts: Tensor
    targets: Tensor
    orders: Tensor

    @property
    def kind(self) -> tuple[Any, ...]:
        """What targets must share to be solved together."""
        problem = self.problem
        return (
            tuple((p.schedule, p.members) for p in problem.rounds),
            problem.num_samples,
            problem.known_targets is None,
            self.joint,
            self.targets.shape,
            self.targets.dtype,
            tuple(problem.statistics),
        )
