"""The last step of an answer: it is brought into the box of valid pixels, and its proofs with it.

A proof speaks of the inputs that the network took. What is answered, and measured, are pixels:
these inputs in the box that pixels in [0, 1] span under the normalisation that the attacker was
told. A proven input outside of that box was no image under that normalisation, so that the told
one is wrong, and so are the pixels of all samples of the batch, those inside of the box included.
"""

from dataclasses import replace

import torch
from torch import Tensor

from flwr_leakage.attacks.exact.batch_proof import NOISE, ROUNDING, Verdict
from flwr_leakage.records import Batch, InputSpec, Reconstruction

OUTSIDE = (
    "The answer lies outside of the box of valid pixels by more than its own error, so that the "
    "normalisation that the attack was told is probably wrong, and nothing is proven."
)
"""Why an answer is not proven any more."""


def in_box(spec: InputSpec, answer: Reconstruction) -> Reconstruction:
    """Return the answer in the box of valid pixels, without proofs if that changes a proven sample.

    A sample is changed if clamping moves an entry of it by more than ``NOISE`` standard deviations
    of its own error: ``stats["relative_errors"]`` times the root mean square of the sample, or
    ``ROUNDING`` times it, if that is more or the attack states none. Then no sample of the batch is
    proven any more, and ``stats["stage"]`` says why.

    Args:
        spec: the normalisation that the attack was told.
        answer: of any attack, with ``stats["verdicts"]`` if it proves anything.
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
    """Which samples (B,) clamping moves by more than their own error."""
    errors = torch.full((len(inputs),), ROUNDING, dtype=torch.float64)
    told = torch.as_tensor(stats.get("relative_errors", ()), dtype=torch.float64)
    errors[: len(told)] = told.clamp_min(ROUNDING)
    sizes = inputs.double().flatten(1).square().mean(1).sqrt()
    return (inputs - clamped).flatten(1).abs().amax(1) > NOISE * errors.to(sizes) * sizes
