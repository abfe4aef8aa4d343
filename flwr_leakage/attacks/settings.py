"""Check that the settings of an attack, such as numbers of steps, lie in their ranges."""

import math
from collections.abc import Callable

RANGES: dict[str, Callable[[float], bool]] = {
    "be at least 0": lambda value: value >= 0,
    "be at least 1": lambda value: value >= 1,
    "be positive": lambda value: value > 0,
    "lie in (0, 1)": lambda value: 0 < value < 1,
    "lie in (0, 1]": lambda value: 0 < value <= 1,
    "lie in [0, 1]": lambda value: 0 <= value <= 1,
}


def require(owner: object, words: str, *names: str) -> None:
    """Raise ``ValueError`` if attributes of a component lie outside a range, or are not finite.

    ``words``, a key of ``RANGES``, is the range, and ``names`` are the attributes of ``owner``.

    Example:
        >>> from types import SimpleNamespace
        >>> require(SimpleNamespace(steps=0), "be at least 1", "steps")
        Traceback (most recent call last):
        ...
        ValueError: steps must be at least 1, got 0.
    """
    for name in names:
        value = getattr(owner, name)
        if not (math.isfinite(value) and RANGES[words](value)):
            raise ValueError(f"{name} must {words}, got {value}.")
