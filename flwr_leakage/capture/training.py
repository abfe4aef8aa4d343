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
    """A module that the training called, with its copy from before the first step.

    Attributes:
        live: the module.
        copy: its copy.
    """

    live: nn.Module
    copy: nn.Module


@dataclass(frozen=True)
class Step:
    """One step of the optimizer.

    Attributes:
        backwards: the backward passes whose gradients it uses; several with gradient accumulation.
        options: the options of each parameter group: learning rate, momentum, …
        rescaled_to: the norm of the gradient at the step, where something changed the gradient
            between ``backward`` and the step (clipping, unscaling, noise); ``None`` otherwise.
        clipped_to: the largest absolute entry of such a gradient, where several entries have it, as
            after clipping by value; ``None`` otherwise.
    """

    backwards: tuple[Backward, ...]
    options: tuple[Mapping[str, Any], ...]
    rescaled_to: float | None = None
    clipped_to: float | None = None


@dataclass(frozen=True)
class Correction:
    """The same change of the parameters after every step, as SCAFFOLD's control variates make it.

    Attributes:
        per_rate: by the live parameter's id, the change divided by the step's learning rate.
        of_gradients: whether its negative is added to the gradients before the step instead.
    """

    per_rate: Mapping[int, Tensor] = field(repr=False)
    of_gradients: bool = False


def rate_of(options: Sequence[Mapping[str, Any]]) -> float:
    """Return the learning rate of a step; 1 for an optimizer that has none."""
    return float(options[0].get("lr") or 1.0)


@dataclass(frozen=True)
class CapturedTraining:
    """One training, as hooks observed it.

    Attributes:
        roots: the modules with parameters or buffers that were called, in the order of calling.
        optimizer: a copy from before the first step, whose parameters are those of the copies;
            ``None`` where there was no step.
        optimizer_class: its class; ``None`` where there was no step.
        batch_norm: ``batch`` where a BatchNorm layer trained in train mode, ``running`` where none
            of them did, empty where there is none.
        steps: those that were kept, from the first on.
        num_steps: all steps.
        batch_sizes: samples of each call of the model that a gradient was taken of.
        after_kept: the parameters after the last kept step by the live parameter's id, where not
            all steps were kept.
        changed_outside: whether parameters changed between the optimizer's steps, and otherwise
            than by ``correction``.
        changed_at_end: whether parameters changed after the last step.
        settings_changed: whether the optimizer's settings changed after the steps that were kept.
        writes: the number of writes to the gradients before the first step, see ``writes_of``.
        held: ids of the live parameters that the optimizer holds.
        correction: of the parameters after each step that was kept; ``None`` where there was none.
        trains_another: whether a model of its own was trained besides, with another optimizer.
        besides: such models, if they were called before the first step.
        problem: why the training was not captured, in words; empty where it was.
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
    def complete(self) -> bool:
        """Return whether every step was kept."""
        return len(self.steps) == self.num_steps


def copy_root(live: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Copy a module; parameters keep plain attributes, such as the counters of Opacus."""
    copied = copy.deepcopy(live, memo)
    for theirs, ours in zip(live.parameters(), copied.parameters(), strict=True):
        for name, value in vars(theirs).items():
            if value is None or isinstance(value, bool | int | float | str):
                setattr(ours, name, value)
    return copied


def copy_optimizer(live: Optimizer, memo: dict[Any, Any]) -> Optimizer:
    """Copy an optimizer with the attributes of its own class, which torch leaves out.

    Attributes that cannot be copied are left out; a step that uses one then fails. Those that hide
    a method are left out, too: a scheduler puts a function before ``step`` that steps ``live``.
    """
    copied = copy.deepcopy(live, memo)
    for name, value in vars(live).items():
        if name not in vars(copied) and not callable(getattr(type(live), name, None)):
            with suppress(Exception):
                setattr(copied, name, copy.deepcopy(value, memo))
    return copied
