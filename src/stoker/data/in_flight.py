"""How many batches a loader has in memory: one place for the engines that hold them and the plan that counts them."""

from __future__ import annotations

from typing import Literal

# Beside those that are on their way: the one that the consumer has, and the one that it has just let go.
IN_HAND = 2


def batches_held(engine: Literal["process", "thread"], workers: int, prefetch: int) -> int:
    """Batches in memory at the most: worker processes fill slots that are there from the start; threads take a buffer
    when they begin, by which time the one that was let go is free again."""
    if workers == 0:
        return IN_HAND
    return workers * prefetch + (IN_HAND if engine == "process" else 1)
