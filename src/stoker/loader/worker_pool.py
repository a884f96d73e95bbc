"""Threads that make batches; how many of them work at once can change at any time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from stoker.core.priority import step_back

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
        """Submits one more job; a thread runs it when its turn comes."""
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
        """Ends the threads after their current jobs."""
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
        result = make()
    except BaseException as error:  # raised by the caller's `result()`
        future.set_exception(error)
        del future  # which the error's traceback would keep alive
    else:
        future.set_result(result)
