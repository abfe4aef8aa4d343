"""Test records for membership in one update, with p-values, evidence and a reason in words."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from flwr_leakage.attacks.problem import Problem, pose
from flwr_leakage.gradient_map import GradientMap, require_optimizer
from flwr_leakage.members.algebra import (
    EXACT_RESIDUAL,
    are_members,
    are_silent,
    rank_by_own_gradient,
    tell_single,
)
from flwr_leakage.members.layers import LayerSpan, agreements, emptiest, find_spans, leftovers
from flwr_leakage.members.likelihood import LARGEST_REFERENCE, Reference
from flwr_leakage.members.p_values import benjamini_hochberg, holm, rank_p_values, tail_p_values
from flwr_leakage.members.rehearsal import (
    LONGEST,
    POOL,
    STEPS,
    STRANGERS,
    Rehearsal,
    Seen,
    compute_features,
    rehearse,
)
from flwr_leakage.members.statistics import LABELLED, STATISTICS, Statistic
from flwr_leakage.records import Batch, InputSpec, Observation, ThreatModel

Evidence = Literal["exact", "statistical", "none"]
"""The strength of a test's evidence. ``exact``: linear algebra decides, up to rounding.
``statistical``: members have smaller statistics on average. ``none``: no statistic that was tried
separates members from others."""

Correction = Literal["holm", "benjamini_hochberg"]

Records = Tensor | Batch
"""Records: inputs (N, C, H, W) as the model takes them, or token ids (N, T) of texts; a ``Batch``
if their labels are known. A model of the next token has the ids as labels."""

MIN_NULL = 20
"""The least number of null records (known not to be members) among which a record is ranked. With
fewer, no p-value by rank could be below 0.05."""

FORGEABLE = (
    "whoever knows the update can make a record that passes for one that was used, and records "
    "whose origin nobody vouches for prove nothing"
)
"""The words for the user why the evidence holds only for records that nobody made to deceive. They
are added if the records' own gradients could not be tested."""

MIXED = (
    "the client says that it trained on mixtures of its records, which hold a single record in part"
)
"""The words for the user why evidence on an update of mixtures, as by MixUp, is never exact."""

NOISY = (
    "the noise leaves too few members to choose a statistic by, and gradient cosine ranks the "
    "records: where each sample's gradient is clipped to one size and noise is Gaussian, its order "
    "is that of the likelihood ratio"
)
"""The words for the user why gradient cosine ranks the records if, under noise, a rehearsal (a
repetition of the round on null records) finds members no better than chance. Let ḡ be the mean
gradient of n samples plus noise of standard deviation σ, and g a record's gradient, clipped to
length C. Without regard to other samples, the likelihood ratio of ḡ with and without the record is
then exp((⟨g, ḡ⟩/n − C²/2n²) / σ²) (Neyman and Pearson 1933)."""

FIT_DAMPING = 1e-5
"""The damping λ of ``Membership.fits``, relative to the largest squared singular value. It was
chosen on development draws of sums of ten clients' updates, of 320 samples in all. There, any λ
from 0 to 1e-4 attributes the same share of records to the right client, within one percent."""


_LEAST_P = 1e-300
"""The smallest p-value that is printed as a number. Double precision represents no much smaller
ones."""


