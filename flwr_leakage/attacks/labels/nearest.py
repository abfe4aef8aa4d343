"""The label of a single sample, by the direction of the gradients that images have under it."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch
from flwr_leakage.spectral.image_prior import ImagePrior


@dataclass(frozen=True)
class NearestGradient:
    """The label attack ``argmax_k cos²(∂L(x, k)/∂θ, g*)``, averaged over images x.

    In some networks, as in those whose logits are a cosine similarity, no layer's gradient shows
    the label. But the label decides more of a gradient's direction than the image does. The attack
    computes K gradients for each image.

    Attributes:
        images: (N, C, H, W) normalised images; ``None`` for draws of the prior.
        draws: number N of draws of the prior.
    """

    images: Tensor | None = None
    draws: int = 8

    def __call__(self, problem: Problem, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Return the label (1,).

        Raises:
            ValueError: the update stems from several samples.
        """
        if problem.num_samples != 1:
            raise ValueError(
                "the nearest gradient infers the label of 1 sample, the update stems from "
                f"{problem.num_samples}."
            )
        observed = ravel(problem.gradient)
        images = self.images
        if images is None:
            prior = ImagePrior.of(problem.spec)
            draws = torch.randn(self.draws, *problem.spec.shape, generator=generator).double()
            images = problem.spec.clamp(prior.inputs(draws))
        images = images.to(observed)

        def likeness(label: int) -> float:
            cosines = []
            for image in images:
                batch = Batch(image[None], torch.tensor([label]))
                found = problem.gradient_map(problem.params, batch, problem.buffers)
                own = ravel({name: found[name] for name in problem.gradient})
                cosines.append(float(torch.cosine_similarity(own, observed, dim=0)) ** 2)
            return sum(cosines) / len(cosines)

        return torch.tensor([max(range(problem.spec.num_classes), key=likeness)])
