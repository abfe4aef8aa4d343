"""The end under noise: what is most likely by the spectrum of the candidate itself."""

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.attacks.budget import UNLIMITED, Budget
from flwr_leakage.attacks.evidence import Evidence
from flwr_leakage.attacks.inversion.annealing import SHORTENINGS, System
from flwr_leakage.attacks.inversion.linearization import Linearization
from flwr_leakage.records import Batch
from flwr_leakage.spectral.conjugate_gradient import conjugate_gradients
from flwr_leakage.spectral.image_prior import ImagePrior


@dataclass(frozen=True)
class Denoising:
    """Gauss–Newton from a candidate, with a prior whose spectrum is that of the candidate.

    Each step minimises to first order

        Σ_j r_j² / v_j + Σ_i ‖s_i‖²

    with v the variance of each entry, read from the residual where that is above the noise
    (:meth:`flwr_leakage.attacks.inversion.likelihood.Likelihood.variances`), and s the coordinates
    of a normal law with each image's own spectrum, ring by ring
    (:meth:`flwr_leakage.spectral.image_prior.ImagePrior.fitted`). That is an estimate by empirical
    Bayes, made again for each step. It takes the noise out of the frequencies and colours of which
    the image has little. A prior of all images leaves it there.

    Attributes:
        steps: at most, ≥ 0; at 0 candidates stay as they are.
        iterations: of conjugate gradients in a step, at most, ≥ 1.
        tolerance: relative, of a step's linear system, in (0, 1).
    """

    steps: int = 8
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
        likelihood, taken = evidence.likelihood, 0
        inputs = candidate.inputs.double()

        def gradient(images: Tensor) -> Tensor:
            return evidence.gradient(Batch(images, candidate.targets))

        while taken < self.steps and not budget.is_spent:
            began = time.process_time()
            prior, point = fitted(evidence.prior, inputs)
            here = Linearization(gradient, inputs)
            residual = likelihood.residual(here.value)
            weights = 1 / likelihood.variances(residual, 1.0)
            system = System(here, prior, weights)

            def product(flat: Tensor, system: System = system, point: Tensor = point) -> Tensor:
                return system(flat.reshape(point.shape)).flatten() + flat

            right = -(system.pull_back(weights * residual) + point).flatten()
            # All of this took about as long as one iteration does.
            left = budget.left / max(time.process_time() - began, 1e-9)
            iterations = int(min(self.iterations, 1 + left))
            change, _ = conjugate_gradients(product, right, self.tolerance, iterations)
            step = change.reshape(point.shape)
            before = (weights * residual.square()).sum() + point.square().sum()
            for number in range(SHORTENINGS):
                trial = point + 0.4**number * step
                images = prior.grey + prior.push(trial)
                with torch.no_grad():
                    rest = likelihood.residual(gradient(images))
                if (weights * rest.square()).sum() + trial.square().sum() < before:
                    break
            else:
                break
            inputs, taken = images, taken + 1
        inputs = evidence.problem.spec.clamp(inputs).to(candidate.inputs)
        return Batch(inputs, candidate.targets), taken


def fitted(prior: ImagePrior, inputs: Tensor) -> tuple[ImagePrior, Tensor]:
    """The prior with the spectrum of each image, and the images' coordinates (B, C, H, W)."""
    each = [prior.fitted(image[None]) for image in inputs]
    point = [own.coordinates(image[None]) for own, image in zip(each, inputs, strict=True)]
    deviations = torch.stack([own.deviations for own in each])
    return replace(prior, deviations=deviations), torch.stack(point)
