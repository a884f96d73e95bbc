"""The host while a script runs: how busy its cores are, what its cgroup holds back, how full /dev/shm gets."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from stoker.facts.observed import HostFacts
from stoker.probe.host import read_machine, usable_cpus

STAT = Path("/proc/stat")
MEMORY = Path("/proc/meminfo")
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - asked about, not written
# (file, name of the line, units in a second): cgroup v2, then v1.
THROTTLE_FILES = (
    (Path("/sys/fs/cgroup/cpu.stat"), "throttled_usec", 1e6),
    (Path("/sys/fs/cgroup/cpu/cpu.stat"), "throttled_time", 1e9),
)


class HostWatch:
    """Begins with the first batch; `look` is called now and then, `facts` gives what was seen since."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._cores = _core_times(_usable_core_numbers())
        self._throttled_s = _throttled_s()
        self._shm_used: int | None = None
        self._available: int | None = None
        self.look()

    def look(self) -> None:
        """Takes note of what only has a momentary value."""
        with suppress(OSError):
            status = os.statvfs(SHARED_MEMORY)
            used = (status.f_blocks - status.f_bfree) * status.f_frsize
            self._shm_used = max(used, self._shm_used or 0)
        available = _available_bytes()
        if available is not None:
            self._available = available if self._available is None else min(available, self._available)

    def facts(self) -> HostFacts:
        """The host since this watch began."""
        self.look()
        elapsed_s = time.monotonic() - self._began_s
        machine = read_machine()
        throttled = _throttled_s()
        share = None
        if throttled is not None and self._throttled_s is not None and elapsed_s > 0:
            share = min(1.0, (throttled - self._throttled_s) / elapsed_s)
        return HostFacts(
            cpus=usable_cpus(),
            ram_bytes=machine.ram_bytes,
            throttled_share=share,
            shm_bytes=machine.shm_bytes,
            shm_used_bytes=self._shm_used,
            cpu_busy_share=_busy_share(self._cores, _core_times(_usable_core_numbers())),
            page_cache_bytes=self._available,
        )


def _usable_core_numbers() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _core_times(cores: set[int]) -> tuple[int, int] | None:
    """Ticks that these cores were busy, and all their ticks."""
    busy = total = 0
    with suppress(OSError, ValueError):
        for line in STAT.read_text().splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name != "cpu" and int(name[3:]) in cores:
                counts = [int(tick) for tick in ticks[:8]]
                total += sum(counts)
                busy += sum(counts) - counts[3] - counts[4]  # idle and waiting for I/O
    return (busy, total) if total else None


def _busy_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def _throttled_s() -> float | None:
    for path, name, per_second in THROTTLE_FILES:
        with suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                if line.startswith(name + " "):
                    return int(line.split()[1]) / per_second
    return None


def _available_bytes() -> int | None:
    with suppress(OSError, ValueError):
        for line in MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None
