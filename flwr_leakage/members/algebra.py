"""Test records for membership exactly, by linear algebra, for a single step on few enough samples.

The row space of a layer's update then contains the layer inputs of the step's samples, and no other
records'.
"""

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
"""The largest residual in some layer at which linear algebra shows a record's membership. The
residual is the distance of the record's layer input h from the row space of the layer's update,
divided by ‖h‖. In single precision almost all members have a smaller residual. A member's copy with
noise of 0.01 on the pixels has a larger one (simulations/benchmarks/results/membership.md)."""

EXACT_MARGIN = 0.1
"""A bound relative to null records, which are known not to be members. In the layer that shows a
record's membership, the record's residual must be at most this share of the smallest null residual.
In all other layers it must be below the smallest null residual."""

EXACT_P_VALUE = 1e-4
"""The largest p-value, by ``tail_p_values``, of the residual of a record that :func:`are_members`
takes for a member. It is a second condition, beside that the residual is as small as rounding."""

SHARE_TOLERANCE = 0.02
"""The relative difference up to which the shares that a record's gradient has in two layers'
updates count as equal. Rounding makes a sample's shares differ by less."""

RESIDUAL_WEIGHT = 0.25
"""The weight of a record's residual (the distance of its layer input from the row space of the
layer's update) in a sum with :meth:`RowSpace.agreement` of its gradient with the update, whose
weight is 1. On ten development draws of a trained MLP, any weight from 0 to 0.5 finds 70 to 72 % of
the members at 0.1 % of false alarms; the residual alone finds 53 %."""

CHANGED_DAMPING = 1e-4
"""The damping λ in :meth:`RowSpace.agreement`, relative to the largest squared singular value, for
clients that may have changed their samples before training, as by MixUp."""

SPANNED_P_VALUE = 1e-3
"""If the smallest corrected p-value of the tested records is at most this number, the layers' row
spaces count as containing the inputs of the client's records. If it is larger, another statistic
ranks the records. This choice adds at most this number to the probability of a false alarm."""

CHANGED_P_VALUE = 5e-3
"""If the smallest corrected p-value of the tested records, by :meth:`RowSpace.agreement` with
``CHANGED_DAMPING``, is at most this number, this statistic ranks the records. If it is larger, the
gradient cosine ranks them. The agreement was used in five of eight development draws of MixUp, and
in none of 24 of InstaHide."""

FOREIGN_P_VALUE = 0.01
"""The p-value of :meth:`RowSpace.agreement` of a record's gradient with the update, above which a
record with inputs in the row spaces counts as no sample, but as a combination of samples."""

SILENT = 5.0
"""The ratio of ‖e hᵀ‖/n, a record's part of a layer's update G of n samples, to the noise σ of one
entry of G. If it is smaller in every layer, nothing can be said of the record's membership. Here h
is the record's input of the layer, and e the derivative of its loss by the layer's outputs. The
product eᵀGh, by which the part is found, has the noise σ for unit vectors e and h. If other
samples' parts overlap with the record's, even less of it can be found."""


def are_members(logs: Float[Tensor, "C S"], of_null: Float[Tensor, "N S"]) -> Bool[Tensor, " C"]:
    """Return whether each of C records (C,) is a member: its input lies in some layer's row space
    up to rounding, and in each of S layers nearer to the row space than the inputs of all N null
    records, which are known not to be members.

    ``logs`` and ``of_null`` hold log r, with the relative distance r of a record's layer input from
    the row space of the layer's update. A layer's inputs may vary in few directions only, so that
    those of non-members come near the row space by chance. If there are enough null records, a
    member's p-value by the tail of their r must also be below ``EXACT_P_VALUE``.
    """
    found = (logs < of_null.amin(0)).all(1) & _is_rounding(logs, of_null).any(1)
    if len(of_null) >= SMALLEST_TAIL / TAIL_SHARE:
        found &= tail_p_values(logs.mean(1), of_null.mean(1)) < EXACT_P_VALUE
    return found


def _is_rounding(logs: Float[Tensor, "C S"], of_null: Float[Tensor, "N S"]) -> Bool[Tensor, "C S"]:
    """Return whether each residual r is below ``EXACT_RESIDUAL``, as by rounding alone, and below
    ``EXACT_MARGIN`` times the smallest of null records, which are known not to be members. ``logs``
    and ``of_null`` hold log r in S layers.
    """
    margins = (logs - of_null.amin(0)).exp()
    return (margins < EXACT_MARGIN) & (logs.exp() < EXACT_RESIDUAL)


