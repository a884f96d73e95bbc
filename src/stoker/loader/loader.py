"""The loader of any kind of data: it chooses the engine and watches for bad samples; and how fast it is by itself."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Generic, Literal

from stoker.core.console import Say
from stoker.io.cache import CopyPlace
from stoker.io.prefetch import HeldBack
from stoker.loader.batch import EnginePlan, LoaderSetup, Made, Maker, Quarantine
from stoker.loader.processes import ProcessEngine
from stoker.loader.threads import ThreadEngine
from stoker.profile.batch_costs import BatchCost

Engine = Literal["auto", "process", "thread"]
Follow = Callable[[int, int, bool | None, bool], None]
"""Called with each batch: the epoch, the position after it, whether the consumer had to wait for it (None if that is
not known), and whether it is the last of its epoch."""
DEFAULT_PREFETCH = 2
# A thread holds the GIL for a tenth of an image's time (results/interpreter_lock), more if the rest is fast: from
# about seven threads on they would wait for it. With two workers neither engine was ahead of the other by more than the
# rounds differ (results/loaders), and threads need neither /dev/shm nor a second to start.
MOST_THREADS = 6


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are made, apart from their content."""

    engine: Engine = "auto"
    workers: int = 0
    prefetch: int | None = None
    held: int = 1
    """Batches that the consumer holds when it asks for the next: with gradient accumulation, those of an update."""
    pin_memory: bool = False
    persistent_workers: bool = True
    worker_start: str = "auto"
    lookahead: int = 256_000_000
    copy: CopyPlace | None = None
    """The local copy that keeps what is read: a cache, or one that training fills."""
    max_object_bytes: int = 256_000_000
    max_bad_fraction: float = 0.01
    quarantine_file: Path | None = None

    @property
    def per_worker(self) -> int:
        """Batches in flight per worker."""
        return self.prefetch or DEFAULT_PREFETCH

    @property
    def readers(self) -> int:
        """Each worker process reads its own steps ahead; threads share one reader."""
        return max(1, self.workers) if choose_engine(self.engine, self.workers) == "process" else 1


class BatchLoader(Generic[Made]):
    """Yields the batches of any epoch, from any position."""

    def __init__(
        self,
        plan: EnginePlan,
        open_maker: Callable[[], Maker[Made]],
        quarantine: Quarantine,
        options: LoaderOptions,
        say: Say = lambda _line: None,
        follow: Follow | None = None,
    ) -> None:
        self._follow = follow
        self.engine = choose_engine(options.engine, options.workers)
        self.quarantine = quarantine
        self._steps = plan.steps
        self.batch_bytes = math.prod(plan.batch_shape)
        """Memory of one batch."""
        self._processes = options.workers
        self._engine: ThreadEngine[Made] | ProcessEngine[Made]
        if self.engine == "thread":
            self._engine = ThreadEngine(open_maker(), options, say)
        else:
            self._engine = ProcessEngine(plan, open_maker, options, say)

    def steps(self, start: int = 0) -> int:
        """Batches of an epoch, starting at a position."""
        return self._steps.count(start)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Made]:
        """The batches of an epoch in order, starting at a position; raises TooManyBad if too many samples are bad."""
        last, total = self.steps(start) - 1, self._steps.total_batch
        for number, batch in enumerate(self._engine.batches(epoch, start)):
            self.quarantine.admit(batch.bad, len(batch))
            if self._follow is not None:
                waited = self.ready() == 0 if self.workers else None
                self._follow(epoch, start + (number + 1) * total, waited, number == last)
            yield batch

    @property
    def workers(self) -> int:
        """Workers that make batches now; 0 if the consumer's own thread does."""
        return self._processes if self.setup is None else self.setup.workers

    @property
    def setup(self) -> LoaderSetup | None:
        """The loader's current limits, for `adjust`; None for worker processes, whose number is fixed."""
        return self._engine.setup if isinstance(self._engine, ThreadEngine) else None

    def adjust(self, setup: LoaderSetup) -> None:
        """Changes how many threads make batches, and how far ahead they read, from the next batch on. The order and
        content of batches stay the same. Call it from the thread that takes the batches."""
        assert isinstance(self._engine, ThreadEngine), "worker processes are started with their share of the steps"
        self._engine.adjust(setup)

    def held_back_by(self) -> HeldBack | None:
        """What keeps the reader from requesting more from its store at this moment; None if nothing does."""
        return self._engine.held_back_by() if isinstance(self._engine, ThreadEngine) else None

    @property
    def most_in_flight(self) -> int:
        """Batches in flight without a limit: workers x prefetch_factor."""
        return self._engine.most_in_flight

    @property
    def in_flight(self) -> int:
        """Batches in flight under the current limit."""
        return self._engine.in_flight

    def limit_prefetch(self, batches: int) -> None:
        """Limits the batches in flight from now on (at least one), and returns the memory of the others to the system
        as they are taken. The order and content of batches stay the same."""
        self._engine.limit(batches)

    def ready(self) -> int:
        """Batches that are made and wait for the consumer."""
        return self._engine.ready()

    def close(self) -> None:
        self._engine.close()


