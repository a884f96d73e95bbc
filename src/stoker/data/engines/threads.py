"""Batches made by threads of this process: nothing is pickled, copied or forked.

Decoders release Python's lock, so threads run in parallel while most of the work is decoding.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic

import torch

from stoker.console import Say
from stoker.data.engines.buffers import BufferPool
from stoker.data.engines.making import Announcer, Made, Maker, beyond_flight
from stoker.data.priority import step_back
from stoker.data.store import outage


class ThreadEngine(Generic[Made]):
    """Yields an epoch's batches in order, with `workers x prefetch` of them in flight."""

    def __init__(
        self,
        maker: Maker[Made],
        *,
        workers: int,
        prefetch: int,
        pin_memory: bool,
        lookahead: int,
        held: int = 1,
        say: Say = lambda _line: None,
    ) -> None:
        self._maker = maker
        self._workers = workers
        self._beyond_flight = beyond_flight(held)
        self.most_in_flight = self.in_flight = max(1, workers * prefetch)
        self._buffers = BufferPool(pinned=pin_memory, say=say)
        self._lookahead = lookahead
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[Made]] = deque()

    def limit(self, batches: int) -> None:
        """Limits the batches in flight from now on; those already made are still yielded."""
        self.in_flight = max(1, min(batches, self.most_in_flight))
        self._buffers.keep(self.in_flight + self._beyond_flight)

    def ready(self) -> int:
        """Batches that are made and wait for the consumer."""
        return sum(future.done() for future in self._pending)

    def batches(self, epoch: int, start: int) -> Iterator[Made]:
        """The batches of an epoch, starting at a position."""
        count = self._maker.plan.steps.count(start)
        announcer = Announcer(self._maker, epoch, start, count, self._lookahead, stride=1, first=0)
        if self._workers == 0:
            try:
                for step in range(count):
                    announcer.before(step)
                    yield self._make(epoch, step, start)
            finally:
                self._maker.reader.forget()
            return
        pool = self._threads()
        stopped = threading.Event()
        pending = self._pending = deque()
        step = 0
        try:
            while step < count or pending:
                while step < count and len(pending) < self.in_flight:
                    announcer.before(step)
                    pending.append(pool.submit(self._make_unless, stopped, epoch, step, start))
                    step += 1
                yield pending.popleft().result()
                if self.in_flight < self.most_in_flight:
                    self._buffers.keep(self.in_flight + self._beyond_flight)
        finally:
            # The consumer left early, or a batch failed: batches that are not begun must not be made.
            stopped.set()
            for future in pending:
                future.cancel()
            self._maker.reader.forget()

    def close(self) -> None:
        """Ends the threads, after the batches they are making; waits no longer for a store that does not respond."""
        outage.leave()
        # First: a batch may be waiting for it.
        self._maker.reader.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="stoker-loader", initializer=step_back)
        return self._pool

    def _make_unless(self, stopped: threading.Event, epoch: int, step: int, start: int) -> Made:
        if stopped.is_set():
            raise RuntimeError("the consumer left this epoch")  # never seen: its future was dropped
        return self._make(epoch, step, start)

    def _make(self, epoch: int, step: int, start: int) -> Made:
        batch = self._maker.make(epoch, step, start, self._buffers.get)
        batch.images = torch.from_numpy(batch.images)
        return batch
