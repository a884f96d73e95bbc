"""Simulates a loader and the loop that takes its batches, event by event, from measured times."""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from stoker.clock.observed import BatchTime, LoaderShape, Observed

# Simulates a loader and the loop that takes its batches, event by event.
#
# Torch's worker processes: batch i belongs to worker i mod w, `prefetch x w` batches are asked for ahead, and they are
# handed out in order, so that one slow batch holds up all behind it. Our threads: the next free one takes the next
# batch. Computing shares the cores: with more demand than cores everybody's computing stretches alike. Blocked time
# (storage, network) overlaps freely.

SLICES = 4
"""A batch waits and computes in turns. Against torch's loader four turns were as near as eight, one was not
(bench/what_if.py: with one, workers that started together stay in step and leave the cores idle together)."""


@dataclass(frozen=True)
class Work:
    """What a batch or a step needs, each thread for itself."""

    cpu_s: float
    blocked_s: float


@dataclass(frozen=True)
class Setup:
    """A loader and the cores that it may use."""

    workers: int
    """0: the loop makes its batches itself."""
    prefetch: int = 2
    round_robin: bool = True
    """Whether batch i belongs to worker i mod w (torch), or to whoever is free (our threads)."""
    cores: float = 1.0
    """May be a fraction: a quota, or what others leave over."""
    consumer_threads: float = 1.0
    """Cores that a step uses while it computes on the CPU."""


@dataclass(frozen=True)
class Simulated:
    """Steady state, the beginning left out."""

    batches_per_second: float
    wait_share: float


@dataclass
class _Thread:
    """A worker, or the consumer: the phases that are left of what it does."""

    number: int
    threads: float = 1.0
    phases: deque[tuple[bool, float]] | None = None
    batch: int = -1


def simulate(setup: Setup, batches: Sequence[Work], steps: Sequence[Work], *, warm_up: int | None = None) -> Simulated:
    """The rate at which batches are consumed; batch i is made with `batches[i]`, its step takes `steps[i mod n]`."""
    if setup.workers == 0:
        return _serial(batches, steps)
    skipped = len(batches) // 5 if warm_up is None else warm_up
    returned, waited = _Run(setup, batches, steps).returns()
    # Whole rounds of the workers: batches come in bursts of as many, and half a burst would count as slow or fast.
    rounds = (len(returned) - 1 - skipped) // setup.workers
    skipped = len(returned) - 1 - rounds * setup.workers if rounds else 0
    seconds = returned[-1] - returned[skipped]
    waiting = sum(waited[skipped + 1 :])
    if seconds <= 0:
        return Simulated(float("inf"), 0.0)
    return Simulated((len(returned) - 1 - skipped) / seconds, waiting / seconds)


def _serial(batches: Sequence[Work], steps: Sequence[Work]) -> Simulated:
    making = sum(work.cpu_s + work.blocked_s for work in batches)
    stepping = sum(steps[i % len(steps)].cpu_s + steps[i % len(steps)].blocked_s for i in range(len(batches)))
    seconds = making + stepping
    return Simulated(len(batches) / seconds if seconds else float("inf"), making / seconds if seconds else 0.0)


class _Run:
    """One simulation. Computing is counted in shared time: it passes more slowly while the cores are short, the same
    for all, so that the next to finish is always on top of a heap."""

    def __init__(self, setup: Setup, batches: Sequence[Work], steps: Sequence[Work]) -> None:
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
        self.waiting_since: float | None = 0.0

    def returns(self) -> tuple[list[float], list[float]]:
        """When each batch was handed to the loop, and how long the loop had stood waiting for it."""
        returned: list[float] = []
        waited: list[float] = []
        for _ in range(self.setup.workers * self.setup.prefetch):
            self._ask()
        while len(returned) < len(self.works):
            if self.waiting_since is not None and self.wanted in self.ready:
                self.ready.remove(self.wanted)
                returned.append(self.now)
                waited.append(self.now - self.waiting_since)
                self.waiting_since = None
                if self.setup.round_robin:
                    self._ask()
                self._begin(self.consumer, self.steps[self.wanted % len(self.steps)])
                self.wanted += 1
                continue
            thread = self._next_event()
            if thread.phases:
                self._next_phase(thread)
            elif thread is self.consumer:
                self.waiting_since = self.now
                if not self.setup.round_robin:
                    self._ask()  # our threads are given the next batch when the loop comes back for one
            else:
                self.ready.add(thread.batch)
                self.idle.add(thread.number)
                self._take(thread.number)
        return returned, waited

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

    def _begin(self, thread: _Thread, work: Work) -> None:
        thread.phases = deque(_phases(work))
        self._next_phase(thread)

    def _next_phase(self, thread: _Thread) -> None:
        assert thread.phases is not None
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


def _phases(work: Work) -> Iterator[tuple[bool, float]]:
    turns = SLICES if work.cpu_s > 0 and work.blocked_s > 0 else 1
    for _ in range(turns):
        if work.blocked_s > 0:
            yield False, work.blocked_s / turns
        if work.cpu_s > 0:
            yield True, work.cpu_s / turns


# A loader and its consumer as a simulation takes them: what was measured of each batch and each step.

FEWEST_BATCHES = 8
"""Below that a mean says little; the doctor stays silent."""


@dataclass(frozen=True)
class Model:
    """What the simulation needs to know, from an observation."""

    setup: Setup
    batches: tuple[Work, ...]
    steps: tuple[Work, ...]
    images_per_second: float
    fetching: tuple[Work, ...] | None = None
    """Of each batch what went into getting its bytes: on a core by threads beside the workers, and blocked. None where
    the stages are not known."""
    fetched_bytes: tuple[float, ...] | None = None
    most_batches_per_second: float | None = None
    """What storage can give at most, however many workers ask."""


