"""Check settings and untrusted values, and shorten values for error messages."""

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, get_args

RANGES: dict[str, Callable[[float], bool]] = {
    "be at least 0": lambda value: value >= 0,
    "be at least 1": lambda value: value >= 1,
    "be ≥ 0": lambda value: value >= 0,
    "be finite and ≥ 0": lambda value: value >= 0,
    "be positive": lambda value: value > 0,
    "be positive and finite": lambda value: value > 0,
    "lie in (0, 1)": lambda value: 0 < value < 1,
    "lie in (0, 1]": lambda value: 0 < value <= 1,
    "lie in [0, 1)": lambda value: 0 <= value < 1,
    "lie in [0, 1]": lambda value: 0 <= value <= 1,
}


def require(owner: object, words: str, *names: str, optional: bool = False) -> None:
    """Raise ``ValueError`` if settings of a component lie outside a range, or are not finite.

    ``words``, a key of ``RANGES``, names the range; ``names`` are attributes of ``owner``. With
    ``optional=True`` an attribute may also be ``None``.

    Example:
        >>> from types import SimpleNamespace
        >>> require(SimpleNamespace(steps=0), "be at least 1", "steps")
        Traceback (most recent call last):
        ...
        ValueError: steps must be at least 1, got 0.
    """
    for name in names:
        value = getattr(owner, name)
        if optional and value is None:
            continue
        if not (math.isfinite(value) and RANGES[words](value)):
            raise ValueError(f"{name} must {words}{' or None' * optional}, got {value}.")


def require_option(owner: object, name: str, options: object) -> None:
    """Raise ``ValueError`` unless the attribute ``name`` of a component is one of the values of a
    ``Literal`` type, ``options``.

    Example:
        >>> from types import SimpleNamespace
        >>> from typing import Literal
        >>> require_option(SimpleNamespace(mode="c"), "mode", Literal["a", "b"])
        Traceback (most recent call last):
        ...
        ValueError: mode must be one of ('a', 'b'), got 'c'.
    """
    value = getattr(owner, name)
    if value not in get_args(options):
        raise ValueError(f"{name} must be one of {get_args(options)}, got {value!r}.")


def is_count(value: object) -> bool:
    """Return whether a value is an integer of at least 1; a boolean is not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0


def is_finite(value: object) -> bool:
    """Return whether a value is a finite real number that a float can hold; a boolean is not.

    Example:
        >>> is_finite(0.5), is_finite(10**400), is_finite("0.5"), is_finite(True)
        (True, False, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def brief(value: object) -> str:
    """Return the first 100 characters of a value's ``repr``, for an error message."""
    try:
        return f"{value!r}"[:100]
    except ValueError:  # Python refuses to print an integer of over 4,300 digits
        return f"a {type(value).__name__} too long to print"


def as_flag(value: object) -> bool:
    """Return an untrusted value that must be a boolean, or raise ``ValueError``."""
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {brief(value)}.")
    return value


def as_count(value: object, below: int) -> int:
    """Return an untrusted value that must be an integer in [0, below), or raise ``ValueError``."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < below:
        raise ValueError(f"expected an integer in [0, {below}), got {brief(value)}.")
    return value


def as_number(value: object, below: float = math.inf) -> float:
    """Return an untrusted value as a float, or raise ``ValueError`` unless it is a finite number of
    a magnitude below ``below``.
    """
    if not isinstance(value, int | float) or not is_finite(value) or not abs(value) < below:
        raise ValueError(f"expected a finite number below {below:g}, got {brief(value)}.")
    return float(value)


def as_share(value: object) -> float:
    """Return an untrusted value as a float, or raise ``ValueError`` unless it lies in [0, 1]."""
    if not 0 <= (share := as_number(value)) <= 1:
        raise ValueError(f"expected a number in [0, 1], got {brief(value)}.")
    return share


def as_text(value: object, most: int) -> str:
    """Return the first ``most`` characters of an untrusted value that must be a text, or raise
    ``ValueError``.
    """
    if not isinstance(value, str):
        raise ValueError(f"expected a text, got {brief(value)}.")
    return value[:most]


def as_list(value: object, most: int) -> list[Any]:
    """Return an untrusted value that must be a list of at most ``most`` entries, or raise
    ``ValueError``.
    """
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"expected a list of at most {most:,} entries, got {brief(value)}.")
    return value
