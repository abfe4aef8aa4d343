"""Run a case through the public call, and say what a user sees of its result."""

import copy
import functools
import math
import re
import warnings
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

import flwr_leakage
from flwr_leakage.attacks import AttackJob, pose
from flwr_leakage.attacks.one_call import ParameterChange
from flwr_leakage.records import Batch, LocalSchedule, Reconstruction
from tests.pins.case import Case

EXACT = 60.0
"""Peak signal-to-noise ratio in dB above which an image counts as exact."""

RIGHT = 40.0
"""In dB: a proven image is right to a hundredth of the pixels' range."""

SHOWN = (
    *("applies", "attack", "stage", "stopped", "equations", "end", "order"),
    *("layer", "rank", "found", "proven", "masks", "proven_masks", "ranks", "positions"),
    "labels_changed",
)
"""The statistics of a result that are pinned."""

FIGURES = re.compile(r"[-+]?(?:\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+)")
"""Numbers in text that rounding changes: all that are no whole numbers."""

LINES = re.compile(r"(\.py:)\d+")
"""Numbers of lines, which an edit of the networks changes."""

TALLIES = re.compile(r"\{[^}]*\}")
"""The statistics that count a search's trials, which depend on its random draws."""


@functools.cache
def preset(name: str, overrides: tuple[str, ...]):
    """An attack, built once."""
    return flwr_leakage.load_preset(name, list(overrides))


@dataclass(frozen=True)
class Checked:
    """An exact attack that is asked before whether it applies; ``stats["applies"]`` has its words.

    A refusal has the words of the attack's own.
    """

    attack: Any

    def __call__(self, job: AttackJob, progress: Any = None) -> list[Reconstruction]:
        """Check, then attack the one observation."""
        (result,) = self.attack(job, progress)
        try:
            problem = pose(job.gradient_map, job.spec, job.observations[0], job.threat)
            said = self.attack.check(problem.to(torch.float64), job.generator(0, "check"))
        except (ValueError, RuntimeError) as error:
            words = "" if str(error) == result.error else f"refused: {error}"
        else:
            words = said.reason if said.gives_images else f"without images: {said.reason}"
        return [replace(result, stats={**result.stats, "applies": words})]


def attacked(case: Case, shake: float = 0.0) -> tuple[Reconstruction, Batch]:
    """Return the attack's answer, and the truth.

    Args:
        case: to run.
        shake: relative size of noise on every number that is sent, then in double precision, to
            see which results hang on rounding.
    """
    torch.set_num_threads(1)
    truth, model = case.truth(), case.model()
    updates: list[Any] = [_update(case, model, truth, turn, shake) for turn in range(case.rounds)]
    targets = [truth.targets] * case.rounds if case.known else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            attack = preset(case.preset, case.overrides)
            if case.labelling is not None:
                attack = replace(attack, labels=case.labelling)
            (result,) = flwr_leakage.attack(
                model,
                updates,
                spec=case.spec,
                preset=Checked(attack) if hasattr(attack, "check") else attack,
                num_examples=case.claimed or case.count,
                schedule=_schedule(case),
                targets=targets,
                members=case.members,
                same_samples=case.rounds > 1,
                loss=case.loss,
                batch_norm_knowledge=case.batch_norm_knowledge,
            )
        except ValueError as error:  # of the settings or of the call, before any attack
            result = Reconstruction(None, math.nan, error=f"raised: {error}")
    return result, truth


def _schedule(case: Case) -> LocalSchedule | None:
    """That of parameters before and after; none of a plain gradient."""
    if case.schedule is None and case.rounds > 1:
        return LocalSchedule(1.0, batch_size=case.count)
    return case.schedule


