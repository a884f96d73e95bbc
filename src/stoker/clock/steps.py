"""Where a step's time goes: waiting for data, computing, the rest."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stoker.clock.costs import BatchCost


class StepClock:
    """Adds up the parts of steps; about two microseconds a step.

    On a GPU `compute` is the time in which the CPU queued the work: events on the device come with the
    doctor. Waiting is what counts here, and that is a time of the CPU.
    """

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.wait_s = 0.0
        self.compute_s = 0.0
        self.total_s = 0.0
        self.first_wait_s: float | None = None
        """The first batch of an epoch: the pipeline was empty."""
        self.samples = 0
        self.steps = 0
        self.cost = BatchCost.zero()
        self._began = time.perf_counter()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        if self.first_wait_s is None:
            self.first_wait_s = took
        self.wait_s += took

    @contextmanager
    def computing(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.compute_s += time.perf_counter() - start

    def step_ends(self, batches: Sequence[Any]) -> None:
        """A step is over: counts it and what its batches had cost to make."""
        now = time.perf_counter()
        self.total_s = now - self._began
        self.steps += 1
        for batch in batches:
            self.samples += len(batch)
            self.cost.add(batch.cost)

    @property
    def wait_share(self) -> float | None:
        """Share of the time so far that was spent waiting for data."""
        return self.wait_s / self.total_s if self.total_s > 0 else None

    @property
    def images_per_second(self) -> float | None:
        """Of this rank."""
        return self.samples / self.total_s if self.total_s > 0 else None
