"""The clock of the training loop: how much of a step is waiting for data, transfer, computing and other. Always on."""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from stoker.profile.batch_costs import BatchCost, run_queue_s
from stoker.profile.observed import BatchTime
from stoker.run.json_lines import Record

# A step that never ends on the device must not fill the memory with events; nor must copies outside of steps.
MOST_PENDING = 1024
MOST_COPIES = 256
# Consecutive batches, so that they include head-of-line waits and a turn of every worker: 40 lines of 8 are the few
# hundred that a simulation of the loader draws from, and a line stays below 1.5 kB.
KEPT_STEPS = 8
MOST_SLOW_SAMPLES = 16
# Microseconds: anything below is measurement noise.
_DIGITS = 6
_SUMS = (
    "elapsed_s", "wait_s", "transfer_s", "compute_s", "other_s", "consumer_cpu_s", "consumer_runq_s", "longest_s",
    "validation_s",
)  # fmt: skip
BATCH_COLUMNS = ("wall_s", "cpu_s", "runq_s", "blocked_s", "samples", "worker", "fetch_s", "bytes")
"""A batch in a line is a list in this order: names would take two thirds of the file."""


class DeviceStep(NamedTuple):
    """One step as the device saw it, in seconds."""

    waited_s: float
    """How long the host waited for the step's data; the device may have been busy with earlier steps meanwhile."""
    idle_s: float | None
    """Between the end of the step before and the beginning of this one; None for the first step of an epoch."""
    transfer_s: float
    """The step's copies, most of which run beside the step before."""
    compute_s: float

    @property
    def starved_s(self) -> float:
        """How long the device was idle because the host waited for data."""
        return self.waited_s if self.idle_s is None else min(self.waited_s, self.idle_s)

    @property
    def exposed_transfer_s(self) -> float:
        """How long it was idle for copies that did not fit beside the step before."""
        return 0.0 if self.idle_s is None else min(self.transfer_s, self.idle_s - self.starved_s)


