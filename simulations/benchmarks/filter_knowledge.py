"""What a server that knows a filter can say of the gradient behind what was sent.

A function of this module takes the pseudo-gradient that a server computes from an update and the
learning rate, and returns a ``Knowledge``. The settings of filters are in units of the update,
``−Δ = rate · g``.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flwr_leakage.attacks.inversion.objectives import Euclidean, Masked
from flwr_leakage.params import Params, ravel, unravel


def _as_sent(g: Params, sent: Params) -> Params:
    return sent


@dataclass(frozen=True)
class Knowledge:
    """What is known of the gradient g behind what was sent.

    Attributes:
        misfit: a scalar, lowest for the gradients that may be behind it; an objective of
            ``GradientInversion``, which hands over a candidate's gradient and what was sent.
        complete: the gradient that agrees with what was sent and is otherwise as a candidate's, for
            attacks that take a gradient; what was sent itself, where nothing is left out.
    """

    misfit: Callable[[Params, Params], Tensor]
    complete: Callable[[Params, Params], Params] = _as_sent


Reading = Callable[[Params, float], Knowledge]


def whole(sent: Params, rate: float) -> Knowledge:
    """The gradient itself was sent, or the gradient under noise without bias."""
    return Knowledge(Euclidean())


def masked(sent: Params, rate: float) -> Knowledge:
    """Entries that are not zero are the gradient's; of the others nothing is known."""

    def complete(g: Params, sent: Params) -> Params:
        return {name: torch.where(value == 0, g[name], value) for name, value in sent.items()}

    return Knowledge(Masked(Euclidean()), complete)


def bounded(gamma: float = torch.inf) -> Reading:
    """Entries are the gradient's, but for two kinds.

    Zeros lie below the smallest entry that was sent, and entries of magnitude ``gamma`` (in the
    update of one step) lie at or beyond it.
    """

    def reading(sent: Params, rate: float) -> Knowledge:
        values = ravel(sent)
        limit = gamma / rate
        least = values[values != 0].abs().min()
        energy = values.square().sum()
        is_zero, is_clipped = values == 0, values.abs() >= limit * (1 - 1e-4)

        def nearest(g: Tensor) -> Tensor:
            beyond = values.sign() * (values.sign() * g).clamp_min(limit)
            found = torch.where(is_clipped, beyond, values)
            return torch.where(is_zero, g.clamp(-least, least), found)

        def misfit(g: Params, sent: Params) -> Tensor:
            entries = _flat(g, sent)
            return (entries - nearest(entries)).square().sum() / energy

        return Knowledge(misfit, lambda g, sent: unravel(nearest(_flat(g, sent)), sent))

    return reading


def signs(sent: Params, rate: float) -> Knowledge:
    """Every entry has the sign that was sent, zeros are zero, and each tensor's mean is known."""

    def misfit(g: Params, sent: Params) -> Tensor:
        terms = []
        for name, value in sent.items():
            size = value.abs().max().clamp_min(1e-30)
            wrong = torch.where(value == 0, g[name], (-value.sign() * g[name]).clamp_min(0))
            scale = g[name].abs().mean() / size if bool(value.any()) else value.new_ones(())
            terms.append((wrong / size).square().mean() + (scale - 1).square())
        return torch.stack(terms).mean()

    def complete(g: Params, sent: Params) -> Params:
        means = {name: value.abs().mean().clamp_min(1e-30) for name, value in g.items()}
        return {
            # Entries of the wrong sign are likely small ones.
            name: value * torch.where(g[name] * value > 0, g[name].abs() / means[name], 0.1)
            for name, value in sent.items()
        }

    return Knowledge(misfit, complete)


def low_rank(sent: Params, rate: float) -> Knowledge:
    """What was cut off is orthogonal to the rows and columns that were sent.

    With U and V the singular vectors that were sent, ``(I − UUᵀ) (g − g*) (I − VVᵀ)`` is open, and
    all other parts of ``g − g*`` are zero.
    """
    bases = {}
    for name, value in sent.items():
        if value.ndim > 1 and bool(value.any()):
            left, sizes, right = torch.linalg.svd(value.flatten(1), full_matrices=False)
            rank = int((sizes > 1e-4 * sizes[0]).sum())
            bases[name] = (left[:, :rank], right[:rank])
    energy = ravel(sent).square().sum()

    def open_part(name: str, rest: Tensor) -> Tensor:
        if name not in bases:
            return torch.zeros_like(rest)
        left, right = (base.to(rest) for base in bases[name])
        rest = rest.flatten(1)
        rest = rest - left @ (left.T @ rest)
        return rest - (rest @ right.T) @ right

    def misfit(g: Params, sent: Params) -> Tensor:
        rests = {name: g[name] - value for name, value in sent.items()}
        known = [r - open_part(name, r).reshape(r.shape) for name, r in rests.items()]
        return torch.stack([part.square().sum() for part in known]).sum() / energy

    def complete(g: Params, sent: Params) -> Params:
        return {
            name: value + open_part(name, g[name] - value).reshape(value.shape)
            for name, value in sent.items()
        }

    return Knowledge(misfit, complete)


def orthogonal(sent: Params, rate: float) -> Knowledge:
    """Each tensor's gradient is orthogonal to what was sent, and as long, or is what was sent."""
    several = [name for name, value in sent.items() if value.numel() > 1 and bool(value.any())]

    def misfit(g: Params, sent: Params) -> Tensor:
        terms = []
        for name in several:
            own, other = g[name].norm() + 1e-12, sent[name].norm()
            cosine = (g[name] * sent[name]).sum() / (own * other)
            terms.append(cosine.square() + (own / other).log().square())
        return torch.minimum(torch.stack(terms).mean(), Euclidean()(g, sent))

    return Knowledge(misfit)


def clipped_under_noise(gamma: float) -> Reading:
    """Entries that are not zero are the gradient's, clipped to ``gamma``, under Laplacian noise."""

    def reading(sent: Params, rate: float) -> Knowledge:
        kept = ravel(sent) != 0
        values, limit = ravel(sent)[kept], gamma / rate

        def misfit(g: Params, sent: Params) -> Tensor:
            entries = _flat(g, sent)[kept]
            # A step as sharp as the clip has no slope almost everywhere.
            width = entries.detach().square().mean().sqrt().clamp_min(limit)
            return (values - limit * (entries / width).tanh()).abs().mean() / values.abs().mean()

        return Knowledge(misfit)

    return reading


def _flat(g: Params, sent: Params) -> Tensor:
    """A candidate's entries in the order of what was sent."""
    return ravel({name: g[name] for name in sent})
