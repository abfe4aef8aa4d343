"""A digest of everything that a Python object computes: data, and the code that runs on them.

Two objects of one digest give the same results. So what decides a result is hashed itself:
tensors by their bytes; functions by their bytecode, constants, defaults, the values that they
close over and the globals that they use; objects by their class' methods and by their attributes.
Code of the standard library and of installed packages is represented by its name and version, that
of this package by its name and all source files; a function that one of them made in a call, by its
bytecode and what it closes over. What cannot be seen into is an error, never a guess.
"""

import builtins
import dataclasses
import dis
import enum
import functools
import hashlib
import logging
import pickle
import platform
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented))
"""Types whose ``repr`` tells all."""

UNTOLD = {
    *("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__match_args__"),
    *("__dataclass_fields__", "__dataclass_params__", "__abstractmethods__", "_abc_impl"),
    *("__parameters__", "__orig_bases__", "__firstlineno__", "__static_attributes__"),
}
"""Attributes of a class that change no result."""

GENERATED = ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__")
"""Methods that ``dataclass`` writes from the fields, whose values are hashed themselves."""

UNSEEN = ("globals", "locals", "vars", "eval", "exec", "__import__")
"""Builtins that reach variables whose names stand nowhere in the code."""

VERSIONED = ("torch", "torchvision", "numpy", "scipy")
"""Packages whose version tells their code wherever they are installed."""


LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
"""Instructions that look a global up."""


def digest(value: object, name: str = "value") -> str:
    """SHA-256 of an object, in hexadecimal, to be read together with :func:`surroundings`.

    Args:
        value: any object made of Python code, numbers, texts, containers, arrays and tensors.
        name: of the object, for errors.

    Raises:
        ValueError: some part has no visible content, such as a callable object written in C; the
            error says which.
    """
    return _Walk().of(value, name).hex()


def surroundings() -> str:
    """SHA-256 of what all results depend on: Python's and torch's version, this package's source.

    The source files are hashed because the package's version does not change with every edit.
    """
    folder = Path(__file__).parents[1]
    paths = sorted(folder.rglob("*.py"))
    parts = [part for p in paths for part in (str(p.relative_to(folder)), p.read_bytes())]
    return _join(platform.python_version(), torch.__version__, *parts).hex()


