"""How near an attack's answer comes to the truth, and what there is to look at."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from flwr_leakage.audit.truth import Truth
from flwr_leakage.metrics import Evaluation, Evaluator, Reference
from flwr_leakage.records import InputSpec, Measurement, Reconstruction


@dataclass(frozen=True)
class Picture:
    """An image of one sample.

    Attributes:
        sample: the truth's index, or the attacker's own where there is no truth.
        role: ``original`` or ``reconstruction``.
        pixels: (C, H, W) in [0, 1].
    """

    sample: int
    role: str
    pixels: Tensor


@dataclass(frozen=True)
class Outcome:
    """What came of attacking one target.

    Attributes:
        measurements: one a metric; none without a truth.
        pictures: originals with the reconstructions matched to them; without a truth the
            reconstructions alone.
    """

    measurements: tuple[Measurement, ...]
    pictures: tuple[Picture, ...]


def evaluate(
    answer: Reconstruction,
    truth: Truth | None,
    evaluator: Evaluator | None,
    spec: InputSpec,
    reference: Reference | None = None,
) -> Outcome:
    """Measure the answer against the private samples, where there is a truth and an evaluator.

    If a normalisation was read off the answer, it is used for the answer and the truth alike.
    """
    spec = answer.spec or spec
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


def _pairs(originals: Tensor, evaluation: Evaluation) -> Iterator[Picture]:
    for sample, image in enumerate(originals):
        yield Picture(sample, "original", image)
        if evaluation.assignment[sample] >= 0:
            yield Picture(sample, "reconstruction", evaluation.matched[sample])
