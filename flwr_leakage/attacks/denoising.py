"""The end under noise: what is most likely by the spectrum and the patches of the candidate."""

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.evidence import Evidence
from flwr_leakage.attacks.inversion.annealing import SHORTENINGS
from flwr_leakage.attacks.inversion.linearization import Linearization
from flwr_leakage.attacks.inversion.settling import Posterior
from flwr_leakage.records import Batch
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior
from flwr_leakage.spectral.patch_prior import PatchPrior


@dataclass(frozen=True)
class Denoising:
    """Gauss–Newton from a candidate, with priors that the candidate itself tells.

    Each step minimises to first order

        Σ_j r_j² / v_j + sᵀ Q s

    with v the variance of each entry, read from the residual where that is above the noise
    (:meth:`flwr_leakage.attacks.inversion.likelihood.Likelihood.variances`), and s the coordinates
    of a normal law with each image's own spectrum, ring by ring
    (:meth:`flwr_leakage.spectral.image_prior.ImagePrior.fitted`). It runs twice: Q is the identity,
    so that the prior is this law, or the cost of patches of the kinds that the image's are
    (:class:`flwr_leakage.spectral.patch_prior.PatchPrior`). Both are estimates by empirical Bayes,
    made again for each step. The first takes the noise out of the frequencies and colours of which
    the image has little, the second out of the places. Their errors differ: the mean of both
    answers is mostly nearer to the image than either. A prior of all images leaves such noise.

    Attributes:
        steps: at most, of each prior, ≥ 0; at 0 candidates stay as they are.
        iterations: of conjugate gradients in a step, at most, ≥ 1.
        tolerance: relative, of a step's linear system, in (0, 1).
    """

    steps: int = 4
    iterations: int = 250
    tolerance: float = 1e-3

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps must be at least 0, got {self.steps}.")
        if self.iterations < 1:
            raise ValueError(f"iterations must be at least 1, got {self.iterations}.")
        if not 0 < self.tolerance < 1:
            raise ValueError(f"tolerance must lie in (0, 1), got {self.tolerance}.")

    def __call__(
        self, evidence: Evidence, candidate: Batch, budget: Budget = UNLIMITED
    ) -> tuple[Batch, int]:
        """Images of the candidate's labels, and the steps that led to them.

        Args:
            evidence: of the update.
            candidate: where to begin.
            budget: looked at between steps.
        """
        start = Batch(candidate.inputs.double(), candidate.targets)
        priors = (None, PatchPrior.of(evidence.prior))
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
        """Images under one prior, and the steps that led to them.

        Args:
            evidence: of the update.
            candidate: where to begin, in double precision.
            patches: the prior, or ``None`` for that of the spectrum.
            budget: looked at between steps.
        """
        likelihood, taken, inputs = evidence.likelihood, 0, candidate.inputs

        def gradient(images: Tensor) -> Tensor:
            return evidence.gradient(Batch(images, candidate.targets))

        while taken < self.steps and not budget.is_spent:
            began = time.process_time()
            prior, point = fitted(evidence.prior, inputs)
            kinds = None if patches is None else patches.at(inputs)
            here = Linearization(gradient, inputs)
            residual = likelihood.residual(here.value)
            weights = 1 / likelihood.variances(residual, 1.0)
            posterior = Posterior(here, prior, weights, kinds)

            def product(flat: Tensor, posterior=posterior, point: Tensor = point) -> Tensor:
                return posterior(flat.reshape(point.shape)).flatten()

            right = -(posterior.pull_back(weights * residual) + posterior.cost(point)).flatten()
            # All of this took about as long as one iteration does.
            left = budget.left / max(time.process_time() - began, 1e-9)
            iterations = int(min(self.iterations, 1 + left))
            change, _ = conjugate_gradients(product, right, self.tolerance, iterations)
            step = change.reshape(point.shape)
            before = (weights * residual.square()).sum() + (point * posterior.cost(point)).sum()
            for number in range(SHORTENINGS):
                trial = point + 0.4**number * step
                images = prior.grey + prior.push(trial)
                with torch.no_grad():
                    rest = likelihood.residual(gradient(images))
                cost = (trial * posterior.cost(trial)).sum()
                if (weights * rest.square()).sum() + cost < before:
                    break
            else:
                break
            inputs, taken = images, taken + 1
        return inputs, taken


def fitted(prior: ImagePrior, inputs: Tensor) -> tuple[ImagePrior, Tensor]:
    """The prior with the spectrum of each image, and the images' coordinates (B, C, H, W)."""
    each = [prior.fitted(image[None]) for image in inputs]
    point = [own.coordinates(image[None]) for own, image in zip(each, inputs, strict=True)]
    deviations = torch.stack([own.deviations for own in each])
    return replace(prior, deviations=deviations), torch.stack(point)
