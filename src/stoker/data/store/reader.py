"""Reads samples before they are needed: their order is known, so they can be fetched while others are decoded.

Read-ahead is bounded by bytes. If reads do not block, as from a warm page cache, the calling thread reads: handing a
sample from thread to thread costs more than such a read.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.data.images.sample_index import SampleIndex, decode_name
from stoker.data.priority import step_back
from stoker.data.store import outage
from stoker.data.store.blocking import Blocking
from stoker.data.store.stores import Buffer, ReadFailure, Store, StoreDown

Found: TypeAlias = Buffer | ReadFailure
Indices = NDArray[np.int64]
HeldBack = Literal["lookahead_bytes", "requests"]
"""What keeps a reader from asking its store for more at this moment."""

# The first reads of each call are timed, and every n-th read of a thread that reads ahead.
TIMED_READS = 4
TIMED_EVERY = 8
# Disks and network mounts gain little from more threads; object stores use `max_in_flight`.
LOCAL_THREADS = 16
# ImageNet's mean; corrected by what is read, and not used if the index has sizes.
FIRST_ESTIMATE_BYTES = 110_000
# A whole epoch may be announced at once; only this many of its indices are Python objects at any time.
_PIECE = 1024
CLOSING_S = 5.0
# Threads whose store does not respond end with the process.
CLOSING_IN_OUTAGE_S = 0.5
# Nothing is waited for while the lock is held, so after this time it is this very thread that holds it.
LOCK_OF_MINE_S = 1.0
NEARLY_ALL = 0.75


class _Place(NamedTuple):
    path: str
    offset: int
    size: int | None


class _Read:
    """A sample that is being read, or has been."""

    __slots__ = ("found", "held", "index", "waiters", "wanted")

    def __init__(self, index: int, held: int = 0) -> None:
        self.index = index
        self.found: Found | BaseException | None = None
        self.held = held
        """Its bytes in the budget: estimated until it is read, none once it is taken."""
        self.wanted = 1
        """How often it is announced: repeats of a sample are neighbours."""
        self.waiters: list[_Waiter] = []


class _Waiter:
    """One `take` that waits until the last of its reads is done."""

    __slots__ = ("done", "left")

    def __init__(self) -> None:
        self.left = 0
        self.done = threading.Event()


class Reader:
    """Reads samples from a store, ahead of time where that helps; for one process and all its threads."""

    def __init__(self, store: Store, samples: SampleIndex, *, lookahead_bytes: int, max_in_flight: int = 64) -> None:
        self._store = store
        self._samples = samples
        self._names = np.asarray(samples.name_bytes).data
        self._budget = lookahead_bytes
        self._most_threads = max_in_flight if store.is_remote else min(max_in_flight, LOCAL_THREADS)
        self._blocking = Blocking(store.is_remote)
        self._reads_remotely = store.is_remote
        self._mean_bytes = float(FIRST_ESTIMATE_BYTES)

        self._lock = threading.Lock()
        self._work_to_do = threading.Condition(self._lock)
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._announced = Announced()
        self._urgent: deque[_Read] = deque()
        self._in_flight: set[_Read] = set()
        self._ahead: dict[int, _Read] = {}
        self._held = self._ready = 0
        self._forgets_later = False
        self._failure: BaseException | None = None
        self._process = os.getpid()
        _open_readers.add(self)

    @property
    def buffered_bytes(self) -> int:
        """Bytes of samples that are read, or being read, and not yet taken."""
        return self._held

    @property
    def ready_bytes(self) -> int:
        """Bytes of samples that are read and not yet taken."""
        return self._ready

    @property
    def requests(self) -> int:
        """Reads under way at once, if reads block."""
        return self._most_threads

    def allow(self, lookahead_bytes: int, requests: int) -> None:
        """Changes how much is read ahead, from the next read on; threads that are too many stay idle."""
        with self._lock:
            self._budget, self._most_threads = lookahead_bytes, requests
            self._wake_a_thread()

    def held_back_by(self) -> HeldBack | None:
        """What keeps it from asking for more: its bytes are full, or all requests are under way."""
        with self._lock:
            if not self._blocking.blocks:
                return None
            index = self._announced.first()
            if index is None and not self._urgent:
                # Everything that was announced is under way: announcing more takes more bytes.
                return "lookahead_bytes" if self._in_flight else None
            # Answers come in bursts: a moment later the next requests are under way.
            if len(self._in_flight) >= NEARLY_ALL * self._most_threads:
                return "requests"
            full = index is not None and self._held and self._held + self._size(index) > self._budget
            return "lookahead_bytes" if full else None

    @property
    def mean_bytes(self) -> float:
        """Estimated mean size of a sample."""
        return self._mean_bytes

    def expect(self, indices: Indices) -> None:
        """Announces samples that will be taken later, in this order; returns at once."""
        with self._lock:
            if self._forgets_later:
                self._forget()
            if self._reads_remotely and getattr(self._store, "is_local_now", False):
                # A local copy is complete. Waits for Python's lock among the threads that read ahead would look like a
                # slow disk, and keep them going: a second epoch was 0.83 of a folder's rate, probably for this reason.
                self._reads_remotely, self._blocking = False, Blocking(False)
            self._announced.add(np.array(indices, np.int64))
            self._wake_a_thread()

    def take(self, indices: Indices) -> list[Found]:
        """The samples' bytes in order, or for each the failure; waits for what has not arrived yet."""
        assert os.getpid() == self._process, "a reader belongs to the process that made it"
        wanted: list[int] = indices.tolist()
        waiter = _Waiter()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            reads, missing = self._claim(wanted, waiter)
            in_pool = self._blocking.blocks
            if in_pool:
                self._put_first(missing, reads, waiter)
        found: dict[int, Found | BaseException | None] = {}
        if not in_pool:
            self._read_here(missing, found, reads, waiter)
        if waiter.left:
            waiter.done.wait()
        for index, read in reads.items():
            found[index] = read.found
        results: list[Found] = []
        for index in wanted:
            result = found[index]
            if isinstance(result, BaseException) and not isinstance(result, ReadFailure):
                raise result
            assert result is not None
            results.append(result)
        return results

    def forget(self) -> None:
        """Drops what was announced and not taken: the epoch ended, or the consumer left it."""
        # Python's collector may end an abandoned epoch anywhere, even in a thread that holds this lock.
        if not self._lock.acquire(timeout=LOCK_OF_MINE_S):
            self._forgets_later = True
            return
        try:
            self._forget()
        finally:
            self._lock.release()

    def _forget(self) -> None:
        self._forgets_later = False
        self._announced.clear()
        for read in self._ahead.values():
            # A read in flight keeps its share of the budget until it ends: its memory is in use.
            if read.found is not None:
                self._held -= read.held
                self._ready -= read.held
            read.wanted = 0
        self._ahead.clear()

    def close(self) -> None:
        """Ends the threads; a `take` that waits raises an error."""
        self.forget()
        with self._lock:
            self._give_up(RuntimeError("the reader was closed"))
        deadline = time.monotonic() + (CLOSING_IN_OUTAGE_S if outage.is_left() else CLOSING_S)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        _open_readers.discard(self)

    def _claim(self, wanted: list[int], waiter: _Waiter) -> tuple[dict[int, _Read], list[int]]:
        """Splits the wanted samples into those read or being read, and the missing ones; call with the lock held."""
        reads: dict[int, _Read] = {}
        missing: dict[int, None] = {}
        announced, ahead = self._announced, self._ahead
        for index in wanted:
            read = ahead.get(index)
            if read is None:
                announced.take_out(index)
                if index not in reads:
                    missing[index] = None
                continue
            if index not in reads:
                reads[index] = read
                if read.found is None:
                    read.waiters.append(waiter)
                    waiter.left += 1
            read.wanted -= 1
            if read.wanted == 0:
                del ahead[index]
                self._held -= read.held
                self._ready -= 0 if read.found is None else read.held
                read.held = 0
        self._wake_a_thread()
        return reads, [index for index in missing if index not in reads]

    def _put_first(self, missing: list[int], reads: dict[int, _Read], waiter: _Waiter) -> None:
        """Puts what is needed now before everything read ahead, regardless of the budget; call with the lock held."""
        if self._failure is not None:  # since `take` began: no thread will read it
            raise self._failure
        if missing and not waiter.left:
            waiter.done.clear()  # what it waited for before may have come in the meantime
        for index in missing:
            read = reads[index] = _Read(index)
            read.waiters.append(waiter)
            waiter.left += 1
            self._urgent.append(read)
        self._wake_a_thread()

    def _read_here(
        self,
        missing: list[int],
        found: dict[int, Found | BaseException | None],
        reads: dict[int, _Read],
        waiter: _Waiter,
    ) -> None:
        for count, place in enumerate(self._places(missing)):
            if count >= TIMED_READS:
                found[missing[count]] = self._read(place)
                continue
            found[missing[count]] = self._read_timed(place)
            if self._blocking.blocks:
                with self._lock:
                    self._put_first(missing[count + 1 :], reads, waiter)
                return

    def _work(self) -> None:
        step_back()
        count = 0
        while (read := self._next_read()) is not None:
            result: Found | BaseException
            try:
                place = next(self._places([read.index]))
                result = self._read(place) if count % TIMED_EVERY else self._read_timed(place)
            except BaseException as error:  # raised by the `take` of this sample
                result = error
            count += 1
            with self._lock:
                self._hand_over(read, result)
            del read, result

    def _next_read(self) -> _Read | None:
        with self._lock:
            while self._failure is None:
                read = None
                if len(self._in_flight) < self._most_threads:
                    read = self._urgent.popleft() if self._urgent else self._next_ahead()
                if read is not None:
                    self._in_flight.add(read)
                    self._wake_a_thread()
                    return read
                self._idle += 1
                self._work_to_do.wait()
                self._idle -= 1
        return None

    def _next_ahead(self) -> _Read | None:
        if not self._blocking.blocks:
            return None
        while True:
            index = self._announced.first()
            if index is None:
                return None
            known = self._ahead.get(index)
            if known is not None:
                known.wanted += 1
                self._announced.drop_first()
                continue
            size = self._size(index)
            # A sample larger than the whole budget is read alone.
            if self._held and self._held + size > self._budget:
                return None
            self._announced.drop_first()
            self._held += size
            read = self._ahead[index] = _Read(index, held=size)
            return read

    def _wake_a_thread(self) -> None:
        """Wakes or starts one thread; each that finds work wakes the next, until there is no more work."""
        if not self._urgent and not (self._blocking.blocks and self._announced.first() is not None):
            return
        if self._idle:
            self._work_to_do.notify()
        elif len(self._threads) < self._most_threads:
            thread = threading.Thread(target=self._work, name="stoker-reader", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _hand_over(self, read: _Read, result: Found | BaseException) -> None:
        self._in_flight.discard(read)
        if isinstance(result, StoreDown):
            # No other read will succeed either: fail at once, not sample after sample.
            self._give_up(result)
        if not isinstance(result, BaseException):
            self._mean_bytes += (len(result) - self._mean_bytes) / 32
        if read.held:
            size = 0 if isinstance(result, BaseException) else len(result)
            self._held += (size if read.wanted else 0) - read.held
            read.held = size if read.wanted else 0
            self._ready += read.held
        _answer(read, result)

    def _give_up(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
            while self._urgent:
                self._hand_over(self._urgent.popleft(), failure)
            # A read in flight may be waiting for its store, for minutes; whoever wants it must not.
            for read in self._in_flight:
                _answer(read, failure)
            self._work_to_do.notify_all()

    def _read(self, place: _Place) -> Found:
        try:
            return self._store.read(place.path, place.offset, place.size, whole=self._samples.shard_of is None)
        except ReadFailure as failure:
            return failure.with_traceback(None)

    def _read_timed(self, place: _Place) -> Found:
        # What a cache in front of a remote store did not have to fetch counts as local.
        before = self._fetches()
        return self._blocking.timed(lambda: self._read(place), lambda: self._fetches() != before)

    def _size(self, index: int) -> int:
        """Bytes of a sample; estimated if the index has no sizes."""
        sizes = self._samples.sizes
        return int(self._mean_bytes) if sizes is None else int(sizes[index])

    def _fetches(self) -> int:
        return getattr(self._store, "fetches", 0)

    def _places(self, wanted: list[int]) -> Iterator[_Place]:
        """Where the samples are; looked up for a whole batch at once, because single array elements are slow."""
        samples, indices = self._samples, np.array(wanted, np.int64)
        sizes = [None] * len(wanted) if samples.sizes is None else samples.sizes[indices].tolist()
        if samples.shard_of is not None and samples.offsets is not None:
            shards, offsets = samples.shard_of[indices].tolist(), samples.offsets[indices].tolist()
            for shard, offset, size in zip(shards, offsets, sizes, strict=True):
                yield _Place(samples.shards[shard], offset, size)
            return
        ends = samples.name_ends[indices].tolist()
        starts = np.where(indices > 0, samples.name_ends[indices - 1], 0).tolist()
        for start, end, size in zip(starts, ends, sizes, strict=True):
            yield _Place(decode_name(bytes(self._names[start:end])), 0, size)


def _answer(read: _Read, result: Found | BaseException) -> None:
    read.found = result
    for waiter in read.waiters:
        waiter.left -= 1
        if waiter.left == 0:
            waiter.done.set()
    read.waiters.clear()


class Announced:
    """The indices that will be taken, in order; some may be taken out of turn. Its owner does the locking."""

    def __init__(self) -> None:
        self._arrays: deque[NDArray[np.int64]] = deque()
        self._next: deque[int] = deque()
        self._taken_early: Counter[int] = Counter()

    def add(self, indices: Indices) -> None:
        """Appends indices; the array must not change afterwards."""
        self._arrays.append(indices)

    def first(self) -> int | None:
        """The next index, or None if nothing is announced."""
        while self._next or self._arrays:
            if not self._next:
                self._unpack()
                continue
            index = self._next[0]
            if index not in self._taken_early:
                return index
            self._next.popleft()
            self._taken_early[index] -= 1
            if not self._taken_early[index]:
                del self._taken_early[index]
        # What is left was never announced (a bad sample's replacement): it must not hide a later one.
        self._taken_early.clear()
        return None

    def drop_first(self) -> None:
        """Removes the next index."""
        self._next.popleft()

    def take_out(self, index: int) -> None:
        """Skips this index once: its sample is read already."""
        first = self.first()
        if first == index:
            self._next.popleft()
        elif first is not None:
            self._taken_early[index] += 1

    def clear(self) -> None:
        """Removes all indices."""
        self._arrays.clear()
        self._next.clear()
        self._taken_early.clear()

    def _unpack(self) -> None:
        array = self._arrays.popleft()
        self._next.extend(array[:_PIECE].tolist())
        if len(array) > _PIECE:
            self._arrays.appendleft(array[_PIECE:])


_open_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


@atexit.register
def _close_readers() -> None:
    # A thread that returns from native code while the interpreter shuts down is undefined behaviour; waiting for the
    # reads in flight takes moments.
    for reader in list(_open_readers):
        reader.close()
