"""Gradient inversion made of parts: find samples whose update equals the observed one."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from flwr_leakage.attacks.base import AttackProgress, ProgressCallback, failure
from flwr_leakage.attacks.evaluation import Batching, Candidates, Evaluator
from flwr_leakage.attacks.initialisation import Grey, Initialisation
from flwr_leakage.attacks.labels.automatic import AutomaticLabels
from flwr_leakage.attacks.labels.base import LabelInference
from flwr_leakage.attacks.objectives.base import Objective
from flwr_leakage.attacks.objectives.euclidean import Euclidean
from flwr_leakage.attacks.optimizers.base import Optimizer
from flwr_leakage.attacks.optimizers.lbfgs import LBFGS
from flwr_leakage.attacks.priors.base import Prior
from flwr_leakage.attacks.problem import Problem, pose
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, InputSpec, Observation, Reconstruction, ThreatModel


@dataclass(frozen=True)
class GradientInversion:
    """Minimise ``objective(∇L(x), observed) + Σ priors(x)`` over inputs x, many targets at once.

    Targets of equal shape and schedule are solved together; every one has its own optimizer
    state and its own random stream, so that the result equals solving it alone. The best iterate
    and the best restart are chosen by the attacker's own objective.

    Attributes:
        objective: distance of the candidate's pseudo-gradient from the observed one.
        priors: penalties of the candidate's inputs.
        labels: how labels are inferred, or ``joint`` to optimise label logits with the inputs
            (DLG). Not used where the threat model grants the labels.
        initialisation: the first candidate.
        optimizer: the minimiser, with its schedule and stopping rules.
        restarts: independent starts a target, ≥ 1.
        box: keep candidates within pixels [0, 1].
        dtype: precision of the computation.
        batching: ``vmap`` (all rows in one pass), ``loop`` (one by one), or ``auto``: what a
            measurement of one evaluation at the start found faster.
        max_rows: rows solved together at most, ≥ 1; bounds memory.
    """

    objective: Objective = field(default_factory=Euclidean)
    priors: Sequence[Prior] = ()
    labels: LabelInference | Literal["joint"] = field(default_factory=AutomaticLabels)
    initialisation: Initialisation = field(default_factory=Grey)
    optimizer: Optimizer = field(default_factory=LBFGS)
    restarts: int = 1
    box: bool = True
    dtype: Literal["float32", "float64"] = "float32"
    batching: Literal["vmap", "loop", "auto"] = "auto"
    max_rows: int = 64

    def __post_init__(self) -> None:
        for name in ("restarts", "max_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.dtype not in ("float32", "float64"):
            raise ValueError(f"dtype must be 'float32' or 'float64', got {self.dtype!r}.")
        if self.batching not in ("vmap", "loop", "auto"):
            raise ValueError(f"batching must be vmap, loop or auto, got {self.batching!r}.")
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
            size = max(1, self.max_rows // self.restarts)
            for begin in range(0, len(group), size):
                chunk = group[begin : begin + size]
                report = _Reporter(progress, done, len(observations), self.optimizer.iterations)
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
        starts = []
        for restart, stream in enumerate(streams):
            inputs = self.initialisation(spec, problem.num_samples, restart, stream)
            if self.box:
                inputs = spec.clamp(inputs)
            row = inputs.reshape(-1)
            if joint:
                logits = torch.randn(problem.num_samples * spec.num_classes, generator=stream)
                row = torch.cat([row, logits])
            starts.append(row.to(like))
        if targets.is_floating_point():
            targets = targets.to(like.dtype)
        return _Target(index, problem, targets.to(like.device), joint, torch.stack(starts))

    def _solve_safely(self, chunk: "list[_Target]", report: "_Reporter") -> list[Reconstruction]:
        """Solve together; where that fails, one by one, so that one target spoils no other."""
        try:
            return self._solve(chunk, report)
        except (RuntimeError, ValueError) as error:
            if len(chunk) == 1:
                return [failure(error)]
        results = []
        for target in chunk:
            results += self._solve_safely([target], report)
        return results

    def _solve(self, chunk: "list[_Target]", report: "_Reporter") -> list[Reconstruction]:
        began = time.process_time()
        first = chunk[0]
        spec = first.problem.spec
        candidates = Candidates(
            (first.problem.num_samples, *spec.shape), spec.num_classes, first.joint
        )
        owner = torch.arange(len(chunk)).repeat_interleave(self.restarts)
        points = torch.cat([target.starts for target in chunk])
        targets = torch.stack([target.targets for target in chunk]).repeat_interleave(
            self.restarts, dim=0
        )

        def evaluator(batching: Batching) -> Evaluator:
            problems = [target.problem for target in chunk]
            return Evaluator(
                problems, targets, owner, candidates, self.objective, self.priors, batching
            )

        if self.batching == "auto":
            evaluate = _faster(evaluator, points)
        else:
            evaluate = evaluator(self.batching)
        size = torch.Size(candidates.shape).numel()

        def project(points: Tensor) -> Tensor:
            inputs = spec.clamp(points[:, :size].reshape(-1, *spec.shape))
            return torch.cat([inputs.reshape(len(points), size), points[:, size:]], dim=1)

        minimum = self.optimizer(evaluate, points, project if self.box else None, report)
        seconds = (time.process_time() - began) / len(chunk)
        results = []
        for position, target in enumerate(chunk):
            rows = torch.arange(self.restarts) + position * self.restarts
            best = int(rows[minimum.values[rows].argmin()])
            objective = float(minimum.values[best])
            if not math.isfinite(objective):
                results.append(failure("the objective was never finite."))
                continue
            inputs, labels = candidates.split(minimum.points[best], target.targets)
            if target.joint:
                labels = labels.argmax(dim=1)
            results.append(
                Reconstruction(
                    batch=Batch(inputs.to(torch.get_default_dtype()), labels),
                    objective=objective,
                    stats={
                        "iterations": int(minimum.iterations[best]),
                        "gradients": int(minimum.evaluations[rows].sum()),
                        "cpu_seconds": seconds,
                        "restart": best - int(rows[0]),
                        "batching": evaluate.batching,
                    },
                )
            )
        return results


@dataclass(frozen=True)
class _Target:
    """A problem ready to be solved: its labels, or that they are variables, and its starts."""

    index: int
    problem: Problem
    targets: Tensor
    joint: bool
    starts: Tensor

    @property
    def kind(self) -> tuple[Any, ...]:
        """What targets must share to be solved together."""
        problem = self.problem
        return (
            problem.schedule,
            problem.num_samples,
            self.joint,
            self.targets.shape,
            self.targets.dtype,
            tuple(problem.statistics),
        )


def _faster(evaluator: Any, points: Tensor) -> Evaluator:
    """Time one evaluation a way, on all rows together and on one, and keep the faster way.

    The loop has to be plainly faster: results of the two ways differ in their last digits, and a
    choice between near equals would change from run to run.
    """
    rows = torch.arange(len(points))
    looped: Evaluator = evaluator("loop")
    if len(points) == 1:
        return looped
    together: Evaluator = evaluator("vmap")
    seconds = {}
    for name, evaluate, count in (("vmap", together, len(points)), ("loop", looped, 1)):
        evaluate(points[:count], rows[:count])  # the first call pays for what later ones reuse
        began = time.process_time()
        evaluate(points[:count], rows[:count])
        seconds[name] = (time.process_time() - began) / count
    return looped if 1.3 * seconds["loop"] < seconds["vmap"] else together


@dataclass
class _Reporter:
    """Passes an optimizer's progress on, at most a few times a second."""

    progress: ProgressCallback | None
    done: int
    total: int
    iterations: int
    last: float = 0.0

    def __call__(self, iteration: int, finished: int, values: Tensor) -> None:
        """Tell the progress if the last time is long enough ago."""
        now = time.monotonic()
        if self.progress is None or now - self.last < 0.25:
            return
        self.last = now
        finite = values[torch.isfinite(values)]
        mean = float(finite.mean()) if len(finite) else math.nan
        self.progress(AttackProgress(self.done, self.total, iteration, self.iterations, mean))
