"""Waits until the cores are idle, so that a measurement is not disturbed by other programs."""

from __future__ import annotations

import os
import time
from pathlib import Path

QUIET_CORES = 0.3
LOOK_S = 0.5


def busy_seconds() -> float:
    """CPU seconds used on all cores since boot, by every program, including time stolen by other guests of the host."""
    with Path("/proc/stat").open() as file:
        user, nice, system, _idle, _io, irq, soft, steal, *_ = map(int, file.readline().split()[1:])
    return (user + nice + system + irq + soft + steal) / os.sysconf("SC_CLK_TCK")


def wait_for_quiet(patience_s: float) -> float:
    """Waits until almost no core is in use, at most `patience_s`; returns how many cores were in use at the end."""
    end = time.monotonic() + patience_s
    while True:
        before = busy_seconds()
        time.sleep(LOOK_S)
        used = (busy_seconds() - before) / LOOK_S
        if used < QUIET_CORES or time.monotonic() > end:
            return used
