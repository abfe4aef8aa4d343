"""Provide a context in which a method decides the result of every call of a torch function."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.overrides import TorchFunctionMode


class FunctionMode(TorchFunctionMode):
    """A context whose method ``on_call`` decides the result of each call of a torch function,
    whether a model makes it by a module, a function, a method or an operator.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self.on_call(func, args, dict(kwargs or {}))

    def on_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the result of ``function(*args, **kwargs)``; a subclass may return another result.
        The dictionary ``kwargs`` is a copy, and may be changed.
        """
        return function(*args, **kwargs)
