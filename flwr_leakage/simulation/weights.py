"""Write and read a model's weights in safetensors files, buffers included."""

import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from flwr_leakage.tracking.text import plain_text
from flwr_leakage.untrusted import NotTensorsError, inside, open_tensors

FOLDER = "weights"
"""The name of the folder within a run folder for saved weights."""


def save_weights(run_dir: Path, server_round: int, state: Mapping[str, Tensor]) -> Path:
    """Write a model's ``state_dict`` to ``weights/round_NNNN.safetensors``; return the file's path.

    ``server_round`` is 0 for the model before training.

    Raises:
        OSError: the file could not be written, as on a full disk; no incomplete file is left.
    """
    path = run_dir / FOLDER / f"round_{server_round:04d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: value.contiguous() for name, value in state.items()}, unfinished)
        unfinished.replace(path)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def load_weights(network: nn.Module, path: str | os.PathLike[str]) -> None:
    """Load the parameters and buffers of a network from a safetensors file.

    Raises:
        ValueError: there is no such file, it is no safetensors file, or its entries have other
            names or shapes than the network's.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise ValueError(f"weights must be a safetensors file, got {file}, which does not exist.")
    try:
        network.load_state_dict(_read(file, network.state_dict(), follow=True))
    except OSError as error:
        raise ValueError(f"weights must be a safetensors file, got {file}: {error}") from error


def last_buffers(run_dir: Path, network: nn.Module) -> dict[str, Tensor] | None:
    """Return the buffers of the latest model that a run saved, by name; ``None`` if no model was
    saved.
    """
    files = sorted(inside(run_dir, FOLDER).glob("round_*.safetensors"))
    if not files:
        return None
    saved = _read(inside(run_dir, f"{FOLDER}/{files[-1].name}"), network.state_dict())
    names = {name for name, _ in network.named_buffers()}
    return {name: value for name, value in saved.items() if name in names}


def _read(file: Path, own: Mapping[str, Tensor], follow: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, whose names and shapes must be those of ``own``.

    ``follow`` says that the file may be a symbolic link.
    """
    try:
        with open_tensors(file, follow) as found:
            names = set(found.keys())
            if names != own.keys():
                wrong = plain_text(", ".join(sorted(names ^ own.keys())[:5]))
                raise ValueError(
                    f"weights must hold the network's {len(own)} entries, got {len(names)}; "
                    f"missing or unknown: {wrong}."
                )
            for name, value in own.items():
                shape = tuple(found.get_slice(name).get_shape())
                if shape != tuple(value.shape):
                    raise ValueError(
                        f"weights[{name!r}] must have shape {tuple(value.shape)}, got {shape}."
                    )
            return {name: found.get_tensor(name) for name in own}
    except NotTensorsError as error:
        raise ValueError(f"weights must be a safetensors file, got {file}: {error}") from error
