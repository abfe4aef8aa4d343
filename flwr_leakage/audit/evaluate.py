"""Evaluate an attack's reconstruction against the true samples, in numbers and images."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flwr_leakage.audit.truth import Truth
from flwr_leakage.metrics import Evaluation, Evaluator, Reference
from flwr_leakage.records import InputSpec, Measurement, Reconstruction


@dataclass(frozen=True)
class Picture:
    """An image of one sample: the original or its reconstruction.

    Attributes:
        sample: the sample's index among the private samples; where these are not known, its index
            in the attack's answer.
        role: ``original`` or ``reconstruction``.
        pixels: (C, H, W) in [0, 1].
    """

    sample: int
    role: str
    pixels: Tensor


@dataclass(frozen=True)
class Text:
    """The tokens of one text: the original, or what an attack recovered of it.

    Attributes:
        sample: the text's index among the private texts; where these are not known, its index in
            the attack's answer. −1 for tokens that are known to occur in some text of the batch.
        role: ``original``, ``reconstruction``, or ``named`` for tokens that occur in some text.
        ids: the token ids, without padding at the end; −1 where no token was found.
        words: the word of each id; empty if they are unknown.
    """

    sample: int
    role: str
    ids: tuple[int, ...]
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The evaluation of an attack on one target.

    Attributes:
        measurements: one measurement for each metric, with a value for each sample; none where the
            private samples are not known.
        pictures: the original images with the reconstructions matched to them; where the private
            samples are not known, the reconstructions alone.
        texts: the original and recovered texts, and tokens that are known to occur in some text.
    """

    measurements: tuple[Measurement, ...]
    pictures: tuple[Picture, ...]
    texts: tuple[Text, ...] = ()


def evaluate(
    answer: Reconstruction,
    truth: Truth | None,
    evaluator: Evaluator | None,
    spec: InputSpec,
    reference: Reference | None = None,
) -> Outcome:
    """Return the metrics of an attack's answer compared with the private samples, and its images.

    Without private samples or an evaluator, the result holds the reconstructed images or texts
    only. A normalisation that the attack inferred is used for the answer and the private samples
    alike.

    Args:
        answer: the reconstruction by an attack.
        truth: the private samples; ``None`` outside of simulations.
        evaluator: the object that computes the metrics; ``None`` for no metrics.
        spec: shapes and normalisation of the inputs.
        reference: a reconstruction made without any attack, to compare with; by default the mean
            colour.
    """
    spec = answer.spec or spec
    if spec.is_text:
        return _texts(answer, truth, evaluator, spec, reference or Reference.of(spec))
    if truth is not None and evaluator is not None:
        evaluation = evaluator.evaluate(answer, truth.private, spec, reference)
        originals = spec.denormalize(truth.private.inputs).clamp(0, 1)
        return Outcome(tuple(evaluation.measurements), tuple(_pairs(originals, evaluation)))
    if answer.batch is None:
        return Outcome((), ())
    pixels = spec.denormalize(answer.batch.inputs).clamp(0, 1)
    return Outcome(
        (), tuple(Picture(sample, "reconstruction", image) for sample, image in enumerate(pixels))
    )


def _texts(
    answer: Reconstruction,
    truth: Truth | None,
    evaluator: Evaluator | None,
    spec: InputSpec,
    reference: Reference,
) -> Outcome:
    """Return the metrics of recovered texts, and the recovered and the private texts.

    Without private texts or an evaluator, the result holds the recovered texts alone, and no
    metrics.
    """
    write = partial(_written, padding=spec.padding, words=reference.words)
    texts: list[Text] = []
    measurements: tuple[Measurement, ...] = ()
    if truth is not None and evaluator is not None:
        evaluation = evaluator.evaluate(answer, truth.private, spec, reference)
        measurements = tuple(evaluation.measurements)
        for sample, ids in enumerate(truth.private.inputs):
            texts.append(write(sample, "original", ids))
            if evaluation.assignment[sample] >= 0:
                texts.append(write(sample, "reconstruction", evaluation.matched[sample]))
    elif answer.batch is not None:
        for sample, ids in enumerate(answer.batch.inputs):
            texts.append(write(sample, "reconstruction", ids))
    if "tokens" in answer.stats:
        texts.append(write(-1, "named", torch.tensor(answer.stats["tokens"])))
    return Outcome(measurements, (), tuple(texts))


def _written(
    sample: int, role: str, ids: Tensor, padding: int | None, words: tuple[str, ...]
) -> Text:
    tokens = ids.tolist()
    while tokens and tokens[-1] == padding:
        tokens.pop()
    told = tuple(words[token] if 0 <= token < len(words) else "" for token in tokens)
    return Text(sample, role, tuple(tokens), told if words else ())


def _pairs(originals: Tensor, evaluation: Evaluation) -> Iterator[Picture]:
    for sample, image in enumerate(originals):
        yield Picture(sample, "original", image)
        if evaluation.assignment[sample] >= 0:
            yield Picture(sample, "reconstruction", evaluation.matched[sample])
