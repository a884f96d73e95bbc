"""What making a batch cost: wall time by stage, and how the thread spent it.

A stage's wall time is running, waiting for a core (run queue), or blocked on storage, the network or a lock. Much
run-queue time calls for fewer workers, little for more.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field

from stoker.attach.stage_clock import read_schedule

STAGES = ("fetch", "decode", "augment", "collate")
"""fetch: waiting for and reading the samples' bytes; decode: headers, decoding, cropping, resizing into the batch;
augment: on the CPU, absent if everything happens on the device; collate: making the batch's buffer.
Everything else, such as drawing members and crops, is `other`."""


@dataclass(slots=True)
class StageCost:
    """Seconds that one stage took."""

    wall_s: float = 0.0
    cpu_s: float | None = 0.0
    runq_s: float | None = 0.0
    """Runnable, but waiting for a core."""
    calls: int = 0
    """Batches that went through it."""

    @property
    def blocked_s(self) -> float | None:
        """Neither running nor runnable: storage, network, locks (including Python's own)."""
        if self.cpu_s is None or self.runq_s is None:
            return None
        return max(0.0, self.wall_s - self.cpu_s - self.runq_s)

    def add(self, other: StageCost) -> None:
        """Adds to this sum; a part that is not measured in one of the two is not known in the sum."""
        self.wall_s += other.wall_s
        self.calls += other.calls
        self.cpu_s = None if self.cpu_s is None or other.cpu_s is None else self.cpu_s + other.cpu_s
        self.runq_s = None if self.runq_s is None or other.runq_s is None else self.runq_s + other.runq_s


@dataclass(slots=True)
class BatchCost:
    """Seconds and bytes that making one batch took, or the sum over several."""

    stages: dict[str, StageCost] = field(default_factory=dict)
    """They add up to the wall time; empty if nothing was measured."""
    wall_s: float = 0.0
    """From start to end."""
    bytes_read: int = 0
    samples: int = 0
    batch_bytes: int | None = None
    """Size of the finished batch."""
    worker: int = 0
    """The kernel's id of the thread that made it; in a sum, of the last one."""
    process: int = 0
    slowest_sample: int | None = None
    """Index of the sample that took longest to decode; fetching is not measured by sample."""
    slowest_s: float = 0.0
    ready_bytes: int = 0
    """Bytes of later samples that its process had already fetched when it was done; in a sum, of the last one."""

    def add(self, other: BatchCost) -> None:
        """Adds another batch's cost to this sum; the slowest sample is the slowest of both."""
        for name, stage in other.stages.items():
            mine = self.stages.get(name)
            if mine is None:
                mine = self.stages[name] = StageCost()
            mine.add(stage)
        self.wall_s += other.wall_s
        self.bytes_read += other.bytes_read
        self.ready_bytes = other.ready_bytes
        self.samples += other.samples
        if other.batch_bytes is not None:
            self.batch_bytes = (self.batch_bytes or 0) + other.batch_bytes
        self.worker, self.process = other.worker, other.process
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest_sample = other.slowest_s, other.slowest_sample

    def wall_of(self, stage: str) -> float:
        """Seconds of one stage; 0 if the batch did not go through it."""
        found = self.stages.get(stage)
        return 0.0 if found is None else found.wall_s

    @property
    def fetch_s(self) -> float:
        return self.wall_of("fetch")

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
        """Seconds per sample, by stage and by how the thread spent them."""
        times: dict[str, float | None] = {stage: self.wall_of(stage) for stage in STAGES}
        times["wall"] = self.wall_s
        times |= {"on_cpu": self.on_cpu_s, "run_queue": self.run_queue_s, "blocked": self.blocked_s}
        count = max(1, self.samples)
        return {name: None if seconds is None else seconds / count for name, seconds in times.items()}


class BatchClock:
    """Measures one batch; every worker thread uses its own. It is always in one stage, starting with `other`.

    Entering a stage costs about six microseconds (results/clock_cost): too much for single samples.
    """

    def __init__(self) -> None:
        self.cost = BatchCost(worker=threading.get_native_id(), process=os.getpid())
        self._stage = "other"
        self._began_s = self._since_s = time.perf_counter()
        self._cpu_s, self._runq_s = time.thread_time(), run_queue_s()

    def begins(self, stage: str) -> None:
        """Ends the current stage; the time from now on counts for this one."""
        # For a running thread schedstat is up to a tick (4 ms) old, the CPU clock never is. So running time is from the
        # CPU clock, and only run-queue time, which ended when the thread got its core back, from schedstat.
        now_s, cpu_s, runq_s = time.perf_counter(), time.thread_time(), run_queue_s()
        sums = self.cost.stages.get(self._stage)
        if sums is None:
            sums = self.cost.stages[self._stage] = StageCost(calls=1)
        wall_s = now_s - self._since_s
        sums.wall_s += wall_s
        if sums.cpu_s is not None and sums.runq_s is not None and runq_s is not None and self._runq_s is not None:
            # The clocks are read one after the other: the gap must not make the parts exceed the wall time.
            ran_s = min(wall_s, cpu_s - self._cpu_s)
            sums.cpu_s += ran_s
            sums.runq_s += min(wall_s - ran_s, runq_s - self._runq_s)
        else:
            sums.cpu_s = sums.runq_s = None
        self._stage, self._since_s, self._cpu_s, self._runq_s = stage, now_s, cpu_s, runq_s

    def finish(self) -> BatchCost:
        self.begins("finished")
        self.cost.wall_s = self._since_s - self._began_s
        return self.cost


def run_queue_s() -> float | None:
    """Seconds that this thread has waited for a core; None if the kernel does not say."""
    schedule = read_schedule()
    return None if schedule is None else schedule[1] / 1e9


def _sum(parts: list[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None
