"""Repeat a client's round on the server's own records, to learn how to weight statistics of
membership.

Such a repetition is a rehearsal. The server knows which of its null records, which are not in the
client's update, were in the repeated update. So it can measure how well each statistic separates
these from the other null records.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import torch
from jaxtyping import Float
from torch import Tensor

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.members.layers import LayerSpan, agreements, find_spans, leftovers
from flwr_leakage.members.likelihood import RIDGES as OUTSIDE
from flwr_leakage.members.likelihood import Reference
from flwr_leakage.members.statistics import (
    gradient_cosine,
    gradient_difference,
    gradient_products,
    losses,
)
from flwr_leakage.params import Params, ravel
from flwr_leakage.records import Batch

LEVELS = (0.0, 1e-8, 1e-6, 1e-4, 1e-2)
"""Dampings λ of the residual from a layer's row space, relative to the largest squared singular
value. A rehearsal (a repetition of the round on the server's records) weights the residuals at all
of them. Several local steps and noise first disturb the directions of small singular values, to
which a larger λ gives less weight."""

PRODUCT_LEVELS = (1e-6, 1e-4, 1e-2)
"""Dampings λ in :meth:`RowSpace.agreement` of a record's gradient with a layer's update, relative
to the layer's largest squared singular value. A rehearsal (a repetition of the round on the
server's records) weights the agreements at all of them."""

MEMBERS = (64, 512)
"""The number of members in all draws of a rehearsal together. A rehearsal repeats the client's
round on draws of the server's own records, which are then members of the repeated update. There are
fewer if ``DRAWS`` draws do not suffice. The second number is used if the first gives an AUC below
``WEAK``."""

WEAK = 0.75
"""The AUC of members against other records below which a rehearsal, a repetition of the round on
the server's records, draws more members. If the AUC stays below, and differs by no more than chance
between several ways to weight statistics, the way is used that is fitted least to the drawn
members. On twelve development draws of DP-SGD with ε = 1 this raised the AUC from 0.50 to 0.55;
gradient cosine alone has 0.56."""

DRAWS = 16
"""The largest number of draws in a rehearsal, which bounds its cost. Each draw repeats the client's
round on other records of the server's own."""

STRANGERS = 50
"""The least number of the server's records in a rehearsal that are not in the repeated update, with
which its members are compared."""

RIDGES = (0.02, 0.2, 2.0)
"""The ridges of Fisher's discriminant that a rehearsal, a repetition of the round, tries. A ridge
is added to the diagonal of the statistics' correlation matrix before its inversion. A large ridge
is best if members hardly differ from other records, as the weights would otherwise be fitted to the
few drawn members."""

STEPS = 1000
"""The largest number of local steps of a rehearsal, over all its repetitions of the client's round.
The limit is needed because clients state their number of steps themselves. No rehearsal is made for
an update of more steps."""

LONGEST = 8.0
"""The ratio of the norm of the client's update to the largest norm of a repeated update above which
the client must have trained in another way than the repetition. On 120 development draws of two
networks, untrained and trained, the ratio of SGD clients was at most 5.7, also for samples of a
single class. On 120 draws of Adam clients it was 11 to 811 if SGD was repeated."""

TOGETHER = 512
"""The number of records whose gradients' sketches are in memory at a time; each takes 0.25 MiB."""

POOL = 300
"""The largest number of records, none in the client's update, from which a rehearsal draws to
repeat the round. For an update of over 100 samples it is three times their number. A rehearsal gets
at most half of the null records."""


@dataclass(frozen=True)
class Seen:
    """One update as the server sees it, prepared for tests of membership.

    Attributes:
        problem: the update with its model, parameters and schedule. The model's BatchNorm uses
            running statistics, or those that follow from the update.
        spans: the row spaces of the layers' updates.
        members: for an update that the server made itself, the indices of the server's records on
            which it trained; ``None`` for the client's update.
    """

    problem: Problem
    spans: Sequence[LayerSpan]
    members: Tensor | None = None


@dataclass(frozen=True)
class Rehearsal:
    """The weights of statistics that a rehearsal found, and how well they separate members.

    F statistics, such as the loss, are computed for a record and an update, to recognise members. A
    rehearsal repeats a client's round several times, each on a draw from the server's null records,
    which are not in the client's update. The drawn records are the *members* of the repeated
    update, and the others its *strangers*.

    Attributes:
        weights: (F,) weights w of the statistics in units of their spread. A record with statistics
            x, in these units, is the likelier a member the smaller Σ w x is.
        spread: (F,) standard deviations of the observed update's statistics among null records.
        members: number of members of all repeated updates together.
        found: number of members with a sum Σ w x below those of 99 % of the strangers. The weights
            that score one half of the members come from the other half.
        auc: the probability that a member has a smaller sum Σ w x than a stranger, with weights
            from the half without the member.
        is_clear: whether the best AUC of several ways to weight statistics exceeds 1/2 by two
            standard deviations of the AUC of random weights. As a maximum, the best AUC is somewhat
            too large.
        length: the norm of the client's update divided by the largest norm of a repeated update.
            Above 8 (``LONGEST``) the client trained in another way, such as by another optimizer.
    """

    weights: Float[Tensor, " F"]
    spread: Float[Tensor, " F"]
    members: int
    found: int
    auc: float
    is_clear: bool
    length: float


def discriminant(
    members: Float[Tensor, "M F"], strangers: Float[Tensor, "N F"], ridge: float = RIDGES[0]
) -> Float[Tensor, " F"]:
    """Return weights of the statistics by which members and strangers differ most (Fisher 1936).

    Members are records in an update that the server made itself; strangers are the server's other
    records. The weights are ``w = (C + ρI)⁻¹ d``, with the correlations C of the strangers'
    statistics and the ridge ρ. The entry d_f is the strangers' mean of statistic f less the
    members' mean, in standard deviations of the strangers. For Gaussian statistics with one
    covariance, ``Σ w x`` is the log-likelihood ratio up to its sign and a constant.

    The weights w (F,) are for statistics in units of their standard deviation; Σ w x is smaller for
    members.

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
    """Return weights (F,) that are 1 for the statistic by which members and strangers differ most,
    and 0 for all others. Members are records in an update that the server made itself; strangers
    are its other records.

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
    seen: Sequence[Seen],
    records: Batch,
    statistics: Sequence[str],
    reference: Reference | None = None,
    rows: slice | None = None,
) -> tuple[tuple[str, ...], Float[Tensor, "V N F"]]:
    """Return the names of F statistics, such as ``fc1 at 1e-06`` (the residual in layer fc1 with a
    damping) or ``gradient_cosine``, and their values (V, N, F) for N records and each of the V
    updates in ``seen``. A small value is evidence for membership. All updates must start from the
    same parameters, and have row spaces of the same layers. ``statistics`` are
    names: ``row_space``, which needs no labels, ``outer_product``, ``gradient_likelihood``,
    ``gradient_cosine``, ``gradient_difference`` and ``loss``. ``reference`` holds the gradients of
    records that are no members, for the likelihood, which is left out if it is ``None``. ``rows``
    is the slice of the reference's records to which ``records`` belong; ``None`` if they are not in
    the reference.
    """
    likely = reference if "gradient_likelihood" in statistics else None
    if seen[0].problem.own_statistics and len(seen) > 1:  # the updates' buffers differ
        alone = [compute_features([each], records, statistics, reference, rows) for each in seen]
        return alone[0][0], torch.cat([values for _, values in alone])
    if likely and rows is None and len(records) > TOGETHER:
        starts = range(0, len(records), TOGETHER)
        parts = [
            compute_features(seen, records[at : at + TOGETHER], statistics, likely) for at in starts
        ]
        return parts[0][0], torch.cat([values for _, values in parts], 1)
    names: list[str] = []
    columns: list[list[Tensor]] = [[] for _ in seen]
    problem = seen[0].problem

    def add(name: str, values: Iterable[Tensor]) -> None:
        names.append(name)
        for column, value in zip(columns, values, strict=True):
            column.append(value)

    same = [problem] * len(seen)
    if "row_space" in statistics and seen[0].spans:
        views = [each.spans for each in seen]
        left, sizes = leftovers(problem, views, records.inputs, torch.tensor(LEVELS).double())
        for index, span in enumerate(seen[0].spans):
            layer = span.name.removesuffix(".weight")
            for at, level in enumerate(LEVELS):
                add(f"{layer} at {level:g}", left[:, :, index, at])
            add(f"size of {layer}'s input", [sizes[:, index] for _ in same])
    if "outer_product" in statistics and seen[0].spans:
        views = [each.spans for each in seen]
        fits = agreements(problem, views, records, torch.tensor(PRODUCT_LEVELS).double())
        for index, span in enumerate(seen[0].spans):
            if span.rows == problem.num_samples:
                for at, level in enumerate(PRODUCT_LEVELS):
                    name = f"{span.name.removesuffix('.weight')}'s product at {level:g}"
                    add(name, -fits[:, :, index, at])
    if likely or {"gradient_cosine", "gradient_difference"} & set(statistics):
        gradients = [each.problem.gradient for each in seen]
        products, norms, sketches = gradient_products(
            problem, gradients, records, sketched=likely is not None and rows is None
        )
        if likely is not None:
            inside = [each.members for each in seen]
            count = problem.num_samples
            if rows is None:
                ratios = likely.compare(gradients, inside, count, sketches)
            else:
                ratios = likely.compare(gradients, inside, count, None)[:, rows]
            for at, ridge in enumerate(OUTSIDE):
                add(f"gradient_likelihood at {ridge:g}", ratios[:, :, at])
        if "gradient_cosine" in statistics:
            sizes_of = [float(ravel(gradient).double().norm()) for gradient in gradients]
            found = zip(products, sizes_of, strict=True)
            add("gradient_cosine", [gradient_cosine(row, norms, size) for row, size in found])
        if "gradient_difference" in statistics:
            count = problem.num_samples
            add("gradient_difference", [gradient_difference(p, norms, count) for p in products])
            add("size of the gradient", [norms.clamp_min(1e-30).log() for _ in same])
    if "loss" in statistics:
        add("loss", [losses(each.problem, records, after=True) for each in seen])
        before = losses(problem, records, after=False)
        add("loss before", [before for _ in same])
    if not names:
        return (), torch.zeros(len(seen), len(records), 0).double()
    return tuple(names), torch.stack([torch.stack(column, 1) for column in columns])


