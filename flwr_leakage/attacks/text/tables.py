"""Read the tokens of a batch, and the order of one text, from the gradients of embedding tables.

A token v at position p enters a transformer as the sum ``u = E_v + P_p`` of a row of the tokens'
table E and one of the positions' table P. So the rows of both tables' gradients are sums of the
errors ``δ = ∂L/∂u``: the row W_v sums over the occurrences of token v, and the row Q_p over all
texts at position p. For one text ``W = M Q``, where M has a 1 for each token at its position, and 0
elsewhere. The equation holds in any number of local steps, and with dropout behind the sum u, as it
is linear.

If the tables are frozen, the first layer shows the tokens. It takes ``z = γ N(E_v + P_p) + β``,
where N centres and scales (LayerNorm), only scales (RMSNorm), or does nothing, with the norm's
weight γ and bias β. So each row of the layer's gradient is a combination of few vectors, the
*atoms*: γ C E_v for each token that occurs, where C is the centring, and also γ C P_p and β.
Simultaneous orthogonal matching pursuit (Tropp et al. 2006) finds the atoms one by one, even with
fewer rows than tokens (:func:`pursue`).
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.attacks.text.anatomy import Anatomy, Site
from flwr_leakage.attacks.text.sequences import token_inputs

FALSE_ALARM = 1e-3
"""Largest probability that noise alone makes any row of an embedding table's gradient count as that
of a token."""


def noise_of(table: Float[Tensor, "V d"]) -> float:
    """Return the standard deviation σ of noise on an embedding table's gradient (V, d), 0 for none.

    With noise, no row is zero. Most rows hold noise alone, as a batch has a small part of the V
    tokens. The norms of these rows are alike, with a relative standard deviation of 1 / √(2 d). If
    a row is shorter than the median by six standard deviations, there is no noise, but all tokens
    of a small vocabulary occur.
    """
    sizes = table.norm(dim=1)
    median, spread = float(sizes.median()), 1 / math.sqrt(2 * table.shape[1])
    is_noise = float(sizes.min()) > (1 - 6 * spread) * median and bool(sizes.all())
    return median / math.sqrt(table.shape[1]) if is_noise else 0.0


def rows_above(table: Float[Tensor, "V d"], noise: float) -> Int[Tensor, " U"]:
    """Return the indices (U,) of the rows of a table's gradient that are not zero or mere noise.

    The table has V tokens or positions. The squared norm of a row of mere noise is σ² (``noise``²)
    times a chi-square variable with d degrees of freedom. Such a variable exceeds
    ``d + 2 √(d x) + 2 x`` with probability e⁻ˣ at most (Laurent and Massart 2000, lemma 1). The
    probability that any of V rows of noise is returned is at most 1e-3.
    """
    count, width = table.shape
    x = math.log(count / FALSE_ALARM)
    limit = noise**2 * (width + 2 * math.sqrt(width * x) + 2 * x)
    return (table.square().sum(1) > limit).nonzero()[:, 0]


def tied_rows(
    table: Float[Tensor, "V d"], most: int, generator: torch.Generator
) -> Int[Tensor, " U"]:
    """Return the tokens (U,) of a batch, from the gradient of a table that is also the last layer.

    As the last layer's weight, the table gets a gradient in the row of each of V tokens. All of
    these rows lie in the span of the layer's inputs, at most ``most`` in the batch. As the
    embedding table, it gets a further gradient only in the rows of tokens in the batch, which
    therefore lie outside.

    Raises:
        ValueError: the features may span the whole space, or no rows stand out of the span.
    """
    count, width = table.shape
    if most >= width or count < 8 * width:
        raise ValueError(
            f"a tied table tells tokens apart from {most} predictions only if its width {width} "
            f"is larger and its {count} rows are many more."
        )
    sizes = table.norm(dim=1)
    rows = table / sizes.clamp_min(1e-30)[:, None]
    low = sizes.argsort()[: int(0.9 * count)]  # rows of the batch's tokens are among the largest
    drawn = low[torch.randperm(len(low), generator=generator)[: 4 * width]]
    basis = torch.linalg.svd(rows[drawn], full_matrices=False)[2][:most]
    outside = (rows - rows @ basis.T @ basis).norm(dim=1)
    ordered = outside.sort(descending=True).values.clamp_min(1e-12)
    ratios = ordered[:most] / ordered[1 : most + 1]
    edge = int(ratios.argmax())
    if float(ratios[edge]) < 5:
        raise ValueError("the rows of a tied table do not part into two kinds.")
    return (outside >= ordered[edge]).nonzero()[:, 0]


def placed_tokens(
    words: Float[Tensor, "U d"], places: Float[Tensor, "T d"], noise: float = 0.0
) -> tuple[Int[Tensor, " T"], Float[Tensor, " T"]]:
    """Return the token at each position of one text, from the gradients of two embedding tables.

    The gradient of the tokens' table is ``W = M Q``, with that of the positions' table Q and an
    unknown matrix M, which has a 1 for each token at its position. The largest least-squares
    coefficient of each position proposes its token. A token is accepted if its row of W is the sum
    of its positions' rows of Q. Both steps are repeated for the remaining tokens, so that there may
    be more positions than the width d. Positions that stay open, by noise or pruning, get tokens by
    damped least squares and single moves that lower ``‖W − M Q‖``.

    Args:
        words: W (U, d), the gradient rows of the tokens that occur.
        places: Q (T, d), the gradient rows of the positions that are used.
        noise: standard deviation of noise in each entry of both gradients.

    Returns:
        The index (T,) of the row of W at each position, and its coefficient (T,) in M. It is 1 for
        tokens that were accepted, and otherwise 1 minus the relative residual.

    Raises:
        ValueError: the tokens found explain less than half of the rows of W.

    Example:
        >>> places = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
        >>> words = torch.stack([places[0] + places[2], places[1]])
        >>> placed_tokens(words, places)[0]
        tensor([0, 1, 0])
    """
    chosen = torch.zeros(len(places), dtype=torch.int64)
    weights = torch.ones(len(places), dtype=places.dtype)
    rest, left = torch.arange(len(places)), torch.arange(len(words))
    sizes = places.norm(dim=1)
    while len(rest) and len(left):
        # The positions' rows are divided by their lengths, as least squares would otherwise mix
        # short rows into the others.
        solved = words[left] @ torch.linalg.pinv(places[rest] / sizes[rest, None]) / sizes[rest]
        found = solved.max(0)
        sums = torch.zeros_like(words[left]).index_add_(0, found.indices, places[rest])
        # A token's own row minus the sum of the k rows of its positions has k + 1 times the noise
        # variance of one row.
        terms = 1 + found.indices.bincount(minlength=len(left))
        rough = 1.5 * noise * (terms * words.shape[1]).sqrt()
        placed = (sums - words[left]).norm(dim=1) < 1e-4 * words[left].norm(dim=1) + rough
        chosen[rest], weights[rest] = left[found.indices], found.values
        ready = placed[found.indices]
        weights[rest[ready]] = 1.0
        rest, left = rest[~ready], left[~placed]
        if not bool(ready.any()):
            break
    if len(rest):
        trials = [_settled(words[left], places[rest], damping) for damping in DAMPINGS]
        best, gap = min(trials, key=lambda trial: trial[1])
        if gap > 0.5:
            raise ValueError(
                f"{len(rest)} positions of one text are not told apart by tables of width "
                f"{places.shape[1]}."
            )
        chosen[rest], weights[rest] = left[best], 1 - gap
    return chosen, weights


DAMPINGS = (1e-6, 1e-4, 1e-2, 1.0)
"""Dampings of the least-squares guess of a text's tokens, as shares of the mean squared norm of the
positions' gradient rows. Each is tried, and the guess with the least residual is taken."""