def choose_engine(wanted: Engine, workers: int, *, volumes: bool = False) -> Literal["process", "thread"]:
    """The wanted engine; for 'auto', threads as long as the GIL lets them run in parallel, else processes.

    For volumes always threads: copying voxels and decoding chunks happens without the GIL, and threads share one
    cache of chunks."""
    if wanted != "auto":
        return wanted
    return "thread" if volumes or workers <= MOST_THREADS else "process"


# The first batches include the start of the workers and an empty pipeline.
WARM_UP_BATCHES = 2


@dataclass(frozen=True)
class LoaderSpeed:
    """What a loader delivers to a consumer that takes no time."""

    workers: int
    images_per_second: float
    first_batch_s: float
    """From opening the loader to its first batch, start of the workers included."""
    cost: BatchCost
    """Sum over the counted batches."""
    images: int


def measure_loader(open_loader: Callable[[], BatchLoader[Any]], workers: int, seconds: float) -> LoaderSpeed:
    """Opens a loader and runs it for about `seconds` after its warm-up."""
    started = time.perf_counter()
    loader = open_loader()
    cost, images, first_batch_s, counted_from = BatchCost(), 0, 0.0, 0.0
    link = LinkBalance()
    try:
        skip = WARM_UP_BATCHES + max(1, workers)
        for number, batch in enumerate(chain.from_iterable(map(loader.epoch, count())), 1):
            now = time.perf_counter()
            link.take(batch.cost)
            if number == 1:
                first_batch_s = now - started
            if number == skip:
                counted_from = now
                link.begin()
            elif number > skip:
                images += len(batch)
                cost.add(batch.cost)
                if now - counted_from >= seconds:
                    break
        elapsed = time.perf_counter() - counted_from
    finally:
        loader.close()
    return LoaderSpeed(workers, link.share_that_came * images / elapsed, first_batch_s, cost, images)


LEAST_CAME = 0.01
"""Lowest share, if nothing arrived at all: a rate of zero could not be compared with others."""


class LinkBalance:
    """The bytes consumed, and the share of them that arrived over the link in the same time.

    A loader that reads far ahead has a store of samples when it begins, and hands them out at the speed of its cores:
    over 6 MB/s, a trial saw 377 images/s of 115 KB. They count only as far as others arrived to replace them.
    """

    def __init__(self) -> None:
        self._ready: dict[int, int] = {}
        self._at_first: dict[int, int] = {}
        self._consumed = 0

    def take(self, cost: BatchCost) -> None:
        """Counts a consumed batch; each process has its own store of samples."""
        self._ready[cost.process] = cost.ready_bytes
        self._at_first.setdefault(cost.process, cost.ready_bytes)
        self._consumed += cost.bytes_read

    def begin(self) -> None:
        self._at_first, self._consumed = dict(self._ready), 0

    @property
    def share_that_came(self) -> float:
        """At most 1: bytes beyond those consumed do not help."""
        if not self._consumed:
            return 1.0
        stored = sum(self._ready.values()) - sum(self._at_first.values())
        return min(1.0, max(LEAST_CAME, 1 + stored / self._consumed))