@dataclass(frozen=True)
class Membership:
    """The result of a test of whether each of C records was in an update. *Null records* cannot be
    members.

    Attributes:
        evidence: how strong the test is on this update: ``exact``, ``statistical`` or ``none``; see
            :data:`Evidence`.
        reason: the reason for this strength, in words.
        statistic: the statistic that the test used, such as ``row_space (fc1)``.
        p_values: (C,) the p-values, by a record's rank among the null records and by their tail.
        rank_p_values: (C,) the p-values by rank alone, at least 1 / (1 + number of null records).
        corrected: (C,) the p-values, corrected for the number of records.
        correction: the method of the correction.
        is_exact: (C,) booleans, true if linear algebra shows that the update contains the record,
            or another record with the same inputs, up to a factor, of all used layers. If labels
            are known, the record's own gradient must be part of the update as well.
        is_composite: (C,) booleans, true if the record's layer inputs are combinations of those of
            the samples, but its own gradient is no part of the update. The record may be a near
            copy of a sample, a mixture of several samples, or made from the update; the samples may
            be mixtures of it; or its label or the client's loss may differ from the assumed one.
            Its p-value is valid only if nobody chose the record with knowledge of the update.
            Without labels this cannot be known, and all are false.
        is_silent: (C,) booleans, true if the record's own gradient is too small to be found above
            the update's rounding or noise, as the model already fitted the record well. Its p-value
            is then no evidence for or against membership. Without labels, and if the evidence is
            ``statistical``, this cannot be known, and all are false.
        null_size: the number of null records among which a record is ranked.
        null_origin: the source of the null records, in words.
        fits: (C, S) measures of how well each record's outer product e hᵀ fits into each of S
            layers' updates; see :meth:`~flwr_leakage.members.row_space.RowSpace.agreement`. They
            are large for members, and 0 if labels are unknown or a layer sees a sample at several
            positions.
        residuals: (C, S) residuals ‖h − P h‖ / ‖h‖ of each record's input h in each layer of
            ``layers``, where P projects on the layer's row space.
        layers: the names and row spaces of the layers.
        left_out: sentences on layers that were not used, with the reasons.
        rehearsal: the findings of a repetition of the round on null records; ``None`` if there was
            none.
        cpu_seconds: CPU seconds that the test took.
    """

    evidence: Evidence
    reason: str
    statistic: str
    p_values: Float[Tensor, " C"]
    rank_p_values: Float[Tensor, " C"]
    corrected: Float[Tensor, " C"]
    correction: Correction
    is_exact: Bool[Tensor, " C"]
    is_composite: Bool[Tensor, " C"]
    is_silent: Bool[Tensor, " C"]
    null_size: int
    null_origin: str
    residuals: Float[Tensor, "C S"]
    fits: Float[Tensor, "C S"]
    layers: tuple[LayerSpan, ...]
    left_out: tuple[str, ...]
    rehearsal: Rehearsal | None
    cpu_seconds: float

    @property
    def is_unresolved(self) -> Bool[Tensor, " C"]:
        """Return booleans (C,), true for records whose p-value is only an upper bound. Their
        statistic is below those of all null records (known not to be members), which are too few to
        estimate a smaller p-value.
        """
        is_least = self.rank_p_values <= 1 / (1 + self.null_size)
        return is_least & (self.p_values >= self.rank_p_values) & (self.p_values < 1)

    @property
    def is_tail(self) -> Bool[Tensor, " C"]:
        """Return booleans (C,), true for records whose statistic is below those of all null records
        (known not to be members). Their p-value comes from a tail that is fitted to the null
        statistics.
        """
        return self.p_values < self.rank_p_values

    def says(self, record: int, level: float = 0.01) -> str:
        """Return the finding on one record as the end of a sentence that begins with the record's
        name, such as "was in the update, by algebra (…)", for a text to the user. It contains the
        record's p-values, unless there is no evidence.

        Args:
            record: index of the record.
            level: the corrected p-value below which the record counts as found.
        """
        p, corrected = float(self.p_values[record]), float(self.corrected[record])
        if self.evidence == "none":
            return "nothing can be said"
        numbers = f"p = {p:.2g}, {corrected:.2g} corrected"
        if p < _LEAST_P:
            rank = float(self.rank_p_values[record])
            numbers = (
                f"p = {rank:.2g} by rank among {self.null_size} null records, and below "
                f"{_LEAST_P:g} by their tail"
            )
        if bool(self.is_exact[record]):
            return f"was in the update, by algebra ({numbers})"
        if bool(self.is_composite[record]):
            return (
                "is spanned by the update's samples, while its own gradient is no part of the "
                "update: it is a near copy of one, a mixture of several, or made from the update; "
                "or they are mixtures of it, or its label or the client's loss is another"
            )
        if corrected <= level:
            return f"was probably in the update, itself or a near copy ({numbers})"
        if bool(self.is_unresolved[record]):
            return (
                f"lies below all {self.null_size} null records, which are too few to say whether "
                f"it was in the update ({numbers})"
            )
        if bool(self.is_silent[record]):
            return (
                f"may have been in the update or not: the model knew it so well that what it would "
                f"add is below the rounding of the update, and nothing can be said ({numbers})"
            )
        return f"was not found in the update, which is no proof of absence ({numbers})"

    def __str__(self) -> str:
        """Return a text on the evidence and on the 20 records with the smallest p-values. It names
        no client and no file.
        """
        order = self.p_values.argsort()[:20].tolist()
        lines = [f"record {index} {self.says(index)}" for index in sorted(order)]
        if len(self.p_values) > 20:
            lines.append(f"and {len(self.p_values) - 20} others with larger p-values")
        return "\n".join(
            [
                f"evidence: {self.evidence}, by {self.statistic}: {self.reason}.",
                f"null: {self.null_size} records ({self.null_origin}); corrected by "
                f"{self.correction} for {len(self.p_values)} records; "
                f"{self.cpu_seconds:.1f} CPU s.",
                *lines,
            ]
        )


