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
    """Mix inputs and one-hot targets alike: x̃ = Σⱼ λⱼ xⱼ, ỹ = Σⱼ λⱼ yⱼ.

    Zhang et al. (2018) for two samples; Huang et al. (2021, section 5.1) for k.

    Args:
        batch: n samples.
        mixing: which of them enter each encoding, and how much.
        num_classes: K.
    """
    targets = soft_targets(batch.targets, num_classes, batch.inputs.dtype)
    return Batch(mix(batch.inputs, mixing), mix(targets, mixing))


@dataclass(frozen=True)
class MixUp(Defense):
    """Encode every batch by :func:`mixup_batch` with fresh draws.

    The partners come from the samples that are encoded in one call: encode a whole epoch at
    once to mix over all of a client's data.

    Attributes:
        k: samples in each encoding, ≥ 1.
        max_coefficient: bound of every coefficient, in (1 / k, 1].
    """

    takes_texts: ClassVar[bool] = False

    k: int = 4
    max_coefficient: float = 0.65

    def __post_init__(self) -> None:
        check_mixing(self.k, self.max_coefficient)

    def in_words(self) -> str:
        """Return a clause that describes the effect of the defense."""
        return "the client trains on mixtures of several images"

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Raise unless at least k samples are encoded at once."""
        super().validate(gradient_map, spec, num_examples)
        if num_examples < self.k:
            raise ValueError(
                f"k must be at most {num_examples}, the samples that are encoded at once, "
                f"got {self.k}."
            )

    def draw_mixing(self, num_samples: int, randomness: Randomness) -> Mixing:
        """Draw partners and coefficients."""
        return draw_mixing(num_samples, self.k, self.max_coefficient, randomness)

    def mixing_matrix(
        self, num_samples: int, randomness: Randomness
    ) -> Float[Tensor, "B n"] | None:
        """Return W (n, n) of the encodings; ``None`` where k is 1."""
        if self.k == 1:
            return None
        return self.draw_mixing(num_samples, randomness).matrix(num_samples)

    def on_batch(self, batch: Batch, num_classes: int, randomness: Randomness) -> Batch:
        """Mix the batch's samples; targets become (B, K) probabilities unless k is 1."""
        if self.k == 1:
            return batch
        mixing = self.draw_mixing(len(batch), randomness)
        return mixup_batch(batch, mixing, num_classes)
