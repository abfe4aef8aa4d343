"""Test records by algebra, if a step has fewer samples than a layer can hold apart."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from flwr_leakage.attacks.problem import Problem
from flwr_leakage.members.layers import LayerSpan, agreements, shares, traces
from flwr_leakage.members.p_values import SMALLEST_TAIL, TAIL_SHARE, holm, tail_p_values
from flwr_leakage.members.statistics import gradient_cosine, gradient_products
from flwr_leakage.params import ravel
from flwr_leakage.records import Batch

EXACT_RESIDUAL = 5e-3
"""Largest residual, in one layer at least, of a record whose membership algebra shows: rounding in
single precision leaves less to almost all members, and noise of 0.01 on pixels leaves more
(simulations/benchmarks/results/membership.md)."""

EXACT_MARGIN = 0.1
"""Such a residual is also at most this share of the null's smallest in that layer; in the others it
lies below the smallest."""

EXACT_P_VALUE = 1e-4
"""Beyond the null's tail a record of ``exact`` evidence is less likely than this to be another."""

SHARE_TOLERANCE = 0.02
"""Relative difference of a sample's share in the update between layers that counts as rounding."""

RESIDUAL_WEIGHT = 0.25
"""Weight of the residual beside the fit of the own outer product, which shows smaller
gradients but takes the label: any from 0 to 0.5 finds 70 to 72 % of a trained MLP's members at 0.1
% of false alarms on ten development draws, where the residual alone finds 53 %."""

CHANGED_DAMPING = 1e-4
"""Damping of the fits of samples that the client may have changed before it used them."""

SPANNED_P_VALUE = 1e-3
"""Corrected p-value up to which a record shows that the spans tell. Where none does, another
statistic ranks the records, which adds at most this to the chance of a false alarm."""

CHANGED_P_VALUE = 5e-3
"""The same of the more damped fit, behind which there is gradient cosine only: on eight development
draws of MixUp it keeps the fit in five, and on 24 of InstaHide in none."""

FOREIGN_P_VALUE = 0.01
"""A record that the samples span whose own outer product has a larger p-value is none of them."""

SILENT = 5.0
"""How many times the noise of one entry a record has to add to a layer, if anything shall be said
of it. The fit of an outer product has the noise of one entry, as e and h are of unit length; what
other samples have in common with them is lost besides."""


def are_members(logs: Float[Tensor, "C S"], of_null: Float[Tensor, "N S"]) -> Bool[Tensor, " C"]:
    """Return whether each record, unlike all null records, lies in all row spaces up to rounding.

    Inputs may fill fewer directions than a layer has, which the tail of the null residuals shows.
    If there are enough null records, a record must lie beyond this tail as well.
    """
    found = (logs < of_null.amin(0)).all(1) & _is_rounding(logs, of_null).any(1)
    if len(of_null) >= SMALLEST_TAIL / TAIL_SHARE:
        found &= tail_p_values(logs.mean(1), of_null.mean(1)) < EXACT_P_VALUE
    return found


def _is_rounding(logs: Float[Tensor, "C S"], of_null: Float[Tensor, "N S"]) -> Bool[Tensor, "C S"]:
    """Return whether each residual is rounding, and far below all residuals of null records."""
    margins = (logs - of_null.amin(0)).exp()
    return (margins < EXACT_MARGIN) & (logs.exp() < EXACT_RESIDUAL)


def tell_single(
    flat: Problem,
    spans: Sequence[LayerSpan],
    candidates: Batch,
    logs: Float[Tensor, "C S"],
    of_null: Float[Tensor, "N S"],
) -> tuple[Bool[Tensor, " C"], Bool[Tensor, " C"]]:
    """Return whether each record's own gradient is part of the update, and whether it is not.

    Only records in the row spaces count. The samples' inputs span all their combinations. The outer
    product of a sample has the same share of the update in all layers; see
    :func:`~flwr_leakage.members.layers.shares`. If there is one layer only, the share must be that
    of one among as many samples as the client states, or as the rank shows.
    """
    able = torch.tensor([span.rows == flat.num_samples for span in spans])
    spanned = _is_rounding(logs, of_null) & able
    is_single = torch.zeros(len(candidates), dtype=torch.bool)
    chosen = spanned.any(1).nonzero().flatten()
    if not len(chosen):
        return (is_single if bool(able.any()) else ~is_single), is_single
    found, seen = shares(flat, spans, candidates[chosen]), spanned[chosen]
    low = found.masked_fill(~seen, torch.inf).amin(1)
    high = found.masked_fill(~seen, -torch.inf).amax(1)
    agree = (low > 0) & (high - low <= SHARE_TOLERANCE * high)
    rank = max(span.space.rank for span in spans)
    known = torch.tensor([1.0, rank / flat.num_samples]).double()
    is_one = ((high[:, None] / known - 1).abs() <= SHARE_TOLERANCE).any(1)
    is_single[chosen] = agree & (is_one | (seen.sum(1) > 1))
    is_composite = spanned.any(1) & ~is_single
    return is_single, is_composite


