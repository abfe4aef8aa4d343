"""Compute the likelihood of a noisy, pruned or plain update, given a candidate's gradient.

The residual is ``r = g(x) − g*``, entry by entry, with the gradient g(x) of the candidate x and
the observed gradient g*. An entry of g* that is not zero has the variance σ² of the noise. An entry
that is zero may have been pruned. It only states that ``|g| ≤ τ``, where τ is the smallest
magnitude that its tensor kept. Without pruning τ is almost zero, so that this bound changes
nothing. An entry that was clipped states that ``|g|`` is larger than its value, and is left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.clipped import clipped_entries
from flwr_leakage.attacks.network.linear import find_last_layer
from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.rounding import FLOAT32_NOISE
from flwr_leakage.params import Params
from flwr_leakage.records import Batch

_ANY = 1e3
"""Bound on |g| of an entry that was clipped, in units of the largest observed magnitude. It is so
large that it never binds."""

BORROWED = 3.0
"""Weight of a whole tensor's mean square in the mean square of each group of its entries, in units
of one entry's weight. The few entries of a group alone would give a poor estimate. The value was
chosen on development draws; no results are kept."""


@dataclass(frozen=True)
class Groups:
    """A partition of an update's entries into groups whose errors are of similar size.

    If ReLU units of one channel are wrongly taken to be on or off, entries of this channel have
    large errors, and those of other channels small ones. A group is a kernel of a convolution (one
    for each pair of channels), a column of a matrix (one for each of its inputs), or a single entry
    of any other tensor. Groups are numbered tensor by tensor.

    Attributes:
        shapes: the shapes of T tensors, which are flattened one after another into P entries.

    Example:
        >>> groups = Groups([torch.Size((2, 1, 1, 2)), torch.Size((2, 2)), torch.Size((2,))])
        >>> groups.spread(torch.arange(6))
        tensor([0, 0, 1, 1, 2, 3, 2, 3, 4, 5])
        >>> groups.sums(torch.ones(10))
        tensor([2., 2., 2., 2., 1., 1.])
    """

    shapes: Sequence[torch.Size]

    @classmethod
    def of(cls, problem: Problem) -> "Groups":
        """Return the groups of gradient entries, of all rounds, with errors of similar size."""
        rounds = problem.rounds
        return cls([value.shape for posed in rounds for value in posed.gradient.values()])

    @property
    def counts(self) -> Tensor:
        """(G,) the number of entries in each of G groups, whose errors are of similar size."""
        sizes = torch.tensor([shape.numel() for shape in self.shapes])
        return (sizes // torch.tensor(self._numbers))[self.tensors]

    @property
    def tensors(self) -> Tensor:
        """(G,) index of the parameter tensor to which each of the G groups of entries belongs."""
        return torch.arange(len(self.shapes)).repeat_interleave(torch.tensor(self._numbers))

    def sums(self, values: Tensor) -> Tensor:
        """Return the sums (G,) of the values (P,) of an update's entries over groups of entries."""
        pieces = values.split([shape.numel() for shape in self.shapes])
        found = []
        for piece, shape in zip(pieces, self.shapes, strict=True):
            if len(shape) > 2:
                piece = piece.reshape(shape[:2].numel(), -1).sum(1)
            elif len(shape) == 2:
                piece = piece.reshape(shape).sum(0)
            found.append(piece)
        return torch.cat(found)

    def spread(self, values: Tensor) -> Tensor:
        """Return for each of P entries of an update the value of its group, from values (G,)."""
        found = []
        for piece, shape in zip(values.split(self._numbers), self.shapes, strict=True):
            if len(shape) > 2:
                piece = piece[:, None].expand(-1, shape[2:].numel())
            elif len(shape) == 2:
                piece = piece.expand(shape)
            found.append(piece.reshape(-1))
        return torch.cat(found)

    @property
    def _numbers(self) -> list[int]:
        """The number of groups of entries in each of the T parameter tensors."""
        return [
            shape[:2].numel() if len(shape) > 2 else shape[1] if len(shape) == 2 else shape.numel()
            for shape in self.shapes
        ]


