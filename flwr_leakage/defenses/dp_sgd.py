"""Clip each sample's gradient and add Gaussian noise in every local step (DP-SGD)."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from flwr_leakage.defenses.accounting import Adjacency, check_adjacency, dp_epsilon
from flwr_leakage.defenses.base import Defense, LocalRound, check_update, require_local_round
from flwr_leakage.defenses.noise import add_gaussian_noise
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import row_norms, sample_gradients
from flwr_leakage.params import Params, ravel, unravel
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Update
from flwr_leakage.values import require

Sampling = Literal["in_order", "poisson"]
"""The ways in which a step of DP-SGD chooses its samples: consecutive batches in the given order,
or each sample independently with the same probability."""


def clipped_mean_gradient(
    gradient_map: GradientMap,
    params: Mapping[str, Tensor],
    batch: Batch,
    max_norm: float,
    buffers: Mapping[str, Tensor] | None = None,
    chunk_size: int = 32,
    divisor: float | None = None,
) -> Params:
    """Return the mean of the samples' clipped gradients, (1/B) Σᵢ gᵢ · min(1, max_norm / ‖gᵢ‖),
    with gᵢ the gradient of sample i alone (Abadi et al. 2016, algorithm 1, before the noise). The
    mean of no samples is zero. A gᵢ whose norm is not finite counts as zero, unless ``max_norm`` is
    infinite.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        params: the parameters θ, by name.
        batch: the samples.
        max_norm: the largest norm of a sample's gradient, > 0.
        buffers: BatchNorm statistics.
        chunk_size: the number of samples whose gradients are held in memory at a time.
        divisor: the divisor B; by default the number of samples.
    """
    total = torch.zeros_like(ravel(params))
    for start in range(0, len(batch), chunk_size):
        part = batch[start : start + chunk_size]
        gradients = sample_gradients(gradient_map, params, part, buffers)
        norms = row_norms(gradients).clamp_min(torch.finfo(gradients.dtype).tiny)
        # A gradient that is not finite counts as zero, as it would turn the sum into NaN.
        if math.isfinite(max_norm):
            finite = norms.isfinite()
            gradients, norms = gradients.where(finite[:, None], 0), norms.where(finite, 1)
        total += (max_norm / norms).clamp_max(1) @ gradients
    return unravel(total / (len(batch) if divisor is None else divisor), params)


def _check_separable(gradient_map: GradientMap) -> None:
    if gradient_map.uses_batch_statistics:
        raise ValueError(
            "DP-SGD needs gradients of single samples, which BatchNorm with batch statistics "
            "mixes: train with batch_norm='running' or without BatchNorm."
        )


def _check_all_samples(known: int, num_examples: int, what: str) -> None:
    if known < num_examples:
        raise ValueError(
            f"sampling='poisson' draws from all {num_examples} samples of the client, and "
            f"{what} {known}: num_steps times batch_size must be at least {num_examples}."
        )


@dataclass(frozen=True)
class DPSGD(Defense):
    """A defense that repeats the local training with clipped per-sample gradients and noise
    (DP-SGD).

    Every step uses ``ḡ + (noise_multiplier · max_norm / B) · z`` in place of the gradient, with z ~
    N(0, I) and ḡ the mean of the samples' clipped gradients, see :func:`clipped_mean_gradient`
    (Abadi et al. 2016, algorithm 1). As the update is computed anew, this defense must come in a
    chain before defenses that change the update. After MixUp or InstaHide, where a sample enters
    several gradients, there is no guarantee for single samples.

    With the sampling ``in_order``, B is the size of the schedule's batches. With ``poisson``, each
    sample enters each step independently with the probability q = min(1, batch_size / n); B = q n,
    whatever was drawn, and a step without samples consists of noise alone.

    Attributes:
        max_norm: the largest norm C > 0 of a sample's gradient; ``inf`` clips nothing and needs
            ``noise_multiplier`` 0.
        noise_multiplier: the standard deviation of the noise on the sum of gradients, divided by C,
            ≥ 0.
        delta: δ in (0, 1) of the reported guarantee, which should be below one over the client's
            number of samples; ``None`` to report none.
        sampling: ``in_order`` or ``poisson``; computing ε for ``poisson`` needs Opacus.
    """

    effect: ClassVar[str] = (
        "in each training step the share of each image is limited, and random noise is added"
    )

    max_norm: float = 1.0
    noise_multiplier: float = 1.0
    delta: float | None = 1e-5
    sampling: Sampling = "in_order"

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {self.max_norm}.")
        require(self, "be finite and ≥ 0", "noise_multiplier")
        if math.isinf(self.max_norm) and self.noise_multiplier:
            raise ValueError(
                "noise_multiplier must be 0 where max_norm is infinite, got "
                f"{self.noise_multiplier}."
            )
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must lie in (0, 1) or be None, got {self.delta}.")
        if self.sampling not in get_args(Sampling):
            raise ValueError(
                f"sampling must be one of {', '.join(get_args(Sampling))}, got {self.sampling!r}."
            )

    @property
    def replaces_update(self) -> bool:
        """Return true: the update is computed anew from the samples."""
        return True

    def epsilon(
        self,
        schedule: LocalSchedule,
        num_examples: int,
        num_rounds: int,
        adjacency: Adjacency = "replace-one",
    ) -> float | None:
        """Return ε at δ = ``delta`` of the updates, for a sample that takes part in ``num_rounds``.

        The number n of samples is public: it travels beside the update, and determines the number
        of steps and the divisor B. Hence the default ``replace-one``, for data sets of equal size.

        With the sampling ``in_order``, ε counts the steps whose batch holds the sample. For
        ``add-or-remove`` it is infinite: without its first sample, a client has other samples in
        every batch.

        With ``poisson``, ε counts all steps, each with the sampling probability q. Then
        ``add-or-remove`` compares training with the sample and training without the sample's
        gradient, at the same q and B, as Opacus does. A message that reveals n itself, such as
        Flower's ``num-examples``, lies outside of this guarantee.

        Args:
            schedule: the local training.
            num_examples: the number n of the client's samples in a round.
            num_rounds: the number of rounds in which the sample takes part.
            adjacency: ``replace-one`` or ``add-or-remove``.

        Raises:
            ImportError: the sampling is ``poisson``, and Opacus is not installed.
            ValueError: the sampling is ``poisson``, and the schedule does not reach all samples.
        """
        check_adjacency(adjacency)
        if self.sampling == "poisson":
            used = schedule.num_samples_used(num_examples)
            _check_all_samples(used, num_examples, "the local schedule reaches")
        if self.delta is None:
            return None
        if self.sampling == "poisson":
            rate = min(1.0, schedule.batch_size / num_examples)
            steps = schedule.num_steps * num_rounds
            return dp_epsilon(self.noise_multiplier, rate, steps, self.delta, adjacency)
        if adjacency == "add-or-remove":
            return math.inf
        touches = sum(window.start == 0 for window in schedule.slices(num_examples))
        return dp_epsilon(self.noise_multiplier, 1.0, touches * num_rounds, self.delta, adjacency)

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Raise ``ValueError`` unless the model gives every sample a gradient of its own."""
        super().validate(gradient_map, spec, num_examples)
        _check_separable(gradient_map)

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Return the update with its ``delta`` replaced by that of DP-SGD on the same samples."""
        check_update(update)
        around = require_local_round(self, local_round)
        gradient_map, batch, schedule = around.gradient_map, around.defended, update.schedule
        _check_separable(gradient_map)
        if self.sampling == "poisson":
            _check_all_samples(len(batch), around.num_examples, "were used and kept (max_samples)")
        used = schedule.num_samples_used(around.num_examples)
        if len(batch) < used:
            raise ValueError(
                f"DP-SGD replays the training on its {used} samples, but only the first "
                f"{len(batch)} were kept: raise max_samples."
            )
        current = dict(around.params)
        velocity: Params | None = None
        for samples, divisor in self._steps(batch, schedule, randomness):
            step = clipped_mean_gradient(
                gradient_map, current, samples, self.max_norm, around.buffers, divisor=divisor
            )
            if self.noise_multiplier:
                std = self.noise_multiplier * self.max_norm / divisor
                step = add_gaussian_noise(step, std, randomness)
            if schedule.weight_decay:
                step = {k: g + schedule.weight_decay * current[k] for k, g in step.items()}
            if velocity is not None and schedule.momentum:
                step = {k: schedule.momentum * velocity[k] + g for k, g in step.items()}
            velocity = step
            current = {k: v - schedule.learning_rate * step[k] for k, v in current.items()}
        delta = {k: (current[k] - around.params[k]).to(v.dtype) for k, v in update.delta.items()}
        return replace(update, delta=delta)

    def _steps(
        self, batch: Batch, schedule: LocalSchedule, randomness: Randomness
    ) -> Iterator[tuple[Batch, float]]:
        """Yield, for each step, its samples and the divisor B by which the sum of their gradients
        is divided.
        """
        if self.sampling == "in_order":
            for window in schedule.slices(len(batch)):
                yield batch[window], window.stop - window.start
            return
        expected = min(schedule.batch_size, len(batch))
        for _ in range(schedule.num_steps):
            drawn = randomness.uniform((len(batch),)) <= expected / len(batch)
            yield batch[drawn.to(batch.inputs.device)], expected
