"""Compare a reconstruction with the private batch: match the samples, then measure each pair.

The private batch, which no attack sees, must be known, as in a simulation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flwr_leakage.metrics.identification import Reference, identification_ranks, text_ranks
from flwr_leakage.metrics.labels import class_indices, label_accuracy
from flwr_leakage.metrics.matching import match_samples
from flwr_leakage.metrics.perceptual import BackboneUnavailableError, Lpips
from flwr_leakage.metrics.pixel import (
    SSIM_WINDOW,
    fit_brightness_and_contrast,
    mse,
    psnr,
    rmse,
    ssim,
)
from flwr_leakage.metrics.text import match_texts, rouge_l, text_grade, token_accuracy
from flwr_leakage.records import Batch, Direction, InputSpec, Measurement, Reconstruction

_SAFER: Direction = "larger is safer"
_LEAKS: Direction = "larger leaks more"
PSNR_CAP = 120.0
"""The largest PSNR in dB that is reported. That of an exact match is infinite, and beyond some
140 dB a PSNR is float32's rounding."""


@dataclass(frozen=True)
class Evaluation:
    """The distance of a reconstruction from the private samples, by several metrics.

    Attributes:
        measurements: a measurement for each metric, whose entry i belongs to private sample i.
        assignment: (B,) int64, for each private sample the index of its reconstruction, −1 if none
            was left for it.
        matched: reconstructed pixels (B, C, H, W) in the order of the private samples, in [0, 1],
            or NaN where ``assignment`` is −1; for texts token ids (B, T), or −1 in the place of
            NaN.
    """

    measurements: list[Measurement]
    assignment: Tensor
    matched: Tensor


@dataclass(frozen=True)
class Evaluator:
    """A set of metrics of reconstructions: MSE, RMSE, PSNR, SSIM, LPIPS, inferred labels and
    others.

    Pixels are compared in float64, after undoing the normalisation and clamping to [0, 1].
    ``affine_psnr`` is the PSNR after the best brightness and contrast of each image, fitted to the
    original. ``blind_affine_psnr`` is the same for the blind guess, an image made without the
    update.

    For texts the metrics are the share of tokens in their place, with a note such as
    ``most tokens``; whether the text is exact; ROUGE-L; the share of a text's distinct tokens that
    the attack names at any place; inferred labels; and the rank of the original among other texts.

    Attributes:
        lpips: how LPIPS is computed; ``None`` leaves LPIPS out.
    """

    lpips: Lpips | None = None

    def evaluate(
        self,
        reconstruction: Reconstruction,
        truth: Batch,
        spec: InputSpec,
        reference: Reference | None = None,
    ) -> Evaluation:
        """Return metrics of a reconstruction, after matching its samples with the private ones.

        If a sample cannot be measured, its value is missing and a note says why.

        Args:
            reconstruction: the result of an attack, in the model's input space.
            truth: the private batch, in the model's input space.
            spec: the shape and the normalisation of the inputs.
            reference: the blind guess, made without the update, and images among which the original
                is looked for; with ``None``, images are compared with neither, and texts are
                compared with one repeated token.

        Raises:
            ValueError: the truth itself does not have the shape that ``spec`` says.
        """
        if tuple(truth.inputs.shape[1:]) != spec.shape:
            raise ValueError(
                f"truth must have shape (B, {', '.join(map(str, spec.shape))}), got "
                f"{tuple(truth.inputs.shape)}."
            )
        if spec.is_text:
            return _texts(reconstruction, truth, spec, reference or Reference.of(spec))
        true_pixels = _pixels(truth.inputs, spec)
        matched = torch.full_like(true_pixels, math.nan)
        assignment = torch.full((len(truth),), -1)
        problem = _problem(reconstruction, spec)
        labels: tuple[float, ...] = ()
        if reconstruction.batch is not None and not problem:
            pixels = _pixels(reconstruction.batch.inputs, spec)
            assignment = match_samples(true_pixels, pixels)
            problem = "no finite reconstruction was left for this sample"
            matched[assignment >= 0] = pixels[assignment[assignment >= 0]]
            found = assignment >= 0
            predicted = class_indices(reconstruction.batch.targets.cpu())
            others = torch.ones_like(predicted, dtype=torch.bool)
            others[assignment[found]] = False
            labels = label_accuracy(
                torch.cat([predicted[assignment[found]], predicted[others]]),
                class_indices(truth.targets.cpu())[found],
            )
        rows = (assignment >= 0).nonzero().squeeze(1)
        measure = _Rows(len(truth), rows.tolist(), problem)
        ours, theirs = matched[rows], true_pixels[rows]
        measurements = [
            measure("mse", mse(ours, theirs).tolist(), "pixel²", _SAFER),
            measure("rmse", rmse(ours, theirs).tolist(), "pixel", _SAFER),
            _psnr(measure, ours, theirs),
            measure.tried("ssim", "1", _LEAKS, partial(ssim, ours, theirs)),
            measure("affine_psnr", _affine_psnr(ours, theirs), "dB", _LEAKS),
        ]
        if self.lpips is not None:
            name, distance = f"lpips_{self.lpips.net}", partial(self.lpips.distance, ours, theirs)
            note = self.lpips.describe((ours.shape[1], ours.shape[2], ours.shape[3]))
            measurements.append(measure.tried(name, "1", _SAFER, distance, note))
        measurements.append(measure("label_accuracy", list(labels), "1", _LEAKS))
        if reference is not None:
            measurements += _against(reference, measure, ours, theirs, true_pixels)
        return Evaluation(measurements, assignment, matched)


