"""Keep observed updates on disk, to be attacked later or elsewhere.

Each round has a folder, in which each client has a file. The folder gets its name only when it is
complete. Files are safetensors, which hold numbers and text and run no code. Only the files' owner
can read them.
"""

import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from safetensors.torch import save
from torch import Tensor

from flwr_leakage.audit.assumed import Inputs
from flwr_leakage.audit.truth import UNREADABLE, Mixed, Truth
from flwr_leakage.normalization import BatchNormMode
from flwr_leakage.params import Params
from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, Update
from flwr_leakage.schedules import MAX_STEPS
from flwr_leakage.tracking.jsonl import make_private_folder, write_private
from flwr_leakage.untrusted import (
    MAX_BATCH_NUMBERS,
    MAX_INPUT_NUMBERS,
    MAX_INTEGER,
    MAX_TENSORS_BYTES,
    inside,
    open_tensors,
    parse_json,
)
from flwr_leakage.values import as_share, require, require_option

FORMAT = "flwr-leakage observation, version 1"
"""The value of ``format`` in the metadata of each file of a kept observation. A file with another
value is refused.
"""

KeptPolicy = Literal["oldest", "attacked", "newest"]
"""The names of the rules by which rounds of kept updates are dropped; see ``KeptObservations``."""

DONE = "done"
"""The name of the empty file that marks a kept round as attacked and recorded."""


@dataclass(frozen=True)
class Kept:
    """One observation, with the assumptions of an attack on it.

    Attributes:
        observation: the observation of one client in one round, without the facts that a threat
            model grants.
        inputs: the client's inputs and loss, as far as an attack assumes them.
        truth: the samples that the client trained on, which are written to a separate file;
            ``None`` outside of simulations.
    """

    observation: Observation
    inputs: Inputs
    truth: Truth | None = None


