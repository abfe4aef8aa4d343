"""Check that untrusted values are numbers, and shorten values for error messages."""

import math
from numbers import Integral, Real


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
