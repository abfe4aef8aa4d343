"""Match the tensors of captured modules to the arrays that a server sends."""

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
    """A tensor of a captured module that belongs to an array which the server sent.

    Attributes:
        root: the index of the module among the captured ones.
        own_name: the name of the tensor in that module's ``state_dict``.
        live: the tensor that was trained.
        before: its copy from before the first step.
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

    The names in a called module may be the received ones, or have a wrapper's prefix such as
    ``module.``. The module may be a part of the model, whose received names have a prefix such as
    ``encoder.``; or only a part of the module may be sent, without its prefix. Arrays named 0, 1, …
    are taken in the order of the module's ``state_dict``, see ``in_order``. ``roots`` are the
    captured modules.
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

    Arrays without names (0, 1, …) are matched by their order to the tensors of the captured
    modules, ``roots``; those that belong to no received array are left out. Other arrays keep their
    names.
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
    """Match received arrays to the tensors of modules.

    The result holds, by an array's name, the index of the module, the tensor's name in it, and the
    tensor. Arrays that have numbers (0, 1, …) in place of names are matched by comparing their
    values with those of the tensors, by default their present ones. Arrays without a match are left
    out.
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
    """Return, by an array's name, the name of the model's entry that matches by name and shape.

    ``state`` is the model's ``state_dict``, and ``parameters`` are the names of its entries that
    are no buffers. Arrays that match no entry are left out.
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
    """Return the received name of each tensor of a module that was received, by its own name.

    ``live`` are the module's tensors. Arrays without names (0, 1, …) are matched by order, shapes
    and ``values``, the tensors' values to compare with. Received names in ``taken`` belong to
    another module already.
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

    The result is by a tensor's name in the module, and empty if no submodule, or several, have
    tensors of these names and shapes. ``live`` are the module's tensors by their own names;
    received names in ``taken`` belong to another module already.
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
    return parts[0] if len(parts) == 1 else {}  # nothing tells two parts of the same shapes apart


def _all_fit(received: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> bool:
    """Return whether all tensors of a module have a received array of their name and shape."""
    return received.keys() >= live.keys() and all(
        tuple(received[own].shape) == value.shape for own, value in live.items()
    )
