"""The number of samples of each class in a batch, from the last layer's gradient."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.labels.last_layer import find_last_bias, find_last_layer
from flwr_leakage.attacks.loss_check import class_weights
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.records import InputSpec


def class_counts(
    bias_gradient: Float[Tensor, " K"],
    mean_softmax: Float[Tensor, " K"],
    num_samples: int,
    weights: Float[Tensor, " K"] | None = None,
) -> Int[Tensor, " K"]:
    """Return ``B · (p̄ − ∂L/∂b)``, rounded to non-negative integers (K,) that sum to B.

    The mean cross-entropy's bias gradient is ``p̄ − counts / B`` with p̄ the batch's mean
    softmax, which an attacker estimates. Each count gets its whole part first. The largest
    remainders get the samples that are left.

    Args:
        bias_gradient: ∂L/∂b (K,) of the last layer, averaged over the samples.
        mean_softmax: the attacker's estimate of p̄ (K,).
        num_samples: B.
        weights: class weights w_k (K,) of the loss, or ``None``. With weights p̄ − ∂L/∂b is the
            share of class k in Σᵢ w(yᵢ), so that it is divided by w_k first.

    Example:
        >>> class_counts(torch.tensor([-0.5, 0.25, 0.25]), torch.tensor([0.5, 0.25, 0.25]), 2)
        tensor([2, 0, 0])
    """
    expected = (num_samples * (mean_softmax - bias_gradient)).clamp_min(0).double()
    if weights is not None:
        # A class of weight 0 has no part in the update.
        expected = torch.where(weights > 0, expected / weights.double().clamp_min(1e-30), 0.0)
        expected = num_samples * expected / expected.sum().clamp_min(1e-30)
    total = expected.sum()
    if total > num_samples:
        expected = expected * num_samples / total
    counts = (expected + 1e-9).floor()
    missing = num_samples - int(counts.sum())
    remainders = expected - counts
    for _ in range(missing):
        best = remainders.argmax()
        counts[best] += 1
        remainders[best] -= 1
    return counts.to(torch.int64)


def mean_feature(
    weight_gradient: Float[Tensor, "K F"], bias_gradient: Float[Tensor, " K"]
) -> Float[Tensor, " F"]:
    """Return the feature vector h (F,) that explains a last layer's gradient ``∂L/∂b hᵀ`` best.

    The least-squares solution is ``h = (∂L/∂W)ᵀ (∂L/∂b) / ‖∂L/∂b‖²``. It is exact for one sample.
    For a batch it is a weighted mean of the samples' features, which differ little in a network
    that is not yet trained.
    """
    return weight_gradient.T @ bias_gradient / bias_gradient.square().sum().clamp_min(1e-30)


def replayed_softmax(
    logits: Float[Tensor, "M K"],
    squared_feature_norm: Float[Tensor, ""],
    bias_gradient: Float[Tensor, " K"],
    learning_rate: float,
    num_steps: int,
    sweeps: int = 50,
) -> Float[Tensor, " K"]:
    """Return the mean softmax p̄ (K,) over a client's local steps, by a replay of the last layer.

    With one feature vector h for all samples, a step's gradient e = p − c (c the class
    frequencies) moves the logits by −η (1 + ‖h‖²) e. The frequencies are unknown. So damped
    fixed-point sweeps make c and the path of p consistent: c = p̄ − ∂L/∂b, averaged over steps.

    Args:
        logits: (M, K) of M dummy inputs at θ_t.
        squared_feature_norm: ‖h‖².
        bias_gradient: ∂L/∂b (K,) of the last layer, averaged over the steps.
        learning_rate: η.
        num_steps: number of local steps.
        sweeps: number of fixed-point sweeps.
    """
    mean = logits.softmax(dim=1).mean(dim=0)
    if num_steps == 1:
        return mean
    rate = learning_rate * (1 + squared_feature_norm)
    for _ in range(sweeps):
        frequencies = (mean - bias_gradient).clamp_min(0)
        frequencies = frequencies / frequencies.sum().clamp_min(1e-12)
        moved, total = logits, torch.zeros_like(mean)
        for _ in range(num_steps):
            softmax = moved.softmax(dim=1).mean(dim=0)
            total = total + softmax / num_steps
            moved = moved - rate * (softmax - frequencies)
        mean = 0.5 * mean + 0.5 * total
    return mean


@dataclass(frozen=True)
class ClassCounts:
    """The label attack that counts classes in the last bias's gradient, with an estimate of p̄.

    Over several local steps the pseudo-gradient sums the steps' gradients, and p̄ drifts while
    the client trains; ``replayed_softmax`` follows it.

    Attributes:
        softmax: the source of p̄: ``features`` (the mean feature vector from the last weight's
            gradient), or ``dummies`` (random images in the data's box, or public ones). Networks
            that do not end in a linear layer have no such vector: in one step p̄ then comes from
            dummies.
        num_dummies: number of random images whose softmax is averaged, ≥ 1.
        public: (M, C, H, W) public images in model space, used in place of random ones.
    """

    softmax: Literal["features", "dummies"] = "features"
    num_dummies: int = 64
    public: Tensor | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.softmax not in ("features", "dummies"):
            raise ValueError(f"softmax must be 'features' or 'dummies', got {self.softmax!r}.")
        if self.num_dummies < 1:
            raise ValueError(f"num_dummies must be at least 1, got {self.num_dummies}.")

    def __call__(self, problem: Problem, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Return the labels (B,) in ascending order, with repetitions.

        Raises:
            ValueError: the logits have no trained bias, the last layer is not linear although the
                update has several steps, or the loss couples the samples.
        """
        bias = find_last_bias(problem)
        if bias is None:
            raise ValueError(
                "class counts need a bias of the logits that is trained, the model has none."
            )
        bias_gradient = problem.gradient[bias].flatten() / problem.gradient_weight
        feature = self._mean_feature(problem, bias_gradient)
        if feature is not None and self.softmax == "features":
            weight = problem.params[find_last_layer(problem).weight]
            logits = (weight @ feature + problem.params[bias])[None]
        else:
            images = self._images(problem.spec, generator).to(bias_gradient)
            logits = problem.gradient_map.logits(problem.params, images, problem.buffers)
        softmax = replayed_softmax(
            logits,
            bias_gradient.new_zeros(()) if feature is None else feature.square().sum(),
            bias_gradient,
            problem.schedule.learning_rate,
            problem.schedule.num_steps,
        )
        weights = class_weights(problem.gradient_map.loss, softmax.clamp_min(1e-12).log())
        counts = class_counts(bias_gradient, softmax, problem.num_samples, weights)
        return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)

    @staticmethod
    def _mean_feature(problem: Problem, bias_gradient: Tensor) -> Tensor | None:
        """Return the mean input (F,) of the last linear layer, or None if there is no such layer.

        Raises:
            ValueError: there is no such layer, and the update has several steps.
        """
        try:
            weight = find_last_layer(problem).weight
        except ValueError:
            if problem.schedule.num_steps > 1:
                raise
            return None
        return mean_feature(problem.gradient[weight] / problem.gradient_weight, bias_gradient)

    def _images(self, spec: InputSpec, generator: torch.Generator) -> Tensor:
        if self.public is not None:
            return self.public
        return spec.normalize(torch.rand(self.num_dummies, *spec.shape, generator=generator))
