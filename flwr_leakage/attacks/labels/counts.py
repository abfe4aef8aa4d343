"""Count the samples of each class in a batch from the last layer's gradient."""

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.optimize import linprog
from torch import Tensor

from flwr_leakage.attacks.labels.head import told_labels
from flwr_leakage.attacks.loss_check import class_weights, lowers_one_logit
from flwr_leakage.attacks.network.linear import find_last_bias, find_last_layer
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.records import InputSpec

HIDDEN = 1 / 30
"""Largest ratio s_{B+1} / s_B of singular values of the last layer's gradient at which its columns
count as spanning the errors of B samples. Without rounding, s_{B+1} would be zero. With parameters
in single precision the ratio was up to 1e-3 on batches of four of trained networks; no results are
kept."""

NEGATIVE = 1e-3
"""Size up to which a negative entry of a sample's error counts as zero. The error is the derivative
of the loss by the logits, scaled to −1 at the sample's class."""

CHANCE = 0.75
"""Largest probability that :func:`possible_classes` marks a class without samples as possible, at
which each possible class is given a sample. With 10 classes, the probability is just below 0.75 for
6 samples, and 0.98 for 8. For 8 samples, fewer labels were right with this rule than without it
(four trained networks, development images; no results are kept)."""

EXPLAINED = 0.25
"""Relative residual of the last bias's gradient up to which whole class counts explain it. If all
samples have nearly the same softmax, the residual is up to a tenth; with a wrong softmax, it is
about 1. No results are kept."""

MOST_CLASSES = 200
"""Largest number of classes at which linear programs, one for each class, show which classes
samples may have. At 100 classes, each program takes about 2 ms."""


def class_counts(
    bias_gradient: Float[Tensor, " K"],
    mean_softmax: Float[Tensor, " K"],
    num_samples: int,
    weights: Float[Tensor, " K"] | None = None,
    possible: Bool[Tensor, " K"] | None = None,
    told: Int[Tensor, " K"] | None = None,
) -> Int[Tensor, " K"]:
    """Return how many of B samples each class has, as integers (K,) that sum to B.

    They are ``B · (p̄ − ∂L/∂b)``, rounded. The gradient of the mean cross-entropy by the last bias b
    is ``p̄ − counts / B``, where p̄ is the mean softmax of the samples, which an attacker estimates.
    Each count first gets its whole part. The samples that are left go to the largest remainders.

    If there are at most as many possible classes as samples, each of these classes gets one sample
    first. No class gets one first if a class without samples may often seem possible
    (:func:`chance_by_signs`), or if whole counts already explain the gradient.

    Args:
        bias_gradient: ∂L/∂b (K,) of the last layer, averaged over the samples.
        mean_softmax: the attacker's estimate of p̄ (K,).
        num_samples: number B of samples.
        weights: class weights w_k (K,) of the loss, or ``None``. With weights, entry k of p̄ − ∂L/∂b
            is the share of class k in the sum Σᵢ w(yᵢ) over samples i of labels yᵢ, so that it is
            divided by w_k first.
        possible: booleans (K,), true for classes that may occur, at least one; all by default. See
            :func:`possible_classes`.
        told: least counts (K,), from samples whose labels are known; zeros by default.

    Example:
        >>> class_counts(torch.tensor([-0.5, 0.25, 0.25]), torch.tensor([0.5, 0.25, 0.25]), 2)
        tensor([2, 0, 0])
    """
    expected = (num_samples * (mean_softmax - bias_gradient)).double()
    missed = (expected - expected.round()).norm()
    is_explained = bool(missed <= EXPLAINED * num_samples * bias_gradient.double().norm())
    expected = expected.clamp_min(0)
    if weights is not None:
        # The count of a class of weight 0 is taken as zero, as its samples have no part in the
        # update.
        expected = torch.where(weights > 0, expected / weights.double().clamp_min(1e-30), 0.0)
        expected = num_samples * expected / expected.sum().clamp_min(1e-30)
    if possible is not None:
        expected = torch.where(possible, expected, 0.0)
        expected = num_samples * expected / expected.sum().clamp_min(1e-30)
    total = expected.sum()
    if total > num_samples:
        expected = expected * num_samples / total
    counts = (expected + 1e-9).floor()
    if (
        possible is not None
        and not is_explained
        and int(possible.sum()) <= num_samples
        and chance_by_signs(num_samples, len(possible)) <= CHANCE
    ):
        counts = possible.double()
    if told is not None:
        counts = torch.maximum(counts, told.double())
        while int(counts.sum()) > num_samples:
            counts[torch.where(counts > told, counts - expected, -math.inf).argmax()] -= 1
    missing = num_samples - int(counts.sum())
    remainders = expected - counts
    if possible is not None:
        remainders[~possible] = -math.inf
    for _ in range(missing):
        best = remainders.argmax()
        counts[best] += 1
        remainders[best] -= 1
    return counts.to(torch.int64)


