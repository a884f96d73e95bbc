"""Waiting for what a test has started: for a condition, never for a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

DEADLINE_S = 240.0
"""For what takes seconds on a quiet machine, and below pytest's own limit: only what hangs gets there."""


def wait_until(
    condition: Callable[[], object], otherwise: Callable[[], str] = lambda: "", deadline_s: float = DEADLINE_S
) -> None:
    """Returns when the condition holds, and fails when it never does."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, otherwise()
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that has ended and was not waited for does not count."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def processes_with(text: str) -> list[int]:
    """Processes whose command line or environment holds the text."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                seen = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if text.encode() in seen and is_running(int(entry.name)):
                found.append(int(entry.name))
    return found