@dataclass(frozen=True)
class _Rows:
    """A function that makes a measurement of all samples from the values of some.

    Of ``count`` samples, those with the indices ``rows`` have a value. The others have no number,
    and ``problem`` as their note.
    """

    count: int
    rows: list[int]
    problem: str

    def __call__(
        self,
        name: str,
        values: list[float],
        unit: str,
        direction: Direction,
        notes: list[str] | None = None,
    ) -> Measurement:
        all_values: list[float | None] = [None] * self.count
        all_notes = [self.problem] * self.count
        for row, value, note in zip(self.rows, values, notes or [""] * len(values), strict=True):
            all_values[row], all_notes[row] = value, note
        return Measurement(name, tuple(all_values), unit, direction, tuple(all_notes))

    def tried(
        self,
        name: str,
        unit: str,
        direction: Direction,
        measure: Callable[[], Tensor],
        note: str = "",
    ) -> Measurement:
        """Return the measurement of a metric that may not apply to these images.

        ``measure`` computes one value for each matched sample, and each of them gets ``note``. If
        ``measure`` raises a ``ValueError``, or an error for missing weights of LPIPS, no sample has
        a value, and the error is the note of each matched one.
        """
        try:
            values = measure().tolist() if self.rows else []
        except (BackboneUnavailableError, ValueError) as error:
            notes = [str(error) if row in self.rows else self.problem for row in range(self.count)]
            return Measurement(name, (None,) * self.count, unit, direction, tuple(notes))
        return self(name, values, unit, direction, [note] * len(values))


def _texts(
    reconstruction: Reconstruction, truth: Batch, spec: InputSpec, reference: Reference
) -> Evaluation:
    """Return the metrics of recovered texts, after matching them with the private texts in
    ``truth``.
    """
    ids, padding = truth.inputs.cpu(), spec.padding
    matched, assignment = torch.full_like(ids, -1), torch.full((len(ids),), -1)
    problem, labels = _problem(reconstruction, spec), []
    if reconstruction.batch is not None and not problem:
        found = reconstruction.batch.inputs.cpu()
        assignment = match_texts(ids, found, padding)
        problem = "no text was left for this one"
        rows = assignment >= 0
        matched[rows] = found[assignment[rows]]
        if not spec.next_token:
            given = class_indices(reconstruction.batch.targets.cpu())[assignment[rows]]
            labels = (given == class_indices(truth.targets.cpu())[rows]).double().tolist()
    rows = (assignment >= 0).nonzero().squeeze(1)
    measure, every = (
        _Rows(len(ids), rows.tolist(), problem),
        _Rows(len(ids), [*range(len(ids))], ""),
    )
    ours, theirs = matched[rows], ids[rows]
    blind = token_accuracy(ids, reference.guess.expand_as(ids), padding)
    accuracy = token_accuracy(theirs, ours, padding).tolist()
    pairs = zip(accuracy, blind[rows].tolist(), strict=True)
    grades: list[str] = [text_grade(*pair) for pair in pairs]
    exact = (ours == theirs).all(1).double().tolist()
    measurements = [
        measure("token_accuracy", accuracy, "1", _LEAKS, grades),
        measure("exact_text", exact, "1", _LEAKS),
        measure("rouge_l", rouge_l(theirs, ours, padding).tolist(), "1", _LEAKS),
        every("blind_token_accuracy", blind.tolist(), "1", "", [reference.meaning] * len(ids)),
    ]
    if labels:
        measurements.append(measure("label_accuracy", labels, "1", _LEAKS))
    if len(reference.pool):
        ranks, counts = text_ranks(ours, theirs, reference, padding)
        notes = [f"of {count} texts" for count in counts.tolist()]
        values = ranks.double().tolist()
        measurements.append(measure("identification_rank", values, "1", _SAFER, notes))
    if "tokens" in reconstruction.stats:
        named = set(reconstruction.stats["tokens"])
        own = [set(text.tolist()) - {padding} for text in ids]
        shares = [len(text & named) / max(len(text), 1) for text in own]
        notes = [f"{len(named)} tokens named"] * len(ids)
        measurements.append(every("named_tokens", shares, "1", _LEAKS, notes))
    return Evaluation(measurements, assignment, matched)


