"""A device ``accel`` that refuses to compute with tensors of the CPU, as a GPU does.

Importing this module registers it for the rest of the process, which must not have used autograd
before. Its tensors hold their values in tensors of the CPU that nothing else sees, and every
operator runs on those. It has no storage of its own, so that views of a tensor are not tracked, and
it has few factory functions: enough for a client that trains there. Torch calls the registration
experimental, and may change it.
"""

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

NAME = "accel"

_values: dict[int, Tensor] = {}
_storages: list[torch.UntypedStorage] = []
_libraries: list[torch.library.Library] = []


class _OnDevice(Tensor):
    @staticmethod
    def __new__(cls, value: Tensor) -> "_OnDevice":
        made = torch._C._acc.create_empty_tensor(tuple(value.shape), value.dtype)
        made.__class__ = cls
        storage = made.untyped_storage()
        _storages.append(storage)  # its address names the value, and must not be used again
        _values[storage._cdata] = value.contiguous()  # as the strides of ``made`` say
        return made


def _is_here(thing: object) -> bool:
    return isinstance(thing, Tensor) and thing.device.type == NAME


def _value(thing):
    if _is_here(thing):
        return _values[thing.untyped_storage()._cdata]
    return torch.device("cpu") if isinstance(thing, torch.device) else thing


def _back(thing):
    return _OnDevice(thing) if isinstance(thing, Tensor) and not _is_here(thing) else thing


def _run(operator, *args, **options):
    elsewhere = [
        leaf
        for leaf in tree_leaves((args, options))
        if isinstance(leaf, Tensor) and not _is_here(leaf) and leaf.ndim > 0
    ]
    if elsewhere and "copy" not in operator.name():
        raise RuntimeError(
            f"{operator.name()} expects all tensors on one device, got cpu and {NAME}"
        )
    args, options, given = *tree_map(_value, (args, options)), args
    result = operator(*args, **options)
    changes_one = operator._schema.is_mutable and len(operator._schema.returns) == 1
    return given[0] if changes_one else tree_map(_back, result)


def _empty(size, dtype=None, **_):
    return _OnDevice(torch.empty(size, dtype=dtype))


def _copy_from(source: Tensor, to: Tensor, non_blocking: bool = False) -> Tensor:
    _value(to).copy_(_value(source))
    return to


def _convolution(*args):
    return _OnDevice(torch.ops.aten.convolution.default(*map(_value, args)))


def _convolution_backward(slope, x, weight, *how):
    *settings, mask = how
    found = torch.ops.aten.convolution_backward.default(
        *map(_value, (slope, x, weight)), [weight.shape[0]], *settings, mask
    )
    return tuple(map(_back, found))


def _install() -> None:
    backend_registration._setup_privateuseone_for_python_backend(NAME)
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_run, "PrivateUse1")
    own = torch.library.Library("aten", "IMPL")
    for name, function in {
        "empty.memory_format": _empty,
        "empty_strided": lambda size, stride, **how: _empty(size, **how),
        "_copy_from": _copy_from,
        "_local_scalar_dense": lambda tensor: _value(tensor).item(),
        "convolution_overrideable": _convolution,
        "convolution_backward_overrideable": _convolution_backward,
    }.items():
        own.impl(name, function, "PrivateUse1")
    _libraries.extend((everything, own))


_install()
