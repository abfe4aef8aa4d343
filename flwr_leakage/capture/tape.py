"""Record the calls from which a loss is computed, so that they can be repeated.

The calls since the last step are recorded: those of modules and of torch functions whose results
depend on trained parameters, such as FedProx's proximal term. All other tensors are constants: the
samples, the targets, and the server's parameters in the proximal term.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flwr_leakage.randomness import States, generators_kept


class UnseenError(ValueError):
    """The error for a tensor that depends on trained parameters and comes from no recorded call."""


class ChangedConstantError(ValueError):
    """The error for a recorded tensor that was changed in place after it was used."""


@dataclass(frozen=True)
class Value:
    """The place of a tensor among the results of recorded calls.

    Attributes:
        entry: the number of the recorded call.
        leaf: the index of the tensor among the leaves of the call's result, a nest of tuples, lists
            and dictionaries.
    """

    entry: int
    leaf: int


@dataclass(frozen=True)
class Constant:
    """A tensor in the recorded calls that depends on no trained parameter.

    Attributes:
        tensor: the tensor.
        version: autograd's version counter of the tensor when the call used it.
    """

    tensor: Tensor = field(repr=False)
    version: int

    def get(self) -> Tensor:
        """Return the tensor, after a check that nothing wrote to it since the recorded call.

        Raises:
            ChangedConstantError: the tensor was changed in place.
        """
        if self.tensor._version != self.version:
            raise ChangedConstantError(
                "a tensor of the training was changed in place after it was used"
            )
        return self.tensor


@dataclass(frozen=True)
class Autocast:
    """The settings of mixed precision under which a call ran."""

    device: str
    enabled: bool
    dtype: torch.dtype

    @staticmethod
    def now(device: str) -> "Autocast":
        """Return the settings of mixed precision that are active now."""
        return Autocast(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of nested tuples, lists and dictionaries with ``change`` applied to every leaf.

    It replaces torch's ``tree_map``, which takes longer than the call of a small layer.
    """
    kind = type(tree)
    if kind is tuple:
        return tuple([map_leaves(change, part) for part in tree])
    if kind is dict:
        return {name: map_leaves(change, part) for name, part in tree.items()}
    if kind in _LEAVES or isinstance(tree, Tensor):
        return change(tree)
    return pytree.tree_map(change, tree)


_LEAVES = {Value, Constant, int, float, bool, str, type(None)}


@dataclass(frozen=True)
class Entry:
    """One recorded call of a module or function.

    Attributes:
        function: the module or torch function.
        arguments: the pair (args, kwargs). In the place of each tensor is a ``Value`` (the result
            of another recorded call), a ``Constant``, or the live parameter.
        states: the states of torch's global random generators before the call, if the call drew
            from one of them; ``None`` otherwise.
        autocast: the mixed precision under which the call ran.
        shapes: the shapes of the returned tensors, by their index among the leaves of the result.
        samples: the number of samples in a call of a model; 0 for other calls.
    """

    function: Callable[..., Any]
    arguments: Any
    states: States | None
    autocast: Autocast
    shapes: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    samples: int = 0

    def inputs(self) -> list[Any]:
        """Return the leaves of the call's nested arguments."""
        leaves: list[Any] = []
        map_leaves(leaves.append, self.arguments)
        return leaves

    def map(self, change: Callable[[Any], Any]) -> "Entry":
        """Return the same call with ``change`` applied to every leaf of its arguments."""
        arguments = map_leaves(change, self.arguments)
        return replace(self, arguments=arguments)


@dataclass(frozen=True)
class Backward:
    """One call of ``backward``, with all recorded calls that lead to it.

    Attributes:
        entries: the recorded calls that the loss depends on, in the order of calling.
        loss: the place of the loss among the results of ``entries``.
        gradient: the argument ``gradient`` of ``backward``; ``None`` if none was given.
        frozen: the ids of the live parameters that required no gradient at this call.
    """

    entries: tuple[Entry, ...]
    loss: Value
    gradient: Constant | None
    frozen: frozenset[int] = frozenset()


