"""Columns of rows as numbers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulations.papers.findings import Row


def number(value: object) -> float:
    """A cell as a number; NaN of a missing one or of words."""
    return float(value) if isinstance(value, int | float) else float("nan")


def numbers(rows: Sequence[Row], column: str) -> NDArray:
    """A column; NaN where it is missing."""
    return np.array([number(row.get(column)) for row in rows])
