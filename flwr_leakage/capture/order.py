"""Match arrays without names to a model's tensors, by their order, shapes and values."""

from collections.abc import Callable, Collection, Mapping, Sequence

Shape = tuple[int, ...]


def in_order(
    arrays: Sequence[Shape],
    own: Mapping[str, Shape],
    parameters: Collection[str],
    same: Callable[[int, str], bool] | None = None,
) -> list[str]:
    """Return the names of the model's entries to which arrays without names belong.

    The names are those of the leading arrays, in order; they are empty if no part or several parts
    of the model fit. Arrays may be the whole ``state_dict`` or all parameters, which further arrays
    may follow (SCAFFOLD's control variates). Otherwise they are a part of either, which is found in
    this order: the entries with the same values; all entries but those of BatchNorm layers (FedBN);
    the first layers (FedPer, FedRep) or the last; the only entries whose shapes fit.

    Args:
        arrays: the shapes of the arrays, in order.
        own: the shapes of the model's ``state_dict`` by name, in its order.
        parameters: the names of the entries that are parameters, not buffers.
        same: a function that returns whether an array, by index, and an entry, by name, have the
            same values; ``None`` if the values are not known.
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
    """Return the names of the entries at which a run of entries with the arrays' shapes begins.

    ``own`` are the shapes of the model's ``state_dict`` in order, and ``parameters`` its entries
    that are no buffers. Two parts of the same architecture, such as a global and a personal one,
    can only be distinguished by their values.
    """
    found: dict[str, None] = {}
    for names in (list(own), [name for name in own if name in parameters]):
        for place in range(len(names) - len(arrays) + 1):
            if list(arrays) == [own[name] for name in names[place : place + len(arrays)]]:
                found[names[place]] = None
    return list(found)


def _parts(names: list[str], trained: list[str], count: int) -> list[list[str]]:
    """Return the lists of ``count`` entries' names that known methods may send of a model.

    They are taken from all entries (``names``) and from the parameters alone (``trained``): those
    outside of BatchNorm layers, if these are ``count``; the first ``count``; and the last.
    """
    normal = {name.removesuffix("running_mean") for name in names if name.endswith("running_mean")}

    def is_normal(name: str) -> bool:
        return any(name.startswith(start) and "." not in name[len(start) :] for start in normal)

    without = [[name for name in some if not is_normal(name)] for some in (names, trained)]
    ends = [part for some in (names, trained) for part in (some[:count], some[-count:])]
    return [part for part in (*without, *ends) if len(part) == count]


def _first_fit(
    arrays: Sequence[Shape], own: Mapping[str, Shape], same: Callable[[int, str], bool]
) -> list[str]:
    """Return the names of entries with the arrays' values, in order; empty if one is missing.

    ``own`` are the entries' shapes. ``same`` compares an array's values, by index, with an entry's.
    """
    found: list[str] = []
    place = 0
    for name, shape in own.items():
        if place < len(arrays) and arrays[place] == shape and same(place, name):
            found.append(name)
            place += 1
    return found if place == len(arrays) else []


def _only_fit(arrays: Sequence[Shape], own: Mapping[str, Shape]) -> list[str]:
    """Return the names of the entries with the arrays' shapes, in order.

    The result is empty if no choice of entries fits, or several do.
    """
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