def _join(*parts: str | bytes | memoryview) -> bytes:
    """SHA-256 of several parts, each after its length, so that no two sequences collide."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


class _Walk:
    """Hashes an object from the hashes of its parts.

    Each object is hashed once. Where an object leads back to one that holds it, the number of steps
    back is hashed.
    """

    def __init__(self) -> None:
        self.known: dict[int, bytes] = {}
        self.open: list[int] = []
        self.alive: list[object] = []  # else Python could give an object's id to another

    def of(self, value: Any, where: str) -> bytes:
        """The digest of one object.

        Args:
            value: the object.
            where: how it is reached, for errors.
        """
        if type(value) in PLAIN:
            return _join("plain", type(value).__name__, repr(value))
        number = id(value)
        if number in self.known:
            return self.known[number]
        if number in self.open:
            return _join("cycle", str(len(self.open) - self.open.index(number)))
        self.alive.append(value)
        self.open.append(number)
        found = self._content(value, where)
        self.open.pop()
        self.known[number] = found
        return found

    def _content(self, value: Any, where: str) -> bytes:
        match value:
            case Tensor():
                return self._tensor(value, where)
            case np.ndarray() | np.generic():
                return self._array(value, where)
            case type() | types.FunctionType() | types.BuiltinFunctionType():
                return self._named(value, where)
            case types.CodeType():
                return self._code(value, where)
            case types.ModuleType():
                return self._module(value, where)
            case enum.Enum():
                return self._parts("member", [type(value), value.name, value.value], where)
            case torch.dtype() | torch.device() | PurePath() | slice() | range():
                return _join(type(value).__name__, repr(value))
            case types.GenericAlias() | types.UnionType():
                origin = getattr(value, "__origin__", None)
                return self._parts("type", [origin, *value.__args__], where)
            case logging.Logger():
                return _join("logger", value.name)  # it writes lines, and changes no result
            case Mapping() | list() | tuple() | set() | frozenset():
                return self._container(value, where)
            case types.MethodType():
                return self._parts("method", [value.__func__, value.__self__], where)
            case staticmethod() | classmethod():
                return self._parts(type(value).__name__, [value.__func__], where)
            case property():
                return self._parts("property", [value.fget, value.fset, value.fdel], where)
            case functools.cached_property():
                return self._parts("cached property", [value.func], where)
            case types.MemberDescriptorType():
                return _join("slot", value.__name__)
        return self._instance(value, where)

    def _container(self, value: Any, where: str) -> bytes:
        """Entries, and of all but Python's plain types whatever else an instance may hold."""
        kind = type(value)
        match value:
            case dict():
                # The base's own methods, as a subclass may show other entries; the keys once
                # more, as an OrderedDict has an order of its own.
                entries = [part for item in dict.items(value) for part in item]
                entries += [] if kind is dict else [*value]
            case Mapping():
                entries = [part for item in value.items() for part in item]
            case list() | tuple():
                base: Any = list if isinstance(value, list) else tuple
                entries = [*base.__iter__(value)]
            case _:
                # Their order differs from process to process.
                base = set if isinstance(value, set) else frozenset
                entries = sorted(self.of(e, f"an entry of {where}") for e in base.__iter__(value))
        own = self._parts("container", [kind, *entries], where)
        if kind in (dict, list, tuple, set, frozenset, types.MappingProxyType):
            return own
        return _join(own, self._named_parts(_attributes(value), where))

    def _parts(self, kind: str, parts: list[Any], where: str) -> bytes:
        return _join(kind, *(self.of(part, f"{where}[{i}]") for i, part in enumerate(parts)))

    def _named_parts(self, parts: Iterator[tuple[str, Any]], where: str) -> bytes:
        """A digest of attributes or variables: of their names and their values."""
        return _join(*(d for k, v in parts for d in (k.encode(), self.of(v, f"{where}.{k}"))))

    def _tensor(self, value: Tensor, where: str) -> bytes:
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise _refused(value, where, "only dense tensors with values are hashed")
        hooks = list((value._backward_hooks or {}).values())
        rest = [type(value), value.requires_grad, hooks]
        more = _join(self._parts("rest", rest, where), self._named_parts(_attributes(value), where))
        flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        kind = (str(value.dtype), str(tuple(value.shape)))
        return _join("tensor", *kind, more, flat.view(torch.uint8).numpy().data)

    def _array(self, value: np.ndarray | np.generic, where: str) -> bytes:
        if value.dtype.hasobject:
            raise _refused(value, where, "it is an array of objects")
        more = (
            self.of(type(value), where),
            self._named_parts(_attributes(value), where),
        )
        data = np.asarray(value).tobytes()
        return _join("array", repr(value.dtype), str(value.shape), *more, data)

    def _named(self, value: Any, where: str) -> bytes:
        """A class or function: by name where its code has a version, else by its code."""
        address = _address(value)
        version = _version(address[0]) if address else None
        if address and version:
            if address[0] == "builtins" and address[1] in UNSEEN:
                raise _refused(value, where, f"what {address[1]}() reaches cannot be seen")
            return _join("name", version, *address)
        if isinstance(value, type):
            return self._class(value, where)
        if isinstance(value, types.FunctionType):
            return self._function(value, where)
        if value.__self__ is not None and not isinstance(value.__self__, types.ModuleType):
            return _join("method", value.__name__, self.of(value.__self__, f"{where}.__self__"))
        raise _refused(value, where, "it is written in C, in a package without a version")

    def _class(self, value: type, where: str) -> bytes:
        """A class by what it and its bases define, up to those that go by their name."""
        untold = UNTOLD.union(GENERATED) if dataclasses.is_dataclass(value) else UNTOLD
        own = vars(value)
        told = (
            (key, entry)
            for key, entry in sorted(own.items())
            if key not in untold or (key in GENERATED and not _is_generated(entry))
        )
        bases = self._parts("bases", [type(value), *value.__bases__], where)
        name = f"{value.__module__}.{value.__qualname__}"
        return _join("class", name, bases, self._named_parts(told, where))

    def _function(self, value: types.FunctionType, where: str) -> bytes:
        closure = self._named_parts(_closure(value), where)
        home = str(value.__globals__.get("__name__", ""))
        if version := _version(home):
            # Of a package of that version: its globals are known, and may keep what it has seen.
            made_of = [value.__code__, value.__defaults__, value.__kwdefaults__]
            return _join("made by", version, home, self._parts("", made_of, where), closure)
        attributes = {k: v for k, v in vars(value).items() if k != "__wrapped__"}
        rest = [value.__code__, value.__defaults__, value.__kwdefaults__, attributes]
        return _join(
            self._parts("function", rest, where),
            closure,
            self._named_parts(_globals_used(value, where), where),
        )

    def _code(self, value: types.CodeType, where: str) -> bytes:
        """What runs, without line numbers and the file's name."""
        counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount)
        names = (value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars)
        table: bytes = value.co_exceptiontable
        constants = self.of(value.co_consts, f"{where}'s constants")
        flags = str(value.co_flags)
        return _join("code", repr(counts), flags, repr(names), value.co_code, table, constants)

    def _module(self, value: types.ModuleType, where: str) -> bytes:
        version = _version(value.__name__)
        if not version:
            raise _refused(value, where, "which of a module's contents count cannot be seen")
        return _join("module", version, value.__name__)

    def _instance(self, value: Any, where: str) -> bytes:
        """Any other object, by what Python's ``copy`` would make a copy of it from."""
        if hasattr(value, "cache_parameters"):  # of functools.lru_cache
            return self._parts("cached", [value.__wrapped__, value.cache_parameters()], where)
        try:
            made_of = value.__reduce_ex__(2)
        except (TypeError, AttributeError, RuntimeError, pickle.PickleError) as error:
            raise _refused(value, where, f"its content cannot be seen ({error})") from error
        if isinstance(made_of, str):
            raise _refused(value, where, f"it gives nothing but its name {made_of!r}")
        make, arguments, *state = made_of
        parts = [make, arguments, *(list(s) if isinstance(s, Iterator) else s for s in state[1:])]
        content = state[0] if state else None
        if isinstance(content, dict):
            named = ((str(key), entry) for key, entry in content.items())
            return _join(self._parts("object", parts, where), self._named_parts(named, where))
        return self._parts("object", [*parts, content], where)