def _settled(
    words: Float[Tensor, "U d"], places: Float[Tensor, "T d"], damping: float
) -> tuple[Int[Tensor, " T"], float]:
    """Return a token for each of T positions, and the residual ``‖W − M Q‖ / ‖W‖`` that is left.

    W, ``words``, and Q, ``places``, are the gradient rows of the tokens and of the positions. M has
    a 1 for each token at its position. The tokens are first guessed by least squares, damped by
    ``damping`` times the mean of ‖Q_p‖². Then one position after another gets the token that lowers
    the residual most, until none changes. With ``R = W − M Q``, moving position p from token u to v
    changes ‖R‖² by ``2 (⟨R_u, Q_p⟩ + ‖Q_p‖² − ⟨R_v, Q_p⟩)``.
    """
    gram = places @ places.T
    scale = damping * gram.diagonal().mean()
    guess = torch.linalg.solve(gram + scale * torch.eye(len(gram)).to(gram), places @ words.T)
    chosen = guess.max(1).indices
    rest = words.clone().index_add_(0, chosen, -places)
    for _ in range(20):
        before = chosen.clone()
        for place, row in enumerate(places):
            rest[chosen[place]] += row
            chosen[place] = (rest @ row).argmax()
            rest[chosen[place]] -= row
        if torch.equal(chosen, before):
            break
    return chosen, float(rest.norm() / words.norm())


