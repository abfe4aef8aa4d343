"""Attack one update that is stored in a file, whatever framework wrote it, without Flower."""

import pickle
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from flwr_leakage import load_preset
from flwr_leakage.attacks import Strongest
from flwr_leakage.audit import ConsoleProgress, ServerAudit
from flwr_leakage.audit.turns import least
from flwr_leakage.capture.glance import some
from flwr_leakage.capture.names import match
from flwr_leakage.cli.kept import make_model
from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.normalization import mode_of
from flwr_leakage.params import Params, scale, subtract
from flwr_leakage.records import InputSpec, LocalSchedule, Observation, Update
from flwr_leakage.report import write_report
from flwr_leakage.report.index import Index
from flwr_leakage.report.verdict import judge
from flwr_leakage.tracking import JsonlTracker, read_run
from flwr_leakage.untrusted import (
    MAX_ARRAYS_BYTES,
    NotTensorsError,
    check_archive,
    open_file,
    open_tensors,
    read_npz,
)

Holds = Literal["difference", "gradient", "parameters"]
"""The contents that a file may have: the change θ_local − θ_t of the parameters, such as NVFlare's
``WEIGHT_DIFF``; the gradient ∇L; or the parameters θ_local after training. θ_t are the parameters
before training.
"""

SUFFIXES = (".safetensors", ".npz", ".pt", ".pth", ".bin")
"""The suffixes of files that can be read: safetensors, numpy's archive, and three of
``torch.save``.
"""

_KINDS: dict[str, Holds] = {"WEIGHT_DIFF": "difference", "WEIGHTS": "parameters"}
"""The content of a file, by the kind that an NVFlare data object in the file names."""


@dataclass(frozen=True)
class UpdateFile:
    """An update in a file, with the facts about it that the user gives.

    Attributes:
        path: the path of the file.
        model: ``module:name`` of a function or class that makes the model without arguments.
        shape: the shape (C, H, W) of one input.
        before: a file with the parameters θ_t before training; ``None`` for those of the new model.
        holds: the content of the file: ``difference`` for θ_local − θ_t, ``gradient``, or
            ``parameters`` for the parameters θ_local after training; ``None`` means ``parameters``
            if ``before`` is given, else ``difference``.
        num_examples: the number of samples that the client trained on.
        schedule: the schedule of local training; ``None`` for a gradient alone.
        mean: the normalisation's mean, one value per channel; empty if unknown.
        std: the normalisation's standard deviation, one value per channel; empty if unknown.
    """

    path: Path
    model: str
    shape: tuple[int, int, int]
    before: Path | None = None
    holds: str | None = None
    num_examples: int = 1
    schedule: LocalSchedule | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.holds not in (None, *get_args(Holds)):
            raise ValueError(f"holds must be one of {get_args(Holds)}, got {self.holds!r}.")
        if self.num_examples < 1:
            raise ValueError(f"the number of examples must be ≥ 1, got {self.num_examples}.")


def attack_file(
    given: UpdateFile, folder: Path, attack: str, max_seconds: float | None = None
) -> str:
    """Attack an update in a file, and write its record, images and report into a new folder.

    Args:
        given: the file, and the facts about it that the user gives.
        folder: the folder to write.
        attack: the name of a preset.
        max_seconds: CPU seconds; ``None`` for the preset's own limit.

    Returns:
        Sentences on assumptions about the file, the verdict on the leak, and the report's path.

    Raises:
        ValueError: a file or a setting is not as expected; the message says what was expected.
        FileExistsError: the folder already holds a run.
    """
    model = make_model(given.model)
    gradient_map = GradientMap(model, batch_norm=mode_of(model))
    gradient_map, seen, remarks = observe_file(given, gradient_map)
    spec = _spec(given, gradient_map)
    tracker, chosen, progress = JsonlTracker(folder), load_preset(attack), ConsoleProgress()
    if not spec.known:
        own = chosen.max_seconds if isinstance(chosen, Strongest) else None
        limit = least(own, max_seconds)
        within = "without a limit of time" if limit is None else f"within {limit:g} CPU s in all"
        progress.line(f"Without --mean and --std several normalisations are tried, {within}.")
    audit = ServerAudit(
        gradient_map, spec, seen.update.schedule, tracker, folder.name, chosen,
        progress=progress, max_seconds=max_seconds,
    )  # fmt: skip
    try:
        for remark in remarks:
            audit.inform(1, -1, remark)
        audit.inspect(1, [seen], [])
    finally:
        tracker.close()
    run = read_run(folder)
    found = [r.value for r in run.records if r.name == "objective" and r.value is not None]
    if found:
        remarks.append(
            f"A reconstruction with the attacker's own objective {found[0]:.1g} is in "
            f"{folder / 'images'}."
        )
    verdict = judge(Index(run.records), run.events, run.metadata)
    return " ".join([*remarks, verdict.sentence, str(write_report(folder))])


