"""Fills a local copy in the background, in the order in which training will need its files.

Training fetches what it needs next itself, and a `StagedStore` keeps that. This fetches what is further ahead, and what
the first epoch never takes, and steps aside when training waits for data.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from stoker.console import Say
from stoker.data.priority import step_back
from stoker.data.store.staged import COMMIT_WHEN_IDLE_S, StagedCopy
from stoker.data.store.stores import ReadFailure, SourceStore, StoreDown
from stoker.units import count

MOST_IN_FLIGHT = 16
# If nobody can tell whether training waits: with no workers, batches are made when they are asked for.
IN_FLIGHT_UNTOLD = 4
# A larger file is fetched in parts of this size.
PART_BYTES = 8 << 20
LOOK_EVERY_S = 0.05
STORE_DOWN_WAIT_S = 5.0
CLOSING_S = 5.0
# Other processes commit what they have kept this long after the epoch's last batch, at the latest.
SETTLING_S = 5 * COMMIT_WHEN_IDLE_S
NAMED_FAILURES = 3


class Wanted(NamedTuple):
    """A file of the source that the copy should have."""

    path: str
    """Below the root of the data."""
    size: int | None = None
    version: str | None = None
    position: int | None = None
    """Of the sample in the epoch, if training fetches this file as a whole when it comes to it."""


class FillOrder(Protocol):
    """Which files the copy should have, and when training will need them."""

    @property
    def files(self) -> int:
        """How many there are."""

    @property
    def fetched_ahead(self) -> int:
        """Positions ahead of its own that training fetches itself."""

    def needed(self, epoch: int, position: int) -> Iterator[Wanted]:
        """What this process should fetch first, in order: what training needs from a position of an epoch on; then what
        that epoch does not take."""

    def everything(self) -> Iterator[Wanted]:
        """This process's share of all files."""

    def all(self) -> Iterator[Wanted]:
        """Every file that the copy should have, with those of other processes."""


