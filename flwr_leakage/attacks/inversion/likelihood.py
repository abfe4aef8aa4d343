"""How well a candidate's gradient explains an update that was noised, pruned, or neither.

The attacker's residual is ``r = g(x) − g*``, entry by entry. An entry that came through has the
noise's variance σ². An entry that is zero may have been pruned: it tells that ``|g| ≤ τ``, with τ
the smallest magnitude that its tensor kept. Without pruning τ is next to zero, and so nothing
changes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.labels.last_layer import find_last_layer
from flwr_leakage.attacks.problem import Problem, simulate_gradient
from flwr_leakage.params import Params
from flwr_leakage.records import Batch

FLOOR = 1e-6
"""Noise of an entry at least, in units of its tensor's root mean square: float32's rounding."""

TINIEST = 1e-8
"""… and in units of the largest root mean square of all tensors."""

BORROWED = 3.0
"""Entries' worth of its tensor's mean square in that of a group: a few entries tell it badly."""

VANISHES = 1e-3
"""The classes' sum of gradients counts as zero below this share of their magnitude."""


@dataclass(frozen=True)
class Likelihood:
    """What is known of every entry of an update.

    Attributes:
        observed: g* (P,), all rounds and tensors one after another.
        tensors: index of each entry's tensor (P,).
        counts: entries of each tensor (T,).
        noise: σ of each tensor's entries (T,), > 0.
        bounds: τ of the entries that are zero, 0 of the others (P,).
    """

    observed: Tensor
    tensors: Tensor
    counts: Tensor
    noise: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, gradients: "list[Params]", noise_std: float | None) -> "Likelihood":
        """Read the bounds from the updates of all rounds.

        Args:
            gradients: pseudo-gradients in double precision.
            noise_std: σ of all entries; ``None`` for no noise but float32's rounding.
        """
        pieces = [value.reshape(-1) for gradient in gradients for value in gradient.values()]
        observed = torch.cat(pieces)
        counts = torch.tensor([len(piece) for piece in pieces])
        tensors = torch.arange(len(pieces)).repeat_interleave(counts)
        sizes = torch.stack([piece.square().mean().sqrt() for piece in pieces])
        noise = torch.maximum(FLOOR * sizes, TINIEST * sizes.max())
        if noise_std is not None:
            noise = noise.clamp_min(noise_std)
        kept = [piece[piece != 0].abs() for piece in pieces]
        # A tensor of which nothing is left was cut by a threshold of the whole update, which is
        # not above what any other tensor kept.
        smallest = min(float(piece.min()) for piece in kept if len(piece))
        taus = torch.tensor([float(piece.min()) if len(piece) else smallest for piece in kept]).to(
            observed
        )
        bounds = torch.where(observed == 0, taus[tensors], 0.0)
        return cls(observed, tensors, counts.to(observed), noise, bounds)

    def residual(self, gradient: Tensor) -> Tensor:
        """``g − g*`` (P,)."""
        return gradient.double() - self.observed

    def excess(self, residual: Tensor) -> Tensor:
        """How far entries are from what is possible: r, and ``max(0, |r| − τ)`` of the zeros."""
        return torch.where(
            self.bounds > 0, (residual.abs() - self.bounds).clamp_min(0), residual.abs()
        )

    def mean_squares(self, residual: Tensor) -> Tensor:
        """Mean square of each tensor's excess (T,)."""
        return self._means(self.excess(residual).square())

    def variances(
        self, residual: Tensor, model_error: float, groups: Tensor | None = None
    ) -> Tensor:
        """Variance v of each entry (P,), by which its squared residual is divided.

        ``σ² + κ max(0, mean r² − σ²)``: what the model itself gets wrong (its blur, its
        linearisation) is read from the residual, tensor by tensor. That of an entry that may
        have been pruned is at least τ²/3, the variance of a uniform law on [−τ, τ].

        Args:
            residual: r (P,).
            model_error: κ in [0, 1].
            groups: of entries whose errors are alike (P,), each within one tensor; a group's mean
                square is then read from its own entries and from three of its tensor. ``None``
                takes each tensor as one.
        """
        noise = self.noise.square()[self.tensors]
        means = self.mean_squares(residual)[self.tensors]
        if groups is not None:
            counts = groups.bincount().to(means)
            sums = torch.zeros_like(counts).index_add_(0, groups, self.excess(residual).square())
            means = (sums[groups] + BORROWED * means) / (counts[groups] + BORROWED)
        each = noise + model_error * (means - noise).clamp_min(0)
        return torch.maximum(each, self.bounds.square() / 3)

    def misfit(self, residual: Tensor) -> float:
        """Mean of ``(excess / σ)²`` over entries: about 1 at the truth, if σ is the noise's."""
        mean = self.mean_squares(residual) / self.noise.square()
        return float((mean * self.counts).sum() / self.counts.sum())

    def energy(
        self, residual: Tensor, unknowns: float = math.inf, groups: Tensor | None = None
    ) -> float:
        """−2 log likelihood up to a constant, at each tensor's most likely error of the candidate.

        A residual is noise in all P_t entries of a tensor, and besides what the candidate gets
        wrong, in D_t directions: as many as it has entries, or as there are unknowns. With m_t the
        mean square of the excess,

            Σ_t P_t log σ_t² + P_t min(1, q_t) + D_t log(1 + P_t / D_t max(0, q_t − 1))

        for ``q_t = m_t / σ_t²``. With D_t = P_t, that is ``P_t (log v_t + m_t / v_t)`` with v_t the
        larger of m_t and σ_t². It ranks candidates whose misfit is far above the noise, too. A
        large tensor that tells the same thing many times, as the outer product of a linear layer,
        counts by what it tells.

        What a candidate gets wrong, as a mask of one channel, may move some groups of a tensor's
        entries by much, others by little. With groups, the last sum is over them, each with its own
        P_g and q_g, and D_g = D_t P_g / P_t.

        Args:
            residual: r (P,).
            unknowns: of the candidate.
            groups: of entries whose errors are alike (P,), each within one tensor; ``None`` takes
                each tensor as one.
        """
        squares = self.excess(residual).square() / self.noise.square()[self.tensors]
        means = self._means(squares)
        common = self.counts * (self.noise.square().log() + means.clamp_max(1))
        shares = self.independent(unknowns) / self.counts
        counts = self.counts
        if groups is not None:
            counts = groups.bincount().to(squares)
            means = torch.zeros_like(counts).index_add_(0, groups, squares) / counts
            tensors = torch.zeros(len(counts), dtype=torch.int64).scatter_(0, groups, self.tensors)
            shares = shares[tensors]
        wrong = (means - 1).clamp_min(0) / shares
        return float(common.sum() + (shares * counts * wrong.log1p()).sum())

    def independent(self, unknowns: float) -> Tensor:
        """D_t, the equations of each tensor (T,) that can be independent."""
        return self.counts.clamp_max(unknowns)

    def distance(self, residual: Tensor) -> float:
        """``‖excess‖² / ‖g*‖²``."""
        squares = self.excess(residual).square().sum() / self.observed.square().sum()
        return float(squares)

    def _means(self, values: Tensor) -> Tensor:
        sums = torch.zeros_like(self.counts).index_add_(0, self.tensors, values)
        return sums / self.counts