def observe_file(
    given: UpdateFile, gradient_map: GradientMap
) -> tuple[GradientMap, Observation, list[str]]:
    """Return what a server would have observed of the update in a file.

    Returns:
        The gradient map, in which only the file's parameters count as trained; the observation; and
        sentences on assumptions, such as that θ_t is the new model's.

    Raises:
        ValueError: the file's arrays do not belong to the model, its format is not supported, or a
            setting is missing.
    """
    tensors, kind = read_tensors(given.path)
    holds = kind or given.holds or ("difference" if given.before is None else "parameters")
    if given.holds is not None and holds != given.holds:
        raise ValueError(f"{given.path} says that it holds {holds}, expected {given.holds}.")
    if holds == "parameters" and given.before is None:
        raise ValueError(
            f"{given.path} holds parameters: --before FILE must name those before training."
        )
    found, extra = _as_named(given.path, tensors, gradient_map)
    params, buffers = gradient_map.params, gradient_map.buffers
    remarks = []
    if given.before is None:
        remarks.append(f"θ_t was taken to be what {given.model} is made with.")
    else:
        first, _ = _as_named(given.before, read_tensors(given.before)[0], gradient_map)
        if lacks := [name for name in params if name in found and name not in first]:
            raise ValueError(
                f"{given.before} must hold the {len(params)} parameters, and lacks {some(lacks)}."
            )
        params = {name: first.get(name, value) for name, value in params.items()}
        buffers = {name: first.get(name, value) for name, value in buffers.items()}
    sent = {name: found[name] for name in params if name in found}
    if missing := [name for name in params if name not in sent]:
        remarks.append(
            f"{given.path.name} holds {len(sent)} of {len(params)} parameters; the attack uses "
            f"these alone, and takes the model's own {some(missing)}."
        )
    if extra:
        remarks.append(f"{len(extra)} of its arrays are none of the model's: {some(extra)}.")
    schedule = given.schedule
    if schedule is None:
        if holds != "gradient":
            raise ValueError(
                "--learning-rate must be given, as it scales the change of the parameters; for "
                "gradients there is --holds gradient."
            )
        schedule = LocalSchedule(1.0, batch_size=given.num_examples)
    if holds == "parameters":
        sent = subtract(sent, {name: params[name] for name in sent})
    elif holds == "gradient":
        sent = scale(sent, -schedule.learning_rate)
    delta = {k: sent[k] if k in sent else torch.zeros_like(v) for k, v in params.items()}
    # Attacks read the running statistics after training, and not their differences, so those of a
    # file of differences are left out.
    after = {k: found[k] for k in buffers if k in found} if holds == "parameters" else {}
    update = Update(delta, after, schedule, given.num_examples)
    return gradient_map.with_trained(sent), Observation(1, 0, params, buffers, update), remarks


def read_tensors(path: Path) -> tuple[dict[str, Tensor], Holds | None]:
    """Return the arrays of a file, and the kind of content that the file itself names, or ``None``.

    The arrays have their names, or their places as text if the file holds a list. No code in the
    file is executed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the format of the file is not supported, or it holds something else than arrays.
    """
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ValueError(f"{path} must be one of {', '.join(SUFFIXES)}, got {suffix or 'none'}.")
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}.")
    read = {".safetensors": _safetensors, ".npz": _npz}.get(suffix, _saved)
    held, kind = _unwrapped(path, read(path))
    if isinstance(held, Sequence) and not isinstance(held, str | bytes):
        held = {str(place): value for place, value in enumerate(held)}
    if not isinstance(held, Mapping) or not held:
        raise ValueError(f"{path} must hold arrays by name or in a list, got {_told(held)}.")
    for name, value in held.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise ValueError(
                f"{path} must hold arrays by name, got {_told(value)} under {str(name)[:100]!r}."
            )
        if value.is_complex() or not bool(torch.isfinite(value).all()):
            raise ValueError(f"{name[:100]!r} of {path} must hold finite real numbers.")
    return {name: value.detach() for name, value in held.items()}, kind


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with open_tensors(path, follow=True) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except NotTensorsError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error