@dataclass(frozen=True)
class Likelihood:
    """The observed value, the noise and the pruning bound of every entry of an update.

    g* is the observed gradient, and g that of a candidate, whose likelihood is computed.

    Attributes:
        observed: (P,) the entries of g*, all rounds and tensors one after another.
        counts: (T,) number of entries of each of the T tensors.
        noise: (T,) standard deviation σ of the noise in each tensor's entries, > 0.
        bounds: (P,) the bound τ on |g| where g* is zero, as the entry may have been pruned; a large
            number for entries that were clipped; 0 for all others.
    """

    observed: Tensor
    counts: Tensor
    noise: Tensor
    bounds: Tensor

    @classmethod
    def of(cls, gradients: "list[Params]", noise_std: float | None) -> "Likelihood":
        """Return the likelihood of the updates of all rounds, observed pseudo-gradients in float64.

        Bounds are read from the updates: zero entries may have been pruned, and entries of the
        largest magnitude clipped. ``noise_std`` is the standard deviation σ of the noise on all
        entries; ``None`` if float32's rounding is the only noise.
        """
        pieces = [value.reshape(-1) for gradient in gradients for value in gradient.values()]
        observed = torch.cat(pieces)
        counts = torch.tensor([len(piece) for piece in pieces]).to(observed)
        sizes = torch.stack([piece.norm() for piece in pieces]) / counts.sqrt()
        noise = torch.maximum(FLOAT32_NOISE * sizes, 1e-8 * sizes.max())
        if noise_std is not None:
            noise = noise.clamp_min(noise_std)
        zeros = [piece == 0 for piece in pieces]
        kept = [
            float(piece.abs().masked_fill_(at, math.inf).min())
            for piece, at in zip(pieces, zeros, strict=True)
        ]
        # If a tensor kept no nonzero entry, the whole update is taken to have one pruning
        # threshold, which is at most the smallest magnitude that any tensor kept.
        smallest = min(tau for tau in kept if tau < math.inf)
        clipped = [at for each in gradients for at in clipped_entries(each).values()]
        most = _ANY * float(observed.abs().max())
        bounds = torch.zeros_like(observed)
        places = bounds.split([len(piece) for piece in pieces])
        for place, at, tau, beyond in zip(places, zeros, kept, clipped, strict=True):
            place.masked_fill_(at, tau if tau < math.inf else smallest)
            place.masked_fill_(beyond.reshape(-1), most)
        return cls(observed, counts, noise, bounds)

    @property
    def tensors(self) -> Tensor:
        """(P,) index of the parameter tensor to which each entry of the update belongs."""
        return self.spread(torch.arange(len(self.counts), device=self.counts.device))

    def spread(self, values: Tensor) -> Tensor:
        """Return for each of P entries of an update the value of its tensor, from values (T,)."""
        return values.repeat_interleave(self.counts.long())

    def sums(self, values: Tensor) -> Tensor:
        """Return sums (T,) of the values (P,) of an update's entries over parameter tensors."""
        pieces = values.split(self.counts.long().tolist())
        return torch.stack([piece.sum() for piece in pieces])

    def residual(self, gradient: Tensor) -> Tensor:
        """Return the residual ``g − g*`` (P,) of a candidate's gradient g from the observed g*."""
        return gradient.double() - self.observed

    def excess(self, residual: Tensor) -> Tensor:
        """Return the distance (P,) of a gradient's entries from the values that the update allows.

        This excess is ``|r|`` for a residual r. It is ``max(0, |r| − τ)`` for observed entries that
        are zero, as these may have been pruned, with the bound τ.
        """
        return residual.abs().sub_(self.bounds).clamp_min_(0)

    def mean_squares(self, residual: Tensor) -> Tensor:
        """Return the mean squares (T,) of a residual ``g − g*`` (P,) over each parameter tensor.

        An entry that may have been pruned counts by its excess over the pruning threshold.
        """
        return self.sums(self.excess(residual).square_()) / self.counts

    def variances(
        self, residual: Tensor, model_error: float, groups: Groups | None = None
    ) -> Tensor:
        """Return the variance v (P,) of each entry, by which a fit divides its squared residual.

        The variance is ``v = σ² + κ max(0, mean r² − σ²)``, with the noise σ of the tensor, the
        mean of the squared residuals r² over the tensor and the share κ in [0, 1], ``model_error``.
        Blur and linearisation of the network cause errors besides the noise, whose size the
        residuals show. An entry that may have been pruned lies in [−τ, τ], with the pruning
        threshold τ, and has at least the variance τ²/3 of a uniform law there. With ``groups`` of
        entries with similar errors the mean is that of the group, to which the mean over the tensor
        is added like three further entries.
        """
        squares = self.excess(residual).square_()
        noise, means = self.noise.square(), self.sums(squares) / self.counts
        if groups is not None:
            noise, means = noise[groups.tensors], means[groups.tensors]
            means = (groups.sums(squares) + BORROWED * means) / (groups.counts + BORROWED)
        each = noise + model_error * (means - noise).clamp_min(0)
        each = self.spread(each) if groups is None else groups.spread(each)
        return torch.maximum(each, self.bounds.square() / 3)

    def misfit(self, residual: Tensor) -> float:
        """Return the mean square of a residual ``g − g*`` (P,) in units of the noise's variance.

        Entries that may have been pruned count by their excess over the pruning threshold. For the
        private samples the result is about 1, if the noise is estimated rightly.
        """
        mean = self.mean_squares(residual) / self.noise.square()
        return float((mean * self.counts).sum() / self.counts.sum())

    def energy(
        self, residual: Tensor, unknowns: float = math.inf, groups: Groups | None = None
    ) -> float:
        """Return −2 log likelihood of a candidate's residual ``g − g*`` (P,), up to a constant.

        A residual has noise of standard deviation σ_t in all P_t entries of a tensor t, and an
        error of the candidate in D_t directions, with D_t the smaller of P_t and the number of
        ``unknowns``, such as pixels. The variance of the error is unknown, and takes its most
        likely value. With m_t the mean square of the excess (:meth:`excess`) over the tensor, the
        energy is

            Σ_t P_t log σ_t² + P_t min(1, q_t) + D_t log(1 + P_t / D_t max(0, q_t − 1))

        for ``q_t = m_t / σ_t²``. With D_t = P_t, that is ``P_t (log v_t + m_t / v_t)`` with v_t the
        larger of m_t and σ_t². This energy also ranks candidates with misfits far above the noise.
        A large tensor with few independent equations, such as the outer product of a linear layer,
        counts by their number.

        An error of a candidate, such as units of one channel wrongly taken to be on, may move some
        groups of a tensor's entries by much and others by little. With ``groups`` of similar
        errors, the last sum runs over them, each with its own P_g and q_g, and D_g = D_t P_g / P_t.
        ``None`` takes each tensor as one group.
        """
        squares, noise = self.excess(residual).square_(), self.noise.square()
        means = self.sums(squares) / self.counts / noise
        common = self.counts * (noise.log() + means.clamp_max(1))
        shares = self.independent(unknowns) / self.counts
        counts = self.counts
        if groups is not None:
            counts, tensors = groups.counts, groups.tensors
            means = groups.sums(squares) / counts / noise[tensors]
            shares = shares[tensors]
        wrong = (means - 1).clamp_min(0) / shares
        return float(common.sum() + (shares * counts * wrong.log1p()).sum())

    def independent(self, unknowns: float) -> Tensor:
        """Return an upper bound (T,) of the number of independent equations in each of T tensors.

        The bound is the tensor's number of entries, or the number of unknowns if that is smaller.
        """
        return self.counts.clamp_max(unknowns)

    def distance(self, residual: Tensor) -> float:
        """Return the relative squared distance ``‖r‖² / ‖g*‖²`` of a candidate's gradient.

        r (P,) is the candidate's gradient minus the observed g*. Entries that may have been pruned
        count by their excess over the pruning threshold.
        """
        excess = self.excess(residual)
        return float(excess.dot(excess) / self.observed.dot(self.observed))


