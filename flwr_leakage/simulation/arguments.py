"""Check that the keys and values of a config section fit the arguments of the function that reads
it.

The function's signature gives the allowed keys and their types. So each key is declared only once,
and a key that no function reads is an error.
"""

import difflib
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, cast

import hydra

from flwr_leakage.simulation.config import ConfigError

HYDRA_KEYS = ("_target_", "_args_", "_convert_", "_partial_", "_recursive_")
"""The keys of a section that Hydra's ``instantiate`` reads itself."""


def check_node(
    key: str, node: Mapping[str, Any], given: Collection[str] = (), kind: type = object
) -> None:
    """Check a section that has a ``_target_``, and all sections nested in it.

    ``key`` is the section's path in the config, and ``given`` are the names of arguments that the
    caller adds. The target must make an instance of ``kind``; if it is a function, its result is
    checked when it is built.

    Raises:
        ConfigError: a key is unknown, missing, or holds a value of another type. The message names
            the key.
    """
    if "_target_" not in node:
        raise ConfigError(f"{key} must be a section with a _target_, got {dict(node)}.")
    try:
        target = hydra.utils.get_object(node["_target_"])
    except Exception as error:  # importing the target may raise any error
        raise ConfigError(f"{key}._target_ cannot be imported: {error}") from error
    if not callable(target):
        raise ConfigError(f"{key}._target_ must be callable, got {node['_target_']}.")
    if isinstance(target, type) and not node.get("_partial_"):
        check_kind(key, target, kind)
    section = {name: value for name, value in node.items() if name not in HYDRA_KEYS}
    # With ``_partial_`` arguments may be missing, and with ``_args_`` they are given by position.
    complete = not node.get("_partial_") and not node.get("_args_")
    check_section(key, section, [target], given, complete=complete)


def check_kind(key: str, found: type, kind: type) -> None:
    """Check that the instances of the class ``found`` implement the interface ``kind``.

    For an interface with ``__call__`` alone, such as ``Attack``, the arguments of the call are
    compared, as ``isinstance`` cannot distinguish two such protocols. ``key`` is the path of the
    section in the config.

    Raises:
        ConfigError: the class does not implement the interface. The message names the key, the
            interface and the class.
    """
    called_with = _required(kind.__call__) if "__call__" in vars(kind) else []
    if not issubclass(found, kind) or not _takes(found, called_with):
        called = f", called with ({', '.join(called_with)})" if called_with else ""
        raise ConfigError(
            f"{key}._target_ must give {kind.__name__}{called}, "
            f"got {found.__module__}.{found.__qualname__}."
        )