def check_records(
    problem: Problem, candidates: Batch, null: Batch, statistics: Sequence[str]
) -> None:
    """Raise ``ValueError`` unless the candidates can be compared with the null records (which
    cannot be members) by these statistics on the update.
    """
    for name, records in (("records", candidates), ("null", null)):
        shape, spec = tuple(records.inputs.shape), problem.spec
        if shape[1:] != tuple(spec.shape):
            axes = "(N, T) with (T,)" if spec.is_text else "(N, C, H, W) with (C, H, W)"
            raise ValueError(f"{name} must be inputs {axes} = {spec.shape}, got {shape}.")
        if spec.is_text:
            ids = records.inputs
            if ids.dtype != torch.int64 or not bool(((ids >= 0) & (ids < spec.vocabulary)).all()):
                raise ValueError(
                    f"{name} must be token ids of type int64 in [0, {spec.vocabulary}), got "
                    f"{ids.dtype} from {ids.min()} to {ids.max()}."
                )
        elif not bool(torch.isfinite(records.inputs).all()):
            raise ValueError(f"{name} hold NaN or infinite entries.")
    if len(null) < MIN_NULL:
        raise ValueError(
            f"null must hold at least {MIN_NULL} records that cannot be members, got {len(null)}: "
            f"a p-value cannot be less than 1 / (1 + their number)."
        )
    unknown = sorted(set(statistics) - set(STATISTICS))
    if unknown or not statistics:
        raise ValueError(f"statistics must be some of {STATISTICS}, got {tuple(statistics)}.")


def require_text_spec(model: nn.Module, spec: InputSpec) -> None:
    """Raise ``ValueError`` if the model has an embedding, and so takes token ids, but the spec is
    one of images.
    """
    has_table = any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in model.modules())
    if has_table and not spec.is_text:
        raise ValueError(
            "the model has an embedding: its inputs are token ids, and spec must be "
            "InputSpec.text(…), got a spec of images."
        )