def rank_by_own_gradient(
    flat: Problem,
    spans: Sequence[LayerSpan],
    candidates: Batch,
    null: Batch,
    logs: Float[Tensor, "C S"],
    of_null: Float[Tensor, "N S"],
) -> tuple[Float[Tensor, " C"], Float[Tensor, " N"], Bool[Tensor, " C"], str]:
    """Return statistics by residual and own gradient, which records look foreign, and a name.

    A statistic is the fit of the record's outer product in each layer (see
    :meth:`~flwr_leakage.members.row_space.RowSpace.agreement`), damped by the rounding alone, with
    a part of the residual. If a client changed its records first, such as by mixing them, its
    samples span none of them. So if the row spaces show no candidate, the statistic is the same fit
    with more damping. If that shows none either, it is the gradient cosine.

    Args:
        flat: the problem with BatchNorm by running statistics.
        spans: the row spaces of the layers that decide.
        candidates: the candidates with their labels.
        null: the null records with their labels.
        logs: log r of the candidates, for residuals r.
        of_null: log r of the null records.

    Returns:
        Statistics of C candidates and N null records, small for members. Booleans (C,), true if a
        candidate's residual is below all null residuals, but its outer product fits as those of
        others do (p > ``FOREIGN_P_VALUE``), as if it had been moved into the row spaces. And the
        names of the parts of the statistics.
    """
    count, records = (
        len(candidates),
        Batch(
            torch.cat([candidates.inputs, null.inputs]),
            torch.cat([candidates.targets, null.targets]),
        ),
    )
    residuals = torch.cat([logs, of_null]).mean(1, keepdim=True)
    able = [at for at, span in enumerate(spans) if span.rows == flat.num_samples]
    if not able:
        nobody = torch.zeros(count, dtype=torch.bool)
        return residuals[:count, 0], residuals[count:, 0], nobody, "row_space"
    levels = torch.tensor([0.0, CHANGED_DAMPING]).double()
    fits = -agreements(flat, [[spans[at] for at in able]], records, levels)[0]
    fit = _in_spreads(fits[..., 0], count)
    own = fit + RESIDUAL_WEIGHT * _in_spreads(residuals, count)
    is_foreign = residuals[:count, 0] < residuals[count:, 0].min()
    is_foreign &= tail_p_values(fit[:count], fit[count:]) > FOREIGN_P_VALUE
    shown = bool(are_members(logs, of_null).any())
    if shown or _lowest(own, count) <= SPANNED_P_VALUE:
        return own[:count], own[count:], is_foreign, "outer_product, row_space"
    changed = _in_spreads(fits[..., 1], count)
    if _lowest(changed, count) <= CHANGED_P_VALUE:
        return changed[:count], changed[count:], is_foreign, "outer_product"
    products, norms = gradient_products(flat, [flat.gradient], records)
    cosine = gradient_cosine(products[0], norms, float(ravel(flat.gradient).double().norm()))
    return cosine[:count], cosine[count:], is_foreign, "gradient_cosine"


def _lowest(values: Float[Tensor, " N"], count: int) -> float:
    """Return the smallest corrected p-value of the first ``count`` values; the null follows."""
    return float(holm(tail_p_values(values[:count], values[count:])).min())


def _in_spreads(values: Float[Tensor, "N F"], count: int) -> Float[Tensor, " N"]:
    """Return the mean of F statistics in units of the null's spread, and again in such units.

    The values of the null stand behind the first ``count``.
    """
    null = values[count:]
    mean = ((values - null.mean(0)) / null.std(0).clamp_min(1e-12)).mean(1)
    return mean / mean[count:].std().clamp_min(1e-12)


def are_silent(flat: Problem, spans: Sequence[LayerSpan], candidates: Batch) -> Bool[Tensor, " C"]:
    """Return whether each record adds too little to every layer to be found; see ``SILENT``."""
    able = [span for span in spans if span.rows == flat.num_samples]
    if not able:
        return torch.zeros(len(candidates), dtype=torch.bool)
    return (traces(flat, able, candidates) < SILENT).all(1)
