"""Copy a model so that it can be computed with other parameters, or say why it cannot be copied."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

PARALLEL = (nn.DataParallel, nn.parallel.DistributedDataParallel)


class Uncompiled(nn.Module):
    """A module that runs the original module of one that ``torch.compile`` made, under the same
    parameter names. Compiled code would be compiled anew for each transform of ``torch.func``.
    """

    def __init__(self, compiled: nn.Module) -> None:
        super().__init__()
        self._orig_mod = compiled._modules["_orig_mod"]
        self.training = compiled.training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the original module."""
        module = self._orig_mod
        assert module is not None
        return module(*args, **kwargs)


def copy_of(model: nn.Module) -> nn.Module:
    """Return a deep copy of a model with the same names of parameters, and without compiled code.
    Tensors that a forward pass stored on the modules, such as features, are detached in the copy.

    Raises:
        ValueError: the parameters of the model cannot be replaced, as in a scripted model.
    """
    require_plain(model)
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in _tensors(list(vars(module).values())):
            if not tensor.is_leaf:
                memo[id(tensor)] = tensor.detach().clone()
    copied = copy.deepcopy(model, memo)
    for parent in list(copied.modules()):
        for name, child in list(parent._modules.items()):
            if child is not None and _is_compiled(child):
                setattr(parent, name, Uncompiled(child))
    return Uncompiled(copied) if _is_compiled(copied) else copied


def require_plain(model: object) -> None:
    """Raise ``ValueError`` if the parameters of a model cannot be replaced, and say why."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"the model must be an nn.Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        kind, where = type(module).__name__, f" as {name!r}" if name else ""
        if isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"the model must be an nn.Module of Python code, got a ScriptModule{where}; pass "
                "the nn.Module that it was made from, with the same weights (load_state_dict)."
            )
        if isinstance(module, PARALLEL):
            raise ValueError(
                f"the model must be on its own, got a {kind}{where}; pass model.module, and its "
                "names of the parameters."
            )
        own = [*module._parameters.items(), *module._buffers.items()]
        for entry, value in own:
            if isinstance(value, UninitializedParameter | UninitializedBuffer):
                raise ValueError(
                    f"the model's parameters must have shapes, got {entry!r} of {kind}{where} "
                    "uninitialised; call the model once on an input first."
                )


def _is_compiled(module: nn.Module) -> bool:
    # The class is compared by name, as torch._dynamo, which defines it, is slow to import.
    return type(module).__name__ == "OptimizedModule" and "_orig_mod" in module._modules


def _tensors(values: list[Any]) -> Iterator[Tensor]:
    """Yield the tensors in a list, and those within its lists, tuples and dictionaries."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(list(value))
        elif isinstance(value, dict):
            yield from _tensors(list(value.values()))
