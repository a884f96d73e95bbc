"""Memory: what a process and its children hold, how fast that grows, and what is left before the kernel kills one."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from stoker.core.cgroups import CGROUP_ROOT, PROC, CgroupFolder, cgroup_folders, memory_limit

# Memory that the kernel reclaims before it kills a process, by cgroup version. Shared memory is not among these: it
# counts as anonymous.
_RECLAIMABLE = {
    1: ("total_active_file", "total_inactive_file"),
    2: ("active_file", "inactive_file", "slab_reclaimable"),
}


@dataclass(frozen=True)
class TreeMemory:
    """Memory of a process and its descendants; pages that they share are counted once."""

    pss_bytes: int
    """The kernel's PSS: only this tree's share of a library that other programs map, too."""
    anonymous_bytes: int
    """Heaps and buffers."""
    shared_bytes: int
    """Shared memory (/dev/shm)."""
    file_bytes: int
    """Pages of libraries and mapped files, of the process that maps most: the others map the same ones."""

    @property
    def total_bytes(self) -> int:
        """Memory that this tree would need on its own: PSS without other programs that map the same libraries.

        Beside another torch process the plain PSS of the same loader was 20 % smaller.
        """
        return self.anonymous_bytes + self.shared_bytes + self.file_bytes


def tree_memory(root: int | None = None) -> TreeMemory:
    """The memory of a process (by default this one) and all its descendants."""
    pss = anonymous = shared = file = 0
    for pid in tree_pids(os.getpid() if root is None else root):
        # Empty where the process has ended in the meantime.
        rollup, status = read_counters(PROC / str(pid) / "smaps_rollup"), read_counters(PROC / str(pid) / "status")
        pss += rollup.get("Pss", 0)
        anonymous += rollup.get("Pss_Anon", 0)
        shared += rollup.get("Pss_Shmem", 0)
        file = max(file, status.get("RssFile", 0))
    return TreeMemory(pss, anonymous, shared, file)


def tree_pids(root: int) -> list[int]:
    """A process and all its present descendants."""
    found, waiting = [], [root]
    while waiting:
        pid = waiting.pop()
        try:
            for task in (PROC / str(pid) / "task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
        found.append(pid)
    return found


def own_and_children_bytes() -> tuple[int, int] | None:
    """Heaps and buffers of this process, and of all its descendants; None where the system does not report it. Pages
    that a fork shares count in both, which does not affect how fast they grow."""
    own, children, me = None, 0, os.getpid()
    for pid in tree_pids(me):
        held = read_counters(PROC / str(pid) / "status").get("RssAnon")
        if pid == me:
            own = held
        else:
            children += held or 0
    return None if own is None else (own, children)


@dataclass(frozen=True)
class MemoryState:
    """Memory under the nearest limit: the host's, or that of a cgroup of this process."""

    available_bytes: int
    """Memory that can still be allocated before the kernel kills a process."""
    limit_bytes: int
    stalled: float | None = None
    """Share of the last ten seconds in which every process waited for memory; None where the kernel does not report
    it."""


def read_memory(cgroup_root: Path = CGROUP_ROOT, proc: Path = PROC) -> MemoryState | None:
    """The memory that is left to this process now; None where the system does not report it. Reads a few files."""
    groups = cgroup_folders("memory", cgroup_root, proc)
    states = [read_host_memory(proc), *map(_group_memory, groups)]
    known = [state for state in states if state is not None]
    if not known:
        return None
    nearest = min(known, key=lambda state: state.available_bytes)
    return MemoryState(nearest.available_bytes, nearest.limit_bytes, _stalled(groups, proc))


def read_host_memory(proc: Path = PROC) -> MemoryState | None:
    """The whole host's memory, whatever limit a container has."""
    counters = read_counters(proc / "meminfo")
    if "MemAvailable" not in counters or "MemTotal" not in counters:
        return None
    return MemoryState(counters["MemAvailable"], counters["MemTotal"])


def used_by_others_bytes() -> int | None:
    """Memory under the nearest limit that the system and other programs hold: not this process or its children."""
    state = read_memory()
    if state is None:
        return None
    own = tree_memory()
    return max(0, state.limit_bytes - state.available_bytes - own.anonymous_bytes - own.shared_bytes)


def _group_memory(folder: CgroupFolder) -> MemoryState | None:
    limit = memory_limit(folder)
    used = folder.number("memory.current" if folder.version == 2 else "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    counters = read_counters(folder.path / "memory.stat")
    held = used - sum(counters.get(name, 0) for name in _RECLAIMABLE[folder.version])
    return MemoryState(max(0, limit - max(0, held)), limit)


def _stalled(groups: list[CgroupFolder], proc: Path) -> float | None:
    """`full avg10` of the nearest pressure file: own cgroup first, else the host's."""
    own = [folder.path / "memory.pressure" for folder in groups if folder.version == 2]
    for path in [*own, proc / "pressure" / "memory"]:
        with suppress(OSError, ValueError, IndexError, StopIteration):
            full = next(line for line in path.read_text().splitlines() if line.startswith("full"))
            return float(full.split()[1].removeprefix("avg10=")) / 100
    return None


def read_counters(path: Path) -> dict[str, int]:
    """Lines like `name 123` or `Name:  123 kB`, in bytes where they have that unit; empty where the file is missing."""
    found = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[1].isdigit():
                found[words[0].rstrip(":")] = int(words[1]) * (1024 if words[2:] == ["kB"] else 1)
    return found


# How fast the memory of a process grows, from readings taken now and then.

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
