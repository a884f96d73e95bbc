"""Looks at the processes of a script from outside, a few times a second: their memory, and the time of their threads.

The memory of a process is one small file. For the memory that it shares with nobody, the kernel counts every page: that
takes 10 ms or more, in which the process cannot map memory, so it is rarely asked. Only this shows pages that a fork
shared with its parent and that become its own when it writes to them, as Python does when it reads an object.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from stoker.attach import ring
from stoker.profile.memory import Point, thinned

LOOK_S = 0.25
RARELY = 200
"""Times as long as counting the pages took, until the next time: half a per cent."""
MOST_PROCESSES = 64
"""The newest ones: workers that are restarted every epoch would be thousands."""
MOST_THREADS = 512
PROC = Path("/proc")
RESIDENT = ("RssAnon", "RssShmem")
"""Memory that cannot be dropped; mapped files are left out, because the kernel drops them when it needs room."""
OWN = ("Pss_Anon", "Pss_Shmem")
"""The same; pages that several processes share count in part, so that all add up."""


@dataclass
class SeenProcess:
    """One process of the script, since it was first looked at."""

    pid: int
    points: list[Point] = field(default_factory=list)
    """Seconds since watching began, and resident bytes."""
    own_points: list[Point] = field(default_factory=list)
    """The same for memory that it shares with nobody; fewer points."""
    first_s: float = 0.0
    last_s: float = 0.0
    threads_before: dict[int, tuple[int, int]] = field(default_factory=dict)
    threads_now: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By thread: nanoseconds on a core, and waiting for one."""

    def thread_times_s(self) -> dict[int, tuple[float, float]]:
        """By thread, since the first look: seconds on a core, and waiting for one."""
        found = {}
        for thread, (ran, waited) in self.threads_now.items():
            ran_before, waited_before = self.threads_before.get(thread, (0, 0))
            found[thread] = max(0, ran - ran_before) / 1e9, max(0, waited - waited_before) / 1e9
        return found


class ProcessWatch:
    """Follows every process that records into a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[int, SeenProcess] = {}
        self._due_s = self._own_due_s = self._began_s = time.monotonic()
        self._interval_s = LOOK_S
        self._taken: dict[int, int] = {}

    def look(self) -> None:
        """Looks, if it is time to, and if the loop has taken a batch since the last look: what a process takes while it
        ends says nothing about training."""
        now_s = time.monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + self._interval_s
        before, self._taken = self._taken, {pid: marks.batches for pid, marks in step_marks(self._folder).items()}
        if self._taken == before:
            return
        for pid in _recorded(self._folder):
            self._look_at(pid, now_s - self._began_s)
        if now_s >= self._own_due_s:
            for each in self._seen.values():
                own = _sum_of(PROC / str(each.pid) / "smaps_rollup", OWN)
                if own is not None:
                    each.own_points = thinned([*each.own_points, (now_s - self._began_s, float(own))])
            self._own_due_s = now_s + max(LOOK_S, RARELY * (time.monotonic() - now_s))

    def seen(self) -> list[SeenProcess]:
        return list(self._seen.values())

    def as_records(self) -> list[dict[str, Any]]:
        return [asdict(each) for each in self._seen.values()]

    def _look_at(self, pid: int, at_s: float) -> None:
        size, threads = _sum_of(PROC / str(pid) / "status", RESIDENT), threads_of(pid)
        if size is None:
            return  # it has ended
        each = self._seen.get(pid)
        if each is None:
            if len(self._seen) >= MOST_PROCESSES:
                del self._seen[min(self._seen, key=lambda other: self._seen[other].last_s)]
            each = self._seen[pid] = SeenProcess(pid, first_s=at_s, threads_before=threads)
        each.last_s, each.threads_now = at_s, threads
        each.points.append((at_s, float(size)))
        shorter = thinned(each.points)
        if len(shorter) < len(each.points):
            each.points = shorter
            # A run of hours keeps a few dozen points too, further apart.
            self._interval_s = max(self._interval_s, (at_s - each.first_s) / len(shorter))


class StepMarks(NamedTuple):
    """How far the loop of a training process is."""

    batches: int
    """Taken by the loop so far."""
    began: bool
    done: bool
    """Whether enough is recorded."""


def step_marks(folder: Path) -> dict[int, StepMarks]:
    """By training process."""
    found = {}
    for path in folder.glob("steps-*.ring"):
        with suppress(OSError, IndexError, ValueError, struct.error), path.open("rb") as stream:
            head = stream.read(ring.STEP_MARKS_AT + ring.STEP_MARKS.size)
            (count,) = ring.COUNT.unpack_from(head, ring.COUNT_AT)
            _, done, first_ns = ring.STEP_MARKS.unpack_from(head, ring.STEP_MARKS_AT)
            found[int(path.stem.split("-")[1])] = StepMarks(count, first_ns != 0, bool(done))
    return found


def _recorded(folder: Path) -> set[int]:
    found = set()
    for pattern in ("steps-*.ring", "fetch-*.ring"):
        for path in folder.glob(pattern):
            with suppress(IndexError, ValueError):
                found.add(int(path.stem.split("-")[1]))
    return found


def _sum_of(path: Path, names: Sequence[str]) -> int | None:
    """Bytes; None if the process has ended, or the kernel does not say."""
    total, found = 0, False
    with suppress(OSError, ValueError, IndexError):
        for line in path.read_text(errors="replace").splitlines():
            name, _, rest = line.partition(":")
            if name in names:
                total, found = total + int(rest.split()[0]) * 1024, True
    return total if found else None


def threads_of(pid: int) -> dict[int, tuple[int, int]]:
    """By thread, nanoseconds on a core and waiting for one; empty if the kernel does not say."""
    found: dict[int, tuple[int, int]] = {}
    with suppress(OSError):
        for task in islice((PROC / str(pid) / "task").iterdir(), MOST_THREADS):
            with suppress(OSError, ValueError):
                ran, waited, _ = (task / "schedstat").read_bytes().split()
                found[int(task.name)] = int(ran), int(waited)
    return found


def seen_from(records: Any) -> list[SeenProcess]:
    """The same back from plain data; what does not fit is left out."""
    found = []
    for record in records if isinstance(records, list) else ():
        with suppress(TypeError, ValueError, KeyError, AttributeError):
            before, now = (
                {int(thread): (int(ran), int(waited)) for thread, (ran, waited) in record[name].items()}
                for name in ("threads_before", "threads_now")
            )
            points, own = ([(float(at), float(size)) for at, size in record[name]] for name in ("points", "own_points"))
            first_s, last_s = float(record["first_s"]), float(record["last_s"])
            found.append(SeenProcess(int(record["pid"]), points, own, first_s, last_s, before, now))
    return found
