"""How long each stage of preparing a batch ran, slept or waited for a core.

Time counts for the innermost of nested stages: a parent's timer stops while its child runs, so decoding inside an
augmentation pipeline counts as decoding.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

OTHER, FETCH, SOCKET, DECODE, READ_AND_DECODE, AUGMENT, COLLATE, PREPROCESS = range(8)
"""READ_AND_DECODE: one call does both. Its blocked time was reading, the rest decoding. PREPROCESS: filters and
resampling of arrays, unless an augmentation calls them; the size of what they work on is kept too."""
STAGE_COUNT = 8

# A shorter piece counts as run, and one that was off its core for less as not queued. Between two images, with cold
# caches, asking for a thread's CPU time takes about 5 µs and reading schedstat 20.
WORTH_ASKING_NS = 20_000
WORTH_A_CLOSER_LOOK = 0.05
"""Share of the time between two settlements in which this thread was off its core."""
CLOSER_LOOKS = 8
# Which stage is charged first for time off the core, if it is not known where it was lost: a thread that slept was
# reading, one that waited for a core was computing.
_SLEEPING = (SOCKET, FETCH, READ_AND_DECODE, OTHER, COLLATE, PREPROCESS, AUGMENT, DECODE)
_COMPUTING = _SLEEPING[::-1]

_wall_ns = time.perf_counter_ns
_cpu_ns = time.thread_time_ns


class StageClock:
    """Splits the time of a loader's batches, one after another, in the thread that prepares them.

    Each boundary ends a piece of time and adds it to the stage on top. How much of it this thread ran, slept, or waited
    for a core is settled once for each sample. Most samples never leave their core; after one that did, the kernel is
    asked at every boundary for a while, so that each stage gets its own share. The lists are sums over all batches so
    far."""

    def __init__(self) -> None:
        self.socket_bytes = 0
        self.opened: Any = None
        """The path that was opened last, and not yet assigned to a sample."""
        self.on_open: Callable[[Any], None] | None = None
        """Called with every path that is opened."""
        self.calling = ""
        """The timed function that is running."""
        self.worked: dict[str, list[int]] = {}
        """Calls of filters, and how many elements the arrays had that they worked on."""
        self.knows_run_queue = read_schedule() is not None
        self.wall = [0] * STAGE_COUNT
        self.off_core = [0] * STAGE_COUNT
        self.run_queue = [0] * STAGE_COUNT
        self.calls = [0] * STAGE_COUNT
        self.queued_ns = 0
        """How long this thread has waited for a core, as of the last time the kernel was asked."""
        self.began_ns = self.took_ns = self.ran_ns = self.queue_ns = 0
        """The last batch's."""
        self.stage = OTHER
        """The stage on top."""
        self._stack: list[int] = []
        self._off_before = 0
        self._last_wall = self._last_cpu = self._asked_wall = self._settled_wall = 0
        self._asked_walls = [0] * STAGE_COUNT
        self._off_since = 0
        self._closer = CLOSER_LOOKS
        self._queues = True

    def begin(self) -> None:
        """Starts a batch; this thread's calls count from here on."""
        self._stack.clear()
        self.stage = OTHER
        here.clock = self
        self._off_before, self._off_since = sum(self.off_core), 0
        self._asked_walls = self.wall[:]
        self.begin_whole()
        self._last_wall = self._settled_wall = self.began_ns

    def begin_whole(self) -> None:
        """Starts a batch that is not split into stages."""
        here.preparing = True
        # Without a baseline, waiting between batches counts as well, up to what this thread was off its core.
        if self._queues and self.knows_run_queue:
            schedule = read_schedule()
            self.queued_ns = schedule[1] if schedule else self.queued_ns
        self.queue_ns = self.queued_ns
        self._queues = False
        self._last_cpu = _cpu_ns()
        self._asked_wall = self.began_ns = _wall_ns()

    def end(self) -> None:
        self.settle()
        here.clock, here.preparing = None, False
        self._sum_up(self._last_wall, sum(self.off_core) - self._off_before)

    def end_whole(self) -> None:
        """Ends a batch that is not split into stages."""
        here.preparing = False
        wall = _wall_ns()
        off_core = max(0, self._off_core_at(wall))
        if off_core > WORTH_A_CLOSER_LOOK * (wall - self.began_ns):
            self._queued_of(off_core)
            self._closer = CLOSER_LOOKS
        self._sum_up(wall, off_core)

    def _sum_up(self, wall: int, off_core: int) -> None:
        self.took_ns = wall - self.began_ns
        self.ran_ns = self.took_ns - off_core
        self.queue_ns = min(off_core, self.queued_ns - self.queue_ns)

    # What `enter` and `leave` share is written out in both: each runs seven times for an image.

    def enter(self, stage: int) -> None:
        wall, top = _wall_ns(), self.stage
        took = wall - self._last_wall
        self._last_wall = wall
        self.wall[top] += took
        if self._closer and took > WORTH_ASKING_NS:
            self._ask(wall, took, top)
        self._stack.append(top)
        self.stage = stage
        self.calls[stage] += 1

    def leave(self) -> None:
        wall, top = _wall_ns(), self.stage
        took = wall - self._last_wall
        self._last_wall = wall
        self.wall[top] += took
        if self._closer and took > WORTH_ASKING_NS:
            self._ask(wall, took, top)
        self.stage = self._stack.pop() if self._stack else OTHER

    def settle(self) -> int:
        """Adds the time since the last boundary to the stage on top, and shares out the time off the core that is not
        yet known; returns the time in ns."""
        wall, top = _wall_ns(), self.stage
        took = wall - self._last_wall
        self._last_wall = wall
        self.wall[top] += took
        if wall - self._asked_wall > WORTH_ASKING_NS:
            if self._closer:
                self._ask(wall, took, top)
            else:
                self._share_out(wall)
        if self._off_since > max(WORTH_ASKING_NS, WORTH_A_CLOSER_LOOK * (wall - self._settled_wall)):
            self._closer = CLOSER_LOOKS
        elif self._closer:
            self._closer -= 1
        self._off_since, self._settled_wall = 0, wall
        return wall

    def _ask(self, wall: int, took: int, stage: int) -> None:
        """Asks the kernel how much of a long piece this thread did not run, and why."""
        off_core = min(took, self._off_core_at(wall))
        if off_core > 0:
            self._off_since += off_core
            self.off_core[stage] += off_core
            self.run_queue[stage] += self._queued_of(off_core)
        self._asked_walls = self.wall[:]

    def _share_out(self, wall: int) -> None:
        """The same for all pieces since the kernel was asked."""
        before, self._asked_walls, since = self._asked_walls, self.wall[:], wall - self._asked_wall
        off_core = self._off_core_at(wall)
        # An interrupt, or the host's own work: that much is lost anywhere.
        if off_core < WORTH_A_CLOSER_LOOK * since:
            return
        self._off_since += off_core
        queued = self._queued_of(off_core)
        room = [now - then for now, then in zip(self.wall, before, strict=True)]
        for left, stages, is_queue in ((queued, _COMPUTING, True), (off_core - queued, _SLEEPING, False)):
            for stage in stages:
                part = min(left, room[stage])
                room[stage] -= part
                left -= part
                self.off_core[stage] += part
                self.run_queue[stage] += part if is_queue else 0

    def _off_core_at(self, wall: int) -> int:
        """Time since the last question that this thread did not run."""
        cpu = _cpu_ns()
        off_core = (wall - self._asked_wall) - (cpu - self._last_cpu)
        self._asked_wall, self._last_cpu = wall, cpu
        return off_core

    def _queued_of(self, off_core: int) -> int:
        """How much of it was spent waiting for a core."""
        if off_core <= WORTH_ASKING_NS or not self.knows_run_queue:
            return 0
        schedule = read_schedule()
        if schedule is None:
            return 0
        self._queues = True
        queued, self.queued_ns = min(off_core, schedule[1] - self.queued_ns), schedule[1]
        return queued


class _Here(threading.local):
    clock: StageClock | None = None
    preparing: bool = False
    """Whether this thread is preparing a batch, split into stages or not."""


here = _Here()
"""The clock of the thread that is preparing a batch in stages; None in every other thread."""


class _ScheduleFile:
    """The kernel's schedstat of the thread that opened it, kept open: opening costs ten times as much as reading."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:  # when its thread ends
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_local = threading.local()


def read_schedule() -> tuple[int, int] | None:
    """Nanoseconds that this thread has been running and waiting for a core; None if the kernel does not say.

    The first is as old as the last tick."""
    file: _ScheduleFile | None = getattr(_local, "file", None)
    try:
        # A forked child inherits the file of its parent's thread, and would read that thread's times.
        if file is None or file.process != os.getpid():
            file = _local.file = _ScheduleFile()
        running, waiting, _ = os.pread(file.descriptor, 64, 0).split()
    except (OSError, ValueError):
        return None
    return int(running), int(waiting)
