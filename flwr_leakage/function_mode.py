"""A context that hands every call of a torch function to one method."""

from collections.abc import Callable, Iterable
from typing import Any

from torch.overrides import TorchFunctionMode


class FunctionMode(TorchFunctionMode):
    """Let ``on_call`` decide the result of each call of a torch function within the context.

    Functions are caught however a model spells them: modules, functional calls, methods, operators.
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
        """Return the call's result; a subclass may change it.

        Args:
            function: that is called.
            args: its positional arguments.
            kwargs: its named arguments, to be changed at will.
        """
        return function(*args, **kwargs)