class Tape:
    """The recorded calls since the last step, from which a loss can be computed again.

    The tape keeps the results alive, so that Python gives their ids to no other tensor.
    """

    def __init__(self) -> None:
        self._entries: list[Entry | None] = []
        self._place: dict[int, Value] = {}
        self._alive: list[tuple[int, Tensor]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def forget(self, count: int) -> None:
        """Forget the first ``count`` recorded calls, whose results no later call uses."""
        self._entries[:count] = [None] * count
        self._alive = [(number, tensor) for number, tensor in self._alive if number >= count]
        kept = {id(tensor) for _, tensor in self._alive}
        self._place = {key: value for key, value in self._place.items() if key in kept}

    def record(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        states: States | None,
        autocast: Autocast,
        samples: int = 0,
        given: Any = None,
    ) -> None:
        """Record a call of a module or function whose result depends on trained parameters.

        If the call uses a tensor that depends on trained parameters and comes from no recorded
        call, its result is marked as not repeatable. ``states`` are those of torch's generators
        before the call, if the call drew from one of them; ``samples`` is the number of samples in
        a call of a model, and 0 for other calls; ``given`` is the result of ``before_call``.
        """
        number = len(self._entries)
        leaves = [result] if isinstance(result, Tensor) else pytree.tree_leaves(result)
        tensors = {leaf: each for leaf, each in enumerate(leaves) if isinstance(each, Tensor)}
        try:
            arguments = given or map_leaves(self._refer, (tuple(args), dict(kwargs)))
            shapes = {leaf: tuple(tensor.shape) for leaf, tensor in tensors.items()}
            entry = Entry(function, arguments, states, autocast, shapes, samples)
            self._entries.append(entry)
        except UnseenError:
            self._entries.append(None)
        for leaf, tensor in tensors.items():
            if tensor.grad_fn is not None:
                self._place[id(tensor)] = Value(number, leaf)
                self._alive.append((number, tensor))

    def before_call(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Return the arguments of a function that changes its first argument, as the tape stores
        them.

        ``None`` is returned for other functions. A sum that begins with ``torch.zeros(())`` and
        grows by ``+=`` is a constant before its first change, and depends on trained parameters
        afterwards. So the arguments have to be stored before the call.
        """
        if not args or not changes_its_argument(function):
            return None
        try:
            first, *rest = map_leaves(self._refer, tuple(args))
            named = map_leaves(self._refer, dict(kwargs))
        except UnseenError:
            return None  # ``record`` gets the same error after the call, and handles it
        if isinstance(first, Constant):
            first = _constant(first.get().clone())
        return (first, *rest), named

    def cut(self, loss: Tensor, gradient: Tensor | None) -> Backward:
        """Return the recorded calls that lead to a loss.

        ``loss`` is the tensor on which ``backward`` is called, and ``gradient`` its argument, if
        any.

        Raises:
            ValueError: the loss, or a part of it, comes from no recorded call.
        """
        place = self._place.get(id(loss))
        if place is None:
            raise ValueError("backward was called on a loss that no model's output leads to")
        needed, waiting = set(), [place.entry]
        while waiting:
            number = waiting.pop()
            if number not in needed:
                needed.add(number)
                inputs = self._seen(number).inputs()
                waiting += [value.entry for value in inputs if isinstance(value, Value)]
        kept = sorted(needed)
        renumbered = {number: position for position, number in enumerate(kept)}

        def renumber(leaf: Any) -> Any:
            return Value(renumbered[leaf.entry], leaf.leaf) if isinstance(leaf, Value) else leaf

        found = [self._seen(number) for number in kept]
        # Calls on which the loss does not depend were left out, so that the others are renumbered.
        if len(kept) < 1 + max(kept):
            found = [entry.map(renumber) for entry in found]
        given = None if gradient is None else _constant(gradient)
        return Backward(tuple(found), renumber(place), given)

    def _seen(self, number: int) -> Entry:
        entry = self._entries[number]
        if entry is None:
            raise UnseenError(
                "a part of the loss was computed before the last step, or within a module that "
                "does not return it"
            )
        return entry

    def _refer(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        place = self._place.get(id(leaf))
        if place is not None:
            return place
        if leaf.requires_grad and leaf.grad_fn is not None:
            raise UnseenError("a trained tensor comes from a call that was not seen")
        return leaf if leaf.requires_grad else _constant(leaf)


_OPERATORS = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow")}


def changes_its_argument(function: Callable[..., Any]) -> bool:
    """Return whether a torch function writes to its first argument: its name ends in one
    underscore, or it is an operator such as ``+=``.

    Example:
        >>> changes_its_argument(torch.Tensor.add_), changes_its_argument(torch.Tensor.__add__)
        (True, False)
    """
    name = str(getattr(function, "__name__", ""))
    return name in _OPERATORS or (name.endswith("_") and not name.endswith("__"))


def _constant(tensor: Tensor) -> Constant:
    detached = tensor.detach()
    return Constant(detached, detached._version)


def play(
    entries: tuple[Entry, ...],
    translate: Callable[[Any], Any],
    given: Mapping[Value, Tensor] | None = None,
) -> list[list[Any]]:
    """Repeat recorded calls on other parameters, and return for each call the leaves of its result.

    Args:
        entries: the recorded calls of a ``Backward``, or the last ones of them.
        translate: a function that returns the module or parameter to use in the place of a live
            one.
        given: the results, by their places, of calls that are not to be repeated. The list of
            leaves of such a call is empty.
    """
    results: list[list[Any]] = []
    known = dict(given or {})
    skipped = {value.entry for value in known}

    def resolve(leaf: Any) -> Any:
        if isinstance(leaf, Value):
            return known[leaf] if leaf in known else results[leaf.entry][leaf.leaf]
        if isinstance(leaf, Constant):
            return leaf.get()
        return translate(leaf) if isinstance(leaf, Tensor | nn.Module) else leaf

    for number, entry in enumerate(entries):
        if number in skipped:
            results.append([])
            continue
        args, kwargs = pytree.tree_map(resolve, entry.arguments)
        if changes_its_argument(entry.function) and isinstance(
            next(iter(entry.arguments[0]), None), Constant
        ):
            # Without a copy, the function would change a constant that a second replay uses.
            args = args[0].clone(), *args[1:]
        drawing = nullcontext() if entry.states is None else generators_kept(entry.states)
        with drawing, _under(entry.autocast):
            results.append(pytree.tree_leaves(translate(entry.function)(*args, **kwargs)))
    return results


def _under(autocast: Autocast) -> Any:
    if not autocast.enabled:
        return nullcontext()
    return torch.autocast(autocast.device, dtype=autocast.dtype)
