"""Which files a local copy should have, and the order in which training will need them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.io.filling import WantedFile
from stoker.loader.sampler import Steps

_PIECE = 4096
Indices = NDArray[np.int64]


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
        return (wanted for wanted in self.all() if self.share.has(wanted.path))

    def all(self) -> Iterator[WantedFile]:
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