def possible_classes(
    weight_gradient: Float[Tensor, "K F"], bias_gradient: Float[Tensor, " K"], num_samples: int
) -> Bool[Tensor, " K"]:
    """Return booleans (K,), true for the classes that samples of a batch may have.

    The last layer's gradients by weight (K, F) and bias (K,) are a sum of ``eᵢ (hᵢ, 1)ᵀ`` over
    samples i with features hᵢ, softmax pᵢ and errors ``eᵢ = pᵢ − onehot(yᵢ)`` of the cross-entropy.
    If there are fewer samples than classes, the gradient's columns span the errors. Then eᵢ is a
    vector of that span whose only negative entry is that of class yᵢ. A class for which the span
    has no such vector is the label of no sample. No estimate of pᵢ is needed, so that this holds
    for trained networks, too.

    If noise is too large, or there are at least K − 1 samples, all classes are possible.
    """
    gradient = torch.cat([weight_gradient, bias_gradient[:, None]], 1).double().cpu()
    count = len(gradient)
    everything = torch.ones(count, dtype=torch.bool)
    span, sizes, _ = torch.linalg.svd(gradient, full_matrices=False)
    if num_samples >= min(count - 1, len(sizes)):
        return everything  # errors sum to 0, so that K − 1 dimensions hold all of them
    # The first B singular values come from B samples, and the others from rounding or noise.
    # ``share`` is the largest of these others, divided by the smallest of the B.
    share = float(sizes[num_samples].maximum(1e-7 * sizes[0]) / sizes[num_samples - 1])
    if not share <= HIDDEN:
        return everything
    basis, tolerance = span[:, :num_samples].numpy(), max(NEGATIVE, 3 * share)
    found = everything.clone()
    for own in range(count):
        others = np.arange(count) != own
        # A linear program finds the largest t for which a vector of the span is −1 at this class
        # and ≥ t elsewhere. The class is possible if t is not negative, up to the tolerance.
        answer = linprog(
            np.append(np.zeros(num_samples), -1.0),
            A_ub=np.column_stack([-basis[others], np.ones(count - 1)]), b_ub=np.zeros(count - 1),
            A_eq=np.append(basis[own], 0.0)[None], b_eq=[-1.0],
            bounds=[(None, None)] * num_samples + [(None, 1.0)],
        )  # fmt: skip
        found[own] = answer.status == 0 and -answer.fun >= -tolerance
    return found if bool(found.any()) else everything


def chance_by_signs(dimension: int, count: int) -> float:
    """Return the probability that a random subspace has a vector with given signs of all entries.

    For B dimensions, ``dimension``, and K entries, ``count``, it is 2^(1−K) Σ_{k<B} C(K−1, k), with
    binomial coefficients C (Wendel 1962).

    Example:
        >>> chance_by_signs(2, 10), chance_by_signs(4, 10)
        (0.01953125, 0.25390625)
    """
    return sum(math.comb(count - 1, k) for k in range(dimension)) / 2 ** (count - 1)


def mean_feature(
    weight_gradient: Float[Tensor, "K F"], bias_gradient: Float[Tensor, " K"]
) -> Float[Tensor, " F"]:
    """Return the vector h (F,) for which ``∂L/∂b hᵀ`` is nearest to ∂L/∂W of the last layer.

    The least-squares solution is ``h = (∂L/∂W)ᵀ (∂L/∂b) / ‖∂L/∂b‖²``. For one sample, h is exactly
    its features, the inputs of the last layer. For a batch it is a weighted mean of the samples'
    features, which differ little in a network that is not yet trained.
    """
    return weight_gradient.T @ bias_gradient / bias_gradient.square().sum().clamp_min(1e-30)