def model_of(observed: Observed) -> Model | None:
    """The observation as the simulation takes it; None where too little of it was measured."""
    rate, shape = observed.images_per_second, observed.loader
    known = [b for b in observed.batches if b.cpu_s is not None and b.blocked_s is not None]
    if rate is None or shape is None or len(known) < FEWEST_BATCHES or not observed.steps_s:
        return None
    cpus = float(observed.host.cpus) if observed.host is not None else float(max(1, shape.workers))
    batches = tuple(Work(b.cpu_s or 0.0, b.blocked_s or 0.0) for b in known)
    worker_cpu = sum(work.cpu_s for work in batches) / len(batches)
    batches_per_second = observed.steps / observed.elapsed_s
    used_cpu = _step_cpu(observed, worker_cpu, cpus)
    mean_step = max(1e-9, statistics.fmean(observed.steps_s))
    step_cpu = _own_cpu(observed, shape, used_cpu, cpus * mean_step)
    # With batches that are there already nobody else uses the cores: the step as it is by itself.
    alone = _alone(observed, mean_step)
    threads = max(1.0, step_cpu / mean_step)
    share = min(1.0, step_cpu / threads / mean_step)
    handover = _handover(observed)
    steps = tuple(
        Work(handover + alone * seconds * share, alone * seconds * (1 - share)) for seconds in observed.steps_s
    )
    others = _others(observed, worker_cpu + used_cpu, batches_per_second)
    fetching = _fetching(known, used_cpu - step_cpu)
    if fetching is not None:
        # What threads compute for a worker that waits for them, they compute on the core that it leaves.
        batches = tuple(Work(b.cpu_s + f.cpu_s, b.blocked_s - f.cpu_s) for b, f in zip(batches, fetching, strict=True))
    return Model(
        setup=Setup(
            workers=shape.workers,
            prefetch=shape.prefetch or 2,
            round_robin=shape.engine == "process" or (shape.engine == "main" and observed.source == "script"),
            cores=max(0.5, cpus - others),
            consumer_threads=threads,
        ),
        batches=batches,
        steps=steps,
        images_per_second=rate,
        fetching=fetching,
        fetched_bytes=_fetched_bytes(observed, [b.samples for b in known]),
        most_batches_per_second=_storage_limit(observed),
    )


def _own_cpu(observed: Observed, shape: LoaderShape, used_cpu: float, most_cpu: float) -> float:
    """What the loop itself computes in a step. Threads that fetch may live in the same process: the loop computes only
    while it does not wait, and a consumer that keeps a pace not at all; the rest is theirs."""
    if shape.engine == "process":
        return used_cpu
    return 0.0 if observed.pace_images_per_second is not None else min(used_cpu, most_cpu)


def _fetching(batches: Sequence[BatchTime], threads_cpu: float) -> tuple[Work, ...] | None:
    blocked = [min(batch.blocked_s or 0.0, batch.fetch_s) for batch in batches if batch.fetch_s is not None]
    if len(blocked) < len(batches):
        return None
    own = [min(threads_cpu, seconds) for seconds in blocked]
    return tuple(Work(cpu, seconds - cpu) for cpu, seconds in zip(own, blocked, strict=True))


def _alone(observed: Observed, mean_step: float) -> float:
    """What the ceiling says of a step's length, beside what was seen with workers around."""
    if not observed.ceiling_images_per_second or not observed.steps:
        return 1.0
    return min(1.0, observed.samples / observed.steps / observed.ceiling_images_per_second / mean_step)


def _step_cpu(observed: Observed, worker_cpu: float, cpus: float) -> float:
    """CPU seconds of the loop itself in one step. Not seen: what a loop without an accelerator computes, it computes
    on a core; with one it mostly waits."""
    steps = max(1, observed.steps)
    if observed.consumer_cpu_s is not None:
        return observed.consumer_cpu_s / steps
    accelerated = observed.accelerator is not None and bool(observed.accelerator.name or observed.accelerator.count)
    if accelerated:
        return 0.0
    busy = observed.host.cpu_busy_share if observed.host is not None else None
    if busy is None:
        return 0.0
    used = busy * cpus * observed.elapsed_s / steps - worker_cpu
    return max(0.0, min(used, cpus * statistics.fmean(observed.steps_s)))


def _others(observed: Observed, ours_a_batch: float, batches_per_second: float) -> float:
    """Cores that other programs took meanwhile."""
    if observed.host is None or observed.host.cpu_busy_share is None or observed.consumer_cpu_s is None:
        return 0.0
    return max(0.0, observed.host.cpu_busy_share * observed.host.cpus - ours_a_batch * batches_per_second)


def _handover(observed: Observed) -> float:
    """What taking a batch costs that is there already: the shortest waits, where they are short enough to be that."""
    if not observed.waits_s:
        return 0.0
    shortest = sorted(observed.waits_s)[len(observed.waits_s) // 10]
    return shortest if shortest < 0.1 * statistics.fmean(observed.steps_s) else 0.0


def _fetched_bytes(observed: Observed, samples: Sequence[int]) -> tuple[float, ...] | None:
    each = observed.storage.bytes_per_sample if observed.storage is not None else None
    return None if each is None else tuple(each * count for count in samples)


def _storage_limit(observed: Observed) -> float | None:
    storage = observed.storage
    if storage is None or not storage.parallel_bytes_per_second or not storage.bytes_per_sample or not observed.steps:
        return None
    if storage.remote is False:
        return None  # what is read twice comes from the page cache: the cold rate binds only the first epoch
    return storage.parallel_bytes_per_second / (storage.bytes_per_sample * observed.samples / observed.steps)
