"""DP-SGD: per-sample clipping and Gaussian noise in every local step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flwr_leakage.defenses.base import Defense, LocalRound, check_update, require_local_round
from flwr_leakage.defenses.noise import add_gaussian_noise
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.operators import row_norms, sample_gradients
from flwr_leakage.params import Params, ravel, unravel
from flwr_leakage.randomness import Randomness
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Update


def clipped_mean_gradient(
    gradient_map: GradientMap,
    params: Mapping[str, Tensor],
    batch: Batch,
    max_norm: float,
    buffers: Mapping[str, Tensor] | None = None,
    chunk_size: int = 32,
) -> Params:
    """(1/B) Σᵢ gᵢ · min(1, max_norm / ‖gᵢ‖) of the samples' own gradients gᵢ.

    Abadi et al. (2016, algorithm 1), before the noise.

    Args:
        gradient_map: of the client's model and loss.
        params: θ.
        batch: B samples.
        max_norm: C > 0, the largest norm of a sample's gradient.
        buffers: BatchNorm statistics.
        chunk_size: samples whose gradients are held at a time.
    """
    total = torch.zeros_like(ravel(params))
    for start in range(0, len(batch), chunk_size):
        part = batch[start : start + chunk_size]
        gradients = sample_gradients(gradient_map, params, part, buffers)
        norms = row_norms(gradients).clamp_min(torch.finfo(gradients.dtype).tiny)
        total += (max_norm / norms).clamp_max(1) @ gradients
    return unravel(total / len(batch), params)


def dp_epsilon(noise_multiplier: float, sample_rate: float, num_steps: int, delta: float) -> float:
    """ε of (ε, δ)-differential privacy, by Opacus's Rényi accountant (Mironov et al. 2019).

    The bound for ``sample_rate < 1`` holds where each step draws its batch by Poisson sampling.
    Clients here pass over their samples in order: then only ``sample_rate=1`` with the number
    of steps that touch a sample is a guarantee, as :meth:`DPSGD.epsilon` computes.

    Args:
        noise_multiplier: standard deviation of the noise over the clipping norm.
        sample_rate: probability with which a sample enters a step, in (0, 1].
        num_steps: steps in total.
        delta: δ in (0, 1).

    Raises:
        ImportError: Opacus is not installed.
    """
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate}.")
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}.")
    if noise_multiplier == 0:
        return math.inf
    try:
        from opacus.accountants import RDPAccountant
    except ImportError as error:
        raise ImportError(
            "accounting ε needs Opacus: pip install 'flwr-leakage[opacus]' (or set delta to null)"
        ) from error
    accountant = RDPAccountant()
    accountant.history = [(noise_multiplier, sample_rate, num_steps)]
    return float(accountant.get_epsilon(delta))


def _check_separable(gradient_map: GradientMap) -> None:
    if gradient_map.uses_batch_statistics:
        raise ValueError(
            "DP-SGD needs gradients of single samples, which BatchNorm with batch statistics "
            "mixes: train with batch_norm='running' or without BatchNorm."
        )


@dataclass(frozen=True)
class DPSGD(Defense):
    """Replay the local training with clipped and noised steps; see :func:`clipped_mean_gradient`.

    Every step uses ``ḡ + (noise_multiplier · max_norm / B) · z`` with z ~ N(0, I) (Abadi et al.
    2016, algorithm 1). The update is computed anew from the encoded samples, so that in a chain
    it must come before what changes the update. MixUp or InstaHide before it would let a sample
    enter several gradients: the guarantee then no longer holds for single samples.

    Attributes:
        max_norm: C > 0, the largest norm of a sample's gradient; ``inf`` clips nothing and
            needs ``noise_multiplier`` 0.
        noise_multiplier: ≥ 0, standard deviation of the summed gradient's noise over C.
        delta: δ in (0, 1) of the guarantee that is reported, below one over the client's
            samples; ``None`` reports none, and needs no Opacus.
    """

    max_norm: float = 1.0
    noise_multiplier: float = 1.0
    delta: float | None = 1e-5

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise ValueError(f"max_norm must be positive, got {self.max_norm}.")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise ValueError(
                f"noise_multiplier must be finite and ≥ 0, got {self.noise_multiplier}."
            )
        if math.isinf(self.max_norm) and self.noise_multiplier:
            raise ValueError(
                "noise_multiplier must be 0 where max_norm is infinite, got "
                f"{self.noise_multiplier}."
            )
        if self.delta is not None and not 0 < self.delta < 1:
            raise ValueError(f"delta must lie in (0, 1) or be None, got {self.delta}.")

    @property
    def replaces_update(self) -> bool:
        """Always: gradients of single samples cannot be clipped in an update."""
        return True

    def epsilon(self, schedule: LocalSchedule, num_examples: int, num_rounds: int) -> float | None:
        """ε spent on a sample that takes part in ``num_rounds`` rounds, at ``delta``.

        The bound counts every step that touches the sample, without amplification by sampling.

        Raises:
            ImportError: Opacus is not installed.
        """
        if self.delta is None:
            return None
        touches = sum(window.start == 0 for window in schedule.slices(num_examples))
        return dp_epsilon(self.noise_multiplier, 1.0, touches * num_rounds, self.delta)

    def validate(self, gradient_map: GradientMap, spec: InputSpec, num_examples: int) -> None:
        """Every sample must have a gradient of its own."""
        super().validate(gradient_map, spec, num_examples)
        _check_separable(gradient_map)

    def on_update(
        self, update: Update, randomness: Randomness, local_round: LocalRound | None = None
    ) -> Update:
        """Replace ``update.delta`` by that of DP-SGD on the same samples."""
        check_update(update)
        around = require_local_round(self, local_round)
        gradient_map, batch, schedule = around.gradient_map, around.defended, update.schedule
        _check_separable(gradient_map)
        used = schedule.num_samples_used(around.num_examples)
        if len(batch) < used:
            raise ValueError(
                f"DP-SGD replays the training on its {used} samples, but only the first "
                f"{len(batch)} were kept: raise max_samples."
            )
        current = dict(around.params)
        velocity: Params | None = None
        for window in schedule.slices(len(batch)):
            samples = batch[window]
            step = clipped_mean_gradient(
                gradient_map, current, samples, self.max_norm, around.buffers
            )
            if self.noise_multiplier:
                std = self.noise_multiplier * self.max_norm / len(samples)
                step = add_gaussian_noise(step, std, randomness)
            if schedule.weight_decay:
                step = {k: g + schedule.weight_decay * current[k] for k, g in step.items()}
            if velocity is not None and schedule.momentum:
                step = {k: schedule.momentum * velocity[k] + g for k, g in step.items()}
            velocity = step
            current = {k: v - schedule.learning_rate * step[k] for k, v in current.items()}
        delta = {k: (current[k] - around.params[k]).to(v.dtype) for k, v in update.delta.items()}
        return replace(update, delta=delta)
