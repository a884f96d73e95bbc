"""Batches made by threads of this process: nothing is pickled, copied or forked.

Decoders release Python's lock, so threads run in parallel while most of the work is decoding.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from stoker.core.console import Say
from stoker.core.priority import step_back
from stoker.io import outage
from stoker.io.prefetch import HeldBack
from stoker.loader.batch import Announcer, LoaderSetup, Made, Maker
from stoker.loader.buffers import BufferPool
from stoker.loader.loader_memory import beyond_flight

if TYPE_CHECKING:
    from stoker.loader.loader import LoaderOptions

Result = TypeVar("Result")

MOST_THREADS = 4096
"""The most that `num_workers` may ask for; a thread is only started when all others are busy."""


class WorkerPool(Generic[Result]):
    """Runs the jobs in the order in which they are submitted, with `size` threads at once."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pool = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="stoker-loader", initializer=step_back)
        self._lock = threading.Lock()
        self._asked: deque[tuple[Future[Result], Callable[[], Result]]] = deque()
        self._working = 0

    def submit(self, make: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        with self._lock:
            self._asked.append((future, make))
            self._call_threads()
        return future

    def resize(self, size: int) -> None:
        """From now on this many threads work at once; a surplus thread stops after its current job."""
        with self._lock:
            self._size = size
            self._call_threads()

    def close(self) -> None:
        with self._lock:
            while self._asked:
                self._asked.popleft()[0].cancel()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _call_threads(self) -> None:
        for _ in range(min(self._size - self._working, len(self._asked))):
            self._working += 1
            self._pool.submit(self._work)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._asked or self._working > self._size:
                    self._working -= 1
                    return
                future, make = self._asked.popleft()
            if future.set_running_or_notify_cancel():
                _fulfil(future, make)
            del future, make  # a buffer is free once nobody refers to it


def _fulfil(future: Future[Result], make: Callable[[], Result]) -> None:
    try:
        future.set_result(make())
    except BaseException as error:  # raised by the caller's `result()`
        future.set_exception(error)
        del future  # which the error's traceback would keep alive


class ThreadEngine(Generic[Made]):
    """Yields an epoch's batches in order, with `workers x prefetch` of them in flight."""

    def __init__(self, maker: Maker[Made], options: LoaderOptions, say: Say = lambda _line: None) -> None:
        self._maker = maker
        self.setup = LoaderSetup(options.workers, options.per_worker, options.lookahead, maker.reader.requests)
        self._beyond_flight = beyond_flight(options.held)
        self._limit: int | None = None
        self._most_so_far = self.most_in_flight
        self._buffers = BufferPool(pinned=options.pin_memory, say=say)
        self._pool: WorkerPool[Made] | None = None
        self._announcer: Announcer | None = None
        self._pending: deque[Future[Made]] = deque()

    @property
    def most_in_flight(self) -> int:
        return max(1, self.setup.workers * self.setup.prefetch)

    @property
    def in_flight(self) -> int:
        return self.most_in_flight if self._limit is None else min(self._limit, self.most_in_flight)

    def limit(self, batches: int) -> None:
        """Limits the batches in flight from now on; those already made are still yielded."""
        # A limit at the maximum is none: with more workers there may be more.
        self._limit = None if batches >= self.most_in_flight else max(1, batches)
        self._buffers.keep(self.in_flight + self._beyond_flight)

    def adjust(self, setup: LoaderSetup) -> None:
        """Applies this setup from now on; a limit on the batches in flight stays."""
        assert (setup.workers == 0) == (self.setup.workers == 0), "batches are made by threads, or in the consumer's"
        self.setup = setup
        self._most_so_far = max(self._most_so_far, self.most_in_flight)
        if self._pool is not None:
            self._pool.resize(setup.workers)
        if self._announcer is not None:
            self._announcer.budget = setup.lookahead_bytes
        self._maker.reader.allow(setup.lookahead_bytes, setup.requests)

    def held_back_by(self) -> HeldBack | None:
        """What keeps the reader from requesting more."""
        return self._maker.reader.held_back_by()

    def ready(self) -> int:
        return sum(future.done() for future in self._pending)

    def batches(self, epoch: int, start: int) -> Iterator[Made]:
        count = self._maker.plan.steps.count(start)
        announcer = self._announcer = Announcer(self._maker, epoch, start, count, self.setup.lookahead_bytes)
        if self.setup.workers == 0:
            try:
                for step in range(count):
                    announcer.before(step)
                    yield self._make(epoch, step, start)
            finally:
                self._maker.reader.forget()
            return
        if self._pool is None:
            self._pool = WorkerPool(self.setup.workers)
        stopped = threading.Event()
        pending = self._pending = deque()
        step = 0
        try:
            while step < count or pending:
                while step < count and len(pending) < self.in_flight:
                    announcer.before(step)
                    pending.append(self._pool.submit(partial(self._make_unless, stopped, epoch, step, start)))
                    step += 1
                yield pending.popleft().result()
                if self.in_flight < self._most_so_far:
                    self._buffers.keep(self.in_flight + self._beyond_flight)
        finally:
            # The consumer left early, or a batch failed: batches that have not begun must not be made.
            stopped.set()
            for future in pending:
                future.cancel()
            self._maker.reader.forget()

    def close(self) -> None:
        outage.leave()
        # First: a batch may be waiting for it.
        self._maker.reader.close()
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _make_unless(self, stopped: threading.Event, epoch: int, step: int, start: int) -> Made:
        if stopped.is_set():
            raise RuntimeError("the consumer left this epoch")  # never seen: its future was dropped
        return self._make(epoch, step, start)

    def _make(self, epoch: int, step: int, start: int) -> Made:
        batch = self._maker.make(epoch, step, start, self._buffers.get)
        batch.images = torch.from_numpy(batch.images)
        return batch