def _npz(path: Path) -> dict[str, Tensor]:
    try:
        with open_file(path, MAX_ARRAYS_BYTES, follow=True) as file, zipfile.ZipFile(file) as held:
            names = [name.removesuffix(".npy") for name in held.namelist()]
        arrays = read_npz(path, names)
        return {name: torch.tensor(array) for name, array in zip(names, arrays, strict=True)}
    except (TypeError, ValueError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is no archive of arrays: {error}") from error


def _saved(path: Path) -> Any:
    check_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    except (EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{path} must hold tensors alone, as torch.save(model.state_dict(), …) writes them; it "
            f"is another file, or holds objects whose loading would run code."
        ) from error


def _unwrapped(path: Path, held: Any) -> tuple[Any, Holds | None]:
    """Return the arrays in what was read from a file, and the kind that the file names, or
    ``None``.

    ``held`` is the file's content. The arrays are a mapping or a list, without the containers that
    frameworks put around them.

    Raises:
        ValueError: the file names an unknown kind of content.
    """
    kind: Holds | None = None
    for _ in range(3):
        if not isinstance(held, Mapping):
            break
        told = held.get("kind", held.get("data_kind"))
        if told is not None and not isinstance(told, Tensor):
            if told not in _KINDS:
                raise ValueError(f"{path} must hold one of {list(_KINDS)}, got {str(told)[:100]}.")
            kind = _KINDS[told]
        inner = next((held[k] for k in ("data", "state_dict", "model") if k in held), None)
        if not isinstance(inner, Mapping | list | tuple):
            break
        held = inner
    return held, kind


def _as_named(
    path: Path, tensors: Mapping[str, Tensor], gradient_map: GradientMap
) -> tuple[Params, list[str]]:
    """Return the file's arrays by the names of the model's parameters and buffers, in the model's
    dtypes.

    The second result has the names of arrays that are neither a parameter nor a buffer.

    Raises:
        ValueError: no array is a parameter of the model, or one has another shape.
    """
    own = gradient_map.params
    state = {name: value.detach() for name, value in gradient_map.model.state_dict().items()}
    for name, value in tensors.items():
        if name in state and value.shape != state[name].shape:
            raise ValueError(
                f"{name!r} of {path} must have shape {tuple(state[name].shape)}, got "
                f"{tuple(value.shape)}."
            )
    names = match({name: tuple(value.shape) for name, value in tensors.items()}, state, own.keys())
    if not set(names.values()) & own.keys():
        expected = {name: tuple(value.shape) for name, value in state.items()}
        came = {name: tuple(value.shape) for name, value in tensors.items()}
        raise ValueError(
            f"{path} must hold parameters of the model, {_few(expected)}; got {_few(came)}."
        )
    found = {each: tensors[name].to(state[each].dtype) for name, each in names.items()}
    return found, [name for name in tensors if name not in names]


def _spec(given: UpdateFile, gradient_map: GradientMap) -> InputSpec:
    """Return the specification of the inputs, with as many classes as the model has logits.

    Without the user's mean and standard deviation, the normalisation counts as unknown.

    Raises:
        ValueError: the model takes no inputs of this shape, or returns no logits (B, K).
    """
    like = next(iter(gradient_map.params.values()))
    try:
        with torch.no_grad():
            logits = gradient_map.logits(gradient_map.params, like.new_zeros(2, *given.shape))
    except (RuntimeError, ValueError, TypeError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"the model must take inputs of shape {given.shape}: {first}") from error
    if logits.ndim != 2:
        raise ValueError(f"the model must return logits (B, K), got {tuple(logits.shape)}.")
    if not given.mean:
        return InputSpec(given.shape, logits.shape[1], known=False)
    return InputSpec(given.shape, logits.shape[1], given.mean, given.std)


def _few(shapes: Mapping[str, tuple[int, ...]]) -> str:
    shown = [f"{name[:60]} {shape}" for name, shape in list(shapes.items())[:3]]
    return ", ".join(shown) + (f" and {len(shapes) - 3} more" if len(shapes) > 3 else "")


def _told(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
