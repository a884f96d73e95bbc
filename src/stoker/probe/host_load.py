"""What a run uses of its host while it goes on: cores, quota, shared memory, memory that is left."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from stoker.facts.observed import HostFacts
from stoker.probe.host import own_cores, read_machine
from stoker.probe.throttling import read_throttling, throttled_share

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written
# Of the columns of /proc/stat: user nice system idle iowait irq softirq steal; what follows is part of user.
_COUNTED, _IDLE = 8, (3, 4)


class HostWatch:
    """Looks at the host now and then; cheap: a few small files a time, a third of a millisecond."""

    def __init__(self) -> None:
        self._machine = read_machine()
        self._shm_used: int | None = None
        self._begin()

    def look(self) -> None:
        """Between two `facts`, where something may be short-lived: keeps the most that was used of shared memory."""
        used = _shm_used_bytes()
        if used is not None:
            self._shm_used = max(used, self._shm_used or 0)

    def facts(self) -> HostFacts:
        """What was seen since the last call; the shares are over that time."""
        self.look()
        machine, shm_used = self._machine, self._shm_used
        elapsed_s = time.monotonic() - self._began_s
        throttled = throttled_share(self._throttling, read_throttling(), elapsed_s, len(own_cores()))
        busy = _busy_share(self._ticks, _ticks())
        self._begin()
        return HostFacts(
            cpus=machine.cpus,
            ram_bytes=machine.ram_bytes,
            throttled_share=throttled,
            shm_bytes=machine.shm_bytes,
            shm_used_bytes=shm_used,
            cpu_busy_share=busy,
            page_cache_bytes=available_bytes(machine.ram_bytes),
        )

    def _begin(self) -> None:
        self._shm_used = None
        self._began_s = time.monotonic()
        self._throttling = read_throttling()
        self._ticks = _ticks()


def available_bytes(limit: int | None) -> int | None:
    """Memory that files or new programs may take: what the kernel thinks is available, within a container's limit.

    Of a container's use only what belongs to nobody else can be told, so its limit alone is applied."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
        return available if limit is None else min(available, limit)
    return None


def _shm_used_bytes() -> int | None:
    with suppress(OSError):
        status = os.statvfs(SHARED_MEMORY)
        return status.f_frsize * (status.f_blocks - status.f_bfree)
    return None


def _ticks() -> tuple[int, int] | None:
    """Idle and all ticks of the cores that this process may run on."""
    wanted = {f"cpu{number}" for number in own_cores()}
    idle = total = 0
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            name, *columns = line.split()
            if name in wanted:
                counts = [int(column) for column in columns[:_COUNTED]]
                total += sum(counts)
                idle += sum(counts[at] for at in _IDLE)
    except (OSError, ValueError, IndexError):
        return None
    return (idle, total) if total else None


def _busy_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None or after[1] <= before[1]:
        return None
    return 1.0 - (after[0] - before[0]) / (after[1] - before[1])
