"""The last step of an attack: proofs of pixels, which rest on the normalisation that was told.

A proof speaks of the inputs that the network took, which do not depend on any normalisation. The
answer, which is measured, consists of pixels. A proof of inputs is one of pixels unless the inputs
themselves speak against the normalisation
(:func:`flwr_leakage.conventions.read_normalization`).
"""

from dataclasses import replace

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.batch_proof import Verdict
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR
from flwr_leakage.conventions import read_normalization
from flwr_leakage.records import Batch, InputSpec, Reconstruction

PROVEN_INPUTS = "proven_inputs"
"""Key in the stats of an answer: the number of samples whose network inputs are proven."""

NORMALISATION = "normalisation"
"""Key in the stats of an answer: what its inputs show of the normalisation, a
:data:`flwr_leakage.conventions.Claim`."""


def in_box(spec: InputSpec, answer: Reconstruction) -> Reconstruction:
    """Return the answer as pixels, with the verdicts that hold for pixels.

    If no sample is proven, the answer is clamped to the box of valid pixels. Otherwise the proven
    inputs decide, and ``stats["normalisation"]`` says how:

    - ``confirmed`` and ``as told``: the proofs stand, and the answer is clamped, which moves it by
      no more than its error. In the second case they rest on the normalisation that was told.
    - ``read off``: the inputs show another normalisation, and only one. It is the answer's
      ``spec``, under which the proofs stand. Nothing is clamped.
    - ``refuted``: no pixel is proven. ``stats["verdicts"]`` say ``plausible``, and
      ``stats["proven_inputs"]`` how many samples' network inputs are proven. Nothing is clamped.

    In the last two cases ``stats["stage"]`` ends with the reason. Inputs without a box need no
    normalisation: their proofs stand as they are.

    Args:
        spec: the normalisation that the attack was told.
        answer: the answer of any attack, with ``stats["verdicts"]`` if it proves anything.
    """
    if answer.batch is None or not spec.box or PROVEN_INPUTS in answer.stats:
        return answer
    inputs, stats = answer.batch.inputs, answer.stats
    verdicts: tuple[Verdict, ...] = stats.get("verdicts", ())
    proven = [index for index, verdict in enumerate(verdicts) if verdict == "proven"]
    clamped = replace(answer, batch=Batch(spec.clamp(inputs), answer.batch.targets))
    if not proven:
        return clamped
    reading = read_normalization(inputs[proven], spec, _error(inputs, stats, proven))
    stats = {**stats, PROVEN_INPUTS: len(proven), NORMALISATION: reading.claim}
    if reading.spec is spec:
        return replace(clamped, stats=stats)
    stage = str(stats.get("stage", "")).rstrip(".")
    stats["stage"] = f"{stage}. {reading.reason}" if stage else reading.reason
    if reading.spec is None:
        stats["verdicts"] = tuple("not" if v == "not" else "plausible" for v in verdicts)
        if "proven" in stats:
            stats["proven"] = 0
    return replace(answer, stats=stats, spec=reading.spec)


def _error(inputs: Tensor, stats: dict[str, object], proven: list[int]) -> float:
    """Return the largest standard deviation of the proven samples' own errors.

    It is ``stats["relative_errors"]`` times the root mean square of a sample;
    ``FLOAT32_RELATIVE_ERROR`` is used if it is larger or the attack states no errors.
    """
    errors = torch.full((len(inputs),), FLOAT32_RELATIVE_ERROR, dtype=torch.float64)
    told = torch.as_tensor(stats.get("relative_errors", ()), dtype=torch.float64)
    errors[: len(told)] = told.clamp_min(FLOAT32_RELATIVE_ERROR)
    sizes = inputs.detach().cpu().double().flatten(1).square().mean(1).sqrt()
    return float((errors * sizes)[proven].max())
