"""Where a step's time goes: waiting for data, transfer, computing, the rest. Always on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stoker.clock.costs import BatchCost
from stoker.clock.device import times_on
from stoker.clock.interval import KEPT_STEPS, Interval, batch_time


class StepClock:
    """Adds up the parts of steps, for the epoch so far and for the interval since the last line of the clock's file.

    Costs 22 microseconds a step, its file included (results/clock_cost). On a GPU transfer and computing are the
    device's own times, and arrive a step late: nothing here waits for it. The attributes are those of the epoch, its
    first wait included.
    """

    def __init__(self, device: Any = None, *, keep: int = KEPT_STEPS) -> None:
        self._times = times_on(device)
        self._keep = keep
        self._workers: dict[int, int] = {}
        self._interval = Interval.keeping(keep)
        self.epoch_begins()

    def epoch_begins(self) -> None:
        """The pipeline is empty: the next wait is for the first batch of an epoch."""
        self.wait_s = 0.0
        self.transfer_s: float | None = None
        self.compute_s = 0.0
        self.total_s = 0.0
        """Of the steps; pauses for checkpoints are not in it."""
        self.first_wait_s: float | None = None
        self.samples = 0
        self.steps = 0
        self.cost = BatchCost.zero()
        self._waited_s = 0.0
        self._mark_s = time.perf_counter()
        self._cpu_mark_s = time.process_time()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The loop stands in the loader."""
        start = time.perf_counter()
        yield
        self._waited_s += time.perf_counter() - start

    @contextmanager
    def transferring(self) -> Iterator[None]:
        """Batches go to the device."""
        if self._times is not None:
            self._times.mark()
        yield
        if self._times is not None:
            self._times.mark()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Augmentation on the device, forward, backward, update. Follows `transferring`, whose end is its begin."""
        start = time.perf_counter()
        yield
        if self._times is not None:
            self._times.mark()
        else:
            self._add_compute(time.perf_counter() - start)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """The loop stands still for a checkpoint: no part of a step."""
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        self._interval.saving_s += took
        self._mark_s += took

    @contextmanager
    def validating(self) -> Iterator[None]:
        """Between two epochs' steps."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._interval.validation_s = (self._interval.validation_s or 0.0) + time.perf_counter() - start

    def step_ends(self, batches: Sequence[Any]) -> None:
        """A step is over: counts it and what its batches had cost to make."""
        now, waited, interval = time.perf_counter(), self._waited_s, self._interval
        took = now - self._mark_s
        self._mark_s, self._waited_s = now, 0.0
        self._count_cpu(batches)
        self.total_s += took
        self.wait_s += waited
        self.steps += 1
        interval.steps += 1
        if self.first_wait_s is None:
            self.first_wait_s = waited
            interval.epoch_starts_s.append(waited)
            took -= waited
        else:
            interval.wait_s += waited
            interval.newest_steps.append((waited, took - waited))
            interval.longest_s = max(interval.longest_s, took)
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
            self._times.step_ends()
            for transfer_s, compute_s in self._times.passed():
                self._add_compute(compute_s)
                self.transfer_s = (self.transfer_s or 0.0) + transfer_s
                interval.transfer_s = (interval.transfer_s or 0.0) + transfer_s

    def take_interval(self) -> Interval:
        """What happened since the last call; a new interval begins."""
        taken, self._interval = self._interval, Interval.keeping(self._keep)
        return taken

    @property
    def wait_share(self) -> float | None:
        """Share of the epoch so far that was spent waiting for data, its first batch included."""
        return self.wait_s / self.total_s if self.total_s > 0 else None

    @property
    def images_per_second(self) -> float | None:
        """Of this rank."""
        return self.samples / self.total_s if self.total_s > 0 else None

    def _count_cpu(self, batches: Sequence[Any]) -> None:
        now = time.process_time()
        used = now - self._cpu_mark_s
        self._cpu_mark_s = now
        here = os.getpid()
        # Threads make batches ahead of the steps that take them: only over many steps do the two come out even.
        made = sum(batch.cost.on_cpu_s or 0.0 for batch in batches if batch.cost.process == here)
        self._interval.consumer_cpu_s += used - made

    def _add_compute(self, seconds: float) -> None:
        self.compute_s += seconds
        self._interval.compute_s += seconds