class DeviceTimes:
    """Times on an accelerator: events in its queues, read once they have passed; nothing waits for them."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._free: list[Any] = []
        self._copies: list[Any] = []
        self._begin: Any = None
        self._end: Any = None
        self._pending: deque[tuple[float, bool, list[Any], Any, Any]] = deque()
        self._end_before: Any = None

    def copy_edge(self) -> None:
        """The beginning or the end of a copy, in the current queue; takes about five microseconds."""
        if len(self._copies) < MOST_COPIES:
            self._copies.append(self._mark())

    def compute_begins(self) -> None:
        """The model's queue has the step's first batch; later batches of a step do not count."""
        if self._begin is None:
            self._begin = self._mark()

    def compute_ends(self) -> None:
        self._end = self._mark()

    def step_ends(self, waited_s: float, *, first: bool) -> None:
        """Ends a step: the events since the last call belong to it."""
        if self._begin is not None and self._end is not None and len(self._pending) < MOST_PENDING:
            self._pending.append((waited_s, first, self._copies, self._begin, self._end))
        self._copies, self._begin, self._end = [], None, None

    def passed(self) -> Iterator[DeviceStep]:
        """The steps that the device has finished since the last call."""
        while self._pending and self._pending[0][-1].query():
            waited_s, first, copies, begin, end = self._pending.popleft()
            idle_s = None
            if not first and self._end_before is not None:
                idle_s = max(0.0, self._end_before.elapsed_time(begin) / 1e3)
            pairs = zip(copies[::2], copies[1::2], strict=False)
            transfer_s = sum(a.elapsed_time(b) for a, b in pairs) / 1e3
            yield DeviceStep(waited_s, idle_s, transfer_s, begin.elapsed_time(end) / 1e3)
            self._free += [*copies, begin, *([] if self._end_before is None else [self._end_before])]
            self._end_before = end

    def _mark(self) -> Any:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event


def times_on(device: Any) -> DeviceTimes | None:
    """Times of this device; None on a CPU, where the loop's own time is the device's."""
    if device is None or device.type != "cuda":  # CUDA and ROCm
        return None
    import torch

    return DeviceTimes(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


@dataclass
class Interval:
    """The steps between two lines of clock.jsonl: sums over all, details of the newest few.

    The first wait of an epoch, validation and saving are in no other sum."""

    steps: int = 0
    samples: int = 0
    elapsed_s: float = 0.0
    """wait + transfer + compute + other."""
    wait_s: float = 0.0
    transfer_s: float | None = None
    """Copies that the device waited for; None if it uses the host's memory."""
    compute_s: float = 0.0
    consumer_cpu_s: float = 0.0
    """CPU time of this process in these steps, all threads, without making batches."""
    consumer_runq_s: float | None = None
    """How long the loop's own thread waited for a core in these steps; None if the kernel does not say."""
    longest_s: float = 0.0
    """The longest of the steps."""
    validation_s: float | None = None
    saving_s: float = 0.0
    """How long the loop was stopped to save a checkpoint."""
    epoch_starts_s: list[float] = field(default_factory=list)
    """Waits for the first batch of an epoch."""
    cost: BatchCost = field(default_factory=BatchCost)
    """What making the batches of these steps cost."""
    newest_steps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """Wait, and the rest of the step."""
    newest_batches: deque[BatchTime] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    slowest: list[tuple[float, int]] = field(default_factory=list)
    """Seconds and number of the slowest samples, one of each batch at most; a heap."""

    @classmethod
    def keeping(cls, steps: int) -> Interval:
        """An interval that keeps the details of this many steps and batches."""
        return cls(newest_steps=deque(maxlen=steps), newest_batches=deque(maxlen=steps))

    def note_slowest(self, seconds: float, sample: int) -> None:
        """Keeps a sample if it is among the slowest."""
        if len(self.slowest) < min(MOST_SLOW_SAMPLES, (self.newest_batches.maxlen or 0) // 2):
            heapq.heappush(self.slowest, (seconds, sample))
        elif self.slowest and seconds > self.slowest[0][0]:
            heapq.heapreplace(self.slowest, (seconds, sample))

    @property
    def other_s(self) -> float:
        """The rest of the steps: logging, agreeing with other ranks, Python. Zero if the device computed while the loop
        waited."""
        return max(0.0, self.elapsed_s - self.wait_s - (self.transfer_s or 0.0) - self.compute_s)

    def as_record(self) -> Record:
        """As a line holds it: seconds rounded to microseconds, without values that were not measured."""
        record: Record = {"steps": self.steps, "samples": self.samples}
        for name in _SUMS:
            record[name] = getattr(self, name)
        record |= {"saving_s": self.saving_s or None, "epoch_starts_s": self.epoch_starts_s or None}
        record |= {"made_samples": self.cost.samples, "batch_bytes": self.cost.batch_bytes}
        record["stages"] = {name: self._stage(name) for name in self.cost.stages}
        record["waits_s"] = [wait for wait, _ in self.newest_steps]
        record["steps_s"] = [rest for _, rest in self.newest_steps]
        record["batches"] = [[getattr(batch, name) for name in BATCH_COLUMNS] for batch in self.newest_batches]
        return {name: _rounded(value) for name, value in record.items() if value is not None}

    def _stage(self, name: str) -> Record:
        stage = self.cost.stages[name]
        parts: Record = {"wall_s": stage.wall_s, "cpu_s": stage.cpu_s, "runq_s": stage.runq_s}
        parts |= {"blocked_s": stage.blocked_s, "calls": stage.calls}
        return parts | ({"read_bytes": self.cost.bytes_read} if name == "fetch" else {})


def batch_time(cost: BatchCost, worker: int) -> BatchTime:
    """What making one batch cost, with workers counted from 0."""
    stages = cost.stages
    return BatchTime(
        wall_s=cost.wall_s, cpu_s=cost.on_cpu_s, runq_s=cost.run_queue_s, blocked_s=cost.blocked_s,
        samples=cost.samples, worker=worker, fetch_s=stages["fetch"].wall_s if "fetch" in stages else None,
        bytes=cost.batch_bytes,
    )  # fmt: skip


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


class StepClock:
    """Adds up the parts of steps, for the epoch so far and for the interval since the last line of clock.jsonl.

    Costs 22 microseconds a step including the file (results/clock_cost). On a GPU the loop runs ahead, and what the
    host waits for says little: waiting, transfer and compute are derived from events on the device and arrive a step
    late, because nothing here waits for it. The attributes are sums over the epoch, including its first wait.
    """

    def __init__(self, device: Any = None, *, keep: int = KEPT_STEPS) -> None:
        self._times = times_on(device)
        self._keep = keep
        self._workers: dict[int, int] = {}
        self._outside = False
        self._interval = Interval.keeping(keep)
        self.epoch_begins()

    def epoch_begins(self) -> None:
        """Starts an epoch: the pipeline is empty, and the next wait is for its first batch."""
        self.wait_s = 0.0
        self.transfer_s: float | None = None
        self.compute_s = 0.0
        self.total_s = 0.0
        """Time of the steps, without pauses for checkpoints."""
        self.first_wait_s: float | None = None
        self.samples = 0
        self.steps = 0
        self.cost = BatchCost()
        self._waited_s = 0.0
        self._mark_s = time.perf_counter()
        self._cpu_mark_s = time.process_time()
        self._runq_mark_s = run_queue_s()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While the loop waits in the loader."""
        start = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - start

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Around a copy to the device, in the queue that makes it."""
        if self._times is None or self._outside:
            yield
            return
        self._times.copy_edge()
        yield
        self._times.copy_edge()

    def data_is_there(self) -> None:
        """The model's queue has the step's first batch; matters only on a device with its own queue."""
        if self._times is not None:
            self._times.compute_begins()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """During augmentation on the device, forward, backward and update."""
        start = time.perf_counter()
        yield
        if self._times is not None:
            self._times.compute_ends()
        else:
            self._add_compute(time.perf_counter() - start)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """While the loop is stopped to save a checkpoint, which is not part of a step."""
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        self._interval.saving_s += took
        self._mark_s += took

    @contextmanager
    def validating(self) -> Iterator[None]:
        """During validation, between the steps of two epochs."""
        start = time.perf_counter()
        self._outside = True
        try:
            yield
        finally:
            self._outside = False
            self._interval.validation_s = (self._interval.validation_s or 0.0) + time.perf_counter() - start

    def step_ends(self, batches: Sequence[Any]) -> None:
        """Ends a step: counts it and what its batches cost to make."""
        now, waited, interval = time.perf_counter(), self._waited_s, self._interval
        took = now - self._mark_s
        self._mark_s, self._waited_s = now, 0.0
        self._count_cpu(batches)
        self.total_s += took
        self.steps += 1
        interval.steps += 1
        first = self.first_wait_s is None
        if first:
            self.first_wait_s = waited
            self.wait_s += waited
            interval.epoch_starts_s.append(waited)
            took -= waited
        elif self._times is None:
            self._add_step(waited, took - waited)
        interval.elapsed_s += took
        for batch in batches:
            count, cost = len(batch), batch.cost
            self.samples += count
            interval.samples += count
            self.cost.add(cost)
            interval.cost.add(cost)
            if cost.stages:
                worker = self._workers.setdefault(cost.worker, len(self._workers))
                interval.newest_batches.append(batch_time(cost, worker))
                if cost.slowest_sample is not None:
                    interval.note_slowest(cost.slowest_s, cost.slowest_sample)
        if self._times is not None:
            self._times.step_ends(waited, first=first)
            for step in self._times.passed():
                self._add_compute(step.compute_s)
                self.transfer_s = (self.transfer_s or 0.0) + step.exposed_transfer_s
                interval.transfer_s = (interval.transfer_s or 0.0) + step.exposed_transfer_s
                if step.idle_s is not None:
                    self._add_step(step.starved_s, step.idle_s - step.starved_s + step.compute_s)

    def take_interval(self) -> Interval:
        """The interval since the last call; a new one begins."""
        taken, self._interval = self._interval, Interval.keeping(self._keep)
        return taken

    @property
    def wait_share(self) -> float | None:
        """Share of the epoch so far that was spent waiting for data, including its first batch."""
        return self.wait_s / self.total_s if self.total_s > 0 else None

    @property
    def images_per_second(self) -> float | None:
        """Samples per second of this rank."""
        return self.samples / self.total_s if self.total_s > 0 else None

    def _count_cpu(self, batches: Sequence[Any]) -> None:
        now = time.process_time()
        used = now - self._cpu_mark_s
        self._cpu_mark_s = now
        here = os.getpid()
        # Threads make batches ahead of the steps that take them: the two only match over many steps.
        made = sum(batch.cost.on_cpu_s or 0.0 for batch in batches if batch.cost.process == here)
        self._interval.consumer_cpu_s += used - made
        queued_s, before_s = run_queue_s(), self._runq_mark_s
        self._runq_mark_s = queued_s
        if queued_s is not None and before_s is not None:
            self._interval.consumer_runq_s = (self._interval.consumer_runq_s or 0.0) + queued_s - before_s

    def _add_step(self, wait_s: float, rest_s: float) -> None:
        """A step other than an epoch's first: the part spent waiting for data, and the rest."""
        self.wait_s += wait_s
        self._interval.wait_s += wait_s
        self._interval.newest_steps.append((wait_s, rest_s))
        self._interval.longest_s = max(self._interval.longest_s, wait_s + rest_s)

    def _add_compute(self, seconds: float) -> None:
        self.compute_s += seconds
        self._interval.compute_s += seconds