def _pixels(inputs: Tensor, spec: InputSpec) -> Tensor:
    """Return model inputs as float64 pixels, NaN where they are not finite.

    The normalisation is undone. If ``spec.box`` says that inputs are images in [0, 1], the pixels
    are clamped to [0, 1].
    """
    pixels = spec.denormalize(inputs.detach().cpu().double())
    return torch.where(pixels.isfinite(), pixels.clamp(0, 1) if spec.box else pixels, math.nan)


def _problem(reconstruction: Reconstruction, spec: InputSpec) -> str:
    """Return why a reconstruction cannot be compared with the private batch; empty if it can."""
    if reconstruction.batch is None:
        return reconstruction.error or "the attack gave no reconstruction"
    shape = tuple(reconstruction.batch.inputs.shape)
    if shape[1:] != spec.shape:
        return f"reconstruction has shape {shape}, expected (B, {', '.join(map(str, spec.shape))})"
    if spec.is_text and reconstruction.batch.inputs.is_floating_point():
        return "reconstruction holds no token ids"
    if reconstruction.batch.targets.ndim not in (1, 2):
        targets = tuple(reconstruction.batch.targets.shape)
        return f"reconstruction has targets {targets}, expected (B,) or (B, K)"
    return ""


def _psnr(measure: _Rows, ours: Tensor, theirs: Tensor) -> Measurement:
    """Return the PSNR in dB of each pair of images, at most ``PSNR_CAP``, with a note if capped."""
    decibels = psnr(ours, theirs).tolist() if len(ours) else []
    notes = [f"at least {PSNR_CAP:g} dB; capped" if v > PSNR_CAP else "" for v in decibels]
    return measure("psnr", [min(v, PSNR_CAP) for v in decibels], "dB", _LEAKS, notes)


def _affine_psnr(ours: Tensor, theirs: Tensor) -> list[float]:
    """Return the PSNR in dB of each pair of images after a fit of brightness and contrast, at most
    ``PSNR_CAP``.

    The fit brings each reconstruction in ``ours`` nearest its original in ``theirs``.
    """
    fitted = fit_brightness_and_contrast(ours, theirs)
    return [min(value, PSNR_CAP) for value in psnr(fitted, theirs).tolist()] if len(ours) else []


def _against(
    reference: Reference, measure: _Rows, ours: Tensor, theirs: Tensor, truth: Tensor
) -> list[Measurement]:
    """Return measurements of the blind guess, and the rank of each original among other images.

    ``reference`` holds the blind guess, made without the update, and the pool of other images,
    which are ranked by likeness to the reconstruction. ``ours`` and ``theirs`` are the matched
    reconstructions and their originals as pixels, and ``truth`` all originals. ``measure`` makes a
    measurement of all samples from the values of matched ones.
    """
    guesses = reference.guess.to(truth).expand_as(truth)
    every = _Rows(len(truth), list(range(len(truth))), "")
    blind = [min(v, PSNR_CAP) for v in psnr(guesses, truth).tolist()]
    found = [every("blind_psnr", blind, "dB", "", [reference.meaning] * len(blind))]
    # The fit turns a constant guess into the original's mean grey level. No fitted image has a
    # lower PSNR than that, so for such a guess the value is a floor for ``affine_psnr``.
    found.append(every("blind_affine_psnr", _affine_psnr(guesses, truth), "dB", ""))
    if min(truth.shape[2:]) >= SSIM_WINDOW:
        found.append(every("blind_ssim", ssim(guesses, truth).tolist(), "1", ""))
    if len(reference.pool):
        ranks, counts = identification_ranks(ours, theirs, reference)
        notes = [f"of {count} images" for count in counts.tolist()]
        affine, _ = identification_ranks(ours, theirs, reference, up_to_brightness=True)
        named = {"identification_rank": ranks, "affine_identification_rank": affine}
        for name, found_at in named.items():
            found.append(measure(name, found_at.double().tolist(), "1", _SAFER, notes))
    return found
