"""Fills a local copy in the background, in the order in which training will need its files.

Training fetches what it needs next itself, and a `CachedStore` keeps that. This fetches what is further ahead, and what
the first epoch never takes, and steps aside when training waits for data.

It runs in threads of each training process, whatever the engine, because only there can it see whether batches are
waiting.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Say
from stoker.core.priority import step_back
from stoker.core.units import count
from stoker.io.cache import COMMIT_WHEN_IDLE_S, OpenCopy
from stoker.io.prefetch import Prefetcher
from stoker.io.stores import Buffer, FileVersion, ReadFailure, SourceStore, StoreDown
from stoker.loader.sampler import Steps

MOST_IN_FLIGHT = 16
# If it is not known whether training waits: with no workers, batches are made when they are requested.
IN_FLIGHT_UNTOLD = 4
# A larger file is fetched in parts of this size.
PART_BYTES = 8 << 20
LOOK_EVERY_S = 0.05
STORE_DOWN_WAIT_S = 5.0
CLOSING_S = 5.0
# Other processes commit what they have kept this long after the epoch's last batch, at the latest.
SETTLING_S = 5 * COMMIT_WHEN_IDLE_S
NAMED_FAILURES = 3
_PIECE = 4096
Indices = NDArray[np.int64]


class WantedFile(NamedTuple):
    """A file of the source that the copy should have."""

    path: str
    """Relative to the root of the data."""
    size: int | None = None
    version: str | None = None
    position: int | None = None
    """The sample's position in the epoch, if training fetches this file as a whole when it comes to it."""


@dataclass(frozen=True)
class Share:
    """The place of this process among those that fill one copy: those of its node, as nodes may have separate disks."""

    rank: int = 0
    local_world: int = 1
    """Processes of this node; their ranks are consecutive."""

    def are_here(self, ranks: Indices) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = ranks // self.local_world == self.rank // self.local_world
        return found

    def has(self, path: str) -> bool:
        """Whether this process of the node fetches a file that any of them could."""
        if self.local_world == 1:
            return True
        return zlib.crc32(path.encode("utf-8", "surrogateescape")) % self.local_world == self.rank % self.local_world


class SplitFiles(Protocol):
    """The files of a split."""

    @property
    def steps(self) -> Steps: ...

    @property
    def positions(self) -> int:
        """How many positions the sampler has; an epoch may take fewer."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def files(self) -> Iterator[WantedFile]: ...

    def at(self, epoch: int, positions: Indices) -> Iterator[WantedFile]:
        """The files of the samples at these positions, in order."""


@dataclass(frozen=True)
class Files:
    """The order of all files of a data set, and of those beside them."""

    train: SplitFiles
    val: SplitFiles | None
    beside: Sequence[WantedFile]
    share: Share
    fetched_ahead: int
    """Positions ahead of the current one that training fetches itself, as whole files; 0 if it reads parts of them."""

    @cached_property
    def files(self) -> int:
        if not self.fetched_ahead:
            return len({wanted.path for wanted in self.all()})
        # A million names take a second, and images are in one split only.
        return sum(len(part) for part in (self.train, self.val) if part is not None) + len(self.beside)

    def needed(self, epoch: int, position: int) -> Iterator[WantedFile]:
        """What this rank reads in the rest of the epoch; its share of validation; then what no rank on this node reads
        in this epoch: samples dropped at its end or taken before a restart, and those of other nodes."""
        found = self._needed(epoch, position)
        return found if self.fetched_ahead else filter(lambda one: self.share.has(one.path), _once(found))

    def everything(self) -> Iterator[WantedFile]:
        """This process's share of all files."""
        return (wanted for wanted in self.all() if self.share.has(wanted.path))

    def all(self) -> Iterator[WantedFile]:
        """Every file that the copy should have, including those of other processes."""
        for part in (self.train, self.val):
            if part is not None:
                yield from part.files()
        # The index is last: a pack is complete when it is there.
        yield from self.beside

    def _needed(self, epoch: int, position: int) -> Iterator[WantedFile]:
        yield from self._own(self.train, epoch, position)
        if self.val is not None:
            for wanted in self._own(self.val, 0, 0):
                yield wanted._replace(position=None)
        yield from self._others(self.train, epoch, position)
        if self.val is not None:
            yield from self._others(self.val, 0, 0)

    def _own(self, part: SplitFiles, epoch: int, start: int) -> Iterator[WantedFile]:
        steps = part.steps
        for positions in pieces(start + steps.rank, _end(steps, start), steps.world):
            yield from part.at(epoch, positions)

    def _others(self, part: SplitFiles, epoch: int, start: int) -> Iterator[WantedFile]:
        end = _end(part.steps, start)
        for positions in pieces(0, part.positions, 1):
            taken = (positions >= start) & (positions < end)
            here = taken & self.share.are_here((positions - start) % part.steps.world)
            for wanted in part.at(epoch, positions[~here]):
                if self.share.has(wanted.path):
                    yield wanted._replace(position=None)