def _update(case: Case, model: nn.Module, truth: Batch, turn: int, shake: float) -> Any:
    """The gradient, or the parameters before and after several steps."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(turn)
    if turn or case.rounds > 1:  # the server's model moved on
        for value in model.parameters():
            move = 0.05 * turn * torch.randn(value.shape, generator=generator)
            value.data += move * value.data.abs().mean()

    def shaken(sent: dict[str, Tensor]) -> dict[str, Tensor]:
        if not shake:
            return sent
        return {
            name: value * (1 + shake * torch.randn(value.shape, generator=generator).double())
            for name, value in sent.items()
        }

    schedule = _schedule(case)
    if schedule is None:
        return shaken(case.sent(case.gradient(model, truth)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(
        [value for value in model.parameters() if value.requires_grad],
        lr=schedule.learning_rate,
        momentum=schedule.momentum,
        weight_decay=schedule.weight_decay,
    )
    for chosen in schedule.slices(case.count):
        gradients = case.gradient(model, truth[chosen])
        for name, value in model.named_parameters():
            value.grad = gradients.get(name)
        optimizer.step()
    after = dict(model.state_dict())
    names = [name for name, value in model.named_parameters() if value.requires_grad]
    change = shaken(case.sent({name: after[name] - before[name] for name in names}))
    return ParameterChange(before, {**after, **{n: before[n] + change[n] for n in names}})


def outcome(result: Reconstruction, truth: Batch, case: Case) -> dict[str, Any]:
    """The pinned facts of a result: no time, and no figure that rounding changes."""
    said: dict[str, Any] = {}
    if result.error:
        said["error"] = plain(result.error)
    if result.batch is not None:
        said |= _compared(result, truth, case)
    for name in SHOWN:
        if name in result.stats and result.stats[name] not in ("", None):
            value = result.stats[name]
            if isinstance(value, float):
                continue
            said[name] = plain(value) if isinstance(value, str) else _listed(value)
    features = result.stats.get("features")
    if result.batch is None and features is not None:
        said["feature_labels"] = sorted(features.labels.tolist())
    refusals = result.stats.get("refusals")
    if refusals:
        said["refusals"] = [plain(text) for text in refusals]
    if result.parts:
        ran = [part for part in result.parts if part.outcome != "not run"]
        said["parts"] = {part.name: _part(part) for part in ran}
    return said


def _part(part: Any) -> str:
    told = part.outcome in ("refused", "failed")
    return f"{part.outcome}: {plain(part.reason)}" if told else part.outcome


def _listed(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def plain(text: str) -> str:
    """A text without its figures, numbers of lines and tallies."""
    text = TALLIES.sub("{…}", FIGURES.sub("#", text.strip()))
    return LINES.sub(r"\1#", text)


def matched(result: Reconstruction, truth: Batch, case: Case) -> tuple[list[int], Tensor]:
    """Return the result's image of each true one, and its ratio in dB, of at most ``EXACT``."""
    assert result.batch is not None
    found = case.spec.denormalize(result.batch.inputs.double()).clamp(0, 1)
    pixels = case.spec.denormalize(truth.inputs.double())
    errors = (pixels[:, None] - found).square().flatten(2).mean(2)
    order = [int(index) for index in linear_sum_assignment(errors)[1]]
    own = errors[range(len(order)), order]
    return order, (-10 * own.clamp_min(1e-30).log10()).clamp(max=EXACT)


def _compared(result: Reconstruction, truth: Batch, case: Case) -> dict[str, Any]:
    """Images beside the nearest true ones, and labels whose order does not count."""
    assert result.batch is not None
    ratios = matched(result, truth, case)[1]
    targets = result.batch.targets
    targets = targets.argmax(1) if targets.is_floating_point() else targets
    found, true = Counter(targets.tolist()), Counter(truth.targets.tolist())
    said = {
        "images": len(result.batch),
        "mean": ratio(float(ratios.mean())),
        "worst": ratio(float(ratios.min())),
        "labels": sorted(found.elements()),
        "labels_right": (found & true).total(),
    }
    if verdicts := result.stats.get("verdicts"):
        said["verdicts"] = dict(sorted(Counter(verdicts).items()))
    return said


def wrongly_proven(result: Reconstruction, truth: Batch, case: Case) -> list[float]:
    """The ratios in dB of proven images that are further from the truth than ``RIGHT``."""
    verdicts = result.stats.get("verdicts", ())
    if result.batch is None or "proven" not in verdicts:
        return []
    order, ratios = matched(result, truth, case)
    pairs = zip(order, ratios.tolist(), strict=True)
    return [found for index, found in pairs if verdicts[index] == "proven" and found < RIGHT]


def ratio(decibels: float) -> float | str:
    """One decimal, or ``exact``."""
    return "exact" if decibels >= EXACT - 1e-6 else round(decibels, 1)