def estimate_noise(problem: Problem) -> float | None:
    """Return the standard deviation σ of noise on an update, estimated from the last layer.

    The noise is assumed to be independent and of equal size in all entries. Softmax cross-entropy
    depends on differences of logits only. So the gradients g of the last layer's weight and bias
    sum to zero over classes, for any batch and any number of steps without weight decay. With
    noise, ``Σ_k g_kf`` over K classes k has the variance K σ² in each column f.

    Returns:
        The estimate, or ``None`` if there is none: the sum over classes is not zero for a grey
        image, there is weight decay, entries were clipped, entries of the layer were pruned, or the
        network has no last linear layer that is trained.
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

    if any(bool(at.any()) for at in clipped_entries(problem.gradient).values()):
        return None
    observed = columns(problem.gradient)
    # The column of a unit that no sample activates is zero as a whole, and is left out. A column
    # that is zero in part was pruned, so that its sum does not show the noise.
    zeros = (observed == 0).sum(0)
    if bool(((zeros > 0) & (zeros < len(observed))).any()) or bool((zeros > 0).all()):
        return None
    grey = problem.spec.blank(problem.num_samples, observed)
    targets = torch.zeros(problem.num_samples, dtype=torch.int64)
    targets = grey if problem.spec.next_token else targets
    own = columns(problem.gradient_of(names, Batch(grey, targets)))
    if float(own.sum(0).norm()) > 1e-3 * float(own.norm()):  # sums over classes are not zero
        return None
    sums = observed[:, zeros < len(observed)].sum(0)
    return float((sums.square().mean() / len(observed)).sqrt())
