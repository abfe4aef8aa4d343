"""The line of a model that called a function, in words for a message."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxtyping
import torch
from torch import nn

from flwr_leakage import dropout, forward, function_mode, gradient_map, model_copy

_TORCH = str(Path(torch.__file__).parent)
_CHECKS = str(Path(jaxtyping.__file__).parent)
_OWN = str(Path(__file__).parents[1])
_PASS = gradient_map.__file__
_AROUND = {each.__file__ for each in (dropout, forward, function_mode, model_copy)}


def describe_call(function: Callable[..., Any]) -> str:
    """Return a function's name with the line that calls it, such as ``max_pool2d (net.py:12)``.

    It is the innermost line that is neither PyTorch's nor this package's. If PyTorch's own module
    inside of ``nn.Sequential`` makes the call, there is no such line, and the name is followed by
    the module's class. The function must be called from within a function mode during a pass.
    """
    name = getattr(function, "__name__", str(function)).strip("_")
    module = ""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        file = frame.f_code.co_filename
        if file == _PASS:
            break
        # Type checks stand between caller and callee; some are compiled on the fly, as <…>.
        if file in _AROUND or file.startswith((_OWN, _CHECKS, "<")):
            continue
        if not file.startswith(_TORCH):
            return f"{name} ({Path(file).name}:{frame.f_lineno})"
        owner = frame.f_locals.get("self")
        if not module and isinstance(owner, nn.Module):
            module = type(owner).__name__
    return f"{name} (of {module})" if module else name
