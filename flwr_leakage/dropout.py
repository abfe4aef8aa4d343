"""Find and replace dropout that a model applies by functions instead of modules."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.function_mode import FunctionMode

ACTIVE = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
IDLE = (F.alpha_dropout, F.feature_alpha_dropout)
"""Functions (inputs, p = 0.5, training), which is true or false by default."""

PLAIN = (torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout)
"""Functions (inputs, p, train)."""

ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


PER_CHANNEL = (F.dropout1d, F.dropout2d, F.dropout3d)
"""Functions that drop whole channels of (B, C, …)."""


class Masked(FunctionMode):
    """Multiply by given masks where a pass calls dropout, whether it is active or not.

    Calls of :data:`ACTIVE` with p > 0 count. None of them drops anything by itself.

    Args:
        masks: the factors of the calls' inputs, in the order of a pass. ``None`` stands for 1, and
            so do masks that are missing at the end.

    Attributes:
        calls: (function, p, shape of the inputs) of each call so far.
    """

    def __init__(self, masks: Sequence[Tensor | None] = ()) -> None:
        super().__init__()
        self.masks = masks
        self.calls: list[tuple[Callable[..., Any], float, torch.Size]] = []

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return a call's outputs, multiplied by its mask in place of its own dropping."""
        if function not in ACTIVE:
            return function(*args, **kwargs)
        given = dict(zip(_names(function), args, strict=False)) | kwargs
        rate, inputs = given.get("p", 0.5), given["input"]
        if not rate > 0:
            return function(*args, **kwargs)
        self.calls.append((function, rate, inputs.shape))
        return self.outputs(len(self.calls) - 1, inputs)

    def outputs(self, number: int, inputs: Tensor) -> Tensor:
        """Return the outputs of a call of dropout, by its number in the pass."""
        mask = self.masks[number] if number < len(self.masks) else None
        return inputs if mask is None else inputs * mask.to(inputs)


class Dropouts(FunctionMode):
    """Note the functions of a pass that drop something; leave them out if asked to.

    Args:
        skip: compute the pass as if nothing were dropped.

    Attributes:
        found: the functions that dropped units, in words, each once.
    """

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.found: list[str] = []

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Note a dropout, and leave it out if asked to."""
        given = dict(zip(_names(function), args, strict=False)) | kwargs
        if function in ATTENTION:
            rate = given.get("dropout_p", 0.0) if given.get("training", True) else 0.0
        elif function in ACTIVE or function in IDLE:
            rate = given.get("p", 0.5) if given.get("training", function in ACTIVE) else 0.0
        elif function in PLAIN:
            rate = given["p"] if given["train"] else 0.0
        else:
            return function(*args, **kwargs)
        if rate > 0:
            self._note(function, rate)
        if not rate > 0 or not self.skip:
            return function(*args, **kwargs)
        return function(**given | {"dropout_p": 0.0}) if function in ATTENTION else given["input"]

    def _note(self, function: Callable[..., Any], rate: float) -> None:
        text = f"{function.__name__} (p={rate:g})"
        if text not in self.found:
            self.found.append(text)


def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the defaults of the arguments that a call may leave out."""
    if function is F.scaled_dot_product_attention:
        return ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    if function is F.multi_head_attention_forward:
        return tuple(inspect.signature(function).parameters)
    return ("input", "p", "train" if function in PLAIN else "training", "inplace")


def functional_dropout(model: nn.Module, inputs: Tensor) -> list[str]:
    """Return in words the functions that drop something in a pass of a model in its present mode.

    Those of ``nn.Dropout`` modules in train mode among them. The global random state is kept.

    Args:
        model: a copy, as a pass in train mode may change it.
        inputs: the inputs of the pass.
    """
    walk = Dropouts(skip=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), walk:
        model(inputs)
    return walk.found
