"""Copies files with threads: from folders and mounts, and from stores that are read through obstore."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from stoker.data.store.copy_manifest import CopiedFile
from stoker.data.store.local_copy import LocalCopy, PartialFile
from stoker.data.store.stores import ReadFailure
from stoker.stage.concurrency import Concurrency, RateLimit
from stoker.stage.records import Events, SourceFile, Tick, writing
from stoker.stage.sources import Source

MOST_THREADS = 64
PART_BYTES = 8 << 20
_TICK_S = 0.25


@dataclass(eq=False)
class _Large:
    """A file that is written in parts."""

    file: SourceFile
    partial: PartialFile
    left: int
    failure: ReadFailure | None = None


@dataclass(eq=False)
class _Task:
    file: SourceFile
    start: int
    end: int
    large: _Large | None = None


class ThreadCopy:
    """Copies files of one source into a local copy."""

    def __init__(
        self, source: Source, copy: LocalCopy, events: Events, concurrency: Concurrency, rate: RateLimit
    ) -> None:
        self._source, self._copy, self._events = source, copy, events
        self._concurrency, self._rate = concurrency, rate
        self._lock = threading.Lock()

    def run(self, files: Iterator[SourceFile], tick: Tick) -> None:
        """Copies all files; those that fail are told to `events`. Raises StoreDown if the whole store fails."""
        tasks = self._tasks(files)
        running: dict[Future[CopiedFile | None], _Task] = {}
        next_tick, more = 0.0, True
        open_files: set[_Large] = set()
        pool = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="stoker-stage")
        try:
            while more or running:
                while more and len(running) < min(self._concurrency.limit, MOST_THREADS) and not self._rate.wait_s():
                    task = next(tasks, None)
                    if task is None:
                        more = False
                        break
                    if task.large is not None:
                        open_files.add(task.large)
                    self._rate.take(task.end - task.start)
                    running[pool.submit(self._copy_one, task)] = task
                if time.monotonic() >= next_tick:
                    next_tick = time.monotonic() + _TICK_S
                    tick()
                ended, _ = wait(running, _TICK_S if running else self._rate.wait_s(), FIRST_COMPLETED)
                if not running:
                    time.sleep(self._rate.wait_s())
                for future in ended:
                    self._ended(running.pop(future), future)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
            for large in open_files:
                large.partial.abandon()

    def _tasks(self, files: Iterator[SourceFile]) -> Iterator[_Task]:
        for file in files:
            try:
                if file.size <= 2 * PART_BYTES:
                    self._copy.check(file.path)
                    yield _Task(file, 0, file.size)
                    continue
                with writing(self._copy):
                    partial = self._copy.create(file.path, file.size)
            except ReadFailure as failure:
                self._events.failed(file, str(failure))
                continue
            starts = range(0, file.size, PART_BYTES)
            large = _Large(file, partial, len(starts))
            for start in starts:
                yield _Task(file, start, min(start + PART_BYTES, file.size), large)

    def _copy_one(self, task: _Task) -> CopiedFile | None:
        """Copies one file or part; the record of the file if that made it complete."""
        large = task.large
        try:
            if large is None or large.failure is None:
                data = self._source.read(task.file, task.start, task.end)
                with writing(self._copy):
                    if large is None:
                        return self._copy.put(task.file.path, data, task.file.version)
                    large.partial.write_at(task.start, data)
        except ReadFailure as failure:
            if large is None:
                raise
            large.failure = failure
        assert large is not None
        with self._lock:
            large.left -= 1
            last = large.left == 0
        if not last:
            return None
        if large.failure is not None:
            large.partial.abandon()
            raise large.failure
        with writing(self._copy):
            return large.partial.finish(task.file.version)

    def _ended(self, task: _Task, future: Future[CopiedFile | None]) -> None:
        try:
            record = future.result()
        except ReadFailure as failure:
            self._events.failed(task.file, str(failure))
            return
        self._concurrency.done(task.end - task.start)
        if record is not None:
            self._events.done(task.file, record)