def pieces(start: int, end: int, step: int) -> Iterator[Indices]:
    """A range in arrays of some thousand numbers."""
    for first in range(start, end, _PIECE * step):
        yield np.arange(first, min(first + _PIECE * step, end), step, dtype=np.int64)


def _once(found: Iterator[WantedFile]) -> Iterator[WantedFile]:
    """Each file where it comes up first; for a small number of files."""
    seen: set[str] = set()
    for wanted in found:
        if wanted.path not in seen:
            seen.add(wanted.path)
            yield wanted


def _end(steps: Steps, start: int) -> int:
    """The first position that the rest of an epoch does not take."""
    return min(steps.samples, start + steps.count(start) * steps.total_batch)


class Filler:
    """Threads that fetch what a copy still lacks; they begin with the first batch of training."""

    def __init__(self, copy: OpenCopy, source: SourceStore, order: Files, say: Say | None) -> None:
        """Without `say`, another process of the copy prints for all."""
        self.is_complete = False
        self.failed: dict[str, str] = {}
        """Files that cannot be fetched, and why."""
        self._copy = copy
        self._source = source
        self._order = order
        self._say = say
        self._epoch = self._position = 0
        self._is_over = False
        self._closing = threading.Event()
        self._files: Prefetcher[WantedFile, None] = Prefetcher(
            self._fetch, lambda _wanted: PART_BYTES, lookahead_bytes=MOST_IN_FLIGHT * PART_BYTES, requests=1,
            are_taken=False,
        )  # fmt: skip
        self._dispatcher: threading.Thread | None = None

    def training_at(self, epoch: int, position: int, waits: bool | None, *, is_over: bool = False) -> None:
        """Notes where training is, and whether it waited for this batch; None if that is not known. Costs nothing."""
        self._epoch, self._position, self._is_over = epoch, position, is_over
        self.make_way(waits)
        if self._dispatcher is None:
            self._dispatcher = threading.Thread(target=self._run, name="stoker-filler", daemon=True)
            self._dispatcher.start()

    def make_way(self, waits: bool | None) -> None:
        """Fetches fewer files at once if training waits for data, and more if it does not."""
        files, more = IN_FLIGHT_UNTOLD, min(MOST_IN_FLIGHT, self._files.requests + 1)
        if waits is not None:
            files = max(1, self._files.requests // 2) if waits else more
        self._allow(files)

    def _allow(self, files: int) -> None:
        self._files.allow(MOST_IN_FLIGHT * PART_BYTES, files)

    def settle(self, seconds: float) -> bool:
        """Training has ended: fetches the rest, for at most this long; returns whether the copy is complete."""
        self._is_over = True
        self._allow(MOST_IN_FLIGHT)
        if self._dispatcher is not None:
            self._dispatcher.join(seconds)
        return self.is_complete

    def close(self) -> None:
        """Ends the threads after their current parts; does not wait for a store that does not respond."""
        self._closing.set()
        self._files.close()
        if self._dispatcher is not None:
            self._dispatcher.join(CLOSING_S)

    def _run(self) -> None:
        step_back()
        epoch, start = self._epoch, self._position
        if self._say is not None:
            files, size = self._copy.totals()
            there = f"{min(files, self._order.files):,} of {count(self._order.files, 'file')} ({size / 1e6:,.0f} MB)"
            self._say(f"staging to {self._copy.folder} while training: {there} are there")
        for wanted in self._order.needed(epoch, start):
            # Training has passed what is nearer, or fetches it itself by now.
            near = self._position + self._order.fetched_ahead
            if wanted.position is None or (self._epoch == epoch and wanted.position >= near):
                self._submit(wanted)
            if self._is_stopped():
                return
        # Training itself fetches the rest of this epoch; files that it could not keep are fetched now.
        while not (self._files.drained(LOOK_EVERY_S, done=True) and self._is_past(epoch)) and not self._is_stopped():
            self._closing.wait(LOOK_EVERY_S)
        self._copy.flush()
        self._closing.wait(SETTLING_S)
        for wanted in self._order.everything():
            self._submit(wanted)
            if self._is_stopped():
                return
        while not self._files.drained(LOOK_EVERY_S, done=True) and not self._closing.is_set():
            pass
        self._copy.commit()
        if self._is_stopped() or self._say is None:
            return
        for wanted in self._order.all():
            while not self._has(wanted) and wanted.path not in self.failed:
                if self._closing.wait(LOOK_EVERY_S):  # another rank is fetching it
                    return
        if self.failed:
            some = ", ".join(f"{path} ({reason})" for path, reason in list(self.failed.items())[:NAMED_FAILURES])
            self._say(
                f"warning: {count(len(self.failed), 'file')} could not be copied to {self._copy.folder}: {some}; "
                "everything else is there"
            )
            return
        self.is_complete = self._copy.is_complete = True
        files, size = self._copy.totals()
        self._say(
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

    def _has(self, wanted: WantedFile) -> bool:
        return self._copy.find(wanted.path, wanted.size, wanted.version) is not None

    def _is_past(self, epoch: int) -> bool:
        return self._order.fetched_ahead == 0 or self._epoch != epoch or self._is_over

    def _submit(self, wanted: WantedFile) -> None:
        """Submits a missing file to be fetched; waits while as many as allowed are being fetched."""
        if wanted.path in self.failed or self._copy.is_coming(wanted.path) or self._has(wanted):
            return
        self._files.expect([wanted])
        while not self._files.drained(LOOK_EVERY_S) and not self._closing.is_set():
            pass

    def _fetch(self, files: Sequence[WantedFile]) -> Iterator[None]:
        for wanted in files:
            while not self._closing.is_set() and not self._copy.is_coming(wanted.path):
                try:
                    self._keep(wanted)
                    break
                except StoreDown:
                    # Training reports it, if it has to read from there; the store may come back.
                    self._closing.wait(STORE_DOWN_WAIT_S)
                except ReadFailure as failure:
                    self.failed[wanted.path] = failure.reason
                    break
            yield None

    def _keep(self, wanted: WantedFile) -> None:
        size = self._source.about(wanted.path).size if wanted.size is None else wanted.size
        if size <= PART_BYTES:
            self._copy.keep(wanted.path, *self._source.fetch(wanted.path, wanted.size))
            return
        expected = self._source.about(wanted.path)
        self._copy.keep_parts(wanted.path, expected, self._parts(wanted.path, expected))

    def _parts(self, path: str, expected: FileVersion) -> Iterator[Buffer]:
        for start in range(0, expected.size, PART_BYTES):
            yield self._source.read(path, start, min(PART_BYTES, expected.size - start))
        if self._source.about(path) != expected:
            raise ReadFailure(path, "changed", "it was replaced while it was being read")
