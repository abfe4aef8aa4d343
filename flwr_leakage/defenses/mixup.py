"""Train on weighted means of k samples and of their labels (MixUp)."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from flwr_leakage.defenses.base import Defense
from flwr_leakage.defenses.mixing import Mixing, check_mixing, draw_mixing, mix, soft_targets
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Batch, InputSpec


def mixup_batch(batch: Batch, mixing: Mixing, num_classes: int) -> Batch:
    """Return mixed inputs x̃ = Σⱼ λⱼ xⱼ and mixed one-hot targets ỹ = Σⱼ λⱼ yⱼ of n samples, with
    the coefficients λ of ``mixing`` (Zhang et al. 2018 for two samples, Huang et al. 2021, section
    5.1, for k).
    """
    targets = soft_targets(batch.targets, num_classes, batch.inputs.dtype)
    return Batch(mix(batch.inputs, mixing), mix(targets, mixing))


@dataclass(frozen=True)
class MixUp(Defense):
    """A defense that trains on random weighted means of k samples and of their labels.

    A sample is mixed with others of the same call of ``on_batch``, such as a whole epoch.

    Attributes:
        k: the number of samples in each mean, ≥ 1.
        max_coefficient: the largest coefficient that a sample may have, in (1 / k, 1].
    """

    effect: ClassVar[str] = "the client trains on mixtures of several images"
    takes_texts: ClassVar[bool] = False

    k: int = 4
    max_coefficient: float = 0.65

    def __post_init__(self) -> None:
        check_mixing(self.k, self.max_coefficient)

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Raise ``ValueError`` if ``num_examples``, the samples that are mixed at once, are fewer
        than k.
        """
        super().validate(gradient_map, spec, num_examples)
        if num_examples < self.k:
            raise ValueError(
                f"k must be at most {num_examples}, the samples that are encoded at once, "
                f"got {self.k}."
            )

    def draw_mixing(self, num_samples: int, randomness: Randomness) -> Mixing:
        """Return random partners and coefficients for each of ``num_samples`` samples."""
        return draw_mixing(num_samples, self.k, self.max_coefficient, randomness)

    def mixing_matrix(
        self, num_samples: int, randomness: Randomness
    ) -> Float[Tensor, "B n"] | None:
        """Return the matrix W (n, n) of the means W · samples; ``None`` if k = 1, so that nothing
        is mixed.
        """
        if self.k == 1:
            return None
        return self.draw_mixing(num_samples, randomness).matrix(num_samples)

    def on_batch(self, batch: Batch, num_classes: int, randomness: Randomness) -> Batch:
        """Return weighted means of the batch's samples. Their targets are class probabilities (B,
        K); for k = 1 the batch stays as it is.
        """
        if self.k == 1:
            return batch
        mixing = self.draw_mixing(len(batch), randomness)
        return mixup_batch(batch, mixing, num_classes)