def kernel_groups(shapes: Sequence[torch.Size]) -> Tensor:
    """The number of the group of each entry of some tensors (P,), one tensor after another.

    What a wrong mask of one channel moves is small in all kernels that it has no part in. Groups
    are the kernels of convolutions, one for each pair of channels, the columns of matrices, one
    for each of their inputs, and single entries of all else.

    Args:
        shapes: of the tensors.

    Example:
        >>> kernel_groups([torch.Size((2, 1, 1, 2)), torch.Size((2, 2)), torch.Size((2,))])
        tensor([0, 0, 1, 1, 2, 3, 2, 3, 4, 5])
    """
    found, first = [], 0
    for shape in shapes:
        if len(shape) > 2:
            count = shape[:2].numel()
            numbers = torch.arange(count).repeat_interleave(shape[2:].numel())
        elif len(shape) == 2:
            count = shape[1]
            numbers = torch.arange(count).repeat(shape[0])
        else:
            count = shape.numel()
            numbers = torch.arange(count)
        found.append(first + numbers)
        first += count
    return torch.cat(found)


def estimate_noise(problem: Problem) -> float | None:
    """σ of independent noise of one size on all entries, from an equation that every batch obeys.

    Softmax cross-entropy depends on differences of logits only, so the gradients of the last
    layer's weight and bias sum to zero over classes, for any batch and any number of steps
    without weight decay. With noise, ``Σ_k g_kf`` has the variance K σ² in each column f.

    Returns:
        σ̂, or ``None`` where the equation does not hold for this model and loss (tried on a grey
        image), entries of the layer were pruned, or it is frozen.
    """
    try:
        layer = find_last_layer(problem)
    except ValueError:
        return None
    if problem.schedule.weight_decay:
        return None
    names = [layer.weight] if layer.bias is None else [layer.weight, layer.bias]

    def columns(gradient: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([gradient[name].reshape(len(gradient[name]), -1) for name in names], 1)

    observed = columns(problem.gradient)
    # Units that no sample activates leave whole columns of zeros; pruning leaves parts of them.
    zeros = (observed == 0).sum(0)
    if bool(((zeros > 0) & (zeros < len(observed))).any()) or bool((zeros > 0).all()):
        return None
    grey = problem.spec.normalize(
        torch.full((problem.num_samples, *problem.spec.shape), 0.5, dtype=observed.dtype)
    )
    targets = torch.zeros(problem.num_samples, dtype=torch.int64)
    own = columns(
        simulate_gradient(
            problem.gradient_map,
            problem.params,
            problem.buffers,
            problem.schedule,
            Batch(grey, targets),
            problem.members,
        )
    )
    if float(own.sum(0).norm()) > VANISHES * float(own.norm()):
        return None
    sums = observed[:, zeros < len(observed)].sum(0)
    return float((sums.square().mean() / len(observed)).sqrt())
