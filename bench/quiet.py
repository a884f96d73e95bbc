"""Waits for a moment in which nobody else uses the cores: what is measured then is ours."""

from __future__ import annotations

import os
import time
from pathlib import Path

QUIET_CORES = 0.3
LOOK_S = 0.5


def busy_seconds() -> float:
    """CPU seconds of all cores since the machine started, by anybody, other guests of the host included."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _idle, _io, irq, soft, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(patience_s: float) -> float:
    """Returns when others use next to nothing, or after so long; the cores that they used last."""
    end = time.monotonic() + patience_s
    while True:
        before = busy_seconds()
        time.sleep(LOOK_S)
        used = (busy_seconds() - before) / LOOK_S
        if used < QUIET_CORES or time.monotonic() > end:
            return used
