"""Attack the updates that a run, a simulation or a user's own app, kept in its folder for later."""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from flwr_leakage import GradientMap, load_preset
from flwr_leakage.attacks.ray_tasks import RayTasks
from flwr_leakage.audit import ConsoleProgress, ServerAudit
from flwr_leakage.audit.later import KeptRun
from flwr_leakage.metrics import Evaluator
from flwr_leakage.records import InputSpec, LocalSchedule
from flwr_leakage.simulation.later import has_config, kept_run
from flwr_leakage.tracking import Tracker


def kept_run_of_folder(
    folder: Path,
    model: str | None,
    attack: str,
    max_seconds: float | None,
    allowed: Sequence[Path] = (),
) -> KeptRun:
    """Return the updates that a run folder keeps for later, with the settings of the attack on
    them.

    Args:
        folder: the run folder.
        model: ``MODULE:NAME`` of a class or function that makes the model without arguments. It is
            needed for a run without a config, such as that of a user's own app.
        attack: the name of the preset of the attack on a run without a config.
        max_seconds: CPU seconds per update; ``None`` for the attack's own limit.
        allowed: files and folders outside of the run that the run's config may read.

    Raises:
        ValueError: the model is needed and not given, or cannot be made; or the command is called
            from within the run folder, from which Python would then import code.
    """
    if has_config(folder):
        return kept_run(folder, max_seconds, allowed)
    if model is None:
        raise ValueError(f"{folder} tells no model: give it by --model MODULE:NAME.")
    if (here := Path.cwd()).is_relative_to(folder.resolve()):
        raise ValueError(
            f"--model must be called from the folder of your own code, got {here}, which is part "
            f"of the run folder: its files would be imported."
        )
    gradient_map, preset = GradientMap(make_model(model)), load_preset(attack)

    def audit_of(tracker: Tracker) -> ServerAudit:
        # These inputs and this schedule are not used: each kept update has its own.
        return ServerAudit(
            gradient_map, InputSpec((1, 1, 1), 1), LocalSchedule(1.0), tracker, folder.name, preset,
            evaluator=Evaluator(), progress=ConsoleProgress(), max_seconds=max_seconds,
        )  # fmt: skip

    return KeptRun(folder, audit_of)


def workers_of(told: str, run: KeptRun) -> int | RayTasks:
    """Return the number of processes that attack, or the settings of Ray tasks that do.

    ``told`` is the number as text, or ``ray`` for tasks of a Ray cluster with the settings of
    ``run``.

    Raises:
        ValueError: the text is neither a positive number nor ``ray``.
    """
    if told == "ray":
        return run.ray
    if not told.isdecimal() or not int(told):
        raise ValueError(f"--workers must be a number of processes or ray, got {told!r}.")
    return int(told)


def make_model(model: str) -> nn.Module:
    """Return the model that a class or function makes without arguments.

    ``model`` is ``MODULE:NAME`` of that class or function. The name is ``Net`` if it is left out.

    Raises:
        ImportError: there is no such module.
        ValueError: the module has no such name, or the name makes no PyTorch module.
    """
    module, _, name = model.partition(":")
    # The working folder is searched last, so that a file in it does not hide a package.
    sys.path.append(str(Path.cwd()))
    make = getattr(importlib.import_module(module), name or "Net", None)
    if not callable(make):
        raise ValueError(f"{module} must have {name or 'Net'!r}, which makes the model.")
    made = make()
    if not isinstance(made, nn.Module):
        raise ValueError(f"{model} must make a torch.nn.Module, got {type(made).__name__}.")
    return made