class Filler:
    """Threads that fetch what a copy still lacks; they begin with the first batch of training."""

    def __init__(self, copy: StagedCopy, source: SourceStore, order: FillOrder, say: Say | None) -> None:
        """Without `say`, another process of the copy speaks for all."""
        self.is_complete = False
        self.failed: dict[str, str] = {}
        """Files that cannot be fetched, and why."""
        self._copy = copy
        self._source = source
        self._order = order
        self._say = say
        self._allowed = 1
        self._epoch = self._position = 0
        self._is_over = False
        self._closing = threading.Event()
        self._jobs: SimpleQueue[Wanted | None] = SimpleQueue()
        self._done = threading.Condition()
        self._active: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._dispatcher: threading.Thread | None = None

    def training_at(self, epoch: int, position: int, waits: bool | None, *, is_over: bool = False) -> None:
        """Tells where training is, and whether it waited for this batch; None if that is not known. Costs nothing."""
        self._epoch, self._position, self._is_over = epoch, position, is_over
        self.make_way(waits)
        if self._dispatcher is None:
            self._dispatcher = threading.Thread(target=self._run, name="stoker-filler", daemon=True)
            self._dispatcher.start()

    def make_way(self, waits: bool | None) -> None:
        """Fetches fewer files at once if training waits for data, and more if it does not."""
        if waits is None:
            self._allowed = IN_FLIGHT_UNTOLD
        else:
            self._allowed = max(1, self._allowed // 2) if waits else min(MOST_IN_FLIGHT, self._allowed + 1)

    def settle(self, seconds: float) -> bool:
        """Training has ended: fetches what is left, for at most this long; whether the copy is complete."""
        self._is_over, self._allowed = True, MOST_IN_FLIGHT
        if self._dispatcher is not None:
            self._dispatcher.join(seconds)
        return self.is_complete

    def close(self) -> None:
        """Ends the threads after the parts that they are fetching; does not wait for a store that does not answer."""
        self._closing.set()
        for _ in self._threads:
            self._jobs.put(None)
        deadline = time.monotonic() + CLOSING_S
        for thread in [*self._threads, *([] if self._dispatcher is None else [self._dispatcher])]:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        step_back()
        epoch, start = self._epoch, self._position
        if self._say is not None:
            files, size = self._copy.totals() if len(self._copy) else (0, 0)
            there = f"{min(files, self._order.files):,} of {count(self._order.files, 'file')} ({size / 1e6:,.0f} MB)"
            self._say(f"staging to {self._copy.folder} while training: {there} are there")
        for wanted in self._order.needed(epoch, start):
            if wanted.position is None or not self._is_near(epoch, wanted.position):
                self._submit(wanted)
            if self._is_stopped():
                return
        # What this epoch still takes, training fetches itself; what it could not keep is fetched now.
        while not self._is_past(epoch) and not self._is_stopped():
            self._closing.wait(LOOK_EVERY_S)
        self._copy.flush()
        self._closing.wait(SETTLING_S)
        for wanted in self._order.everything():
            self._submit(wanted)
            if self._is_stopped():
                return
        with self._done:
            while self._active and not self._closing.is_set():
                self._done.wait(LOOK_EVERY_S)
        self._copy.commit()
        if self._is_stopped() or self._say is None:
            return
        for wanted in self._order.all():
            while not self._copy.has(wanted.path, wanted.size, wanted.version) and wanted.path not in self.failed:
                if self._closing.wait(LOOK_EVERY_S):  # another rank is fetching it
                    return
        self._finish(self._say)

    def _finish(self, say: Say) -> None:
        if self.failed:
            some = ", ".join(f"{path} ({reason})" for path, reason in list(self.failed.items())[:NAMED_FAILURES])
            say(
                f"warning: {count(len(self.failed), 'file')} could not be copied to {self._copy.folder}: {some}; "
                "everything else is there"
            )
            return
        self.is_complete = self._copy.is_complete = True
        files, size = self._copy.totals()
        say(
            f"the local copy is complete: {count(files, 'file')}, {size / 1e6:,.0f} MB; "
            f"next time data_root={self._copy.folder}"
        )

    def _is_stopped(self) -> bool:
        if self._closing.is_set():
            return True
        if self._copy.has_room():
            return False
        if self._say is not None:
            self._say(
                f"warning: the local copy in {self._copy.folder} stays incomplete: {self._copy.stopped}; "
                "training goes on from the source"
            )
        return True

    def _is_near(self, epoch: int, position: int) -> bool:
        """Whether training has passed a position, or fetches it itself by now."""
        return self._epoch != epoch or position < self._position + self._order.fetched_ahead

    def _is_past(self, epoch: int) -> bool:
        return self._order.fetched_ahead == 0 or self._epoch != epoch or self._is_over

    def _is_missing(self, wanted: Wanted) -> bool:
        return (
            wanted.path not in self.failed
            and wanted.path not in self._active
            and not self._copy.is_coming(wanted.path)
            and not self._copy.has(wanted.path, wanted.size, wanted.version)
        )

    def _submit(self, wanted: Wanted) -> None:
        """Has a file fetched if it is missing; waits while as many as allowed are being fetched."""
        if not self._is_missing(wanted):
            return
        with self._done:
            while len(self._active) >= self._allowed and not self._closing.is_set():
                self._done.wait(LOOK_EVERY_S)
            if self._closing.is_set():
                return
            self._active.add(wanted.path)
        if len(self._active) > len(self._threads):
            thread = threading.Thread(target=self._work, name="stoker-filler", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._jobs.put(wanted)

    def _work(self) -> None:
        step_back()
        while (wanted := self._jobs.get()) is not None:
            if not self._closing.is_set() and not self._copy.is_coming(wanted.path):
                self._fetch(wanted)
            with self._done:
                self._active.discard(wanted.path)
                self._done.notify_all()

    def _fetch(self, wanted: Wanted) -> None:
        while not self._closing.is_set():
            try:
                size = self._source.about(wanted.path)[0] if wanted.size is None else wanted.size
                if size > PART_BYTES:
                    self._copy.keep_large(wanted.path, self._source, PART_BYTES)
                else:
                    self._copy.keep(wanted.path, *self._source.fetch(wanted.path, wanted.size))
                return
            except StoreDown:
                # Training says so, if it has to read from there; it may come back.
                self._closing.wait(STORE_DOWN_WAIT_S)
            except ReadFailure as failure:
                self.failed[wanted.path] = failure.reason
                return
