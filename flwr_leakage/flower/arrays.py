"""Convert Flower's ``ArrayRecord`` to a model's parameters and buffers and back.

Names, shapes, types and values of every reply are checked on the way.
"""

import io
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from torch import Tensor

from flwr_leakage.gradient_map import GradientMap
from flwr_leakage.params import Params

_PLAIN = {
    torch.float16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip
"""The types of numbers that torch and NumPy have in common; bfloat16 is none of them."""


class MalformedArraysError(ValueError):
    """The error for arrays whose names, shapes, types or values do not fit the model."""


class NotFiniteError(MalformedArraysError):
    """The error for arrays that hold NaN or infinite entries, as after a training that diverged."""


def diverged(error: NotFiniteError) -> str:
    """Return a sentence for the log: the strategy sends a model with NaN or infinite entries.

    ``error`` names the array with such entries. The sentence blames no client, as the server sent
    the array.
    """
    return f"nothing is observed: the model that the strategy sends has diverged ({error})"


def read_arrays(arrays: Mapping[str, Array], gradient_map: GradientMap) -> tuple[Params, Params]:
    """Return copies of the parameters and the buffers, by name, that an ``ArrayRecord`` holds.

    The arrays must have the names of the model's ``state_dict``. Buffers are cast to the dtypes
    that they have in the model, as averaging turns integer counters into floats. All tensors are
    put on the model's device.

    Raises:
        MalformedArraysError: an array is missing, unknown, of another shape, not numeric, or not
            finite. The message names the first one.
    """
    params, buffers, _ = read_reply(arrays, gradient_map.params, gradient_map.buffers)
    return params, buffers


def read_reply(
    arrays: Mapping[str, Array], params: Params, buffers: Params
) -> tuple[Params, Params, tuple[str, ...]]:
    """Return a reply's parameters, its buffers, and the names of its less precise arrays.

    An array is less precise than the model's if it has floating-point numbers of fewer bits, or
    whole numbers where the model has floating-point ones. The tensors are copies, by name, with the
    dtype and device of the model's ``params`` and ``buffers``.

    Raises:
        MalformedArraysError: an array is missing, unknown, of another shape, not numeric, or not
            finite. The message names the first one.
    """
    expected = {**params, **buffers}
    _check_names(arrays, expected)
    raw = {name: _read(name, arrays[name], like) for name, like in expected.items()}
    narrow = tuple(name for name, like in expected.items() if _is_narrow(raw[name], like))
    # The tensors are moved to the model's device, which may differ from that of the client's
    # training.
    state = {name: raw[name].to(like.device, like.dtype) for name, like in expected.items()}
    return (
        {name: state[name] for name in params},
        {name: state[name] for name in buffers},
        narrow,
    )


def check_like(arrays: Mapping[str, Array], sent: Mapping[str, Array]) -> tuple[str, ...]:
    """Return the names of a reply's arrays that are less precise than those that were sent.

    An array is less precise if its numbers have fewer bits. Names and shapes must be those of the
    arrays in ``sent``. The function serves if the server knows no model to which the arrays belong.
    A row of bytes (``uint8``, one axis) may have any length: strategies use it for objects that are
    no tensors, such as trees.

    Raises:
        MalformedArraysError: an array is missing, unknown, of another shape, not numeric, or not
            finite. The message names the first one.
    """
    like = {name: torch.tensor(array.numpy()) for name, array in sent.items()}
    if set(arrays) != set(like):
        raise MalformedArraysError("its arrays have other names than those that were sent.")
    for name, value in like.items():
        if value.dtype == torch.uint8 and value.ndim == 1 and len(arrays[name].shape) == 1:
            like[name] = torch.empty(arrays[name].shape, dtype=torch.uint8, device="meta")
    raw = {name: _read(name, arrays[name], value) for name, value in like.items()}
    return tuple(name for name, value in like.items() if _is_narrow(raw[name], value))


class Expected:
    """The names, shapes and types of a model's arrays, with which the arrays of replies are
    compared.
    """

    def __init__(self, gradient_map: GradientMap) -> None:
        self.params, self.buffers = gradient_map.params, gradient_map.buffers
        self._plain: dict[torch.dtype, list[_Plain]] = {}
        for name, like in {**self.params, **self.buffers}.items():
            header = _header_of(like) if like.dtype in _PLAIN else b""
            entry = _Plain(name, tuple(like.shape), header, len(header) + like.nbytes)
            self._plain.setdefault(like.dtype, []).append(entry)

    def misfit(self, names: Sequence[str]) -> str:
        """Return a text on why ``names`` are not the names of the model's arrays; empty if they
        are.
        """
        try:
            _check_names(names, {**self.params, **self.buffers})
        except MalformedArraysError as error:
            return str(error)
        return ""

    def read(self, arrays: Mapping[str, Array]) -> tuple[Params, Params, tuple[str, ...]]:
        """Return the parameters and buffers in ``arrays``, and the names of less precise arrays.

        Less precise arrays have fewer bits than the model's, or whole numbers in place of floating
        ones.

        Raises:
            MalformedArraysError: the arrays have other names, shapes or types than the model's, or
                hold values that are not finite.
        """
        return read_reply(arrays, self.params, self.buffers)

    def check(self, arrays: Mapping[str, Array]) -> tuple[str, ...]:
        """Check arrays as :func:`read_reply` does, and return the names of the less precise ones.

        Less precise arrays have fewer bits than the model's, or whole numbers in place of floating
        ones. If all arrays have the model's own format, the method makes no tensors, and is faster
        than :meth:`read`.

        Raises:
            MalformedArraysError: an array is missing, unknown, of another shape, not numeric, or
                not finite. The message names the first one.
        """
        count = len(self.params) + len(self.buffers)
        held = dict(arrays.items())
        if len(held) == count and all(
            self._is_finite(dtype, plain, held) for dtype, plain in self._plain.items()
        ):
            return ()
        return self.read(arrays)[2]

    @staticmethod
    def _is_finite(
        dtype: torch.dtype, plain: Sequence["_Plain"], arrays: Mapping[str, Array]
    ) -> bool:
        """Return whether the arrays of one dtype have the expected format, and only finite entries.

        Each array must begin with the header that ``np.save`` writes for the shape and dtype of the
        model's tensor of this name. The result is false for a dtype that NumPy lacks, such as
        bfloat16. ``plain`` holds the expected names, shapes and headers, and ``arrays`` the arrays
        that came, by name.
        """
        if dtype not in _PLAIN:
            return False
        parts = []
        for entry in plain:
            array = arrays.get(entry.name)
            if array is None or array.stype != "numpy.ndarray" or len(array.data) != entry.size:
                return False
            if tuple(array.shape) != entry.shape or not array.data.startswith(entry.header):
                return False
            parts.append(memoryview(array.data)[len(entry.header) :])
        values = np.frombuffer(b"".join(parts), _numpy(dtype))
        return not dtype.is_floating_point or bool(np.isfinite(values).all())


@dataclass(frozen=True, slots=True)
class _Plain:
    """The name, shape, header and size of one expected array, in the format of ``np.save``.

    Attributes:
        name: the array's name in the model's ``state_dict``.
        header: the bytes that ``np.save`` writes before the entries.
        size: the number of bytes of header and entries together.
    """

    name: str
    shape: tuple[int, ...]
    header: bytes
    size: int


def tensors_of(arrays: Mapping[str, Array]) -> Params:
    """Return the arrays as tensors by name; arrays that hold no numbers, such as texts, are left
    out.
    """
    values = {name: array.numpy() for name, array in arrays.items()}
    numbers = {name: each for name, each in values.items() if each.dtype.kind in "biufc"}
    return {name: torch.from_numpy(each) for name, each in numbers.items()}


def differing(arrays: Mapping[str, Array], tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors whose values differ from the array of the same name.

    The result includes tensors without an array of their name. Bytes are compared first, which is
    faster than comparing numbers.
    """
    held = dict(arrays.items())
    return [
        name
        for name, tensor in tensors.items()
        if name not in held
        or not (_has_the_same_bytes(held[name], tensor) or _holds_the_same(held[name], tensor))
    ]


def _has_the_same_bytes(array: Array, tensor: Tensor) -> bool:
    if tensor.dtype not in _PLAIN or tensor.layout is not torch.strided:
        return False
    own: bytes = tensor.numpy(force=True).tobytes()
    return array.data == _header_of(tensor) + own


def _holds_the_same(array: Array, tensor: Tensor) -> bool:
    own = tensor.detach().cpu()
    other = torch.from_numpy(array.numpy())
    return own.shape == other.shape and torch.equal(own, other.to(own.dtype))


def unequal(
    arrays: Mapping[str, Array], others: Mapping[str, Array], names: Sequence[str]
) -> list[str]:
    """Return those of ``names`` under which two collections of arrays hold different values.

    The result includes names that only one of the collections has.
    """
    if not names:
        return []
    one, two = dict(arrays.items()), dict(others.items())
    return [name for name in names if not _are_equal(one.get(name), two.get(name))]


def _are_equal(left: Array | None, right: Array | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.data == right.data or np.array_equal(left.numpy(), right.numpy())


def write_arrays(like: Mapping[str, Array], params: Params, buffers: Params) -> ArrayRecord:
    """Build an ``ArrayRecord`` of parameters and buffers, with the names and the order of ``like``.

    Entries of ``like`` that are in neither ``params`` nor ``buffers`` stay as they are. So if a
    defense withholds the client's buffers, the reply has the buffers that the server had sent.
    """
    state = {**params, **buffers}
    return ArrayRecord(
        {
            name: Array(state[name].detach().cpu().numpy()) if name in state else array
            for name, array in like.items()
        }
    )


def _check_names(arrays: Collection[str], expected: Params) -> None:
    missing = [name for name in expected if name not in arrays]
    unknown = [name for name in arrays if name not in expected]
    if missing or unknown:
        raise MalformedArraysError(
            f"arrays must hold the model's {len(expected)} entries; "
            f"missing: {missing[:3] or 'none'}, unknown: {unknown[:3] or 'none'}."
        )


def _read(name: str, array: Array, like: Tensor) -> Tensor:
    _check_shape(name, array.shape, like)
    try:
        value = torch.tensor(_values(array, like))
    # A client's bytes may cause any error, for example if they end too early.
    except Exception as error:
        raise MalformedArraysError(f"{name!r} cannot be read as an array: {error}") from error
    _check_shape(name, value.shape, like)  # the shape in the bytes may differ from the declared one
    if value.is_complex() or value.dtype == torch.bool:
        raise MalformedArraysError(f"{name!r} must hold real numbers, got {value.dtype}.")
    # The values must be finite in the model's dtype, too: a large float64 is infinite in float32.
    if not (_is_finite(value) and (value.dtype == like.dtype or _is_finite(value.to(like.dtype)))):
        finite = torch.isfinite(value) & torch.isfinite(value.to(like.dtype))
        count = finite.numel() - int(finite.sum())
        raise NotFiniteError(f"{name!r} holds {count} entries that are NaN or infinite.")
    return value


def _is_finite(value: Tensor) -> bool:
    """Return whether all entries are finite. Their sum is checked first, in a third of the time: it
    is finite only if all entries are.
    """
    total = float(value.sum(dtype=torch.float64))
    return math.isfinite(total) or bool(torch.isfinite(value).all())


def _values(array: Array, like: Tensor) -> NDArray[Any]:
    """Return ``array.numpy()``, in less time if the array has the dtype and shape of ``like``.

    Such an array begins with a known header, which need not be parsed.
    """
    dtype, header = _numpy(like.dtype), _header_of(like)
    size = len(header) + like.numel() * dtype.itemsize
    plain = array.stype == "numpy.ndarray" and len(array.data) == size
    if plain and array.data.startswith(header):
        return np.frombuffer(array.data, dtype, offset=len(header)).reshape(like.shape)
    return array.numpy()


@lru_cache(maxsize=64)
def _numpy(dtype: torch.dtype) -> np.dtype[Any]:
    return np.dtype(str(dtype).removeprefix("torch."))


def _header_of(like: Tensor) -> bytes:
    return _header(like.dtype, like.shape)


@lru_cache(maxsize=1024)
def _header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """Return the bytes that ``np.save`` writes before the entries of an array of this dtype and
    shape.
    """
    buffer = io.BytesIO()
    fields = {"descr": _numpy(dtype).str, "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(buffer, fields)
    return buffer.getvalue()


def _is_narrow(value: Tensor, like: Tensor) -> bool:
    if not like.is_floating_point():
        return False
    if not value.is_floating_point():
        return True
    return torch.finfo(value.dtype).bits < torch.finfo(like.dtype).bits


def _check_shape(name: str, shape: Sequence[int], like: Tensor) -> None:
    if tuple(shape) != tuple(like.shape):
        raise MalformedArraysError(
            f"{name!r} must have shape {tuple(like.shape)}, got {tuple(shape)}."
        )