def _required(function: Callable[..., Any]) -> list[str]:
    """Return the names of a method's parameters without a default, except ``self``."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    by_name = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [p.name for p in by_name if p.default is p.empty]


def _takes(found: type, names: list[str]) -> bool:
    """Return whether the instances of a class can be called with arguments of these names and no
    others.
    """
    if not names:
        return True
    call = inspect.signature(cast(Any, found).__call__)
    if any(p.kind is p.VAR_POSITIONAL for p in call.parameters.values()):
        return True
    try:
        call.bind(None, **dict.fromkeys(names))
    except TypeError:
        return False
    return True


def check_section(
    key: str,
    section: Mapping[str, Any],
    targets: Sequence[Callable[..., Any]],
    given: Collection[str] = (),
    *,
    complete: bool = True,
) -> None:
    """Check that each key of a section is an argument of a function that reads it, with a value of
    its type.

    Args:
        key: the path of the section in the config; empty at the top.
        section: the section's keys and values.
        targets: the functions or classes that read the section, with annotated signatures.
        given: the names of arguments that the caller adds, which the section cannot hold.
        complete: whether the section must hold all arguments without a default.

    Raises:
        ConfigError: a key is unknown, missing, or holds a value of another type. The message names
            the key.
    """
    known: dict[str, Any] = {}
    required: list[str] = []
    takes_any = False
    for target in targets:
        annotations = hints(target)
        try:
            parameters = inspect.signature(target).parameters
        except ValueError:  # a function written in C may have no signature
            takes_any = True
            continue
        for name, parameter in parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                takes_any = True
            elif parameter.kind is not parameter.VAR_POSITIONAL and name not in given:
                known[name] = annotations.get(name, Any)
                if parameter.default is parameter.empty:
                    required.append(name)
    for name, value in section.items():
        if name not in known and not takes_any:
            raise ConfigError(unknown_key(key, name, known))
        check_value(_join(key, name), value, known.get(name, Any))
    missing = [name for name in required if name not in section]
    if complete and missing:
        where = _join(key, missing[0])
        raise ConfigError(f"{where} must be given: {where}=VALUE, got none.")


def check_value(key: str, value: object, expected: Any) -> None:
    """Check that a config's value fits ``expected``, the type annotation of the argument that gets
    it.

    A section with a ``_target_`` is checked against that target's signature. NaN fits no
    annotation. ``key`` is the path of the value in the config.

    Raises:
        ConfigError: the value does not fit. The message names the key, what it must hold, and what
            it holds.
    """
    if isinstance(value, float) and math.isnan(value):
        raise ConfigError(f"{key} must be {_describe(expected)}, got nan.")
    if isinstance(value, Mapping) and "_target_" in value:
        check_node(key, value)
        return
    if not _fits(value, expected):
        raise ConfigError(f"{key} must be {_describe(expected)}, got {value!r}.")
    if isinstance(value, Mapping | list):
        entries = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, entry in entries:
            check_value(f"{key}.{name}", entry, _entry(expected))


def unknown_key(section: str, name: object, known: Iterable[str]) -> str:
    """Return a text that says that a section has no key ``name``, and which keys it has.

    ``section`` is the section's path in the config, empty at the top.
    """
    where = f"in {section!r}" if section else "at the top level"
    keys = [key for key in known if key not in HYDRA_KEYS]
    listing = f"; keys: {', '.join(keys)}" if keys else ""
    return f"there is no key {str(name)!r} {where}{suggest(str(name), keys)}{listing}"


def suggest(word: str, known: Iterable[str]) -> str:
    """Return a question such as "did you mean …?" with the known word that is most similar to
    ``word``; empty if none is similar.
    """
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _join(section: str, name: object) -> str:
    return f"{section}.{name}" if section else str(name)


def hints(target: Callable[..., Any]) -> dict[str, Any]:
    """Return the type annotations of a function's arguments, by name.

    The result is empty if one of the annotations cannot be evaluated at run time.
    """
    function = cast(Any, target).__init__ if isinstance(target, type) else target
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError):
        return {}


def _fits(value: object, expected: Any) -> bool:
    """Return whether a config's value, of a plain type, fits a type annotation.

    An annotation that cannot be checked at run time accepts every value. The entries of a list or
    mapping are not checked here; ``check_value`` checks them.
    """
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return value in arguments
    if expected is None or expected is type(None):
        return value is None
    if expected is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if expected is int:
        return isinstance(value, int) and not isinstance(value, bool)
    kind = origin or expected
    if kind is Callable or not isinstance(kind, type):
        return True
    if issubclass(kind, Mapping):
        return isinstance(value, Mapping)
    if _holds_a_list(kind):
        fixed = issubclass(kind, tuple) and arguments and arguments[-1] is not Ellipsis
        return isinstance(value, list) and (not fixed or len(value) == len(arguments))
    if issubclass(kind, PurePath):
        return isinstance(value, str)
    try:
        return isinstance(value, kind)
    except TypeError:  # some protocols cannot be checked at run time
        return True


def _entry(expected: Any) -> Any:
    """Return the annotation of the entries of a list's or mapping's annotation; ``Any`` if there is
    none.
    """
    options = [a for a in typing.get_args(expected) if a is not type(None)]
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        return _entry(options[0]) if len(options) == 1 else Any
    entries = [option for option in options if option is not Ellipsis]
    if typing.get_origin(expected) is tuple and len(set(entries)) > 1:
        return Any
    return entries[-1] if entries else Any


def _holds_a_list(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Iterable) and not issubclass(kind, str)


def _describe(expected: Any, many: bool = False) -> str:
    """Return a type annotation in words, in the plural if ``many``."""
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(argument) for argument in arguments)
    if origin is typing.Literal:
        return " or ".join(map(repr, arguments))
    if expected is None or expected is type(None):
        return "null"
    words = {
        int: ("an integer", "integers"),
        float: ("a number", "numbers"),
        bool: ("true or false", "true or false"),
        str: ("a text", "texts"),
    }
    if expected in words:
        return words[expected][many]
    kind = origin or expected
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return "keys with values"
    if _holds_a_list(kind):
        entry = _entry(expected)
        return "a list" if entry is Any else f"a list of {_describe(entry, many=True)}"
    return getattr(kind, "__name__", "given")
