"""Match the tensors of captured modules with the arrays that a server sends."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flwr_leakage.capture.order import in_order
from flwr_leakage.capture.training import Root

_WRAPPERS = ("", "_module.", "module.", "_orig_mod.")
"""The prefixes that Opacus, data parallelism and ``torch.compile`` put before a model's own
names."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor of a captured module, matched with an array that the server sent.

    Attributes:
        root: the index of the module among ``CapturedTraining.roots``.
        own_name: the name of the tensor in that module's ``state_dict``.
        live: the module's own tensor, which the training changes.
        before: a copy of the tensor from before the first step.
    """

    root: int
    own_name: str
    live: Tensor
    before: Tensor

    @property
    def is_parameter(self) -> bool:
        """Return whether the tensor is a parameter, and not a buffer."""
        return isinstance(self.live, nn.Parameter)


def name_tensors(received: Mapping[str, Tensor], roots: tuple[Root, ...]) -> dict[str, NamedTensor]:
    """Return, by the name of a received array, the captured tensor with the same name and shape.

    A module's names may equal the received ones, or have a wrapper's prefix such as ``module.``. If
    the module is only a part of the model, the received names have a prefix more, such as
    ``encoder.``. If the server sends only a part of the module, the received names have a prefix
    less. Arrays named 0, 1, … are matched in the order of the module's ``state_dict``, see
    ``in_order``. ``roots`` are the captured modules.
    """
    before = [root.copy.state_dict(keep_vars=True) for root in roots]
    found = name_live(received, [root.live for root in roots], before)
    return {
        name: NamedTensor(index, own, live, before[index][own])
        for name, (index, own, live) in found.items()
    }


def as_received(
    sent: Mapping[str, Tensor], received: Mapping[str, Tensor], roots: tuple[Root, ...]
) -> dict[str, Tensor]:
    """Return the arrays that a client sends, under the names by which it received the same tensors.

    Arrays with numbers (0, 1, …) as names are matched by order with the tensors of ``roots``, the
    captured modules. Such arrays are left out if their tensor was not received. Arrays with names
    keep them.
    """
    if not sent or not all(name.isdigit() for name in sent):
        return dict(sent)
    ours = {id(each.live): name for name, each in name_tensors(received, roots).items()}
    found = name_live(sent, [root.live for root in roots])
    return {ours[id(t)]: sent[name] for name, (_, _, t) in found.items() if id(t) in ours}


def name_live(
    received: Mapping[str, Tensor],
    models: Sequence[nn.Module],
    values: Sequence[Mapping[str, Tensor]] | None = None,
) -> dict[str, tuple[int, str, Tensor]]:
    """Return the tensor of a module that each received array belongs to, by the array's name.

    Each entry of the result is (index of the module in ``models``, the tensor's name in the module,
    tensor). Arrays with numbers (0, 1, …) as names are matched by comparing their values with
    ``values``, by default the present values of the tensors. Arrays without a match are left out.
    """
    found: dict[str, tuple[int, str, Tensor]] = {}
    for index, model in enumerate(models):
        live = model.state_dict(keep_vars=True)
        own_values = live if values is None else values[index]
        for own, name in _own_names(received, live, found, own_values).items():
            found[name] = (index, own, live[own])
    return {name: found[name] for name in received if name in found}


def match(
    shapes: Mapping[str, tuple[int, ...]], state: Mapping[str, Tensor], parameters: Collection[str]
) -> dict[str, str]:
    """Return, by the name of each array in ``shapes``, the name of the model's matching entry.

    Name and shape must agree, up to a prefix of the name. ``state`` is the model's ``state_dict``,
    and ``parameters`` are the names of its entries that are no buffers. Arrays that match no entry
    are left out.
    """
    like = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if like and all(name.isdigit() for name in like):
        own = _by_order(like, state, parameters, None)
    else:
        own = _own_names(like, state, (), {})
    return {name: each for each, name in own.items()}


def _by_order(
    received: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
    parameters: Collection[str],
    same: Callable[[int, str], bool] | None,
) -> dict[str, str]:
    order = sorted(received, key=int)
    shapes = {own: tuple(value.shape) for own, value in live.items()}
    found = in_order([tuple(received[name].shape) for name in order], shapes, parameters, same)
    return dict(zip(found, order, strict=False))


def _own_names(
    received: Mapping[str, Tensor],
    live: Mapping[str, Tensor],
    taken: Collection[str],
    values: Mapping[str, Tensor],
) -> dict[str, str]:
    """Return the name under which each tensor of a module was received, by its name in the module.

    ``live`` are the module's tensors. Arrays with numbers (0, 1, …) as names are matched by order,
    shapes and ``values``, the tensors' values with which the arrays are compared. Received names in
    ``taken`` are already matched with another module. Tensors that were not received are left out.
    """
    if received and all(name.isdigit() for name in received):
        order = sorted(received, key=int)

        def same(place: int, own: str) -> bool:
            theirs = received[order[place]].detach().cpu()
            return torch.equal(values[own].detach().cpu().to(theirs.dtype), theirs)

        parameters = [own for own, value in live.items() if isinstance(value, nn.Parameter)]
        return {} if taken else _by_order(received, live, parameters, same)
    if _all_fit(received, live) and not taken:
        return {own: own for own in live}
    best = {
        own: own
        for own, value in live.items()
        if own in received and own not in taken and received[own].shape == value.shape
    }
    for wrapper in _WRAPPERS:
        inner = {own: own.removeprefix(wrapper) for own in live if own.startswith(wrapper)}
        if not inner:
            continue
        first = next(iter(inner.values()))
        for start in (name.removesuffix(first) for name in received if name.endswith(first)):
            matched = {
                own: start + name
                for own, name in inner.items()
                if start + name in received
                and start + name not in taken
                and tuple(received[start + name].shape) == tuple(live[own].shape)
            }
            if len(matched) > len(best):
                best = matched
    return best or _part_of(received, live, taken)


def _part_of(
    received: Mapping[str, Tensor], live: Mapping[str, Tensor], taken: Collection[str]
) -> dict[str, str]:
    """Return the received names of a submodule's tensors, if it is sent under its own names.

    The keys are the tensors' names in the module. The result is empty if no submodule has tensors
    of the received names and shapes, or if several have. ``live`` are the module's tensors by name.
    Received names in ``taken`` are already matched with another module.
    """
    first = next((name for name in received if name not in taken), None)
    if first is None:
        return {}
    parts = []
    for start in (own.removesuffix(first) for own in live if own.endswith(f".{first}")):
        matched = {
            start + name: name
            for name, array in received.items()
            if start + name in live and tuple(live[start + name].shape) == tuple(array.shape)
        }
        if len(matched) == len(received):
            parts.append(matched)
    # If several submodules have these names and shapes, nothing tells which of them was sent.
    return parts[0] if len(parts) == 1 else {}


def _all_fit(received: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> bool:
    """Return whether all tensors of a module have a received array of their name and shape."""
    return received.keys() >= live.keys() and all(
        tuple(received[own].shape) == value.shape for own, value in live.items()
    )
