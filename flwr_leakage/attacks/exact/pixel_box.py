"""The last step of an attack: it clamps the answer to valid pixels and withdraws refuted proofs.

A proof speaks of the inputs that the network took. The answer, which is measured, consists of
pixels: these inputs clamped to the box that pixels in [0, 1] span under the normalisation that the
attacker was told. If a proven input lies outside of that box, it is no image under that
normalisation. So the told normalisation is wrong, and with it the pixels of all samples of the
batch, including those inside of the box.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.batch_proof import Verdict
from flwr_leakage.attacks.rounding import FLOAT32_RELATIVE_ERROR, NOISE_DEVIATIONS
from flwr_leakage.records import Batch, InputSpec, Reconstruction

OUTSIDE = (
    "The answer lies outside of the box of valid pixels by more than its own error, so that the "
    "normalisation that the attack was told is probably wrong, and nothing is proven."
)
"""The reason, for the user, why an answer is no longer proven."""


def in_box(spec: InputSpec, answer: Reconstruction) -> Reconstruction:
    """Return the answer in the box of valid pixels, without proofs if that changes a proven sample.

    A sample counts as changed if clamping moves an entry of it by more than ``NOISE_DEVIATIONS``
    standard deviations of its own error. This deviation is ``stats["relative_errors"]`` times the
    root mean square of the sample; ``FLOAT32_RELATIVE_ERROR`` is used if it is larger or the attack
    states no errors. If a proven sample changes, no sample of the batch is proven any more, and
    ``stats["stage"]`` says why.

    Args:
        spec: the normalisation that the attack was told.
        answer: the answer of any attack, with ``stats["verdicts"]`` if it proves anything.
    """
    if answer.batch is None:
        return answer
    inputs = answer.batch.inputs
    clamped = spec.clamp(inputs)
    verdicts: tuple[Verdict, ...] = answer.stats.get("verdicts", ())
    stats = answer.stats
    proven = torch.tensor([verdict == "proven" for verdict in verdicts])
    if len(proven) and bool((_moved(inputs, clamped, stats)[: len(proven)].cpu() & proven).any()):
        left: tuple[Verdict, ...] = tuple("not" if v == "not" else "plausible" for v in verdicts)
        stage = str(stats.get("stage", "")).rstrip(".")
        stats = {**stats, "verdicts": left, "stage": f"{stage}. {OUTSIDE}" if stage else OUTSIDE}
        if "proven" in stats:
            stats["proven"] = 0
    return replace(answer, batch=Batch(clamped, answer.batch.targets), stats=stats)


def _moved(inputs: Tensor, clamped: Tensor, stats: dict[str, object]) -> Tensor:
    """Return booleans (B,), true for the samples that clamping moves by more than their error."""
    errors = torch.full((len(inputs),), FLOAT32_RELATIVE_ERROR, dtype=torch.float64)
    told = torch.as_tensor(stats.get("relative_errors", ()), dtype=torch.float64)
    errors[: len(told)] = told.clamp_min(FLOAT32_RELATIVE_ERROR)
    sizes = inputs.double().flatten(1).square().mean(1).sqrt()
    return (inputs - clamped).flatten(1).abs().amax(1) > NOISE_DEVIATIONS * errors.to(sizes) * sizes