def pair_weights(words: Float[Tensor, "U d"], places: Float[Tensor, "T d"]) -> Float[Tensor, "T U"]:
    """Return weights (T, U) that tell how likely each token stands at each position in a batch.

    The gradient row Q_p of position p, in ``places``, is a sum over the texts of the batch. It
    contains the row W_v, in ``words``, of each token v that occurs once, at p, and parts of W_v of
    tokens that occur several times. The weight is the matched filter
    ``Q_pᵀ C⁻¹ W_v / W_vᵀ C⁻¹ W_v``, where C is the covariance of the rows of both sets.
    It is about 1 for tokens that occur once, at p. Of the 40 largest of 1,168 weights, 39 were
    right in a batch of 8 texts of 16 tokens, and 34 by least squares.
    """
    covariance = words.T @ words + places.T @ places
    # A share of the covariance's mean diagonal is added, so that it can be inverted. Between shares
    # of 1e-6 and 1e-2 the results hardly differed on development draws; none are kept.
    scale = 0.01 * covariance.diagonal().mean()
    filters = torch.linalg.solve(covariance + scale * torch.eye(len(covariance)).to(words), words.T)
    return places @ filters / (words.T * filters).sum(0)


ROWS = 48
"""Number of the strongest singular directions of a layer's gradient that the tokens found must
explain. The value was chosen on development draws; no results are kept."""

EXACT = 1e-4
"""Relative residual at which the tokens found explain a gradient without noise: ten times the
largest error of a float32 gradient."""

FALL = 3.0
"""Least ratio of the part of a gradient that the last token of the batch explains to the part that
the best further token explains. Under noise of 3e-5 and pruning of half of the entries this ratio
was 6 to 600, and less than 2 between tokens that occur (development draws, width 192 and 384, 47
tokens)."""

BEYOND = 8
"""Number of tokens that are tried beyond the largest number that may occur. They show how much a
token explains that does not occur. Each costs one more step of the pursuit."""


def atoms(
    problem: Problem, anatomy: Anatomy, site: Site
) -> tuple[Float[Tensor, "V d"], Float[Tensor, "n d"]]:
    """Return the vectors (atoms) whose combinations are the rows of a first layer's gradient.

    The layer takes ``z = γ N(E_v + P_p) + β`` for token v at position p, with the norm N and the
    tables E and P. The inputs of the layers of ``site`` depend on nothing else.

    Returns:
        The atoms (V, d) γ C E_v of all tokens, with N's centring C; and those of all positions, γ C
        P_p, followed by β.

    Raises:
        ValueError: the inputs of the layers are no such sum.
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
    rows: Float[Tensor, "m d"], words: Float[Tensor, "V d"], others: Float[Tensor, "n d"], most: int
) -> Int[Tensor, " U"]:
    """Return the tokens (U,), in ascending order, that explain the rows of a layer's gradient.

    Each row is a combination of vectors, one for each token that occurs (its atom, in ``words``),
    and of ``others``, such as the atoms of positions. Orthogonal matching pursuit adds one atom
    after another, at most ``most``, each time the one that lowers the squared residual of the rows
    most. The search ends where this gain falls most clearly.

    Raises:
        ValueError: the gain does not fall clearly: no small set of tokens explains the rows.
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
    # The squared residual would rise by ``adds`` if one token were left out. A token that was
    # chosen in error would hardly raise it, and is dropped.
    inverse = torch.linalg.pinv(words[chosen[:count]])
    adds = (whole @ inverse).square().sum(0) / inverse.square().sum(0)
    kept = adds > 2 * max(*gains[count:], least)
    return torch.tensor(chosen[:count])[kept].sort().values
