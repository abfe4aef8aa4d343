"""Match arrays without names with a model's tensors, by order, shapes and values."""

from collections.abc import Callable, Collection, Mapping, Sequence

Shape = tuple[int, ...]


def in_order(
    arrays: Sequence[Shape],
    own: Mapping[str, Shape],
    parameters: Collection[str],
    same: Callable[[int, str], bool] | None = None,
) -> list[str]:
    """Return the names of the ``state_dict`` entries to which arrays without names belong.

    The n-th name belongs to the n-th array; the last arrays may have none. The result is empty if
    no part of the model fits the arrays, or if several parts do. The arrays may be the whole
    ``state_dict`` or all parameters, followed by others such as SCAFFOLD's control variates. Else
    they are a part of the entries, for which these candidates are tried in order: the entries with
    the arrays' values; all entries but those of BatchNorm layers (FedBN); the first layers (FedPer,
    FedRep) or the last layers; the only entries whose shapes fit.

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
    """Return the names of those entries with which a run of entries of the arrays' shapes begins.

    A run consists of consecutive entries, or of consecutive parameters. ``own`` are the shapes of
    the model's ``state_dict`` in order, and ``parameters`` the names of its entries that are no
    buffers. Several names mean that parts of the model have equal shapes, such as a global and a
    personal part. Only their values can distinguish them.
    """
    found: dict[str, None] = {}
    for names in (list(own), [name for name in own if name in parameters]):
        for place in range(len(names) - len(arrays) + 1):
            if list(arrays) == [own[name] for name in names[place : place + len(arrays)]]:
                found[names[place]] = None
    return list(found)


def _parts(names: list[str], trained: list[str], count: int) -> list[list[str]]:
    """Return candidates for a part of a model that a client sends: lists of ``count`` entries'
    names.

    Each of ``names`` (all entries) and ``trained`` (the parameters) gives up to three: the entries
    outside of BatchNorm layers, if there are ``count`` of them; the first ``count`` entries; and
    the last ``count``.
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
    """Return, for each array in order, the name of an entry with its shape and values.

    Entries keep their order. The result is empty if an array has no such entry. ``own`` are the
    entries' shapes by name. ``same`` tells whether an array, by index, and an entry, by name, have
    equal values.
    """
    found: list[str] = []
    place = 0
    for name, shape in own.items():
        if place < len(arrays) and arrays[place] == shape and same(place, name):
            found.append(name)
            place += 1
    return found if place == len(arrays) else []


def _only_fit(arrays: Sequence[Shape], own: Mapping[str, Shape]) -> list[str]:
    """Return the names of the only entries that have the arrays' shapes, in the same order.

    The result is empty if no choice of entries has these shapes, or if several choices do.
    """
    names, shapes = list(own), list(own.values())
    early = _greedy(arrays, shapes)
    late = [len(shapes) - 1 - each for each in _greedy(arrays[::-1], shapes[::-1])][::-1]
    # The choice is unique if each array's first possible entry is its last possible one, too.
    return [names[place] for place in early] if early and early == late else []


def _greedy(arrays: Sequence[Shape], shapes: Sequence[Shape]) -> list[int]:
    found: list[int] = []
    for place, shape in enumerate(shapes):
        if len(found) < len(arrays) and arrays[len(found)] == shape:
            found.append(place)
    return found if len(found) == len(arrays) else []