def replayed_softmax(
    logits: Float[Tensor, "M K"],
    squared_feature_norm: Float[Tensor, ""],
    bias_gradient: Float[Tensor, " K"],
    learning_rate: float,
    num_steps: int,
) -> Float[Tensor, " K"]:
    """Return the mean softmax p̄ (K,) over a client's local steps, by a replay of the last layer.

    If all samples had one feature vector h, a step's gradient e = p − c by the last bias would move
    the logits by −η (1 + ‖h‖²) e, with the softmax p and the class frequencies c. The frequencies
    are unknown. So 50 damped sweeps make c and the sequence of p consistent with c = p̄ − ∂L/∂b.
    The bias's gradient ∂L/∂b (K,) is averaged over the steps. The replay begins at ``logits``
    (M, K) of M dummy inputs at θ_t. ``squared_feature_norm`` is ‖h‖², and ``learning_rate`` η.
    """
    mean = logits.softmax(dim=1).mean(dim=0)
    if num_steps == 1:
        return mean
    rate = learning_rate * (1 + squared_feature_norm)
    for _ in range(50):
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
    """A label attack that counts the samples of each class by the gradient of the last bias.

    The counts also depend on p̄, the mean softmax of the batch, which is estimated. Over several
    local steps the pseudo-gradient sums the steps' gradients, and the softmax changes while the
    client trains; :func:`replayed_softmax` follows it.

    Attributes:
        softmax: the source of p̄: ``features`` (the mean feature vector of the batch, which the last
            weight's gradient shows), or ``dummies`` (random pixels, or public images). Networks
            that do not end in a linear layer have no feature vector. Their p̄ comes from dummies if
            there is one step.
        public: (M, C, H, W) public images, normalised as the network takes them, which are used in
            place of random ones.
        signs: whether the span of the last layer's gradient is used. If so, samples that
            :func:`flwr_leakage.attacks.labels.head.told_labels` separates keep their labels, and
            classes that :func:`possible_classes` excludes are left out.
    """

    softmax: Literal["features", "dummies"] = "features"
    public: Tensor | None = field(default=None, compare=False, repr=False)
    signs: bool = True

    def __post_init__(self) -> None:
        if self.softmax not in ("features", "dummies"):
            raise ValueError(f"softmax must be 'features' or 'dummies', got {self.softmax!r}.")

    def __call__(self, problem: Problem, generator: torch.Generator) -> Int[Tensor, " B"]:
        """Return the labels (B,) of the samples behind an update, in ascending order.

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
            logits = problem.logits(images)
        softmax = replayed_softmax(
            logits,
            bias_gradient.new_zeros(()) if feature is None else feature.square().sum(),
            bias_gradient,
            problem.schedule.learning_rate,
            problem.schedule.num_steps,
        )
        weights = class_weights(problem.gradient_map.loss, softmax.clamp_min(1e-12).log())
        possible = self._possible(problem, bias_gradient)
        told = torch.bincount(told_labels(problem), minlength=len(softmax)) if self.signs else None
        counts = class_counts(bias_gradient, softmax, problem.num_samples, weights, possible, told)
        return torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)

    def _possible(self, problem: Problem, bias_gradient: Tensor) -> Tensor | None:
        """Return booleans (K,), true for classes that samples may have; ``None`` for all classes.

        ∂L/∂b (K,) is the gradient of the last layer's bias.
        """
        count = len(bias_gradient)
        if not self.signs or count > MOST_CLASSES or not problem.is_single_gradient:
            return None
        if not lowers_one_logit(problem.gradient_map.loss, count):
            return None
        try:
            weight = find_last_layer(problem).weight
        except ValueError:
            return None
        own = problem.gradient[weight] / problem.gradient_weight
        return possible_classes(own, bias_gradient, problem.num_samples)

    @staticmethod
    def _mean_feature(problem: Problem, bias_gradient: Tensor) -> Tensor | None:
        """Return the mean input (F,) of the last linear layer; ``None`` if no such layer gives the
        logits.

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
        return spec.normalize(torch.rand(64, *spec.shape, generator=generator))


def label_moves(targets: Tensor, bias_residual: Tensor, most: int) -> list[Tensor]:
    """Return variants of a batch's labels with one label changed, the most promising first.

    The mean cross-entropy's gradient by the last bias is ``g_b = p̄ − counts / B``, with the mean
    softmax p̄ of B samples. Under wrong counts, images x̂ that are fitted to the update have to
    distort p̄, which the prior and the other gradients resist. So ``B (g_b(x̂) − g_b*)``, with the
    observed gradient g_b*, stays positive for classes with too few labels, and negative for classes
    with too many. ``bias_residual`` (K,) is ``g_b(x̂) − g_b*`` of images that were fitted under
    ``targets`` (B,), the present classes. At most ``most`` variants are returned.

    Example:
        >>> label_moves(torch.tensor([0, 2]), torch.tensor([-0.2, 0.3, 0.0]), 1)
        [tensor([1, 2])]
    """
    present = targets.unique()
    gains = bias_residual[None, :] - bias_residual[present][:, None]
    gains[torch.arange(len(present)), present] = -torch.inf
    moves = []
    for flat in gains.flatten().argsort(descending=True)[:most].tolist():
        row, new = divmod(flat, len(bias_residual))
        if not torch.isfinite(gains[row, new]):
            break
        changed = targets.clone()
        changed[(targets == present[row]).nonzero()[0, 0]] = new
        moves.append(changed.sort().values)
    return moves
