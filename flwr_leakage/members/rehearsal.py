"""A rehearsal on records that are no members: which statistic finds members here, and how well.

The server repeats the client's round with records of its own, as it knows the model and the
schedule. It then knows which of them were in that update, and how far every statistic tells them
from the others. Nothing is trained beyond the round's own steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.attacks.problem import Problem, simulate_gradient
from flwr_leakage.members.layers import LayerSpan, find_spans, leftovers
from flwr_leakage.members.statistics import (
    gradient_cosine,
    gradient_difference,
    gradient_norms,
    gradient_products,
    losses,
)
from flwr_leakage.params import Params, ravel
from flwr_leakage.records import Batch

LEVELS = (0.0, 1e-8, 1e-6, 1e-4, 1e-2)
"""Damping of a layer's directions, relative to the largest singular value squared, among which the
rehearsal chooses: local steps and noise blur the small ones first."""

MEMBERS = 64
"""Members of a rehearsal, all of its draws together, unless those would be more than ``DRAWS``."""

DRAWS = 16
"""Most draws, each of which repeats the client's round."""

STRANGERS = 50
"""Fewest records that a rehearsal needs beside the members of a draw."""

RIDGES = (0.02, 0.2, 2.0)
"""What is added to the correlations of the statistics before they are inverted; the rehearsal
chooses. Much where members hardly differ, as weights then follow the few members drawn."""

STEPS = 1000
"""Most local steps that a rehearsal repeats, all draws together, as their number is a client's own
word. An update of more is not rehearsed."""

POOL = 300
"""Null records that a rehearsal takes; more only for larger updates."""