@dataclass(frozen=True)
class KeptObservations:
    """A folder with the observations of a run that are to be attacked later.

    Attributes:
        folder: the folder, which gets mode 0700 if it is made here.
        max_bytes: the limit of the bytes of all observations together, > 0.
        policy: the rule by which rounds are dropped beyond ``max_bytes``. ``oldest`` drops the
            oldest, and ``attacked`` first the oldest that were attacked and recorded. ``newest``
            drops none, but does not keep a new round that exceeds the limit.
    """

    folder: Path
    max_bytes: int = 1_000_000_000
    policy: KeptPolicy = "oldest"

    def __post_init__(self) -> None:
        require_option(self, "policy", KeptPolicy)
        require(self, "be at least 1", "max_bytes")

    def keep(self, server_round: int, several: Sequence[Kept]) -> list[str]:
        """Write the observations of a round, and drop rounds beyond ``max_bytes`` by the policy.

        The result holds a sentence for each round that was dropped or not kept.

        Raises:
            FileExistsError: the round was kept before.
            ValueError: two observations are of the same client.
        """
        counts = Counter(kept.observation.client_id for kept in several)
        if twice := sorted(client_id for client_id, count in counts.items() if count > 1):
            raise ValueError(
                f"round {server_round} must have one observation a client, got several of the "
                f"clients {twice}."
            )
        make_private_folder(self.folder)
        place, unfinished = self._round(server_round), self.folder / f".round{server_round:06d}"
        if place.exists():
            raise FileExistsError(f"round {server_round} is in {self.folder} already.")
        shutil.rmtree(unfinished, ignore_errors=True)
        make_private_folder(unfinished)
        for kept in several:
            name = f"client{kept.observation.client_id:04d}"
            write_private(unfinished / f"{name}.safetensors", _to_bytes(kept))
            if kept.truth is not None:
                write_private(unfinished / f"{name}.truth", truth_to_bytes(kept.truth))
        size, held = _size(unfinished), sum(_size(self._round(each)) for each in self.rounds())
        if self.policy == "newest" and held + size > self.max_bytes:
            shutil.rmtree(unfinished)
            return [
                f"round {server_round} ({size:,} bytes) was not kept, as at most "
                f"{self.max_bytes:,} bytes of observations are kept and no round is dropped for "
                "another"
            ]
        unfinished.rename(place)
        return self._drop()

    def rounds(self) -> list[int]:
        """Return the numbers of the kept rounds, attacked or not, ascending."""
        return sorted(
            int(path.name.removeprefix("round"))
            for path in self.folder.glob("round*")
            if re.fullmatch("round[0-9]{6,9}", path.name) and not path.is_symlink()
        )

    def read(self, server_round: int) -> tuple[list[Kept], list[str]]:
        """Return a round's observations, in the order of client ids, and a sentence for each
        unreadable file.
        """
        found: list[Kept] = []
        problems: list[str] = []
        room = MAX_TENSORS_BYTES
        for path in sorted(self._round(server_round).glob("*.safetensors")):
            try:
                room -= sum(p.lstat().st_size for p in (path, _truth_of(path)) if p.is_file())
                if room < 0:
                    raise ValueError(f"a round must have at most {MAX_TENSORS_BYTES:,} bytes.")
                found.append(_from_file(self.folder, path, server_round))
            except (OSError, *UNREADABLE) as error:
                problems.append(f"{path.name} of round {server_round} cannot be read: {error}")
        return sorted(found, key=lambda kept: kept.observation.client_id), problems

    def is_done(self, server_round: int) -> bool:
        """Return whether a kept round is marked as attacked and recorded."""
        return (self._round(server_round) / DONE).exists()

    def set_done(self, server_round: int) -> bool:
        """Mark a kept round as attacked and recorded, and return whether that was possible.

        That is not possible if another process has removed the round, to keep within ``max_bytes``.
        """
        try:
            write_private(self._round(server_round) / DONE, b"")
        except FileNotFoundError:
            return False
        return True

    def room(self, server_round: int) -> int:
        """Return the number, at least 1, of rounds as large as the given one that fit into
        ``max_bytes``.
        """
        return max(1, self.max_bytes // max(1, _size(self._round(server_round))))

    def _drop(self) -> list[str]:
        sizes = {number: _size(self._round(number)) for number in self.rounds()}
        said = []
        spared = [n for n in sizes if self.policy == "attacked" and not self.is_done(n)]
        for number in sorted(sizes, key=lambda each: (each in spared, each)):
            if sum(sizes.values()) <= self.max_bytes:
                break
            fate = "after its attack" if self.is_done(number) else "before it was attacked"
            said.append(
                f"round {number} ({sizes.pop(number):,} bytes) was dropped {fate}, as at most "
                f"{self.max_bytes:,} bytes of observations are kept"
            )
            # The folder is renamed first, so that it disappears at once for other processes, and is
            # deleted afterwards.
            dropped = self.folder / f".dropped{number:06d}"
            shutil.rmtree(dropped, ignore_errors=True)
            self._round(number).rename(dropped)
            shutil.rmtree(dropped, ignore_errors=True)
        return said

    def _round(self, server_round: int) -> Path:
        return self.folder / f"round{server_round:06d}"


def _size(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # a process that attacks the round removes its own files
            total += path.stat().st_size
    return total


def _to_bytes(kept: Kept) -> bytes:
    seen = kept.observation
    groups = {
        "params": seen.params,
        "buffers": seen.buffers,
        "delta": seen.update.delta,
        "sent": seen.update.buffers,
    }
    tensors = {
        f"{group}/{name}": value.detach().cpu().contiguous().clone()
        for group, values in groups.items()
        for name, value in values.items()
    }
    about = {
        "server_round": seen.server_round,
        "client_id": seen.client_id,
        "num_examples": seen.update.num_examples,
        "mixed": seen.update.mixed,
        "schedule": asdict(seen.update.schedule),
        "spec": asdict(kept.inputs.spec),
        "batch_norm": kept.inputs.batch_norm,
        "label_smoothing": kept.inputs.label_smoothing,
    }
    content: bytes = save(tensors, {"format": FORMAT, "observation": json.dumps(about)})
    return content


def _from_file(folder: Path, path: Path, server_round: int) -> Kept:
    tensors, metadata = _load(inside(folder, f"{path.parent.name}/{path.name}"))
    if metadata.get("format") != FORMAT:
        raise ValueError(f"expected the format {FORMAT!r}, got {metadata.get('format')!r}.")
    about = parse_json(metadata["observation"])
    for name in ("server_round", "client_id", "num_examples"):
        if type(about[name]) is not int or not -1 <= about[name] < MAX_INTEGER:
            raise ValueError(f"{name} must be an integer, got {str(about[name])[:100]}.")
    spec = InputSpec(**{name: _tuple(value) for name, value in about["spec"].items()})
    if about["batch_norm"] not in get_args(BatchNormMode):
        raise ValueError(f"batch_norm must be of {get_args(BatchNormMode)}.")
    smoothing = as_share(about.get("label_smoothing", 0.0))  # earlier versions kept none
    update = Update(
        _group(tensors, "delta"),
        _group(tensors, "sent"),
        LocalSchedule(**about["schedule"]),
        about["num_examples"],
        about.get("mixed") is True,
    )
    if about["server_round"] != server_round:
        raise ValueError(f"it must be of round {server_round}, got {about['server_round']}.")
    _check_sizes(spec, update)
    params, buffers = _group(tensors, "params"), _group(tensors, "buffers")
    observation = Observation(about["server_round"], about["client_id"], params, buffers, update)
    truth = None
    if os.path.lexists(_truth_of(path)):
        truth = read_truth(inside(folder, f"{path.parent.name}/{_truth_of(path).name}"))
        for batch in (truth.private, truth.defended):
            if tuple(batch.inputs.shape[1:]) != tuple(spec.shape):
                raise ValueError(
                    f"true inputs must be {spec.shape}, got {tuple(batch.inputs.shape[1:])}."
                )
    return Kept(observation, Inputs(spec, about["batch_norm"], smoothing), truth)


def _truth_of(path: Path) -> Path:
    return path.with_suffix(".truth")


def _check_sizes(spec: InputSpec, update: Update) -> None:
    """Refuse an observation whose claimed inputs and steps would take an attack too much memory.

    Raises:
        ValueError: the observation claims too many steps, or inputs or samples of too many numbers.
    """
    steps, examples, each = update.schedule.num_steps, update.num_examples, math.prod(spec.shape)
    if steps > MAX_STEPS:
        raise ValueError(f"a round may have at most {MAX_STEPS:,} steps, got {steps:,}.")
    taken = update.schedule.num_samples_used(examples) * (each + spec.num_classes)
    if each > MAX_INPUT_NUMBERS or taken > MAX_BATCH_NUMBERS:
        raise ValueError(
            f"an input must have at most {MAX_INPUT_NUMBERS:,} numbers, and those of an update "
            f"{MAX_BATCH_NUMBERS:,}, got {each:,} and {taken:,}."
        )


def truth_to_bytes(truth: Truth) -> bytes:
    """Return a client's true samples and their mixing as the content of a safetensors file."""
    batches = {"private": truth.private, "defended": truth.defended}
    tensors = {
        f"{name}/{field}": getattr(batch, field).detach().cpu().contiguous().clone()
        for name, batch in batches.items()
        for field in ("inputs", "targets")
    }
    flips_signs = False
    if truth.mixing is not None:
        tensors["mixing"] = truth.mixing.matrix.detach().cpu().contiguous().clone()
        flips_signs = truth.mixing.flips_signs
    content: bytes = save(tensors, {"format": FORMAT, "flips_signs": str(flips_signs)})
    return content


def read_truth(path: Path) -> Truth:
    """Return the true samples of a client, from a file with the content of ``truth_to_bytes``.

    Raises:
        ValueError: the file is of another kind.
        KeyError: the file lacks a part of the samples.
    """
    tensors, metadata = _load(path)
    private, defended = (
        Batch(tensors[f"{name}/inputs"], tensors[f"{name}/targets"])
        for name in ("private", "defended")
    )
    mixing = None
    if "mixing" in tensors:
        mixing = Mixed(tensors["mixing"], metadata["flips_signs"] == "True")
    return Truth(private, defended, mixing)


def _load(path: Path) -> tuple[dict[str, Tensor], Mapping[str, str]]:
    with open_tensors(path) as file:
        # A tensor of a file may lie at an address that is not aligned, and the rounding of sums
        # depends on that. A copy is aligned, as in a worker that gets the tensor from another
        # process.
        return {n: file.get_tensor(n).clone() for n in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _group(tensors: Mapping[str, Tensor], group: str) -> Params:
    prefix = f"{group}/"
    return {n.removeprefix(prefix): value for n, value in tensors.items() if n.startswith(prefix)}


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
