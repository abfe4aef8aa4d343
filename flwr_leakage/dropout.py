"""Find dropout that a model applies by functions instead of modules, and replace it by masks."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flwr_leakage.function_mode import FunctionMode

ACTIVE = (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d)
IDLE = (F.alpha_dropout, F.feature_alpha_dropout)
"""Dropout functions with arguments (inputs, p = 0.5, training = False). By default they drop
nothing, unlike those in ``ACTIVE``, whose ``training`` is true by default."""

PLAIN = (torch.dropout, torch.alpha_dropout, torch.feature_dropout, torch.feature_alpha_dropout)
"""Dropout functions whose arguments are (inputs, p, train), all without a default."""

ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)


PER_CHANNEL = (F.dropout1d, F.dropout2d, F.dropout3d)
"""Dropout functions that drop whole channels of inputs (B, C, …)."""


class Masked(FunctionMode):
    """A context in which each call of a dropout function multiplies its input by a given mask,
    whatever its argument ``training`` is.

    Calls of the functions in :data:`ACTIVE` with p > 0 are replaced, and draw no random mask.

    Args:
        masks: the tensor by which each call's input is multiplied, in the order of the calls in a
            forward pass. A call whose mask is ``None``, or for which the sequence is too short,
            returns its input as it is.

    Attributes:
        calls: the function, p and the input's shape of each call so far, as tuples.
    """

    def __init__(self, masks: Sequence[Tensor | None] = ()) -> None:
        super().__init__()
        self.masks = masks
        self.calls: list[tuple[Callable[..., Any], float, torch.Size]] = []

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call of a torch function. A call of a dropout function returns its
        input times its mask.
        """
        if function not in ACTIVE:
            return function(*args, **kwargs)
        given = dict(zip(_names(function), args, strict=False)) | kwargs
        rate, inputs = given.get("p", 0.5), given["input"]
        if not rate > 0:
            return function(*args, **kwargs)
        self.calls.append((function, rate, inputs.shape))
        return self.outputs(len(self.calls) - 1, inputs)

    def outputs(self, number: int, inputs: Tensor) -> Tensor:
        """Return the output of the dropout call of index ``number`` in the forward pass, counted
        from 0: ``inputs`` times the call's mask.
        """
        mask = self.masks[number] if number < len(self.masks) else None
        return inputs if mask is None else inputs * mask.to(inputs)


class Dropouts(FunctionMode):
    """A context that notes functions that drop units in a forward pass, and can switch them off.

    Args:
        skip: whether the pass is computed as if nothing were dropped.

    Attributes:
        found: the functions that drop units in the pass, such as ``dropout (p=0.5)``, each once.
    """

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.skip = skip
        self.found: list[str] = []

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of a call of a torch function, and add the function to ``found`` if it
        drops units. If ``skip`` is true, the result is computed without dropping units.
        """
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
    """Return the names of a dropout function's positional arguments, in order."""
    if function is F.scaled_dot_product_attention:
        return ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    if function is F.multi_head_attention_forward:
        return tuple(inspect.signature(function).parameters)
    return ("input", "p", "train" if function in PLAIN else "training", "inplace")


def functional_dropout(model: nn.Module, inputs: Tensor) -> list[str]:
    """Return the dropout functions that drop units in a forward pass of the model in its present
    mode, such as ``dropout (p=0.5)``, each once. Those that ``nn.Dropout`` modules call are among
    them. The pass is made on a copy, and torch's global random generator keeps its state.
    """
    walk = Dropouts(skip=False)
    with torch.no_grad(), torch.random.fork_rng(devices=[]), walk:
        model(inputs)
    return walk.found
