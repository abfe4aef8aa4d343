"""The files of a challenge: updates, private images apart from them, and answers."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flwr_leakage.records import Batch, InputSpec, LocalSchedule, Observation, Update
from flwr_leakage.untrusted import inside, open_tensors, parse_json, read_file, read_npz
from simulations.benchmarks.portfolio_cases import NETWORKS

INDEX, MOST_INDEX_BYTES = "challenge.json", 1_000_000


@dataclass(frozen=True)
class Frozen:
    """What the server of one update knows.

    Attributes:
        track: the name of the track.
        network: the name of the network.
        spec: of the inputs.
        seen: the model that the client got, and its update. Its round is its number in the track.
    """

    track: str
    network: str
    spec: InputSpec
    seen: Observation

    @property
    def name(self) -> str:
        """The name of the update's file, without its ending."""
        return f"{self.track}-{self.seen.server_round}"

    def model(self) -> nn.Module:
        """Return the network with the weights that the client got, in eval mode."""
        model = NETWORKS[self.network](self.spec.shape).eval()
        model.load_state_dict({**self.seen.params, **self.seen.buffers})
        return model


@dataclass(frozen=True)
class Secret:
    """What no entry may know: the private images and labels of an update, and a pool of others."""

    private: Batch
    pool: Tensor


class Challenge:
    """A folder of frozen updates.

    Attributes:
        folder: the folder.
        index: for each update, the digests of its files.
        defense: the name of the defense that clients applied.
    """

    def __init__(self, folder: Path) -> None:
        """Open the folder.

        Raises:
            FileNotFoundError: it holds no challenge.
            ValueError: its index is none that ``freeze`` wrote.
        """
        self.folder = folder
        try:
            told = parse_json(read_file(folder / INDEX, MOST_INDEX_BYTES))
        except FileNotFoundError:
            raise FileNotFoundError(f"{folder} holds no {INDEX}: run freeze first.") from None
        if not isinstance(told, dict) or told.get("version") != 1:
            raise ValueError(f"{folder / INDEX} must be of version 1.")
        self.defense: str = told["defense"]
        self.index: Mapping[str, Mapping[str, str]] = told["updates"]

    def updates(self) -> Iterator[Frozen]:
        """Return all updates, checked by their digests."""
        for name in self.index:
            yield _read_update(self._checked("updates", f"{name}.safetensors", name))

    def secret(self, name: str) -> Secret:
        """Return the truth behind an update."""
        images, labels, pool = read_npz(
            self._checked("truth", f"{name}.npz", name), ("images", "labels", "pool")
        )
        return Secret(Batch(torch.tensor(images), torch.tensor(labels)), torch.tensor(pool))

    def _checked(self, part: str, file: str, name: str) -> Path:
        path = inside(self.folder / part, file)
        if digest(path) != self.index[name][part]:
            raise ValueError(f"{path} is not the file that was frozen.")
        return path


def write(folder: Path, defense: str, made: Iterator[tuple[Frozen, Secret]]) -> None:
    """Write updates and what is behind them into a new folder, the index last.

    Raises:
        FileExistsError: the folder is there.
    """
    for part in ("updates", "truth"):
        (folder / part).mkdir(parents=True)
    index: dict[str, dict[str, str]] = {}
    for frozen, secret in made:
        update = folder / "updates" / f"{frozen.name}.safetensors"
        truth = folder / "truth" / f"{frozen.name}.npz"
        _write_update(update, frozen)
        private = secret.private
        np.savez(
            truth,
            images=private.inputs.numpy(), labels=private.targets.numpy(), pool=secret.pool.numpy(),
        )  # fmt: skip
        index[frozen.name] = {"updates": digest(update), "truth": digest(truth)}
    told = {"version": 1, "defense": defense, "updates": index}
    (folder / INDEX).write_text(json.dumps(told, indent=1))


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_update(path: Path, frozen: Frozen) -> None:
    seen, spec = frozen.seen, frozen.spec
    told = {
        "track": frozen.track,
        "number": seen.server_round,
        "network": frozen.network,
        "shape": spec.shape,
        "num_classes": spec.num_classes,
        "mean": spec.mean,
        "std": spec.std,
        "num_examples": seen.update.num_examples,
        "schedule": asdict(seen.update.schedule),
    }
    parts = {"sent": seen.params, "buffer": seen.buffers, "change": seen.update.delta}
    tensors = {
        f"{part}.{name}": value.detach().contiguous()
        for part, values in parts.items()
        for name, value in values.items()
    }
    save_file(tensors, path, {"told": json.dumps(told)})


def _read_update(path: Path) -> Frozen:
    with open_tensors(path) as file:
        told: dict[str, Any] = parse_json(file.metadata()["told"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    params, buffers, change = (
        {n.removeprefix(f"{part}."): t for n, t in tensors.items() if n.startswith(f"{part}.")}
        for part in ("sent", "buffer", "change")
    )
    # A file has tensors by their names; attacks of others count on the order of the network.
    order = [name for name, _ in NETWORKS[told["network"]](tuple(told["shape"])).named_parameters()]
    params, change = ({name: each[name] for name in order} for each in (params, change))
    update = Update(change, buffers, LocalSchedule(**told["schedule"]), told["num_examples"])
    shape, mean, std = (tuple(told[name]) for name in ("shape", "mean", "std"))
    spec = InputSpec(shape, told["num_classes"], mean, std)
    seen = Observation(told["number"], 0, params, buffers, update)
    return Frozen(told["track"], told["network"], spec, seen)
