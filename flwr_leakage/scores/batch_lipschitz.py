"""Estimate Lipschitz and angular Lipschitz constants of the gradient of a whole training batch."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.params import ravel
from flwr_leakage.per_sample import ClientSamples
from flwr_leakage.per_sample.samples import converted
from flwr_leakage.randomness import make_generator
from flwr_leakage.records import Batch, Measurement
from flwr_leakage.scores.base import Column, measured
from flwr_leakage.scores.lipschitz import lipschitz_constants

OF_THE_BATCH = "of the whole batch, the same for each of its samples"


@dataclass(frozen=True)
class BatchLipschitz:
    """A score: the Lipschitz constant L̃ and the angular one L̃cos of a batch's gradient.

    L̃ = maxₙ ‖g(x + n) − g(x)‖/‖n‖ and L̃cos = maxₙ (1 − cos(g(x + n), g(x)))/(1 − cos(x + n, x)),
    where x is the whole batch and g the gradient of its mean loss. BatchNorm in train mode
    normalises every draw with that draw's own statistics, as the client does. Each draw costs one
    gradient of the batch. Both values are maxima over draws, hence lower bounds of the constants.
    A larger value means safer, as for ``Lipschitz``. Both are computed in float64.

    Attributes:
        noise_std: the standard deviation of the noise n ~ N(0, noise_std²), in the units of the
            inputs, > 0.
        num_draws: the number of draws of n, ≥ 1.
    """

    noise_std: float = 1e-3
    num_draws: int = 1000

    def __call__(self, client: ClientSamples, seed: int) -> list[Measurement]:
        """Return the measurements ``batch_lipschitz`` and ``batch_angular_lipschitz``."""
        exposure = client.exposure.whole
        params, batch = converted(exposure.params, exposure.defended, torch.float64)

        def oracle(flat: Tensor) -> Tensor:
            inputs = flat.reshape(batch.inputs.shape)
            found = client.gradient_map(params, Batch(inputs, batch.targets), exposure.buffers)
            return ravel(found)[None]

        constants = lipschitz_constants(
            oracle,
            batch.inputs.reshape(1, -1),
            make_generator(seed, purpose="batch lipschitz"),
            self.noise_std,
            self.num_draws,
        )
        names = ("batch_lipschitz", "batch_angular_lipschitz")
        return [_repeated(*each, len(client)) for each in zip(names, constants, strict=True)]


def _repeated(name: str, value: Float[Tensor, " 1"], count: int) -> Measurement:
    known = bool(value.isfinite())
    note = OF_THE_BATCH if known else "no direction: the batch or its gradient is zero"
    values, notes = value.expand(count), [note] * count
    column = Column(name, values, "1", "larger is safer", notes, None, "lower bound")
    return measured(column, [""] * count)