def rehearse(
    client: Problem,
    observed: Seen,
    pool: Batch,
    statistics: Sequence[str],
    generator: torch.Generator,
    noise_std: float = 0.0,
    optimizer: str = "SGD",
    reference: Reference | None = None,
) -> Rehearsal:
    """Return weights of the statistics, from repetitions of a round on the server's records.

    The members of a repeated round are known, so that each statistic's power to separate them can
    be measured. The repeated update is changed as the client's seems to have been. If there is
    noise, it is scaled to the same size, as by clipping. It is pruned to the same number of
    entries. It is turned into signs if most entries of the client's update have one magnitude, as
    after a step of Adam.

    Args:
        client: the client's update with its model, whose BatchNorm is in the mode of the client's
            training.
        observed: the client's update, with the row spaces of its layers.
        pool: records with labels, none of which is a member of the observed update.
        statistics: the statistics to measure; see :func:`compute_features`.
        generator: draws the records that become members.
        noise_std: the standard deviation of a defense's noise on the pseudo-gradient. The repeated
            update gets such noise, too.
        optimizer: the name of the client's optimizer, one of
            :data:`~flwr_leakage.gradient_map.OPTIMIZERS`.
        reference: the gradients of null records, for the likelihood; the first of them are those of
            ``pool``.

    Raises:
        ValueError: the pool is smaller than the number of the update's samples plus 50
            (``STRANGERS``), or the round has more than 1000 (``STEPS``) steps.
    """
    count, flat = client.num_samples, observed.problem
    if client.schedule.num_steps > STEPS:
        raise ValueError(
            f"at most {STEPS} local steps are repeated, got {client.schedule.num_steps}"
        )
    if len(pool) < count + STRANGERS:
        raise ValueError(
            f"a rehearsal takes {count} members and {STRANGERS} other null records, got {len(pool)}"
        )
    layers = [span.name for span in observed.spans]
    orders: list[Tensor] = []
    inside: list[Tensor] = []
    outside: list[Tensor] = []
    weighings: list[Callable[[Tensor, Tensor], Tensor]]
    weighings = [*(partial(discriminant, ridge=ridge) for ridge in RIDGES), best_alone]
    rows = slice(len(pool)) if reference else None
    _, (usual,) = compute_features([observed], pool, statistics, reference, rows)
    size = _signal_size(client, flat, pool, noise_std, optimizer) if noise_std else 1.0
    longest = 0.0
    for wanted in MEMBERS:
        draws = min(DRAWS, math.ceil(wanted / count), STEPS // client.schedule.num_steps)
        seen = []
        for _ in range(draws - len(orders)):
            order = torch.randperm(len(pool), generator=generator)
            shown = _repeated(client, flat, pool[order[:count]], optimizer)
            gradient = {name: size * value for name, value in shown.gradient.items()}
            gradient = _as_released(gradient, client.gradient, noise_std, generator)
            longest = max(longest, float(ravel(gradient).norm()))
            shown = replace(shown, gradient=gradient)
            by_name = {span.name: span for span in find_spans(shown, noise_std or None, layers)[0]}
            orders.append(order)
            seen.append(Seen(shown, [by_name[name] for name in layers], order[:count]))
        if seen:
            _, found = compute_features(seen, pool, statistics, reference, rows)
        for values, order in zip(found if seen else (), orders[len(inside) :], strict=True):
            inside.append(values[order[:count]])
            outside.append(values[order[count:]])
        members, strangers = torch.cat(inside), torch.cat(outside)
        tried = [_crossed(weigh, members, strangers) for weigh in weighings]
        auc, caught = max(tried, key=itemgetter(0))
        if auc >= WEAK:
            break
    deviation = math.sqrt((1 / len(members) + 1 / len(strangers)) / 12)
    is_clear = auc > 0.5 + 2 * deviation
    slack = deviation if auc < WEAK else 0.0
    at = max(index for index, (other, _) in enumerate(tried) if other >= auc - slack)
    spread = usual.std(0).clamp_min(1e-12)
    weights = weighings[at](members, strangers)
    auc, caught = tried[at]
    own = float(ravel(client.gradient).norm())
    length = own / max(longest, torch.finfo(torch.float32).tiny)
    return Rehearsal(weights, spread, len(members), caught, auc, is_clear, length)


def _repeated(client: Problem, flat: Problem, batch: Batch, optimizer: str) -> Problem:
    """Return the update, without any defense, of a round that is repeated on a batch of the
    server's records.

    ``client`` is the client's update with the model, whose BatchNorm is in the mode of the client's
    training. The result is a copy of ``flat``, the client's update with BatchNorm by running
    statistics, in which the repeated update replaces the client's.
    """
    with torch.no_grad():
        gradient = client.replay(batch, optimizer)
        buffers = flat.buffers
        if client.own_statistics:
            own = client.gradient_map.statistics(client.params, batch.inputs, client.buffers)
            buffers = {**buffers, **own}
    gradient = {name: gradient[name].detach() for name in client.gradient}
    return replace(flat, gradient=gradient, buffers=buffers)


def _signal_size(
    client: Problem, flat: Problem, pool: Batch, noise_std: float, optimizer: str
) -> float:
    """Return the size s of the client's update G without its noise, relative to repeated updates
    Rₖ.

    It is the larger of two estimates. With repeated updates Rₖ of draws from ``pool`` that share no
    record, ``s = mean_k ⟨G, Rₖ⟩ / mean_{k≠l} ⟨Rₖ, Rₗ⟩`` also works if G is mostly noise. ``s² =
    (‖G‖² − 2dσ²) / mean ‖Rₖ‖²`` also works if the client's labels differ from the pool's. In it the
    squared norm dσ² of the noise on d entries counts twice, as σ = ``noise_std`` is an estimate.
    The first estimate is replaced by its standard error if that is larger, and by 1 if the repeated
    updates have no common direction. The result is at most 1, as clipping only shortens updates.
    """
    given = ravel(client.gradient).double()
    total, energies = torch.zeros_like(given), []
    size = client.num_samples
    for start in range(0, len(pool) - size + 1, size):
        batch = pool[start : start + size]
        row = ravel(_repeated(client, flat, batch, optimizer).gradient).double()
        total += row
        energies.append(float(row.square().sum()))
    count, energy = len(energies), sum(energies)
    # ``common`` is K times the mean of ⟨Rₖ, Rₗ⟩ over k ≠ l, for K repeated updates Rₖ.
    common = (float(total @ total) - energy) / max(count - 1, 1)
    along = 1.0
    if common > 0:
        along = max(float(given @ total) / common, noise_std * (count / common) ** 0.5)
    beyond = float(given.square().sum()) - 2 * len(given) * noise_std**2
    return min(1.0, max(along, math.sqrt(max(beyond, 0.0) * count / max(energy, 1e-300))))


def _crossed(
    weigh: Callable[[Tensor, Tensor], Tensor],
    members: Float[Tensor, "M F"],
    strangers: Float[Tensor, "N F"],
) -> tuple[float, int]:
    """Return the AUC of weighted sums of statistics, and the number of members whose weighted sum
    is below those of 99 % of the strangers (records that were not in the repeated update). Each
    half of the members is weighted by the weights (F,) that ``weigh`` returns for the other half.
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
    """Return the gradient of a repeated round, changed as the observed gradient seems to have been.
    It is pruned if the observed one has more zeros, turned into signs if most entries of the
    observed one have one magnitude, and gets noise of standard deviation ``noise_std``.
    """
    entries = sum(value.numel() for value in observed.values())
    kept = sum(int(value.count_nonzero()) for value in observed.values())
    own = sum(int(value.count_nonzero()) for value in gradient.values())
    if own - kept > 0.01 * entries:
        sizes = torch.cat([value.abs().flatten() for value in gradient.values()])
        limit = sizes.kthvalue(len(sizes) - kept).values
        gradient = {k: torch.where(v.abs() > limit, v, 0.0) for k, v in gradient.items()}
    size = _only_size(observed)
    if size is not None and _only_size(gradient) is None:
        gradient = {k: size * v.sign() for k, v in gradient.items()}
    if noise_std:
        gradient = {
            k: v + noise_std * torch.randn(v.shape, generator=generator, dtype=v.dtype).to(v.device)
            for k, v in gradient.items()
        }
    return gradient


def _only_size(gradient: Params) -> float | None:
    """Return the median magnitude of a gradient's nonzero entries if most of them differ from it by
    less than 1 %; else ``None``.
    """
    entries = torch.cat([value.abs().flatten() for value in gradient.values()])
    kept = entries[entries > 0]
    size = float(kept.median())
    return size if bool(((kept / size - 1).abs() < 0.01).double().mean() > 0.5) else None
