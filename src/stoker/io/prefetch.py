"""Reads what will be needed before it is: images, regions of volumes, parts of objects, and files for a local copy.

- Keys are announced in the order in which they will be needed (`expect`), and taken in any order (`take`). A key that
  is taken before its turn goes first, whatever else is announced.
- Reading ahead is bounded by bytes and by reads in flight; both may change at any time (`allow`). With `first_requests`
  it begins with few reads and adds one with each that is done: the first results, which are needed at once, would
  otherwise share the bandwidth with all that follow them.
- If reads do not block, as from a warm page cache, the calling thread reads: handing a result from thread to thread
  costs more than such a read (blocking.py).
- An error is raised to whoever takes the key; a ReadFailure is a result, of that key alone.
- Threads start when there is work, and each that finds some wakes the next. Whoever waits for a result is released by
  `close`, and the end of the program waits for reads in flight, but not for a store that does not respond.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from stoker.core.priority import step_back
from stoker.io import outage
from stoker.io.blocking import Blocking
from stoker.io.stores import Buffer, Location, ReadFailure, Store, StoreDown

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")
HeldBack: TypeAlias = Literal["lookahead_bytes", "requests"]
"""What keeps a prefetcher from requesting more from its store at this moment."""

# The first reads of each call are timed, and every n-th read of a thread that reads ahead.
TIMED_READS = 4
TIMED_EVERY = 8
# Disks and network mounts gain little from more threads; object stores use `max_in_flight`.
LOCAL_THREADS = 16
# ImageNet's mean; corrected by actual reads, and not used where sizes are known.
FIRST_ESTIMATE_BYTES = 110_000
CLOSING_S = 5.0
# Threads whose store does not respond end with the process.
CLOSING_IN_OUTAGE_S = 0.5
# No thread waits while it holds the lock, so after this time the calling thread itself must hold it.
LOCK_OF_MINE_S = 1.0
NEARLY_ALL = 0.75


class _Read(Generic[Key, Result]):
    """A key that is being read, or has been."""

    __slots__ = ("found", "held", "is_done", "key", "waiters", "wanted")

    def __init__(self, key: Key, held: int = 0) -> None:
        self.key = key
        self.found: Result | BaseException | None = None
        self.is_done = False
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


class Prefetcher(Generic[Key, Result]):
    """Reads keys ahead of time, with its own threads; for one process and all its threads."""

    def __init__(
        self,
        read: Callable[[Sequence[Key]], Iterator[Result | ReadFailure]],
        size: Callable[[Key], int | None],
        *,
        lookahead_bytes: int,
        requests: int,
        first_requests: int | None = None,
        store: Store | None = None,
        are_taken: bool = True,
    ) -> None:
        """`read` yields the result of each key, `size` is how many bytes one takes, None if unknown. Reads of a `store`
        are timed, and made by the caller if they do not block; without one they always block. Without `are_taken`, keys
        are read only for the side effect."""
        self._read = read
        self._size_of = size
        self._budget = lookahead_bytes
        self.requests = requests
        """Reads in flight, if reads block."""
        self._first_requests = first_requests
        self._begun = first_requests
        """Reads in flight that are allowed so far; None for all."""
        self._store = store
        self._reads_remotely = store is None or store.is_remote
        self._blocking = Blocking(self._reads_remotely)
        self._are_taken = are_taken
        self.mean_bytes = float(FIRST_ESTIMATE_BYTES)
        """Mean size of a result; an estimate."""

        self._lock = threading.Lock()
        self._work_to_do = threading.Condition(self._lock)
        self._progress = threading.Condition(self._lock)
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._announced: Announced[Key] = Announced()
        self._urgent: deque[_Read[Key, Result]] = deque()
        self._in_flight: set[_Read[Key, Result]] = set()
        self._ahead: dict[Key, _Read[Key, Result]] = {}
        self.buffered_bytes = 0
        """Bytes of results that are read, or being read, and not yet taken."""
        self.ready_bytes = 0
        """Bytes of results that are read and not yet taken."""
        self._forgets_later = False
        self._is_closed = False
        self._process = os.getpid()
        _open.add(self)

    def allow(self, lookahead_bytes: int, requests: int) -> None:
        """Changes how much is read ahead, from the next read on; surplus threads stay idle."""
        with self._lock:
            self._budget, self.requests = lookahead_bytes, requests
            self._wake_a_thread()

    def held_back_by(self) -> HeldBack | None:
        """What keeps it from requesting more: its bytes are full, or all requests are in flight."""
        with self._lock:
            if not self._blocking.blocks:
                return None
            key = self._announced.first()
            if key is None and not self._urgent:
                # Everything that was announced is in flight: announcing more takes more bytes.
                return "lookahead_bytes" if self._in_flight else None
            # Responses arrive in bursts: a moment later the next requests are in flight.
            if len(self._in_flight) >= NEARLY_ALL * self.requests:
                return "requests"
            full = key is not None and self.buffered_bytes and self.buffered_bytes + self._size(key) > self._budget
            return "lookahead_bytes" if full else None

    def expect(self, keys: Sequence[Key]) -> None:
        """Announces keys that will be taken later, in this order; returns at once."""
        with self._lock:
            if self._forgets_later:
                self._forget()
            if self._reads_remotely and getattr(self._store, "is_local_now", False):
                # A local copy is complete. Waits for the GIL among the threads that read ahead would look like a
                # slow disk, and keep them going: a second epoch was 0.83 of a folder's rate, probably for this reason.
                self._reads_remotely, self._blocking = False, Blocking(False)
            self._announced.add(keys)
            self._wake_a_thread()

    def take(self, keys: Sequence[Key]) -> list[Result | ReadFailure]:
        """The results in order, or for each the failure; waits for those that have not arrived yet."""
        assert os.getpid() == self._process, "a prefetcher belongs to the process that made it"
        waiter = _Waiter()
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the reader was closed")
            reads, missing = self._claim(keys, waiter)
            in_pool = self._blocking.blocks
            if in_pool:
                self._put_first(missing, reads, waiter)
        found: dict[Key, Any] = {}
        if not in_pool:
            self._read_here(missing, found, reads, waiter)
        if waiter.left:
            waiter.done.wait()
        for key, read in reads.items():
            found[key] = read.found
        results: list[Result | ReadFailure] = []
        for key in keys:
            result = found[key]
            if isinstance(result, BaseException) and not isinstance(result, ReadFailure):
                raise result
            results.append(result)
        return results

    def drop(self, keys: Sequence[Key]) -> None:
        """Takes keys without their results, which the caller does not need."""
        with self._lock:
            self._claim(keys, _Waiter())

    def drained(self, seconds: float, *, done: bool = False) -> bool:
        """Waits until everything announced is in flight, or done; returns whether it is."""
        with self._lock:
            return self._progress.wait_for(
                lambda: self._announced.first() is None and not (done and self._in_flight), seconds
            )

    def forget(self) -> None:
        """Drops keys that were announced and not taken: the epoch ended, or the consumer left it."""
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
            if read.is_done:
                self.buffered_bytes -= read.held
                self.ready_bytes -= read.held
            read.wanted = 0
        self._ahead.clear()
        self._begun = self._first_requests

    def close(self) -> None:
        """Ends the threads; a `take` that waits raises an error."""
        self.forget()
        with self._lock:
            self._is_closed = True
            self._give_up(RuntimeError("the reader was closed"))
            self._work_to_do.notify_all()
        deadline = time.monotonic() + (CLOSING_IN_OUTAGE_S if outage.is_left() else CLOSING_S)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        _open.discard(self)

    def _give_up(self, failure: BaseException) -> None:
        """Releases every waiting `take`. A read in flight may be waiting for its store, for minutes."""
        for read in [*self._urgent, *self._in_flight]:
            _answer(read, failure)
            # Its bytes count until it ends, but it will not be taken any more.
            if self._ahead.get(read.key) is read:
                del self._ahead[read.key]
                read.wanted = 0
        self._urgent.clear()
        self._progress.notify_all()

    def _claim(self, wanted: Sequence[Key], waiter: _Waiter) -> tuple[dict[Key, _Read[Key, Result]], list[Key]]:
        """Splits the wanted keys into those read or being read, and the missing ones; call with the lock held."""
        reads: dict[Key, _Read[Key, Result]] = {}
        missing: dict[Key, None] = {}
        announced, ahead = self._announced, self._ahead
        for key in wanted:
            read = ahead.get(key)
            if read is None:
                announced.take_out(key)
                if key not in reads:
                    missing[key] = None
                continue
            if key not in reads:
                reads[key] = read
                if not read.is_done:
                    read.waiters.append(waiter)
                    waiter.left += 1
            read.wanted -= 1
            if read.wanted == 0:
                del ahead[key]
                self.buffered_bytes -= read.held
                self.ready_bytes -= read.held if read.is_done else 0
                read.held = 0
        self._wake_a_thread()
        return reads, [key for key in missing if key not in reads]

    def _put_first(self, missing: list[Key], reads: dict[Key, _Read[Key, Result]], waiter: _Waiter) -> None:
        """Puts keys that are needed now before all that are read ahead, regardless of the budget; needs the lock."""
        if self._is_closed:  # since `take` began: no thread will read it
            raise RuntimeError("the reader was closed")
        if missing and not waiter.left:
            waiter.done.clear()  # the previous reads may have arrived in the meantime
        for key in missing:
            read: _Read[Key, Result] = _Read(key)
            reads[key] = read
            read.waiters.append(waiter)
            waiter.left += 1
            self._urgent.append(read)
        self._wake_a_thread()

    def _read_here(
        self, missing: list[Key], found: dict[Key, Any], reads: dict[Key, _Read[Key, Result]], waiter: _Waiter
    ) -> None:
        results = self._read(missing)
        for count, key in enumerate(missing):
            if count >= TIMED_READS:
                found[key] = next(results)
                continue
            found[key] = self._timed(results)
            if self._blocking.blocks:
                with self._lock:
                    self._put_first(missing[count + 1 :], reads, waiter)
                return

    def _work(self) -> None:
        step_back()
        count = 0
        while (read := self._next_read()) is not None:
            result: Any
            try:
                results = self._read([read.key])
                result = next(results) if self._store is None or count % TIMED_EVERY else self._timed(results)
            except ReadFailure as failure:
                result = failure.with_traceback(None)
            except BaseException as error:  # raised by the `take` of this key
                result = error
            count += 1
            with self._lock:
                self._hand_over(read, result)
            del read, result

    def _timed(self, results: Iterator[Result | ReadFailure]) -> Result | ReadFailure:
        # Results that a cache in front of a remote store did not have to fetch count as local.
        before = getattr(self._store, "fetches", 0)
        return self._blocking.timed(lambda: next(results), lambda: getattr(self._store, "fetches", 0) != before)

    def _next_read(self) -> _Read[Key, Result] | None:
        with self._lock:
            while not self._is_closed:
                read = None
                if len(self._in_flight) < self.requests:
                    read = self._urgent.popleft() if self._urgent else self._next_ahead()
                if read is not None:
                    self._in_flight.add(read)
                    self._wake_a_thread()
                    self._progress.notify_all()
                    return read
                self._idle += 1
                self._work_to_do.wait()
                self._idle -= 1
        return None

    def _next_ahead(self) -> _Read[Key, Result] | None:
        while self._has_announced():
            key = self._announced.first()
            assert key is not None
            known = self._ahead.get(key)
            if known is not None:
                known.wanted += 1
                self._announced.drop_first()
                continue
            size = self._size(key)
            # A key larger than the whole budget is read alone.
            if self.buffered_bytes and self.buffered_bytes + size > self._budget:
                return None
            self._announced.drop_first()
            self.buffered_bytes += size
            read: _Read[Key, Result] = _Read(key, held=size)
            if self._are_taken:
                self._ahead[key] = read
            else:
                read.wanted = 0
            return read
        return None

    def _has_announced(self) -> bool:
        """Whether another key may be read ahead, as far as reads in flight are concerned."""
        is_allowed = self._begun is None or len(self._in_flight) < self._begun
        return self._blocking.blocks and is_allowed and self._announced.first() is not None

    def _size(self, key: Key) -> int:
        size = self._size_of(key)
        return int(self.mean_bytes) if size is None else size

    def _wake_a_thread(self) -> None:
        """Wakes or starts one thread; each that finds work wakes the next, until there is no more work."""
        if len(self._in_flight) >= self.requests or not (self._urgent or self._has_announced()):
            return
        if self._idle:
            self._work_to_do.notify()
        elif len(self._threads) < self.requests:
            thread = threading.Thread(target=self._work, name="stoker-reader", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _hand_over(self, read: _Read[Key, Result], result: Any) -> None:
        self._in_flight.discard(read)
        if isinstance(result, StoreDown) and not read.is_done:
            self._give_up(result)  # no other read will succeed either: all fail at once, not one after the other
        if self._begun is not None:
            self._begun += 1
        size = _bytes_of(result)
        if size:
            self.mean_bytes += (size - self.mean_bytes) / 32
        if read.held:
            self.buffered_bytes += (size if read.wanted else 0) - read.held
            read.held = size if read.wanted else 0
            self.ready_bytes += read.held
        _answer(read, result)
        self._progress.notify_all()


def _answer(read: _Read[Any, Any], result: Any) -> None:
    if read.is_done:  # by `_give_up`
        return
    read.found, read.is_done = result, True
    for waiter in read.waiters:
        waiter.left -= 1
        if waiter.left == 0:
            waiter.done.set()
    read.waiters.clear()


def _bytes_of(result: Any) -> int:
    if result is None or isinstance(result, BaseException):
        return 0
    return result.nbytes if hasattr(result, "nbytes") else len(result)


class Announced(Generic[Key]):
    """The keys that will be taken, in order; some may be taken out of turn. Its owner does the locking."""

    def __init__(self) -> None:
        self._next: deque[Key] = deque()
        self._taken_early: Counter[Key] = Counter()

    def add(self, keys: Iterable[Key]) -> None:
        self._next.extend(keys)

    def first(self) -> Key | None:
        """The next key, or None if nothing is announced."""
        while self._next:
            key = self._next[0]
            if key not in self._taken_early:
                return key
            self._next.popleft()
            self._taken_early[key] -= 1
            if not self._taken_early[key]:
                del self._taken_early[key]
        # Keys that are left were never announced (a bad sample's replacement): they must not hide a later one.
        self._taken_early.clear()
        return None

    def drop_first(self) -> None:
        self._next.popleft()

    def take_out(self, key: Key) -> None:
        """Skips this key once: it is read already."""
        first = self.first()
        if first == key:
            self._next.popleft()
        elif first is not None:
            self._taken_early[key] += 1

    def clear(self) -> None:
        self._next.clear()
        self._taken_early.clear()


class Located(Protocol):
    """Numbered pieces of a store's objects, such as the samples of a data set."""

    @property
    def are_files(self) -> bool:
        """Whether each is a whole object, so that a different size means that it changed."""

    def locations(self, numbers: Sequence[int]) -> Iterator[Location]:
        """Where they are; looked up for many at once, because single array elements are slow."""

    def bytes_of(self, number: int) -> int | None:
        """The size of one; None if it is not known."""


Reader: TypeAlias = Prefetcher[int, Buffer]


def open_reader(store: Store, pieces: Located, *, lookahead_bytes: int, max_in_flight: int = 64) -> Reader:
    """Reads pieces from a store by their numbers, ahead of time where that helps."""

    def read(numbers: Sequence[int]) -> Iterator[Buffer | ReadFailure]:
        for place in pieces.locations(numbers):
            try:
                found: Buffer | ReadFailure = store.read(place.path, place.offset, place.size, whole=pieces.are_files)
            except ReadFailure as failure:
                found = failure.with_traceback(None)
            yield found

    requests = max_in_flight if store.is_remote else min(max_in_flight, LOCAL_THREADS)
    return Prefetcher(read, pieces.bytes_of, lookahead_bytes=lookahead_bytes, requests=requests, store=store)


_open: weakref.WeakSet[Prefetcher[Any, Any]] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread that returns from native code while the interpreter shuts down is undefined behaviour; waiting for the
    # reads in flight takes moments.
    for one in list(_open):
        one.close()