@torch.random.fork_rng(devices=[])  # a model may draw from torch's global generator
def examine_observation(
    gradient_map: GradientMap,
    spec: InputSpec,
    observation: Observation,
    records: Records,
    null: Records,
    *,
    null_origin: str = "given",
    statistics: Sequence[Statistic] = STATISTICS,
    correction: Correction = "holm",
    noise_std: float | None = None,
    seed: int = 0,
    optimizer: str = "SGD",
) -> Membership:
    """Return the test of records for membership in the update that a server observed.

    If the inputs of one step's samples are few enough for a layer's row space to exclude others,
    the row space alone decides (``exact``). Otherwise the statistics are weighted by a rehearsal: a
    repetition of the round on a part of the null records (``statistical``). Records are then ranked
    among the other null records, so that the choice of weights does not bias the ranks. If gradient
    cosine alone is used, to which nothing was fitted, it ranks them among all null records.

    If the client states that it trained on mixtures of its records (``Update.mixed``), the row
    space is that of the mixtures' inputs, and need not contain a record's own. No evidence is exact
    then, and there is no rehearsal, as the mixtures are unknown. If labels are not known, the row
    space is the only statistic, and a rehearsal draws the labels of the null records at random.

    Args:
        gradient_map: the gradient map of the client's model and loss.
        spec: the public facts about the inputs.
        observation: the server's view of the update.
        records: the records in question, normalised for the model.
        null: records that cannot be members, from the distribution of the records in question.
        null_origin: the source of the null records in words, for the result.
        statistics: the names of the statistics that may be used.
        correction: the method that corrects p-values for the number of records.
        noise_std: σ of a defense's noise on the entries of the pseudo-gradient. ``None`` estimates
            it from a layer's singular values, which is possible for one step on fewer samples than
            the layer has units.
        seed: the seed of the rehearsal's draws.
        optimizer: the name of the client's optimizer, which a rehearsal repeats. If the repeated
            updates are far shorter than the client's, the rehearsal uses Adam. Only the update of a
            step of SGD is a sum of outer products. So for another optimizer the evidence is
            statistical at most, and noise must be given by ``noise_std``.

    Raises:
        ValueError: see :func:`check_records`; the optimizer is none of
            :data:`~flwr_leakage.gradient_map.OPTIMIZERS`.
    """
    began = time.process_time()
    threat = ThreatModel(view="aggregate" if observation.members else "single")
    problem = pose(gradient_map, spec, observation, threat)
    labelled = spec.next_token or (isinstance(records, Batch) and isinstance(null, Batch))
    generator = torch.Generator().manual_seed(seed)
    candidates = _as_batch(records, spec, generator)
    null = _as_batch(null, spec, generator)
    mixed = observation.update.mixed
    check_records(problem, candidates, null, statistics)
    require_optimizer(optimizer)
    used = [name for name in statistics if labelled or name not in LABELLED]
    flat = replace(
        problem,
        gradient_map=problem.gradient_map.with_batch_norm("running"),
        buffers={**problem.buffers, **problem.own_statistics},
    )
    spans: list[LayerSpan] = []
    left_out: list[str] = []
    if {"row_space", "outer_product"} & set(used):
        spans, left_out = find_spans(flat, noise_std)
    train_mode = problem.gradient_map.uses_batch_statistics and not problem.own_statistics
    one_step = problem.schedule.num_steps == 1 and optimizer == "SGD"
    fuller = next((span for span in spans if one_step and span.is_too_full), None)
    complete = [
        span
        for span in spans
        if one_step
        and fuller is None
        and span.is_complete
        and not (train_mode and span.behind_batch_norm)
    ]
    if problem.spec.is_text:
        # Attention's softmax gives some tokens' queries and keys no derivative. Their layers'
        # updates have a lower rank, and do not contain all inputs.
        full = max((span.space.rank for span in complete), default=0)
        own = flat.num_samples
        complete = [span for span in complete if span.space.rank == full or span.rows == own]
    layers = complete or spans
    has_own_rows = any(span.rows == flat.num_samples for span in complete)
    logs = _log_residuals(flat, layers, candidates)
    fits = torch.zeros_like(logs)
    if "outer_product" in used and layers:
        fits = agreements(flat, [layers], candidates, torch.tensor([FIT_DAMPING]))[0, :, :, 0]
    is_exact = is_composite = is_silent = torch.zeros(len(candidates), dtype=torch.bool)
    rehearsal: Rehearsal | None = None
    evidence: Evidence
    if complete:
        of_null = _log_residuals(flat, complete, null)
        values, null_values, names = logs.mean(1), of_null.mean(1), "row_space"
        if {"outer_product", "gradient_cosine"} <= set(used):
            values, null_values, is_foreign, names = rank_by_own_gradient(
                flat, complete, candidates, null, logs, of_null
            )
        statistic = f"{names} ({', '.join(str(span) for span in complete)})"
        if mixed:
            evidence = "statistical"
            reason = MIXED
        else:
            evidence = "exact"
            reason = (
                "the inputs of all samples of one step lie in the update's row space, and there "
                "are fewer of them than the layer holds apart; a record whose gradient vanishes "
                "leaves no trace, one that the client augmented or mixed before is another record, "
                "and a copy that is the same to the layer up to a factor is taken for it"
            )
            is_exact = are_members(logs, of_null)
            if labelled and has_own_rows:
                is_single, is_composite = tell_single(flat, complete, candidates, logs, of_null)
                is_exact = is_exact & is_single
            if {"outer_product", "gradient_cosine"} <= set(used):
                is_composite = is_composite | (is_foreign & ~is_exact)
                is_silent = are_silent(flat, complete, candidates)
        in_space = int((of_null.exp() < EXACT_RESIDUAL).all(1).sum())
        if in_space:
            reason += (
                f"; {in_space} of {len(null)} null records lie in it, too, and hide what tells the "
                f"samples from others: they are no null records if the client used them or copies "
                f"of them, or if a model of the next token reads them as the beginning of a sample"
            )
        elif "row_space" not in names:
            reason += (
                f"; no record lies in it, and {names} alone ranks the records, in case that the "
                f"client changed its records before it used them"
            )
    else:
        values, null_values, rehearsal, evidence, statistic, reason = _weigh(
            problem, flat, spans, candidates, null, used, noise_std, seed, mixed, optimizer
        )
        if fuller is not None:
            reason += (
                f"; {fuller} spans more than one plain step on the update's samples can: there is "
                f"noise or pruning, or more steps, another optimizer or more samples than assumed"
            )
        if train_mode:
            reason += (
                "; the client normalised by its batch (BatchNorm in train mode), so that inputs "
                "behind such a layer are not the same alone"
            )
    if not labelled and evidence != "none":
        reason += f"; without labels {FORGEABLE}"
    elif evidence == "exact" and not has_own_rows:
        reason += f"; as each sample gives these layers several inputs, {FORGEABLE}"
    if evidence == "none":
        ranks = tails = torch.ones(len(candidates), dtype=torch.float64)
    else:
        ranks, tails = rank_p_values(values, null_values), tail_p_values(values, null_values)
    correct = holm if correction == "holm" else benjamini_hochberg
    return Membership(
        evidence,
        reason,
        statistic,
        tails,
        ranks,
        correct(tails),
        correction,
        is_exact,
        is_composite,
        is_silent,
        len(null_values),
        null_origin,
        logs.exp(),
        fits,
        tuple(layers),
        tuple(left_out),
        rehearsal,
        time.process_time() - began,
    )


