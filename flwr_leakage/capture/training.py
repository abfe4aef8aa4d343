"""Hold a captured training: its steps, its model and its optimizer."""

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from flwr_leakage.capture.tape import Backward


@dataclass(frozen=True)
class Root:
    """A module that the training called outside of other modules, with a copy from before the first
    step.

    Attributes:
        live: the module itself.
        copy: its copy from before the first step.
    """

    live: nn.Module
    copy: nn.Module


@dataclass(frozen=True)
class Step:
    """One step of the optimizer.

    Attributes:
        backwards: the calls of ``backward`` whose gradients the step uses; several with gradient
            accumulation.
        options: the settings of each parameter group: learning rate, momentum, …
        rescaled_to: the Euclidean norm of all gradients at the step, if something changed them
            between ``backward`` and the step (clipping, unscaling, noise); ``None`` otherwise.
        clipped_to: the largest absolute entry of such gradients, if several entries have it, as
            after clipping by value; ``None`` otherwise.
    """

    backwards: tuple[Backward, ...]
    options: tuple[Mapping[str, Any], ...]
    rescaled_to: float | None = None
    clipped_to: float | None = None


@dataclass(frozen=True)
class Correction:
    """A change of the parameters that the training made after every step, besides the optimizer,
    such as SCAFFOLD's control variates.

    Attributes:
        per_rate: by the ``id`` of a trained parameter, its change over the step's learning rate.
        of_gradients: if true, not the parameters were changed, but minus ``per_rate`` was added to
            their gradients before each step.
    """

    per_rate: Mapping[int, Tensor] = field(repr=False)
    of_gradients: bool = False


def rate_of(options: Sequence[Mapping[str, Any]]) -> float:
    """Return the learning rate of a step, given its settings; 1 for an optimizer that has none."""
    return float(options[0].get("lr") or 1.0)


def sgd_settings(options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the learning rate, momentum and weight decay of a step, keyed as the fields of
    ``LocalSchedule``. ``options`` are the settings of the optimizer's parameter groups. A setting
    that the optimizer lacks is 0.
    """
    first = options[0]
    return {
        "learning_rate": float(first["lr"]),
        "momentum": float(first.get("momentum", 0.0)),
        "weight_decay": float(first.get("weight_decay", 0.0)),
    }


@dataclass(frozen=True)
class CapturedTraining:
    """One training, as hooks observed it.

    Attributes:
        roots: the called modules that have parameters or buffers, those with trained parameters
            first.
        optimizer: a copy of the optimizer from before the first step, which holds the parameters of
            the copied modules; ``None`` if there was no step.
        optimizer_class: the class of the optimizer; ``None`` if there was no step.
        batch_norm: ``batch`` if a BatchNorm layer trained in train mode, ``running`` if none did,
            and empty if there is no such layer.
        steps: the steps that were recorded in full (kept), from the first on; later ones are only
            counted.
        num_steps: the number of all steps.
        batch_sizes: the number of samples in each call of the model through which a gradient was
            taken.
        after_kept: the parameters after the last kept step, by the live parameter's id; empty if
            all steps were kept.
        changed_outside: whether parameters changed between the optimizer's steps otherwise than by
            ``correction``.
        changed_at_end: whether parameters changed after the last step.
        settings_changed: whether the optimizer's settings changed after the kept steps.
        writes: how often the gradients were written to before the first step, see ``writes_of``.
        held: the ids of the live parameters that the optimizer holds.
        correction: the change of the parameters that followed each kept step; ``None`` if there was
            none.
        trains_another: whether another model was trained as well, with an optimizer of its own.
        besides: the models of a second optimizer that were called before the first step.
        problem: why the training was not captured, in words; empty if it was.
    """

    roots: tuple[Root, ...]
    optimizer: Optimizer | None
    optimizer_class: type[Optimizer] | None
    batch_norm: Literal["batch", "running", ""]
    steps: tuple[Step, ...] = field(repr=False)
    num_steps: int
    batch_sizes: tuple[int, ...]
    after_kept: Mapping[int, Tensor] = field(repr=False)
    changed_outside: bool
    changed_at_end: bool
    settings_changed: bool
    writes: int = -1
    held: frozenset[int] = frozenset()
    correction: Correction | None = None
    trains_another: bool = False
    besides: tuple[Root, ...] = ()
    problem: str = ""

    @property
    def backwards(self) -> list[Backward]:
        """Return the calls of ``backward`` of all steps that were recorded in full, in their
        order.
        """
        return [backward for step in self.steps for backward in step.backwards]

    @property
    def complete(self) -> bool:
        """Return whether every step was recorded in full, and none was only counted."""
        return len(self.steps) == self.num_steps


def copy_root(live: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Return a deep copy of a module whose parameters keep attributes that Python code set on them,
    such as Opacus's counters.

    ``memo`` holds the copies made so far, as for ``copy.deepcopy``.
    """
    copied = copy.deepcopy(live, memo)
    for theirs, ours in zip(live.parameters(), copied.parameters(), strict=True):
        for name, value in vars(theirs).items():
            if value is None or isinstance(value, bool | int | float | str):
                setattr(ours, name, value)
    return copied


def copy_optimizer(live: Optimizer, memo: dict[Any, Any]) -> Optimizer:
    """Return a copy of an optimizer with the attributes of its own class, which torch leaves out.

    ``memo`` holds the copies made so far, as for ``copy.deepcopy``, so that the parameters are
    those of the copied modules. Attributes that cannot be copied are left out; a step that uses one
    then fails. Attributes that replace a method are left out, too: a scheduler replaces ``step`` by
    a function that steps ``live``.
    """
    copied = copy.deepcopy(live, memo)
    for name, value in vars(live).items():
        if name not in vars(copied) and not callable(getattr(type(live), name, None)):
            with suppress(Exception):
                setattr(copied, name, copy.deepcopy(value, memo))
    return copied
