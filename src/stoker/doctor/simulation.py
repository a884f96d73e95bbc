"""Simulates a loader and the loop that takes its batches, event by event.

Torch's worker processes: batch i belongs to worker i mod w, `prefetch x w` batches are requested ahead, and they are
handed out in order, so one slow batch holds up all behind it. Our threads: the next free one takes the next batch.
Computing shares the cores: with more demand than cores, all computing slows down alike. Blocked time (storage, network)
overlaps freely.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

SLICES = 4
"""A batch waits and computes in turns. Compared with torch's loader four turns were as accurate as eight, one was not
(bench/what_if.py: with one, workers that started together stay in step and leave the cores idle together)."""


@dataclass(frozen=True)
class ThreadWork:
    """What a batch or a step needs, per thread."""

    cpu_s: float
    blocked_s: float


@dataclass(frozen=True)
class Setup:
    """A loader and the cores that it may use."""

    workers: int
    """0: the loop prepares its own batches."""
    prefetch: int = 2
    round_robin: bool = True
    """Whether batch i belongs to worker i mod w (torch), or to the next free one (our threads)."""
    cores: float = 1.0
    """May be a fraction: a quota, or what other programs leave."""
    consumer_threads: float = 1.0
    """Cores that a step uses while it computes on the CPU."""


@dataclass
class _Thread:
    """A worker, or the consumer, with its remaining phases."""

    number: int
    threads: float = 1.0
    phases: deque[tuple[bool, float]] = field(default_factory=deque)
    """Whether it computes, and seconds."""
    batch: int = -1


def simulate(setup: Setup, batches: Sequence[ThreadWork], steps: Sequence[ThreadWork]) -> float:
    """Batches that are consumed per second; batch i needs `batches[i]`, its step needs `steps[i mod n]`."""
    if setup.workers == 0:
        making = sum(work.cpu_s + work.blocked_s for work in batches)
        stepping = sum(steps[i % len(steps)].cpu_s + steps[i % len(steps)].blocked_s for i in range(len(batches)))
        return len(batches) / (making + stepping) if making + stepping else float("inf")
    skipped = len(batches) // 5
    returned = _Simulation(setup, batches, steps).returns()
    # Whole rounds of the workers: batches come in bursts of as many, and half a burst would count as slow or fast.
    rounds = (len(returned) - 1 - skipped) // setup.workers
    skipped = len(returned) - 1 - rounds * setup.workers if rounds else 0
    seconds = returned[-1] - returned[skipped]
    return (len(returned) - 1 - skipped) / seconds if seconds > 0 else float("inf")


class _Simulation:
    """One simulation. Computing is counted in shared time, which passes more slowly while the cores are short, the same
    for all, so that the next to finish is always on top of a heap."""

    def __init__(self, setup: Setup, batches: Sequence[ThreadWork], steps: Sequence[ThreadWork]) -> None:
        self.setup = setup
        self.works = batches
        self.steps = steps
        self.now = 0.0
        self.shared = 0.0
        self.demand = 0.0
        self.sequence = 0
        self.computing: list[tuple[float, int, _Thread]] = []
        self.blocked: list[tuple[float, int, _Thread]] = []
        self.workers = [_Thread(number) for number in range(setup.workers)]
        self.consumer = _Thread(-1, setup.consumer_threads)
        self.queues: list[deque[int]] = [deque() for _ in range(setup.workers if setup.round_robin else 1)]
        self.idle = set(range(setup.workers))
        self.asked = 0
        self.ready: set[int] = set()
        self.wanted = 0
        self.waits = True

    def returns(self) -> list[float]:
        """When each batch was handed to the loop."""
        returned: list[float] = []
        for _ in range(self.setup.workers * self.setup.prefetch):
            self._ask()
        while len(returned) < len(self.works):
            if self.waits and self.wanted in self.ready:
                self.ready.remove(self.wanted)
                returned.append(self.now)
                self.waits = False
                if self.setup.round_robin:
                    self._ask()
                self._begin(self.consumer, self.steps[self.wanted % len(self.steps)])
                self.wanted += 1
                continue
            thread = self._next_event()
            if thread.phases:
                self._next_phase(thread)
            elif thread is self.consumer:
                self.waits = True
                if not self.setup.round_robin:
                    self._ask()  # our threads are given the next batch when the loop comes back for one
            else:
                self.ready.add(thread.batch)
                self.idle.add(thread.number)
                self._take(thread.number)
        return returned

    def _ask(self) -> None:
        if self.asked >= len(self.works):
            return
        if self.setup.round_robin:
            worker = self.asked % self.setup.workers
            self.queues[worker].append(self.asked)
        else:
            self.queues[0].append(self.asked)
            worker = min(self.idle, default=-1)
        self.asked += 1
        if worker in self.idle:
            self._take(worker)

    def _take(self, number: int) -> None:
        queue = self.queues[number if self.setup.round_robin else 0]
        if queue:
            self.idle.discard(number)
            worker = self.workers[number]
            worker.batch = queue.popleft()
            self._begin(worker, self.works[worker.batch])

    def _begin(self, thread: _Thread, work: ThreadWork) -> None:
        turns = SLICES if work.cpu_s > 0 and work.blocked_s > 0 else 1
        turn = ((False, work.blocked_s / turns), (True, work.cpu_s / turns))
        thread.phases = deque([phase for phase in turn if phase[1] > 0] * turns)
        self._next_phase(thread)

    def _next_phase(self, thread: _Thread) -> None:
        computes, seconds = thread.phases.popleft() if thread.phases else (False, 0.0)
        self.sequence += 1
        if computes:
            self.demand += thread.threads
            heapq.heappush(self.computing, (self.shared + seconds, self.sequence, thread))
        else:
            heapq.heappush(self.blocked, (self.now + seconds, self.sequence, thread))

    def _next_event(self) -> _Thread:
        rate = min(1.0, self.setup.cores / self.demand) if self.demand > 0 else 1.0
        computed = self.now + (self.computing[0][0] - self.shared) / rate if self.computing else float("inf")
        woken = self.blocked[0][0] if self.blocked else float("inf")
        if computed <= woken:
            self.shared, _, thread = heapq.heappop(self.computing)
            self.now = max(self.now, computed)
            self.demand = max(0.0, self.demand - thread.threads) if self.computing else 0.0
        else:
            self.shared += (woken - self.now) * rate
            self.now, _, thread = heapq.heappop(self.blocked)
        return thread
