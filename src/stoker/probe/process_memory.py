"""The memory of a process and everything it started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

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
