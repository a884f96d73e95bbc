"""Columns of numbers for charts, thinned so that a page of a year's training stays small."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

Column = list[float | None]

POINTS = 900
"""More than a screen has pixels for: 900 points of 6 digits in 20 columns are 130 KB."""
DIGITS = 5
"""Significant ones: what a chart can show, and a tenth of what a float is written with."""


def columns(
    rows: Sequence[Mapping[str, float | None]], names: Sequence[str], worst: Sequence[str] = (), points: int = POINTS
) -> dict[str, Column]:
    """The rows as columns of at most `points` values each, those without any value left out.

    Neighbours are averaged; of a column in `worst` the largest stays, so that a stall is not averaged away.
    """
    edges = _edges(len(rows), points)
    found: dict[str, Column] = {}
    for name in names:
        merge = max if name in worst else _mean
        column = [_merged([row.get(name) for row in rows[a:b]], merge) for a, b in pairwise(edges)]
        if any(value is not None for value in column):
            found[name] = column
    return found


def rounded(value: float | None, digits: int = DIGITS) -> float | None:
    """The number with as many digits as anybody reads; whole numbers stay whole."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{digits}g}")


def _edges(count: int, points: int) -> list[int]:
    if count <= points:
        return list(range(count + 1))
    return [round(number * count / points) for number in range(points + 1)]


def _merged(values: Sequence[float | None], merge: Callable[[list[float]], float]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return rounded(merge(known)) if known else None


def _mean(values: list[float]) -> float:
    return values[0] if len(values) == 1 else math.fsum(values) / len(values)