def _refused(value: object, where: str, reason: str) -> ValueError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return ValueError(
        f"{where} must be made of Python code and data, to be told from others by a digest; got "
        f"{kind}: {reason}."
    )


def _is_generated(method: Any) -> bool:
    """Whether ``dataclass`` wrote a method, from text that is in no file."""
    code = getattr(method, "__code__", getattr(method, "__wrapped__", None))
    return method is None or getattr(code, "co_filename", "<string>") == "<string>"


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    """What an instance holds beside its entries: its ``__dict__``, slots and default factory."""
    yield from sorted(getattr(value, "__dict__", {}).items())
    for base in type(value).__mro__:
        for name, entry in sorted(vars(base).items()):
            slot = isinstance(entry, types.MemberDescriptorType)
            if slot and hasattr(value, name) and base.__module__ != "builtins":
                yield name, entry.__get__(value)


def _address(value: Any) -> tuple[str, str] | None:
    """Module and name under which an object is found, if it is this very object.

    Also where only a package above that module has it: the compiler of torch, once imported,
    puts a wrapper of ``torch.random.manual_seed`` into ``torch`` that computes the same.
    """
    module = getattr(value, "__module__", None)
    if not module:
        return None
    if isinstance(value, types.FunctionType):
        # A wrapper takes over the module's name, but not the module of its code.
        home = str(value.__globals__.get("__name__", ""))
        if home.partition(".")[0] != module.partition(".")[0]:
            return None
    parts = module.split(".")
    for name in (value.__qualname__, value.__name__):
        for count in range(len(parts), 0, -1):
            found: Any = sys.modules.get(".".join(parts[:count]))
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is value:
                return module, name
    return None


def _version(module: str) -> str:
    """What fixes the code of a module's package, or empty: its version, if it is installed."""
    root = module.partition(".")[0]
    if root == "builtins" or root in sys.stdlib_module_names:
        return "python"
    if root == __name__.partition(".")[0]:
        return root
    package = sys.modules.get(root)
    file, version = getattr(package, "__file__", None), getattr(package, "__version__", None)
    if not file or not isinstance(version, str):
        return ""
    # A package that is being developed keeps its version while its code changes.
    folders = [Path(sysconfig.get_paths()[kind]).resolve() for kind in ("purelib", "platlib")]
    installed = any(Path(file).resolve().is_relative_to(folder) for folder in folders)
    return f"{root} {version}" if installed or root in VERSIONED else ""


def _closure(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """The variables that a function closes over; those without a value yet are left out."""
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:
            continue


def _globals_used(function: types.FunctionType, where: str) -> Iterator[tuple[str, object]]:
    """The globals that a function, and those defined inside it, load: name and value.

    Of a module it is the attribute taken from it: ``F.relu`` is a function, not all of ``F``.
    """
    codes = [function.__code__]
    known = {**vars(builtins), **function.__globals__}
    while codes:
        code = codes.pop()
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
        instructions = list(dis.get_instructions(code))
        for index, instruction in enumerate(instructions):
            name = instruction.argval
            if instruction.opname == "IMPORT_NAME" and not _version(name):
                raise ValueError(
                    f"{where} must import {name!r} at the top of its module to be told from others "
                    "by a digest, got an import inside the function."
                )
            if instruction.opname not in LOADS:
                continue
            if name not in known:
                continue  # not defined yet
            value = known[name]
            for later in instructions[index + 1 :]:
                taken = later.opname in ("LOAD_ATTR", "LOAD_METHOD")
                if not taken or not isinstance(value, types.ModuleType):
                    break
                name, value = f"{name}.{later.argval}", getattr(value, later.argval, None)
            yield name, value