def tell_single(
    flat: Problem,
    spans: Sequence[LayerSpan],
    candidates: Batch,
    logs: Float[Tensor, "C S"],
    of_null: Float[Tensor, "N S"],
) -> tuple[Bool[Tensor, " C"], Bool[Tensor, " C"]]:
    """Return which records' own gradients are part of the update, and which records only have
    inputs in the layers' row spaces.

    The row spaces contain all linear combinations of the samples' inputs. Records outside of them
    are not tested. Only for a sample itself does its gradient's outer product have the same share
    of the update in all layers; see :func:`~flwr_leakage.members.layers.shares`. With one layer
    only, this share must be that of one sample among n, with n the number that the client states or
    the update's rank.

    The results are two tensors of booleans (C,): true for records whose own gradient is part of the
    update; and true for other records in the row spaces.

    Args:
        flat: the update with its model, whose BatchNorm uses running statistics.
        spans: the row spaces of S layers. Layers that see a sample at several positions, as most
            convolutions do, are skipped.
        candidates: C records with their labels.
        logs: (C, S) log r of the records' residuals r.
        of_null: (N, S) log r of null records, which are known not to be members.
    """
    able = torch.tensor([span.rows == flat.num_samples for span in spans])
    spanned = _is_rounding(logs, of_null) & able
    is_single = torch.zeros(len(candidates), dtype=torch.bool)
    chosen = spanned.any(1).nonzero().flatten()
    if not len(chosen):
        return is_single, is_single
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
    """Return statistics of records from their residuals and own gradients, small for members.

    The statistic is the fit of the record's outer product in each layer (see
    :meth:`~flwr_leakage.members.row_space.RowSpace.agreement`), damped only by the size of
    rounding, plus ``RESIDUAL_WEIGHT`` times the residual. If this shows no candidate as a member,
    as after MixUp, the statistic is the fit with the damping ``CHANGED_DAMPING``. If this shows
    none either, it is the gradient cosine.

    The results are the statistics (C,) of the candidates and (N,) of the null records; booleans
    (C,), true if a candidate's residual is below all null residuals although its outer product fits
    no better than theirs (p > 0.01, ``FOREIGN_P_VALUE``), as if somebody had moved it into the row
    spaces; and a text with the names of the statistic's parts.

    Args:
        flat: the update with its model, whose BatchNorm uses running statistics.
        spans: the row spaces of the layers that decide.
        candidates: C candidates with their labels.
        null: N null records, known not to be members, with their labels.
        logs: (C, S) log r of the candidates' residuals r.
        of_null: (N, S) log r of the null records.
    """
    count = len(candidates)
    records = Batch(
        torch.cat([candidates.inputs, null.inputs]), torch.cat([candidates.targets, null.targets])
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
    products, norms, _ = gradient_products(flat, [flat.gradient], records)
    cosine = gradient_cosine(products[0], norms, float(ravel(flat.gradient).double().norm()))
    return cosine[:count], cosine[count:], is_foreign, "gradient_cosine"


def _lowest(values: Float[Tensor, " N"], count: int) -> float:
    """Return the smallest p-value, corrected by Holm's method, of the first ``count`` statistics.
    The other statistics are those of null records, known not to be members.
    """
    return float(holm(tail_p_values(values[:count], values[count:])).min())


def _in_spreads(values: Float[Tensor, "N F"], count: int) -> Float[Tensor, " N"]:
    """Return the mean (N,) of each record's F statistics, divided by its standard deviation among
    null records. Before, each statistic is centred and divided by its standard deviation among null
    records. These are known not to be members, and are all rows but the first ``count``.
    """
    null = values[count:]
    mean = ((values - null.mean(0)) / null.std(0).clamp_min(1e-12)).mean(1)
    return mean / mean[count:].std().clamp_min(1e-12)


def are_silent(flat: Problem, spans: Sequence[LayerSpan], candidates: Batch) -> Bool[Tensor, " C"]:
    """Return whether each record's part of every layer's update is too small to be found (C,): its
    norm is below five (``SILENT``) times the noise of one entry. ``flat`` is the update with its
    model, whose BatchNorm uses running statistics; ``spans`` are the layers' row spaces. Layers
    that see a sample at several positions are skipped. If all do, the result is false for all
    records.
    """
    able = [span for span in spans if span.rows == flat.num_samples]
    if not able:
        return torch.zeros(len(candidates), dtype=torch.bool)
    return (traces(flat, able, candidates) < SILENT).all(1)
