"""A context that passes every call of a torch function to a method of its own."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.overrides import TorchFunctionMode


class FunctionMode(TorchFunctionMode):
    """A context whose method ``on_call`` decides the result of each call of a torch function.

    It catches functions however a model spells them: as modules, functional calls, methods or
    operators.
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
        """Return the result of a call of a torch function; a subclass may return another one.

        Args:
            function: the torch function that was called.
            args: the positional arguments of the call.
            kwargs: the named arguments of the call, a copy that may be changed.
        """
        return function(*args, **kwargs)
