"""Name the tokens behind a first layer's gradient by few atoms, where its span holds noise.

A first layer takes ``z = γ N(E_v + P_p) + β`` of token v at position p, where N centres and scales
(LayerNorm), scales (RMSNorm), or does nothing. So each row of its gradient is a combination of few
atoms γ C E_v, one for each token that occurs, besides γ C P_p and β. Simultaneous orthogonal
matching pursuit (Tropp et al. 2006) finds them one by one, with fewer rows than tokens, too.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.text.anatomy import Anatomy, Site
from flwr_leakage.attacks.text.sequences import token_inputs

ROWS = 48
"""Number of the strongest directions of a gradient that are explained. The value was
chosen on development draws; no table."""

EXACT = 1e-4
"""Relative residual at which the tokens explain a gradient without noise."""

FALL = 3.0
"""Least factor by which what a token explains falls behind the last that occurs. It fell by 6 to
600 under noise of 3e-5 and half pruning, and by less than 2 before (development draws, width 192
and 384, 47 tokens)."""

BEYOND = 8
"""Number of tokens tried beyond those that may occur, which show what explains nothing."""


def atoms(
    problem: Problem, anatomy: Anatomy, site: Site
) -> tuple[Float[Tensor, "V d"], Float[Tensor, "n d"]]:
    """Return the atoms of all tokens at a pointwise site, and those of positions with β.

    Raises:
        ValueError: the site's inputs are no normalised sum of looked-up rows.
    """
    table, offsets = problem.params[anatomy.words], anatomy.offsets
    tokens = torch.linspace(1, len(table) - 1, 48).long()
    inputs = token_inputs(problem, anatomy, site, tokens)
    sums = table[tokens][:, None] + offsets
    if inputs.shape == sums.shape:
        for centred in (True, False):
            for scaled in (True, False):
                normal = sums - sums.mean(-1, keepdim=True) if centred else sums
                if scaled:
                    normal = normal / normal.square().mean(-1, keepdim=True).sqrt()
                gap = normal - normal.mean((0, 1))
                weight = (gap * inputs).sum((0, 1)) / gap.square().sum((0, 1)).clamp_min(1e-30)
                bias = (inputs - weight * normal).mean((0, 1))
                rest = inputs - weight * normal - bias
                if float(rest.norm() / (inputs - bias).norm()) < 1e-2:
                    every = torch.cat([table, offsets])
                    every = weight * (every - every.mean(1, keepdim=True) if centred else every)
                    return every[: len(table)], torch.cat([every[len(table) :], bias[None]])
    raise ValueError("the first layer takes no normalised sum of looked-up rows.")


def pursue(
    rows: Float[Tensor, "m d"],
    words: Float[Tensor, "V d"],
    others: Float[Tensor, "n d"],
    most: int,
) -> Int[Tensor, " U"]:
    """Return the words that explain the rows; a fall of what one explains tells their number.

    Args:
        rows: a gradient.
        words: atoms, few of which take part.
        others: atoms that may all take part.
        most: largest number of vectors that the layer took.

    Raises:
        ValueError: no few words explain the rows.
    """
    _, sizes, basis = torch.linalg.svd(others, full_matrices=False)
    basis = basis[sizes > 1e-9 * sizes[0]]
    rows, words = (each - each @ basis.T @ basis for each in (rows, words))
    _, values, right = torch.linalg.svd(rows, full_matrices=False)
    whole = values[:ROWS, None] * right[:ROWS]
    lengths = words.norm(dim=1)
    words = words / lengths.clamp_min(1e-30)[:, None]
    is_open = lengths > 1e-6 * lengths.median()
    fits, left = words @ whole.T, torch.ones(len(words)).to(words)
    rest, known, least = whole, words[:0], (EXACT * float(whole.norm())) ** 2
    chosen: list[int] = []
    gains: list[float] = []
    for _ in range(min(most, (rows.shape[1] - len(basis)) // 2) + BEYOND):
        every = torch.where(is_open, fits.square().sum(1) / left.clamp_min(1e-4), 0.0)
        best = int(every.argmax())
        gains.append(float(every[best]))
        chosen.append(best)
        if float(rest.square().sum()) <= least:
            break
        atom = words[best] - words[best] @ known.T @ known
        atom = atom / atom.norm()
        shares, parts = words @ atom, rest @ atom
        fits, left = fits - shares[:, None] * parts, left - shares.square()
        rest, known = rest - parts[:, None] * atom, torch.cat([known, atom[None]])
        is_open[best] = False
    else:
        least = 0.0
    falls = [min(gains[:n]) / max(*gains[n:], least) for n in range(2, len(gains))]
    if not falls or max(falls) < FALL:
        raise ValueError(f"{len(chosen)} tokens do not explain the first layer's gradient.")
    count = 2 + falls.index(max(falls))
    # What dropping a word adds to the squared residual; words chosen in error add nothing.
    inverse = torch.linalg.pinv(words[chosen[:count]])
    adds = (whole @ inverse).square().sum(0) / inverse.square().sum(0)
    kept = adds > 2 * max(*gains[count:], least)
    return torch.tensor(chosen[:count])[kept].sort().values
