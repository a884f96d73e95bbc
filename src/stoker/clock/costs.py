"""What the making of a batch cost: wall time by stage, and how the thread spent each of them.

What is left of a stage's wall time after running and waiting for a core was spent blocked: on storage, the network,
a lock. High run-queue time asks for fewer workers, low for more.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field

STAGES = ("fetch", "decode", "augment", "collate")
"""fetch: waiting for and reading the samples' bytes; decode: headers, decoding, cropping, resizing into the batch;
augment: on the CPU, absent where everything happens on the device; collate: making the batch's buffer.
What is in none of them, the drawing of members and crops, is `other`."""


@dataclass(slots=True)
class StageCost:
    """Seconds that one stage took."""

    wall_s: float = 0.0
    cpu_s: float | None = 0.0
    runq_s: float | None = 0.0
    """Ready to run while others ran."""
    calls: int = 0
    """Batches that went through it."""

    @property
    def blocked_s(self) -> float | None:
        """Neither running nor ready: storage, network, locks (Python's own among them)."""
        if self.cpu_s is None or self.runq_s is None:
            return None
        return max(0.0, self.wall_s - self.cpu_s - self.runq_s)

    def add(self, other: StageCost) -> None:
        """Adds to this sum; a part that was not measured once stays unmeasured."""
        self.wall_s += other.wall_s
        self.calls += other.calls
        self.cpu_s = None if self.cpu_s is None or other.cpu_s is None else self.cpu_s + other.cpu_s
        self.runq_s = None if self.runq_s is None or other.runq_s is None else self.runq_s + other.runq_s


@dataclass(slots=True)
class BatchCost:
    """Seconds and bytes that one batch took to make, or the sum over several."""

    stages: dict[str, StageCost] = field(default_factory=dict)
    """They add up to the wall time; empty where nothing was measured."""
    wall_s: float = 0.0
    """From the first to the last moment of the making."""
    bytes_read: int = 0
    samples: int = 0
    batch_bytes: int | None = None
    """Size of the batch as it is handed over."""
    worker: int = 0
    """The kernel's number of the thread that made it; in a sum, of the last one."""
    process: int = 0
    slowest_sample: int | None = None
    """The number in the index of the sample that took longest to decode; its fetching is not known apart."""
    slowest_s: float = 0.0

    def add(self, other: BatchCost) -> None:
        """Adds another batch's cost to this sum, whose slowest sample is the slowest of all."""
        for name, stage in other.stages.items():
            mine = self.stages.get(name)
            if mine is None:
                mine = self.stages[name] = StageCost()
            mine.add(stage)
        self.wall_s += other.wall_s
        self.bytes_read += other.bytes_read
        self.samples += other.samples
        if other.batch_bytes is not None:
            self.batch_bytes = (self.batch_bytes or 0) + other.batch_bytes
        self.worker, self.process = other.worker, other.process
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest_sample = other.slowest_s, other.slowest_sample

    def wall_of(self, stage: str) -> float:
        """Seconds of one stage; 0 where the batch never went through it."""
        found = self.stages.get(stage)
        return 0.0 if found is None else found.wall_s

    @property
    def fetch_s(self) -> float:
        return self.wall_of("fetch")

    @property
    def decode_s(self) -> float:
        return self.wall_of("decode")

    @property
    def collate_s(self) -> float:
        return self.wall_of("collate")

    @property
    def on_cpu_s(self) -> float | None:
        return _sum([stage.cpu_s for stage in self.stages.values()])

    @property
    def run_queue_s(self) -> float | None:
        return _sum([stage.runq_s for stage in self.stages.values()])

    @property
    def blocked_s(self) -> float | None:
        return _sum([stage.blocked_s for stage in self.stages.values()])

    def per_image(self) -> dict[str, float | None]:
        """Seconds for each sample, by stage and by how the thread spent them."""
        times: dict[str, float | None] = {stage: self.wall_of(stage) for stage in STAGES}
        times["wall"] = self.wall_s
        times |= {"on_cpu": self.on_cpu_s, "run_queue": self.run_queue_s, "blocked": self.blocked_s}
        count = max(1, self.samples)
        return {name: None if seconds is None else seconds / count for name, seconds in times.items()}

    @classmethod
    def zero(cls) -> BatchCost:
        """A sum to add to."""
        return cls()


class BatchClock:
    """Measures one batch; each worker thread uses its own. It is always in one stage, at first in `other`.

    Entering a stage costs about six microseconds (results/clock_cost): not for single samples.
    """

    def __init__(self) -> None:
        self.cost = BatchCost(worker=threading.get_native_id(), process=os.getpid())
        self._stage = "other"
        self._began_s = self._since_s = time.perf_counter()
        self._cpu_s, self._runq_s = time.thread_time(), _run_queue_s()

    def begins(self, stage: str) -> None:
        """Closes the stage that was, and counts what follows for this one."""
        # schedstat's account of a thread that runs is up to a tick (4 ms) old, its CPU clock never is: so the time on
        # a core is from there, and only the time in the queue, which ended when the thread came back, from schedstat.
        now_s, cpu_s, runq_s = time.perf_counter(), time.thread_time(), _run_queue_s()
        sums = self.cost.stages.get(self._stage)
        if sums is None:
            sums = self.cost.stages[self._stage] = StageCost(calls=1)
        wall_s = now_s - self._since_s
        sums.wall_s += wall_s
        if sums.cpu_s is not None and sums.runq_s is not None and runq_s is not None and self._runq_s is not None:
            # The clocks are read one after the other: what lies between them must not make more than the wall time.
            ran_s = min(wall_s, cpu_s - self._cpu_s)
            sums.cpu_s += ran_s
            sums.runq_s += min(wall_s - ran_s, runq_s - self._runq_s)
        else:
            sums.cpu_s = sums.runq_s = None
        self._stage, self._since_s, self._cpu_s, self._runq_s = stage, now_s, cpu_s, runq_s

    def finish(self) -> BatchCost:
        """The batch is made."""
        self.begins("finished")
        self.cost.wall_s = self._since_s - self._began_s
        return self.cost


class _ScheduleFile:
    """The kernel's account of the thread that opened it, kept open: opening costs ten times the reading."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:  # with the thread, whose own it is
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_local = threading.local()


def read_schedule() -> tuple[int, int] | None:
    """Nanoseconds that this thread has run and has been ready without running; None where the kernel does
    not say. The first is as old as the last tick."""
    file: _ScheduleFile | None = getattr(_local, "file", None)
    try:
        # A forked child inherits the file of its parent's thread, and would read that one's times.
        if file is None or file.process != os.getpid():
            file = _local.file = _ScheduleFile()
        running, waiting, _ = os.pread(file.descriptor, 64, 0).split()
    except (OSError, ValueError):
        return None
    return int(running), int(waiting)


def _run_queue_s() -> float | None:
    schedule = read_schedule()
    return None if schedule is None else schedule[1] / 1e9


def _sum(parts: list[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None
