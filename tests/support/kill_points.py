"""Named moments of a run at which a process kills itself: every point of a save, epochs, validation, steps."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from typing import Any

from stoker.tasks import training
from stoker.train.checkpoint.folder import Checkpoints

VARIABLE = "STOKER_TEST_KILL_AT"
SAVES = (
    "before temp", "half of temp", "after temp", "during rotation", "before rename", "after rename", "after rotation",
    "before prune", "during prune",
)  # fmt: skip
CALLS = ("epoch_begins", "step", "validation_begins", "validation_step", "epoch_ends", "event")
"""What the loop tells its observer, and so where it is."""
POINTS = (*SAVES, *(f"{when} {call}" for call in CALLS for when in ("before", "after")))


def a_point(rng: random.Random) -> str:
    """A moment that a short run reaches: a point, and how often it is passed before."""
    return f"{rng.choice(POINTS)}:{rng.choice([0, 0, 1, 2, 4])}"


def install() -> None:
    """Makes this process kill itself at the point that the environment names, on the rank it names."""
    wanted, _, rank = os.environ.get(VARIABLE, "").partition("@")
    if not wanted or os.environ.get("RANK", "0") != (rank or "0"):
        return
    point, count = wanted.rsplit(":", 1)
    left = int(count)

    def reached(name: str) -> None:
        nonlocal left
        if name == point:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    training.Checkpoints = partial(Checkpoints, stop=reached)  # type: ignore[misc, assignment]
    for observer in (training.RunObserver, training.Observer):
        for call in CALLS:
            if hasattr(observer, call):
                setattr(observer, call, _telling(getattr(observer, call), call, reached))


def _telling(method: Any, call: str, reached: Any) -> Any:
    def told(*arguments: Any, **keys: Any) -> Any:
        reached(f"before {call}")
        result = method(*arguments, **keys)
        reached(f"after {call}")
        return result

    return told
