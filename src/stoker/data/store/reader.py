"""Reads samples before they are asked for: their order is known, so latency can pass while others are decoded.

Bounded by bytes. Where reading does not block, as from a warm page cache, it happens in the calling thread:
handing a sample from thread to thread costs more than such a read.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.data.images.sample_index import SampleIndex, decode_name
from stoker.data.store.lookahead import Announced, Blocking
from stoker.data.store.stores import Buffer, ReadFailure, Store, StoreDown

Found: TypeAlias = Buffer | ReadFailure
Samples = NDArray[np.int64]

# Reads of each call, and every n-th of a thread that reads ahead, that are timed.
TIMED_READS = 4
TIMED_EVERY = 8
# Disks and network mounts gain little beyond this; object stores have `max_in_flight`.
LOCAL_THREADS = 16
# ImageNet's mean; corrected by what is read, and not used where the index has sizes.
FIRST_ESTIMATE_BYTES = 110_000
CLOSING_S = 5.0


class _Place(NamedTuple):
    path: str
    offset: int
    size: int | None


class _Read:
    """A sample that is being read or has been."""

    __slots__ = ("found", "held", "sample", "waiters", "wanted")

    def __init__(self, sample: int, held: int = 0) -> None:
        self.sample = sample
        self.found: Found | BaseException | None = None
        self.held = held
        """Bytes it takes of the budget: estimated until it is read, none once it is taken."""
        self.wanted = 1
        """How many of the announced samples it is: repeats of an image stand side by side."""
        self.waiters: list[_Waiter] = []


class _Waiter:
    """One `take` that waits until the last of its reads is done."""

    __slots__ = ("done", "left")

    def __init__(self) -> None:
        self.left = 0
        self.done = threading.Event()


class Reader:
    """Look-ahead over a store for one process; any number of its threads may use it at once."""

    def __init__(self, store: Store, index: SampleIndex, *, lookahead_bytes: int, max_in_flight: int = 64) -> None:
        self._store = store
        self._index = index
        self._names = np.asarray(index.name_bytes).data
        self._budget = lookahead_bytes
        self._most_threads = max_in_flight if store.is_remote else min(max_in_flight, LOCAL_THREADS)
        self._blocking = Blocking(store.is_remote)
        self._mean_bytes = float(FIRST_ESTIMATE_BYTES)

        self._lock = threading.Lock()
        self._hands = threading.Condition(self._lock)
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._announced = Announced()
        self._urgent: deque[_Read] = deque()
        self._ahead: dict[int, _Read] = {}
        self._held = 0
        self._failure: BaseException | None = None
        self._process = os.getpid()
        _open_readers.add(self)

    @property
    def buffered_bytes(self) -> int:
        """What is read, or being read, of samples that nobody has asked for yet."""
        return self._held

    @property
    def mean_bytes(self) -> float:
        """Size of a sample, as far as is known."""
        return self._mean_bytes

    def expect(self, ids: Samples) -> None:
        """Announces samples that will be taken later, in this order; returns at once."""
        with self._lock:
            self._announced.add(np.array(ids, np.int64))
            self._call_a_hand()

    def take(self, ids: Samples) -> list[Found]:
        """The samples' bytes, or why there are none, in order; waits for what has not come yet."""
        assert os.getpid() == self._process, "a reader belongs to the process that made it"
        samples: list[int] = ids.tolist()
        waiter = _Waiter()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            reads, missing = self._claim(samples, waiter)
            in_pool = self._blocking.blocks
            if in_pool:
                self._put_first(missing, reads, waiter)
        found: dict[int, Found | BaseException | None] = {}
        if not in_pool:
            self._read_here(missing, found, reads, waiter)
        if waiter.left:
            waiter.done.wait()
        for sample, read in reads.items():
            found[sample] = read.found
        results: list[Found] = []
        for sample in samples:
            result = found[sample]
            if isinstance(result, BaseException) and not isinstance(result, ReadFailure):
                raise result
            assert result is not None
            results.append(result)
        return results

    def forget(self) -> None:
        """Drops everything announced that was not taken: the epoch ended, or the consumer left."""
        with self._lock:
            self._announced.clear()
            for read in self._ahead.values():
                # What is under way keeps its share until it has come: the memory is in use until then.
                if read.found is not None:
                    self._held -= read.held
                read.wanted = 0
            self._ahead.clear()

    def close(self) -> None:
        """Ends the threads; whoever waits in `take` gets an error."""
        self.forget()
        with self._lock:
            self._give_up(RuntimeError("the reader was closed"))
        deadline = time.monotonic() + CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        _open_readers.discard(self)

    def _claim(self, samples: list[int], waiter: _Waiter) -> tuple[dict[int, _Read], list[int]]:
        """What of these is read or being read already, and what is not; under the lock."""
        reads: dict[int, _Read] = {}
        missing: dict[int, None] = {}
        announced, ahead = self._announced, self._ahead
        for sample in samples:
            read = ahead.get(sample)
            if read is None:
                announced.take_out(sample)
                if sample not in reads:
                    missing[sample] = None
                continue
            if sample not in reads:
                reads[sample] = read
                if read.found is None:
                    read.waiters.append(waiter)
                    waiter.left += 1
            read.wanted -= 1
            if read.wanted == 0:
                del ahead[sample]
                self._held -= read.held
                read.held = 0
        self._call_a_hand()
        return reads, [sample for sample in missing if sample not in reads]

    def _put_first(self, missing: list[int], reads: dict[int, _Read], waiter: _Waiter) -> None:
        """What is asked for now goes before all that is read ahead, whatever the budget says; under the lock."""
        for sample in missing:
            read = reads[sample] = _Read(sample)
            read.waiters.append(waiter)
            waiter.left += 1
            self._urgent.append(read)
        self._call_a_hand()

    def _read_here(
        self,
        missing: list[int],
        found: dict[int, Found | BaseException | None],
        reads: dict[int, _Read],
        waiter: _Waiter,
    ) -> None:
        for number, place in enumerate(self._places(missing)):
            if number >= TIMED_READS:
                found[missing[number]] = self._read(place)
                continue
            found[missing[number]] = self._read_timed(place)
            if self._blocking.blocks:
                with self._lock:
                    self._put_first(missing[number + 1 :], reads, waiter)
                return

    def _work(self) -> None:
        count = 0
        while (read := self._next_read()) is not None:
            result: Found | BaseException
            try:
                place = next(self._places([read.sample]))
                result = self._read(place) if count % TIMED_EVERY else self._read_timed(place)
            except BaseException as error:  # handed to whoever takes the sample
                result = error
            count += 1
            with self._lock:
                self._hand_over(read, result)
            del read, result

    def _next_read(self) -> _Read | None:
        with self._lock:
            while self._failure is None:
                read = self._urgent.popleft() if self._urgent else self._next_ahead()
                if read is not None:
                    self._call_a_hand()
                    return read
                self._idle += 1
                self._hands.wait()
                self._idle -= 1
        return None

    def _next_ahead(self) -> _Read | None:
        if not self._blocking.blocks:
            return None
        while True:
            sample = self._announced.first()
            if sample is None:
                return None
            known = self._ahead.get(sample)
            if known is not None:
                known.wanted += 1
                self._announced.drop_first()
                continue
            size = int(self._mean_bytes) if self._index.sizes is None else int(self._index.sizes[sample])
            # One larger than the whole budget goes alone.
            if self._held and self._held + size > self._budget:
                return None
            self._announced.drop_first()
            self._held += size
            read = self._ahead[sample] = _Read(sample, held=size)
            return read

    def _call_a_hand(self) -> None:
        """Wakes or starts one thread; each that finds work calls the next, until there is none left."""
        if not self._urgent and not (self._blocking.blocks and self._announced.first() is not None):
            return
        if self._idle:
            self._hands.notify()
        elif len(self._threads) < self._most_threads:
            thread = threading.Thread(target=self._work, name="stoker-reader", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _hand_over(self, read: _Read, result: Found | BaseException) -> None:
        if isinstance(result, StoreDown):
            # Nothing else will come either: no more waiting, sample after sample.
            self._give_up(result)
        if not isinstance(result, BaseException):
            self._mean_bytes += (len(result) - self._mean_bytes) / 32
        if read.held:
            size = 0 if isinstance(result, BaseException) else len(result)
            self._held += (size if read.wanted else 0) - read.held
            read.held = size if read.wanted else 0
        read.found = result
        for waiter in read.waiters:
            waiter.left -= 1
            if waiter.left == 0:
                waiter.done.set()
        read.waiters.clear()

    def _give_up(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
            while self._urgent:
                self._hand_over(self._urgent.popleft(), failure)
            self._hands.notify_all()

    def _read(self, place: _Place) -> Found:
        try:
            return self._store.read(place.path, place.offset, place.size, whole=self._index.shard_of is None)
        except ReadFailure as failure:
            return failure.with_traceback(None)

    def _read_timed(self, place: _Place) -> Found:
        # What a cache in front of a remote store did not have to fetch is as good as local.
        before = self._fetches()
        return self._blocking.timed(lambda: self._read(place), lambda: self._fetches() != before)

    def _fetches(self) -> int:
        return getattr(self._store, "fetches", 0)

    def _places(self, samples: list[int]) -> Iterator[_Place]:
        """Where the samples are; for a batch at once, as taking single numbers out of arrays is slow."""
        index, ids = self._index, np.array(samples, np.int64)
        sizes = [None] * len(samples) if index.sizes is None else index.sizes[ids].tolist()
        if index.shard_of is not None and index.offsets is not None:
            shards, offsets = index.shard_of[ids].tolist(), index.offsets[ids].tolist()
            for shard, offset, size in zip(shards, offsets, sizes, strict=True):
                yield _Place(index.shards[shard], offset, size)
            return
        ends = index.name_ends[ids].tolist()
        starts = np.where(ids > 0, index.name_ends[ids - 1], 0).tolist()
        for start, end, size in zip(starts, ends, sizes, strict=True):
            yield _Place(decode_name(bytes(self._names[start:end])), 0, size)


_open_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


@atexit.register
def _close_readers() -> None:
    # Threads that come back from native code while the interpreter takes itself apart stand on undefined
    # ground; waiting for the reads under way takes moments.
    for reader in list(_open_readers):
        reader.close()
