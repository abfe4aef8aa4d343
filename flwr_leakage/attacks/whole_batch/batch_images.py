"""Find all images of a batch jointly, after the features of every sample are found exactly."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

from flwr_leakage.attacks.base import failure
from flwr_leakage.attacks.budget import UNLIMITED, Budget, Stopwatch, stop_mark
from flwr_leakage.attacks.distance import gradient_distance
from flwr_leakage.attacks.exact.batch_linear import choose_layer, recover_batch
from flwr_leakage.attacks.exact.batch_proof import BatchInputs
from flwr_leakage.attacks.exact.batch_search import SearchSettings
from flwr_leakage.attacks.inversion.gauss_newton import GaussNewton
from flwr_leakage.attacks.inversion.jacobian import calls_kinks
from flwr_leakage.attacks.inversion.likelihood import estimate_noise
from flwr_leakage.attacks.labels.assumed import answer
from flwr_leakage.attacks.one_by_one import OneByOne
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.whole_batch.known_errors import KnownErrors
from flwr_leakage.attacks.whole_batch.sharp import Edges, Sharpening
from flwr_leakage.records import Batch, Reconstruction

LARGEST_FEATURE_ERROR = 1e-2
"""Largest relative error (standard deviation) of a layer's recovered inputs at which images are
sought. The value was chosen on development draws; no results are kept."""

SMOOTH_FACTOR = 0.2
"""Ratio of the prior's weight in a Gauss–Newton step to that in the step before, on networks
without ReLUs or other functions with kinks. There is nothing to blur there, so that the weight may
fall faster. On three batches of four (development draws) ratios of 0.1, 0.2 and 0.4 were within 0.2
dB of one another, and 0.7 up to 7 dB worse; no results are kept."""


@dataclass(frozen=True)
class BatchImages(OneByOne):
    """Solve for all images of a batch, once the features of every sample are known.

    The gradient of a linear layer behind convolutions determines each sample's features, which are
    the layer's inputs, and its label (:class:`flwr_leakage.attacks.exact.batch_linear.ExactBatch`).
    These determine the derivatives of the loss by the features. With them, the gradients of the
    parameters before the layer become equations that are linear in the images for given states of
    ReLUs and given places of pooling maxima; see :class:`KnownErrors`.

    Gauss–Newton solves them with a prior and a blur that fade, as :class:`GaussNewton` does with
    the gradient itself. The likeliest candidate is kept. If a small batch has more equations than
    pixels, further steps correct the states of ReLUs until the equations hold
    (:class:`Sharpening`). If the equations leave images open, further steps use a prior that allows
    sharp edges (:class:`Edges`).

    The attack takes one plain step of one client. Pooling removes details from all equations, so
    that images behind pooling stay approximate.

    Attributes:
        search: the limits of the search for features.
        solver: the settings of Gauss–Newton, of which annealings, noise, steps, products,
            iterations and tolerance are used. The labels are those found with the features.
        sharpening: the settings of the final steps if there are many equations.
        edges: the settings of the final steps if there are too few equations.
    """

    purpose: ClassVar[str] = "batch images"

    search: SearchSettings = field(default_factory=SearchSettings)
    solver: GaussNewton = field(default_factory=GaussNewton)
    sharpening: Sharpening = field(default_factory=Sharpening)
    edges: Edges = field(default_factory=Edges)

    def solve(
        self, problem: Problem, generator: torch.Generator, restart: int, budget: Budget
    ) -> Reconstruction:
        """Return the images that explain the update of one problem, with their labels.

        Args:
            problem: the network and the observed update of a batch, in float64.
            generator: the random stream for the search and for draws of the prior.
            restart: number of the restart; it changes nothing but the random stream.
            budget: the CPU time, after which the steps end early.

        Raises:
            ValueError: the equations cannot be set up; see :meth:`equations`.
        """
        watch = Stopwatch()
        model, found = self.equations(problem, generator, budget)
        problem = problem.divided(found.scale / problem.scale)
        feature_seconds = watch.seconds
        noise = self.solver.noise_std
        likelihood = model.likelihood(estimate_noise(problem) if noise is None else noise)
        end, told = self._end(model)
        solver = self._faded(problem, end)
        run, products, steps = solver.fit(model, likelihood, model, likelihood, budget)
        if not math.isfinite(run.distance):
            return failure("the objective was never finite.")
        inputs = run.inputs
        if end is not None:
            inputs, told = end(model, likelihood, run, solver.solved_distance, budget)
        batch = Batch(problem.spec.clamp(inputs), found.labels)
        residual = likelihood.residual(model.gradient(inputs, 0.0, precise=True))
        stats: dict[str, Any] = {
            "stage": f"{run.stage}{model.passed.contrast.note}",
            "layer": found.layer,
            **({"scale": found.scale} if found.scale != 1 else {}),
            "features_proven": found.proven,
            "features": found,
            "weight": model.passed.narrow.weight,
            "features_seconds": feature_seconds,
            "equations": likelihood.distance(residual),
            "iterations": steps,
            "products": products,
            "end": told,
            **stop_mark(run.stopped),
        }
        distance = gradient_distance(problem, batch)
        return Reconstruction(answer(batch.inputs, batch.targets), distance, stats)

    def _end(self, model: KnownErrors) -> tuple[Sharpening | Edges | None, str]:
        """Return the settings of the steps after Gauss–Newton and "", or None and why none follow.

        Sharpening needs two equations for each unknown, and edges at most 1.25, so that no batch
        takes both.
        """
        reasons = []
        for end in (self.sharpening, self.edges):
            if not (reason := end.obstacle(model)):
                return end, ""
            reasons.append(reason)
        return None, f"none, as {' and '.join(reasons)}"

    def _faded(self, problem: Problem, end: Sharpening | Edges | None) -> GaussNewton:
        """Return the settings of Gauss–Newton for the run before the final steps.

        The prior fades faster if no activation's slope jumps and there is no max pooling. The run
        takes the share ``end.before`` of the allowed products with the Jacobian, or all of them if
        ``end`` is ``None``, which means that there are no final steps.
        """
        solver = self.solver
        if end is not None:
            solver = replace(solver, products=max(1, int(end.before * solver.products)))
        if not calls_kinks(problem):
            faster = [replace(each, factor=SMOOTH_FACTOR) for each in solver.annealings]
            solver = replace(solver, annealings=faster)
        return solver

    def equations(
        self, problem: Problem, generator: torch.Generator, budget: Budget = UNLIMITED
    ) -> tuple[KnownErrors, BatchInputs]:
        """Return the equations of a batch's images, and the recovered features of every sample.

        The equations come from the features, and from the gradients of the parameters before the
        layer that takes the features. Sample i of the equations is sample i of the features.

        Args:
            problem: the network and the observed update.
            generator: the random stream for the search and for draws of the prior.
            budget: the CPU time of the search for features.

        Raises:
            ValueError: the update is not one plain step; no linear layer's gradient can be
                factored; the layer takes the images themselves; not all samples were found; noise
                leaves an error above ``LARGEST_FEATURE_ERROR`` in the features; the logits also
                depend on the images by a path around the layer; or no parameter is used before the
                layer only.
        """
        if not problem.is_single_gradient:
            raise ValueError("images behind features are solved for from one plain step.")
        layers, layer, _ = choose_layer(problem, generator)
        if layer.takes_input:
            raise ValueError(f"{layer.name} takes the images themselves, which are no features.")
        allowed = min(self.search.max_seconds, budget.left)
        found = recover_batch(problem, replace(self.search, max_seconds=allowed), generator)
        if len(found.labels) != problem.num_samples:
            raise ValueError(
                f"the features of {len(found.labels)} of {problem.num_samples} samples were found "
                f"at {found.layer}; the images need those of all."
            )
        error = float(found.relative_errors.max())
        if not error <= LARGEST_FEATURE_ERROR:
            raise ValueError(
                f"noise leaves an error of {error:.1e} in the features at {found.layer}; their "
                f"equations need {LARGEST_FEATURE_ERROR:g} or less."
            )
        problem = problem.divided(found.scale / problem.scale).held
        layer = next(each for each in layers if each.name == found.layer)
        return KnownErrors.of(problem, layer.weight, found, generator), found
