"""How fast the memory of a process grows, from readings taken now and then. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeVar

WARM_UP = 1 / 3
"""Share of the time that is left out: imports, first batches, allocators and caches that fill."""
FEWEST_POINTS = 6
LEAST_BYTES = 16e6
"""Growth after the warm-up below which it is noise: memory kept by Python and malloc varies by a few megabytes."""
LEVELS_OFF = 0.5
"""The second half must grow at least at this share of the first half's rate."""
NOISE = 3.0
"""The growth must exceed the typical distance of a point from the line by this factor."""
MOST_POINTS = 64

Point = tuple[float, float]
"""Seconds, bytes."""
Kept = TypeVar("Kept")


def growth_rate(points: Sequence[Point]) -> float | None:
    """Bytes a second; 0 if there is no lasting growth, None if there are too few points to say."""
    if len(points) < FEWEST_POINTS:
        return None
    began_s, ended_s = points[0][0], points[-1][0]
    late = [point for point in points if point[0] >= began_s + WARM_UP * (ended_s - began_s)]
    if len(late) < FEWEST_POINTS:
        return None
    rate = _slope(late)
    grown = rate * (late[-1][0] - late[0][0])
    start = statistics.median(size - rate * at for at, size in late)
    noise = statistics.median(abs(size - rate * at - start) for at, size in late)
    if grown < LEAST_BYTES or grown < NOISE * noise:
        return 0.0
    # The halves meet in the middle point, so that each has at least half of the points.
    middle = len(late) // 2
    first, second = _slope(late[: middle + 1]), _slope(late[middle:])
    return rate if second >= LEVELS_OFF * max(first, rate) else 0.0


def _slope(points: Sequence[Point]) -> float:
    """Theil and Sen's slope: the median over all pairs, which a few jumps do not change."""
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for number, earlier in enumerate(points)
        for later in points[number + 1 :]
        if later[0] > earlier[0]
    ]
    return statistics.median(slopes) if slopes else 0.0


def thinned(points: list[Kept]) -> list[Kept]:
    """Every second point, once there are too many; the first and the newest stay."""
    return points if len(points) <= MOST_POINTS else [*points[:-1:2], points[-1]]
