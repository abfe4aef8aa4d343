"""Attacks that start from the batch that another attack found, for updates with or without noise.

Such a batch is called a candidate.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget, Stopwatch, stop_mark
from flwr_leakage.attacks.evidence import Evidence
from flwr_leakage.attacks.inversion.dense_gauss_newton import DenseGaussNewton
from flwr_leakage.attacks.inversion.gradient_inversion import GradientInversion
from flwr_leakage.attacks.inversion.least_absolute import LeastAbsolute
from flwr_leakage.attacks.job import AttackJob
from flwr_leakage.attacks.solve.descent import Iterate, Posed, follow
from flwr_leakage.attacks.solve.linearization import Linearization
from flwr_leakage.attacks.solve.posterior import Posterior, Solver
from flwr_leakage.records import Batch, Reconstruction
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.patch_prior import PatchPrior
from flwr_leakage.values import require


@dataclass(frozen=True)
class Finish:
    """An attack that starts from a candidate, a batch that another attack found.

    One attack may be good at finding the neighbourhood of the private samples, and another one at
    converging there.

    Attributes:
        attack: the attack that continues. It starts from the candidate's inputs in place of its own
            start, and takes the candidate's labels.
    """

    attack: GradientInversion | LeastAbsolute | DenseGaussNewton

    def __call__(self, job: AttackJob, candidate: Batch) -> Reconstruction:
        """Return the reconstruction of the job's only observation, from another attack's batch.

        Raises:
            ValueError: the job has no observation, or several.
        """
        if len(job.observations) != 1:
            raise ValueError(f"job must have one observation, got {len(job.observations)}.")
        candidate = in_granted_order(candidate, job.problem(0).known_targets)
        attack = self.attack
        if isinstance(attack, DenseGaussNewton):
            attack = replace(attack, ahead=None)
        attack = replace(
            attack,
            initialisation=lambda *_: candidate.inputs.clone(),
            labels=lambda *_: candidate.targets,
        )
        (result,) = attack(job)
        return result


def in_granted_order(candidate: Batch, granted: Tensor | None) -> Batch:
    """Return a candidate with its samples sorted so that its labels have the granted order.

    Exact attacks sort their samples by label, and the next attack pairs samples with the labels
    (B,) that the threat model grants, in their order. The candidate is returned as it is if no
    labels are granted, if labels are probabilities or several per sample, or if the candidate's
    labels are not the granted ones in some order.
    """
    classes = candidate.targets
    if granted is None or granted.shape != classes.shape:
        return candidate
    if granted.ndim != 1 or granted.is_floating_point() or classes.is_floating_point():
        return candidate
    mine, theirs = classes.argsort(stable=True), granted.argsort(stable=True)
    if not torch.equal(classes[mine], granted[theirs].to(classes)):
        return candidate
    order = torch.empty_like(mine)
    order[theirs] = mine
    return candidate[order]


@dataclass(frozen=True)
class Denoising:
    """A Gauss–Newton attack on a noised update that starts from a batch another attack found.

    Its priors are estimated from that batch. Each step minimises, with r linear in s,

        Σ_j r_j² / v_j + sᵀ Q s

    r_j is entry j of the candidate's gradient minus the observed one. v_j is the variance of r_j:
    that of the noise, or more where the residual is larger
    (:meth:`flwr_leakage.attacks.inversion.likelihood.Likelihood.variances`). s are the coordinates
    of the images, with identity covariance under a normal law that has each image's own spectrum
    (:meth:`flwr_leakage.spectral.image_prior.ImagePrior.fitted`). There are two runs. In the first,
    Q is the identity, so that this law is the prior. It removes noise from frequencies and colours
    with little content. In the second, Q is the cost of patches by their kind
    (:class:`flwr_leakage.spectral.patch_prior.PatchPrior`), which removes noise from places with
    little content. The result is the mean of the images of both runs, as their errors differ.

    Attributes:
        steps: largest number of steps in each run, ≥ 0; with 0 the batch stays as it is.
        iterations: largest number of iterations of conjugate gradients in a step, ≥ 1.
        tolerance: relative residual at which a step's linear system counts as solved, in (0, 1).
    """

    steps: int = 4
    iterations: int = 250
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        require(self, "be at least 0", "steps")
        require(self, "be at least 1", "iterations")
        require(self, "lie in (0, 1)", "tolerance")

    def __call__(self, job: AttackJob, candidate: Batch, evidence: Evidence) -> Reconstruction:
        """Return a denoised reconstruction of the job's only observation.

        ``candidate`` is the batch of another attack to start from. ``evidence`` holds the
        observation's problem, its noise and the prior.
        """
        budget = Budget.of(job.max_seconds)
        batch, steps = self.denoised(evidence, candidate, budget)
        stats = {"stage": f"{steps} steps", **stop_mark(budget.is_spent)}
        return Reconstruction(batch, evidence.judge(batch).distance, stats)

    def denoised(
        self, evidence: Evidence, candidate: Batch, budget: Budget = UNLIMITED
    ) -> tuple[Batch, int]:
        """Return a denoised batch, and the number of Gauss–Newton steps that both runs took.

        ``candidate`` is the batch to start from; its labels are kept. ``evidence`` holds the
        problem, the noise and the prior.
        """
        start = Batch(candidate.inputs.double(), candidate.targets)
        priors = (None, PatchPrior.of(evidence.image_prior))
        answers = [self.solve(evidence, start, prior, budget) for prior in priors]
        found = [inputs for inputs, steps in answers if steps] or [start.inputs]
        mean = evidence.problem.spec.clamp(torch.stack(found).mean(0))
        taken = sum(steps for _, steps in answers)
        return Batch(mean.to(candidate.inputs), candidate.targets), taken

    def solve(
        self,
        evidence: Evidence,
        candidate: Batch,
        patches: PatchPrior | None = None,
        budget: Budget = UNLIMITED,
    ) -> tuple[Tensor, int]:
        """Return the images (B, C, H, W) found under one prior, and the number of steps taken.

        The prior is that of ``patches``; if it is ``None``, the normal law of each image's
        spectrum. ``candidate`` is the batch to start from.
        """
        if budget.is_spent:
            return candidate.inputs, 0
        likelihood = evidence.likelihood
        prior, start = fitted(evidence.image_prior, candidate.inputs)

        def gradient(images: Tensor) -> Tensor:
            return evidence.gradient(Batch(images, candidate.targets))

        def pose(at: Iterate, _: int) -> Posed:
            nonlocal prior
            watch = Stopwatch()
            images = prior.inputs(at.point) if at.steps else candidate.inputs
            prior, point = fitted(evidence.image_prior, images)
            here = Linearization(gradient, images)
            residual = likelihood.residual(here.value)
            weights = 1 / likelihood.variances(residual, 1.0)
            kinds = None if patches is None else patches.at(images)
            now = prior

            def residual_at(trial: Tensor) -> Tensor:
                with torch.no_grad():
                    return likelihood.residual(gradient(now.inputs(trial)))

            # The linearisation above took about as long as one iteration of conjugate gradients, so
            # that its time tells how many iterations the budget allows.
            iterations = 1 + budget.affordable(self.iterations - 1, watch.seconds)
            return Posterior(
                *(here, prior, weights, residual, point, residual_at), patches=kinds
            ).posed(Solver(iterations, self.tolerance))

        end = follow(
            range(self.steps), pose, start, lambda at, _: budget.is_spent or not at.has_moved
        )
        images = prior.inputs(end.point) if end.steps else candidate.inputs
        return images, end.steps - (end.steps > 0 and not end.has_moved)


def fitted(prior: ImagePrior, inputs: Tensor) -> tuple[ImagePrior, Tensor]:
    """Return a prior with the spectrum of each given image, and the images' coordinates under it.

    The images, inputs of the network, and their coordinates have the shape (B, C, H, W). ``prior``
    is that of images in general.
    """
    each = [prior.fitted(image[None]) for image in inputs]
    point = [own.coordinates(image[None]) for own, image in zip(each, inputs, strict=True)]
    deviations = torch.stack([own.deviations for own in each])
    return replace(prior, deviations=deviations), torch.cat(point)


Continuation = Finish | Denoising
"""An attack that continues from a batch that another attack found."""
