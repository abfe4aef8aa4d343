"""Entries: what an attack answered to each update, made by a preset or read from a folder."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flwr_leakage import load_preset
from flwr_leakage.attacks import AttackJob
from flwr_leakage.attacks.base import ProgressCallback, failure
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.records import Batch, Reconstruction, ThreatModel
from flwr_leakage.untrusted import inside, read_npz
from simulations.benchmarks.attacks_portfolio import run_peer
from simulations.benchmarks.portfolio_cases import Target
from simulations.challenge.folder import Challenge, Frozen

COPY = 0.5 / 255
"""Largest difference of pixels between images that are equal when stored in 8 bits."""


def enter(challenge: Challenge, folder: Path, preset: str, seconds: float) -> None:
    """Answer the updates that have no answer yet by a preset, or by ``breaching:NAME``.

    Args:
        challenge: the updates.
        folder: the folder of the entry, made if it is missing.
        preset: the name of the attack.
        seconds: CPU seconds for each update.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for frozen in challenge.updates():
        file = folder / f"{frozen.name}.npz"
        if file.exists():
            continue
        began = time.process_time()
        batch, reason = _answer(frozen, preset, seconds)
        spent = time.process_time() - began
        if batch is None:
            print(f"{frozen.name}: no answer: {reason}", flush=True)
            continue
        images = frozen.spec.denormalize(batch.inputs.float()).clamp(0, 1)
        np.savez(file, images=images.numpy(), labels=batch.targets.numpy(), cpu_seconds=spent)
        print(f"{frozen.name}: {spent:.1f} CPU s", flush=True)


def _answer(frozen: Frozen, preset: str, seconds: float) -> tuple[Batch | None, str]:
    model = frozen.model()
    if preset.startswith("breaching:"):
        nothing = Batch(torch.empty(0), torch.empty(0))  # a peer is given no truth
        target = Target(model, frozen.spec, nothing, frozen.seen)
        steps = frozen.seen.update.schedule.num_steps
        answer = run_peer(preset, target, f"steps-{steps}" if steps > 1 else "clean", seconds)
        if answer.found is None:
            return None, answer.said
        return Batch(answer.found, torch.full((len(answer.found),), -1)), ""
    job = AttackJob(
        GradientMap(model), frozen.spec, [frozen.seen], ThreatModel(), max_seconds=seconds
    )
    (found,) = load_preset(preset)(job)
    return found.batch, found.error


@dataclass(frozen=True)
class Answers:
    """An attack that answers with the files of an entry, which anybody may have written.

    Attributes:
        folder: the folder of the entry.
        track: the name of the track.
        private: the private images (B, C, H, W) of each update of the challenge, by its name. An
            answer that holds one of another update is refused as a copy.
    """

    folder: Path
    track: str
    private: Mapping[str, Tensor]

    def __call__(
        self, job: AttackJob, progress: ProgressCallback | None = None
    ) -> list[Reconstruction]:
        """Return the entry's answer to each observation, or the reason why it has none."""
        found = []
        for seen in job.observations:
            try:
                batch = self.read(f"{self.track}-{seen.server_round}", seen.update.num_examples)
            except (FileNotFoundError, ValueError) as error:
                found.append(failure(f"{error}"))
                continue
            inputs = job.spec.normalize(batch.inputs)
            found.append(Reconstruction(Batch(inputs, batch.targets), torch.nan))
        return found

    def read(self, name: str, count: int) -> Batch:
        """Return the images in [0, 1] and labels of an answer; −1 stands for an unknown label.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is none that was asked for, or a copy of other private images.
        """
        path = inside(self.folder, f"{name}.npz")
        if not path.is_file():
            raise FileNotFoundError(f"the entry has no {path.name}.")
        try:
            array, labels = read_npz(path, ("images", "labels"))
            images, targets = torch.tensor(array).float(), torch.tensor(labels).long()
        except TypeError as error:
            raise ValueError(f"{path.name} must hold arrays of numbers: {error}") from error
        expected = (count, *self.private[name].shape[1:])
        if tuple(images.shape) != expected or tuple(targets.shape) != (count,):
            raise ValueError(
                f"{path.name} must hold images {expected} and {count} labels, got "
                f"{tuple(images.shape)} and {tuple(targets.shape)}."
            )
        if not bool(((images >= 0) & (images <= 1)).all()):
            raise ValueError(f"{path.name} must hold pixels in [0, 1].")
        for other, private in self.private.items():
            if other == name or private.shape[1:] != images.shape[1:]:
                continue
            apart = (images[:, None] - private[None]).abs().flatten(2).amax(2)
            if float(apart.min()) <= COPY:
                raise ValueError(f"{path.name} holds a private image of {other}: a copy.")
        return Batch(images, targets)