@dataclass(frozen=True)
class Features:
    """One number a record and statistic; small speaks for membership.

    Attributes:
        names: of F statistics, such as ``fc1 at 1e-06`` or ``gradient_cosine``.
        values: (N, F).
    """

    names: tuple[str, ...]
    values: Float[Tensor, "N F"]


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found.

    Attributes:
        weights: w (F,) of the statistics in units of their spread; x with small Σ w x is a member.
        members: members of all draws.
        found: how many of them lay below 99 % of the strangers, by weights from the other half of
            the members.
        auc: the chance that a member lies below a stranger, likewise.
        is_clear: whether the AUC is above 1/2 by two standard deviations of what chance gives. It
            is of the best of several weighings, and so somewhat too large.
    """

    weights: Float[Tensor, " F"]
    members: int
    found: int
    auc: float
    is_clear: bool


def discriminant(
    members: Float[Tensor, "M F"], strangers: Float[Tensor, "N F"], ridge: float = RIDGES[0]
) -> Float[Tensor, " F"]:
    """Return weights of the statistics by which members and strangers differ most (Fisher 1936).

    ``w = (C + ρI)⁻¹ d`` with C the correlations of the strangers' statistics, d how many of their
    standard deviations the mean member lies below, and ρ the ridge. For Gaussian statistics of
    one covariance ``Σ w x`` is the log-likelihood ratio. A statistic that knows nothing of
    membership, such as the size of a record's gradient, counts through its correlations.

    Returns:
        w, so that members have the smaller sums; for statistics in units of their spread.

    Example:
        >>> strangers = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]]).double()
        >>> w = discriminant(strangers[:2] - torch.tensor([3.0, 0.0]).double(), strangers)
        >>> bool(w[0] > 1), round(abs(float(w[1])), 6)
        (True, 0.0)
    """
    spread = strangers.std(0).clamp_min(1e-12)
    distance = (strangers.mean(0) - members.mean(0)) / spread
    unit = (strangers - strangers.mean(0)) / spread
    correlations = unit.T @ unit / len(unit)
    damped = correlations + ridge * torch.eye(len(distance), dtype=distance.dtype)
    found: Tensor = torch.linalg.solve(damped, distance)
    return found


def best_alone(
    members: Float[Tensor, "M F"], strangers: Float[Tensor, "N F"]
) -> Float[Tensor, " F"]:
    """Return the weights that keep the one statistic by which members and strangers differ most.

    Example:
        >>> strangers = torch.tensor([[1.0, 5.0], [-1.0, -5.0]]).double()
        >>> best_alone(strangers - 3, strangers).tolist()
        [1.0, 0.0]
    """
    distance = (strangers.mean(0) - members.mean(0)) / strangers.std(0).clamp_min(1e-12)
    found = torch.zeros_like(distance)
    found[distance.argmax()] = 1.0
    return found


def compute_features(
    problem: Problem,
    spans: Sequence[LayerSpan],
    records: Batch,
    statistics: Sequence[str],
    norms: Float[Tensor, " N"] | None = None,
) -> Features:
    """Return the statistics asked for, of each record.

    Args:
        problem: with BatchNorm by running statistics.
        spans: of the problem's layers.
        records: the labels count for statistics other than ``row_space`` only.
        statistics: ``row_space`` and the names of ``members.statistics``.
        norms: of the records' own gradients, where they are known already.
    """
    names: list[str] = []
    columns: list[Tensor] = []
    if "row_space" in statistics and spans:
        left, sizes = leftovers(problem, spans, records.inputs, torch.tensor(LEVELS).double())
        for index, span in enumerate(spans):
            layer = span.name.removesuffix(".weight")
            names += [f"{layer} at {level:g}" for level in LEVELS]
            columns += list(left[:, index].T)
            names.append(f"size of {layer}'s input")
            columns.append(sizes[:, index])
    if {"gradient_cosine", "gradient_difference"} & set(statistics):
        norms = gradient_norms(problem, records) if norms is None else norms
        products = gradient_products(problem, records)
        if "gradient_cosine" in statistics:
            names.append("gradient_cosine")
            norm = float(ravel(problem.gradient).double().norm())
            columns.append(gradient_cosine(products, norms, norm))
        if "gradient_difference" in statistics:
            names += ["gradient_difference", "size of the gradient"]
            columns.append(gradient_difference(products, norms, problem.num_samples))
            columns.append(norms.clamp_min(1e-30).log())
    if "loss" in statistics:
        names += ["loss", "loss before"]
        columns += [losses(problem, records, after=True), losses(problem, records, after=False)]
    values = torch.stack(columns, 1) if columns else torch.zeros(len(records), 0).double()
    return Features(tuple(names), values)


def rehearse(
    client: Problem,
    flat: Problem,
    pool: Batch,
    statistics: Sequence[str],
    generator: torch.Generator,
    noise_std: float = 0.0,
) -> Rehearsal:
    """Repeat the round on null records, and measure how far each statistic tells them apart.

    A released update that has more zeros than the repeated one is taken for a pruned one, and the
    repeated one is pruned to as many entries. One whose entries are mostly of one size is taken for
    a step of Adam, or for signs, and the repeated one is turned into signs.

    Args:
        client: the problem with BatchNorm as the client trained.
        flat: the same with BatchNorm by running statistics.
        pool: H records with labels, none of which is a member.
        statistics: see :func:`compute_features`.
        generator: draws the members.
        noise_std: σ of a defense's noise on the pseudo-gradient, which is added likewise.

    Raises:
        ValueError: the pool is smaller than the update's samples and ``STRANGERS`` together, or the
            round has more than ``STEPS`` steps.
    """
    count = client.num_samples
    if client.schedule.num_steps > STEPS:
        raise ValueError(
            f"at most {STEPS} local steps are repeated, got {client.schedule.num_steps}"
        )
    if len(pool) < count + STRANGERS:
        raise ValueError(
            f"a rehearsal takes {count} members and {STRANGERS} other null records, got {len(pool)}"
        )
    takes_gradients = {"gradient_cosine", "gradient_difference"} & set(statistics)
    norms = gradient_norms(flat, pool) if takes_gradients else None
    inside: list[Tensor] = []
    outside: list[Tensor] = []
    draws = min(DRAWS, math.ceil(MEMBERS / count), STEPS // client.schedule.num_steps)
    for _ in range(draws):
        order = torch.randperm(len(pool), generator=generator)
        batch = pool[order[:count]]
        with torch.no_grad():
            gradient = simulate_gradient(
                client.gradient_map, client.params, client.buffers, client.schedule, batch,
                client.members,
            )  # fmt: skip
        gradient = {name: gradient[name].detach() for name in client.gradient}
        gradient = _as_released(gradient, client.gradient, noise_std, generator)
        shown = replace(flat, gradient=gradient)
        spans, _ = find_spans(shown, noise_std or None)
        found = compute_features(shown, spans, pool, statistics, norms)
        inside.append(found.values[order[:count]])
        outside.append(found.values[order[count:]])
    members, strangers = torch.cat(inside), torch.cat(outside)
    weighings: list[Callable[[Tensor, Tensor], Tensor]]
    weighings = [*(partial(discriminant, ridge=ridge) for ridge in RIDGES), best_alone]
    tried = [_crossed(weigh, members, strangers) for weigh in weighings]
    auc, caught = max(tried, key=itemgetter(0))
    chosen = weighings[tried.index((auc, caught))]
    deviation = math.sqrt((1 / len(members) + 1 / len(strangers)) / 12)
    is_clear = auc > 0.5 + 2 * deviation
    return Rehearsal(chosen(members, strangers), len(members), caught, auc, is_clear)


def _crossed(
    weigh: Callable[[Tensor, Tensor], Tensor],
    members: Float[Tensor, "M F"],
    strangers: Float[Tensor, "N F"],
) -> tuple[float, int]:
    """Return the AUC, and the number of members below 99 % of the strangers.

    The weights that score a half of the members come from the other half.
    """
    spread = strangers.std(0).clamp_min(1e-12)
    caught, wins = 0, 0.0
    for own, other in ((members[::2], members[1::2]), (members[1::2], members[::2])):
        if not len(own) or not len(other):
            continue
        weights = weigh(other, strangers) / spread
        theirs = (strangers @ weights).sort().values
        below = torch.searchsorted(theirs, own @ weights)
        caught += int((below < 0.01 * len(theirs)).sum())
        wins += float((1 - below / len(theirs)).sum())
    return wins / len(members), caught


def _as_released(
    gradient: Params, observed: Params, noise_std: float, generator: torch.Generator
) -> Params:
    """Return the gradient with as many zeros and as much noise as the observed one."""
    entries = sum(value.numel() for value in observed.values())
    kept = sum(int(value.count_nonzero()) for value in observed.values())
    own = sum(int(value.count_nonzero()) for value in gradient.values())
    if own - kept > 0.01 * entries:
        sizes = torch.cat([value.abs().flatten() for value in gradient.values()])
        limit = sizes.kthvalue(len(sizes) - kept).values
        gradient = {k: torch.where(v.abs() > limit, v, 0.0) for k, v in gradient.items()}
    sizes = torch.cat([value.abs().flatten() for value in observed.values()])
    size = sizes[sizes > 0].median()
    if float(((sizes / size - 1).abs() < 0.01).double().mean()) > 0.5 * kept / entries:
        gradient = {k: size * v.sign() for k, v in gradient.items()}
    if noise_std:
        gradient = {
            k: v + noise_std * torch.randn(v.shape, generator=generator, dtype=v.dtype).to(v.device)
            for k, v in gradient.items()
        }
    return gradient