def _as_batch(records: Records, spec: InputSpec, generator: torch.Generator) -> Batch:
    """Return records as a batch on the CPU, with contiguous inputs, as many models need for
    ``view``. Unknown labels are drawn at random; they serve only to repeat the round on records
    that are no members. In a model of the next token, the labels are the token ids.
    """
    if isinstance(records, Batch):
        records = records.to(torch.device("cpu"))
        return Batch(records.inputs.contiguous(), records.targets)
    inputs = records.cpu().contiguous()
    if spec.next_token:
        return Batch(inputs, inputs)
    return Batch(inputs, torch.randint(spec.num_classes, (len(records),), generator=generator))


def _log_residuals(
    flat: Problem, spans: Sequence[LayerSpan], records: Batch
) -> Float[Tensor, "N S"]:
    """Return log r (N, S) of N records in S layers. r is the distance of the record's layer input
    from the layer's row space, relative to the input's length, with no other damping than the
    noise.
    """
    return leftovers(flat, [spans], records.inputs, torch.zeros(1).double())[0][0].squeeze(2)


_Weighed = tuple[Tensor, Tensor, Rehearsal | None, Evidence, str, str]


def _weigh(
    problem: Problem,
    flat: Problem,
    spans: Sequence[LayerSpan],
    candidates: Batch,
    null: Batch,
    statistics: Sequence[str],
    noise_std: float | None,
    seed: int,
    mixed: bool,
    optimizer: str,
) -> _Weighed:
    """Return statistics of candidates and null records for an update on which linear algebra cannot
    decide.

    The results are the candidates' statistics, the null records' statistics, the rehearsal (a
    repetition of the round on null records), the evidence, the statistic's name and the reason. The
    statistic is ``Σ_f w_f x_f / σ_f`` over values x_f, with the rehearsal's weights w_f (see
    :func:`~flwr_leakage.members.rehearsal.discriminant`) and the spread σ_f on the observed update.
    The statistic is the gradient cosine instead if, under noise, the rehearsal is no better than
    chance, or if the update is longer than any repeated optimizer makes it. If the round is not
    repeated, as on mixtures (``mixed``), the statistic is that of :func:`_first_choice`, and the
    rehearsal is ``None``. ``flat`` is ``problem`` with BatchNorm by running statistics.
    """
    generator = torch.Generator().manual_seed(seed)
    size = min(len(null) // 2, max(POOL, 3 * problem.num_samples))
    pool, observed = null[:size], Seen(flat, emptiest(spans))
    why = ""
    if mixed:
        why = MIXED
    elif size < problem.num_samples + STRANGERS:
        why = (
            f"{problem.num_samples} samples take {2 * (problem.num_samples + STRANGERS)} null "
            f"records to rehearse, got {len(null)}"
        )
    elif problem.schedule.num_steps > STEPS:
        why = f"{problem.schedule.num_steps} local steps are more than the {STEPS} of a rehearsal"
    reference = None
    if not why and "gradient_likelihood" in statistics and not problem.own_statistics:
        reference = Reference.of(flat, null[: max(size, LARGEST_REFERENCE)])
    names, (usual,) = compute_features([observed], candidates, statistics, reference)
    if not names:
        why = "no layer tells, and the labels that other statistics take are not known"
        empty = torch.zeros(0).double()
        return torch.zeros(len(candidates)).double(), empty, None, "none", "no statistic", why

    def alone(name: str, why: str, made: Rehearsal | None = None) -> _Weighed:
        wanted = ["gradient_cosine"] if name == "gradient_cosine" else statistics
        others, (of_null,) = compute_features([observed], null, wanted)
        values = usual[:, names.index(name)], of_null[:, others.index(name)]
        return *values, made, "statistical", name, why

    if why:
        why += ", so that nobody knows how well the test finds members here"
        return alone(_first_choice(names, observed), why)
    std = noise_std or 0.0
    # the noise cannot be estimated for other optimizers, whose updates have full rank even without
    # noise
    if noise_std is None and optimizer == "SGD":
        told = [span.noise_std for span in spans if span.noise_std is not None]
        std = median_high(told or [0.0])
    for repeated in dict.fromkeys((optimizer, "Adam")):
        rehearsal = rehearse(
            problem, observed, pool, statistics, generator, std, repeated, reference
        )
        if rehearsal.length <= LONGEST:
            break
        why += f"the update is {rehearsal.length:.0f} times as long as {repeated} makes it here; "
    cosine = names.index("gradient_cosine") if "gradient_cosine" in names else None
    if rehearsal.length > LONGEST:
        name = _first_choice(names, observed) if cosine is None else "gradient_cosine"
        return alone(name, f"{why}nobody knows how to repeat it, and {name} ranks the records")
    if why:
        why += f"{repeated} was repeated; "
    why += (
        f"in a rehearsal on null records, {rehearsal.found} of {rehearsal.members} members lay "
        f"below 99 % of the others (AUC {rehearsal.auc:.2f})"
    )
    weights = rehearsal.weights / rehearsal.spread
    if not rehearsal.is_clear:
        why += ", which is no better than chance"
    if not rehearsal.is_clear and std and cosine is not None:
        why += f"; {NOISY}"
        weights = torch.zeros_like(weights)
        weights[cosine] = 1.0
    if weights.nonzero().flatten().tolist() == [cosine]:
        # No weights were fitted to the records on which the round was repeated, so that all null
        # records can rank the candidates.
        return alone("gradient_cosine", why, rehearsal)
    known = len(reference.gram) if reference else size
    parts = [(null[size:known], slice(size, None)), (null[known:], None)]
    null_values = torch.cat([
        compute_features([observed], part, statistics, reference, rows)[1][0] @ weights
        for part, rows in parts
        if len(part)
    ])  # fmt: skip
    values = usual @ weights
    if not rehearsal.is_clear:
        return values, null_values, rehearsal, "none", "no statistic", why
    best = rehearsal.weights.abs().argsort(descending=True)[:3].tolist()
    most = ", ".join(names[index] for index in best)
    name = f"{len(names)} statistics, most by {most}"
    return values, null_values, rehearsal, "statistical", name, why


def _first_choice(names: Sequence[str], observed: Seen) -> str:
    """Return the name of the statistic for an update whose round is not repeated. The
    statistic is that of the layer with the smallest ratio of ``rows`` to ``capacity``: with labels
    :meth:`RowSpace.agreement`, else the residual, the distance from the row space. The agreement
    also works if the layer has fewer units than there are samples. On six development draws with
    115 samples and 108 to 114 units, it separated all samples from 600 non-members, the residual 88
    % of the samples.
    """
    layers = [span.name.removesuffix(".weight") for span in observed.spans[:1]]
    tried = [f"{layer}{end} at 1e-06" for layer in layers for end in ("'s product", "")]
    return next((name for name in tried if name in names), names[0])
