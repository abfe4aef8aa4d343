"""The images of a whole batch: exact features of every sample first, then all images jointly."""

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.budget import Budget, stop_mark
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.exact.batch_linear import choose_layer, recover_batch
from flwr_leakage.attacks.exact.batch_proof import BatchInputs
from flwr_leakage.attacks.exact.batch_search import SearchSettings
from flwr_leakage.attacks.inversion.gauss_newton import Candidate, GaussNewton
from flwr_leakage.attacks.inversion.likelihood import estimate_noise
from flwr_leakage.attacks.labels.assumed import answer
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors
from flwr_leakage.records import Batch, Reconstruction


@dataclass(frozen=True)
class BatchImages(OneByOne):
    """Solve for all images of a batch, once the features of every sample are known.

    A linear layer behind convolutions gives each sample's features and label
    (:class:`flwr_leakage.attacks.exact.batch_linear.ExactBatch`). Their errors then follow, and
    the gradients before the layer become equations that are linear in the images for given masks
    and maxima; see :class:`KnownErrors`. They are solved by Gauss–Newton with a prior and a blur
    that fade, as the gradient itself is by :class:`GaussNewton`. The candidate whose equations are
    met best is kept.

    It takes one plain step of one client. Networks that pool lose what no equation tells: their
    images stay approximate.

    Attributes:
        search: how long features are searched for, and what is accepted.
        solver: its annealings, noise, steps, products, iterations and tolerance are used; labels
            are those of the features.
    """

    purpose: ClassVar[str] = "batch images"

    search: SearchSettings = field(default_factory=SearchSettings)
    solver: GaussNewton = field(default_factory=GaussNewton)

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Attack one problem.

        Raises:
            ValueError: no linear layer behind convolutions gives the features of all samples.
        """
        began = time.process_time()
        weight, found = self._features(problem, generator, budget)
        told = time.process_time() - began
        model = KnownErrors.of(problem, weight, found, generator)
        noise = self.solver.noise_std
        likelihood = model.likelihood(estimate_noise(problem) if noise is None else noise)
        best: Candidate | None = None
        products = steps = chosen = 0
        for number, annealing in enumerate(self.solver.annealings):
            candidate = self.solver.run(model, likelihood, annealing, budget)
            products, steps = products + candidate.products, steps + candidate.steps
            if best is None or candidate.energy < best.energy:
                best, chosen = candidate, number
            if best.distance <= self.solver.solved_distance or budget.is_spent:
                break
        assert best is not None
        if not math.isfinite(best.distance):
            return failure("the objective was never finite.")
        batch = Batch(problem.spec.clamp(best.inputs), found.labels)
        stats: dict[str, Any] = {
            "stage": f"run {chosen + 1} of {len(self.solver.annealings)}, {best.stage}",
            "layer": found.layer,
            "features_proven": found.proven,
            "features_seconds": told,
            "equations": best.distance,
            "iterations": steps,
            "products": products,
            "cpu_seconds": time.process_time() - began,
            **stop_mark(best.stopped),
        }
        distance = gradient_distance(problem, batch)
        return Reconstruction(answer(batch.inputs, batch.targets), distance, stats)

    def _features(
        self, problem: Problem, generator: torch.Generator, budget: Budget
    ) -> tuple[str, BatchInputs]:
        """The layer's weight, and the features of all samples."""
        if not problem.is_single_gradient:
            raise ValueError("images behind features are solved for from one plain step.")
        _, layer, _ = choose_layer(problem, generator)
        if layer.takes_input:
            raise ValueError(f"{layer.name} takes the images themselves, which are no features.")
        allowed = min(self.search.max_seconds, budget.left)
        found = recover_batch(problem, replace(self.search, max_seconds=allowed), generator)
        if len(found.labels) != problem.num_samples:
            raise ValueError(
                f"the features of {len(found.labels)} of {problem.num_samples} samples were found "
                f"at {found.layer}; the images need those of all."
            )
        return layer.weight, found
