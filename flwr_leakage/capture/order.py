"""Match arrays without names to a model's tensors, by order, shapes and values."""

from collections.abc import Callable, Collection, Mapping, Sequence

Shape = tuple[int, ...]


def in_order(
    arrays: Sequence[Shape],
    own: Mapping[str, Shape],
    parameters: Collection[str],
    same: Callable[[int, str], bool] | None = None,
) -> list[str]:
    """Return the names of those leading arrays that belong to the model; later arrays do not.

    Arrays are the whole ``state_dict`` or all parameters, which others may follow (SCAFFOLD's
    control variates), or a part of either: the one whose values are the model's; all but BatchNorm
    layers (FedBN); the first layers (FedPer, FedRep) or the last; or the only one whose shapes fit.

    Args:
        arrays: their shapes, in order.
        own: the shapes of the model's ``state_dict``, in its order.
        parameters: the names in it that are no buffers.
        same: (place, name) ↦ whether the array there has the model's values, where that is known.

    Returns:
        The names, or none where nothing fits or several parts do.
    """
    names = list(own)
    trained = [name for name in names if name in parameters]
    for whole in (names, trained):
        if whole and list(arrays[: len(whole)]) == [own[name] for name in whole]:
            return whole
    if same is not None and (found := _first_fit(arrays, own, same)):
        return found
    count = len(arrays)
    for part in _parts(names, trained, count):
        if part and list(arrays) == [own[name] for name in part]:
            return part
    return _only_fit(arrays, own)


def runs(
    arrays: Sequence[Shape], own: Mapping[str, Shape], parameters: Collection[str]
) -> list[str]:
    """Return where in a model runs of tensors with the arrays' shapes begin, by their first names.

    Two parts of one architecture, such as a global and a personal one, are told apart by nothing
    else than their values.
    """
    found: dict[str, None] = {}
    for names in (list(own), [name for name in own if name in parameters]):
        for place in range(len(names) - len(arrays) + 1):
            if list(arrays) == [own[name] for name in names[place : place + len(arrays)]]:
                found[names[place]] = None
    return list(found)


def _parts(names: list[str], trained: list[str], count: int) -> list[list[str]]:
    """Return the parts of a model that known methods send and that have this number of arrays."""
    normal = {name.removesuffix("running_mean") for name in names if name.endswith("running_mean")}

    def is_normal(name: str) -> bool:
        return any(name.startswith(start) and "." not in name[len(start) :] for start in normal)

    without = [[name for name in some if not is_normal(name)] for some in (names, trained)]
    ends = [part for some in (names, trained) for part in (some[:count], some[-count:])]
    return [part for part in (*without, *ends) if len(part) == count]


def _first_fit(
    arrays: Sequence[Shape], own: Mapping[str, Shape], same: Callable[[int, str], bool]
) -> list[str]:
    """Return the names of tensors with the arrays' values, in order; none where one is missing."""
    found: list[str] = []
    place = 0
    for name, shape in own.items():
        if place < len(arrays) and arrays[place] == shape and same(place, name):
            found.append(name)
            place += 1
    return found if place == len(arrays) else []


def _only_fit(arrays: Sequence[Shape], own: Mapping[str, Shape]) -> list[str]:
    """Return names of tensors with the arrays' shapes, in order; none where several fit."""
    names, shapes = list(own), list(own.values())
    early = _greedy(arrays, shapes)
    late = [len(shapes) - 1 - each for each in _greedy(arrays[::-1], shapes[::-1])][::-1]
    # Each array lies between its first and its last possible place.
    return [names[place] for place in early] if early and early == late else []


def _greedy(arrays: Sequence[Shape], shapes: Sequence[Shape]) -> list[int]:
    found: list[int] = []
    for place, shape in enumerate(shapes):
        if len(found) < len(arrays) and arrays[len(found)] == shape:
            found.append(place)
    return found if len(found) == len(arrays) else []
