"""The processes that belong to a watched script: those that carry its mark in their environment."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

PROCESSES = Path("/proc")


def processes_with(mark: str) -> list[int]:
    """Living processes that were started with this `NAME=value`; none where there is no /proc."""
    found = []
    with suppress(OSError):
        for entry in PROCESSES.iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid() and _carries(entry, mark):
                found.append(int(entry.name))
    return found


def kill_all(mark: str) -> None:
    """SIGKILL to each of them, and to what they started meanwhile."""
    for pid in processes_with(mark):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _carries(entry: Path, mark: str) -> bool:
    try:
        # A process that has ended but was not waited for has no environment any more.
        return mark.encode() in (entry / "environ").read_bytes().split(b"\0")
    except OSError:
        return False
