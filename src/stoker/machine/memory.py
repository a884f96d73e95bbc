"""Memory: of a process and everything it started, and how much is left before the kernel ends one."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# The memory of a process and everything it started.

PROC = Path("/proc")


@dataclass(frozen=True)
class TreeMemory:
    """Memory of a process tree; a page that several of its processes share is counted once."""

    pss_bytes: int
    """As the kernel counts: of a library that strangers use too, only this tree's share."""
    anonymous_bytes: int
    """Heaps and buffers."""
    shared_bytes: int
    """Shared memory (/dev/shm)."""
    file_bytes: int
    """Pages of libraries and mapped files, of the process that has most of them: the others map the same ones."""

    @property
    def total_bytes(self) -> int:
        """PSS as it would be if no stranger on this machine used the same libraries: what this tree needs by itself.

        Beside another torch process the plain PSS of one and the same loader was 20 % smaller.
        """
        return self.anonymous_bytes + self.shared_bytes + self.file_bytes


def tree_memory(root: int | None = None) -> TreeMemory:
    """The memory of a process, this one unless told otherwise, and all its descendants."""
    pss = anonymous = shared = file = 0
    for pid in tree_pids(os.getpid() if root is None else root):
        try:
            rollup = _kilobytes(PROC / str(pid) / "smaps_rollup")
            status = _kilobytes(PROC / str(pid) / "status")
        except OSError:
            continue  # it ended while we looked
        pss += rollup.get("Pss", 0)
        anonymous += rollup.get("Pss_Anon", 0)
        shared += rollup.get("Pss_Shmem", 0)
        file = max(file, status.get("RssFile", 0))
    return TreeMemory(pss, anonymous, shared, file)


def tree_pids(root: int) -> list[int]:
    """A process and all its descendants that are there now."""
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


def _kilobytes(path: Path) -> dict[str, int]:
    """The lines of the form `Name:  123 kB`, in bytes."""
    found = {}
    for line in path.read_text().splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB":
            found[words[0].rstrip(":")] = int(words[1]) * 1024
    return found


# How much memory is left before the kernel ends a process, by whichever limit is nearest. Cheap: reads a few files.

CGROUP_ROOT = Path("/sys/fs/cgroup")
# What the kernel gives up before it ends a process. Shared memory is no file cache here: it stands with the anonymous.
_RECLAIMABLE_V2 = ("active_file", "inactive_file", "slab_reclaimable")
_RECLAIMABLE_V1 = ("total_active_file", "total_inactive_file")


@dataclass(frozen=True)
class MemoryState:
    """Memory under the limit that is nearest: the host's, or that of a cgroup above this process."""

    available_bytes: int
    """What may still be taken before the kernel ends a process."""
    limit_bytes: int
    stalled: float | None = None
    """Share of the last ten seconds in which every process waited for memory; None where the kernel does not tell."""


def read_memory(cgroup_root: Path = CGROUP_ROOT, proc: Path = PROC) -> MemoryState | None:
    """The memory that is left to this process now; None where the system does not tell."""
    states, groups = [_host(proc)], cgroup_folders(cgroup_root, proc)
    for version, folder in groups:
        states.append(_group_v2(folder) if version == 2 else _group_v1(folder))
    known = [state for state in states if state is not None]
    if not known:
        return None
    nearest = min(known, key=lambda state: state.available_bytes)
    return MemoryState(nearest.available_bytes, nearest.limit_bytes, _stalled(groups, proc))


def used_by_others_bytes() -> int | None:
    """Memory under the nearest limit that neither this process nor its children hold: the system's, other programs'."""
    state = read_memory()
    if state is None:
        return None
    own = tree_memory()
    return max(0, state.limit_bytes - state.available_bytes - own.anonymous_bytes - own.shared_bytes)


def cgroup_folders(root: Path = CGROUP_ROOT, proc: Path = PROC) -> list[tuple[int, Path]]:
    """The memory cgroups of this process, from its own up to the root, each with its version: any of them may limit.

    A container may see its own group as the root, whatever path /proc tells; folders that are not there are left out.
    """
    found: list[tuple[int, Path]] = []
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        version, base = (1, root / "memory") if controllers else (2, root)
        folder = base / path.lstrip("/")
        while folder != base and base in folder.parents:
            found.append((version, folder))
            folder = folder.parent
        found.append((version, base))
    return [(version, folder) for version, folder in found if folder.is_dir()]


def _host(proc: Path) -> MemoryState | None:
    figures = _figures(proc / "meminfo")
    if "MemAvailable" not in figures or "MemTotal" not in figures:
        return None
    return MemoryState(figures["MemAvailable"] * 1024, figures["MemTotal"] * 1024)


def _group_v2(folder: Path) -> MemoryState | None:
    limit, used = _number(folder / "memory.max"), _number(folder / "memory.current")
    return _group(limit, used, folder, _RECLAIMABLE_V2)


def _group_v1(folder: Path) -> MemoryState | None:
    limit, used = _number(folder / "memory.limit_in_bytes"), _number(folder / "memory.usage_in_bytes")
    # 'No limit' is the largest multiple of a page there.
    return _group(limit if limit is not None and limit < 1 << 60 else None, used, folder, _RECLAIMABLE_V1)


def _group(limit: int | None, used: int | None, folder: Path, reclaimable: tuple[str, ...]) -> MemoryState | None:
    if limit is None or used is None:
        return None
    figures = _figures(folder / "memory.stat")
    held = used - sum(figures.get(name, 0) for name in reclaimable)
    return MemoryState(max(0, limit - max(0, held)), limit)


def _stalled(groups: list[tuple[int, Path]], proc: Path) -> float | None:
    """`full avg10` of the nearest pressure file: own cgroup first, else the host's."""
    own = [folder / "memory.pressure" for version, folder in groups if version == 2]
    for path in [*own, proc / "pressure" / "memory"]:
        with suppress(OSError, ValueError, IndexError):
            full = next(line for line in path.read_text().splitlines() if line.startswith("full"))
            return float(full.split()[1].removeprefix("avg10=")) / 100
    return None


def _figures(path: Path) -> dict[str, int]:
    """`name number` or `name: number kB`, line by line."""
    found = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            words = line.split()
            if len(words) >= 2 and words[1].isdigit():
                found[words[0].rstrip(":")] = int(words[1])
    return found


def _number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None
