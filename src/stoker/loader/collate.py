"""What the engines know about a plan and the maker of its batches, and what the makers of all kinds of data share.

Those of images and patches are in tasks/images/image_loader.py and tasks/volumes/patches/patch_collate.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.io.prefetch import HeldBack
from stoker.loader.batch import BadSample, LoadedBatch
from stoker.loader.rng import REPLACEMENT, mix
from stoker.loader.sampler import Steps

Allocate = Callable[[tuple[int, ...]], NDArray[np.uint8]]
# With one sample in a hundred unreadable, sixteen bad draws in a row happen once in 10^32 samples.
MAX_REPLACEMENTS = 16


@dataclass(frozen=True)
class LoaderSetup:
    """The limits of a loader of threads. Batches do not depend on them, so they may change at any time."""

    workers: int
    prefetch: int
    """Batches in flight per worker."""
    lookahead_bytes: int
    requests: int
    """Reads in flight, where reading ahead pays off."""


Made = TypeVar("Made", bound=LoadedBatch)
Made_co = TypeVar("Made_co", bound=LoadedBatch, covariant=True)


class EnginePlan(Protocol):
    """What an engine needs to know about a plan."""

    @property
    def steps(self) -> Steps: ...

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of a whole batch's memory, in bytes; the samples come first."""


class BatchSource(Protocol):
    """What an engine needs to know about the place that a maker reads from."""

    @property
    def mean_bytes(self) -> float: ...

    @property
    def requests(self) -> int:
        """Requests that it may have in flight."""

    @property
    def ready_bytes(self) -> int:
        """Bytes that have arrived and were not taken yet."""

    def allow(self, lookahead_bytes: int, requests: int) -> None:
        """Allows it to read this many bytes ahead from now on, with this many requests at once."""

    def held_back_by(self) -> HeldBack | None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class Maker(Protocol[Made_co]):
    """Makes the batches of a plan; several threads may share it."""

    @property
    def plan(self) -> EnginePlan: ...

    @property
    def reader(self) -> BatchSource: ...

    def announce(self, epoch: int, step: int, start: int) -> None: ...

    def make(self, epoch: int, step: int, start: int, allocate: Allocate) -> Made_co: ...


def replacements(key: int, samples: int) -> Iterator[int]:
    """The samples to try, one after the other, in place of one that cannot be read. They depend only on its key: they
    are the same in every worker."""
    for attempt in range(MAX_REPLACEMENTS):
        yield int(mix(mix(key, REPLACEMENT), attempt)) % samples


def none_readable(bad: Sequence[BadSample], what: str, why: str) -> UserError:
    """The error where none of the replacements could be read either."""
    named = "\n".join(f"{sample.name}: {sample.reason}" for sample in bad[-MAX_REPLACEMENTS:])
    return UserError(
        "no-readable-sample",
        f"{MAX_REPLACEMENTS} {what} in a row cannot be read\n{named}",
        why=f"this is not chance: {why}",
        hint="open one of these files",
    )


class Announcer:
    """Keeps about `budget` bytes of upcoming steps announced to the reader, so that their bytes are fetched early."""

    def __init__(
        self, maker: Maker[Any], epoch: int, start: int, count: int, budget: int, *, stride: int, first: int
    ) -> None:
        self._maker = maker
        self._epoch = epoch
        self._start = start
        self._count = count
        self.budget = budget
        self._stride = stride
        self._next = first

    def before(self, step: int) -> None:
        """Call before a step is made: announces it, and as many later steps as fit the budget."""
        batch_bytes = max(1.0, self._maker.plan.steps.batch_size * self._maker.reader.mean_bytes)
        # At least two, so that the next batch is fetched while this one is decoded.
        ahead = max(2, int(self.budget / batch_bytes))
        last = min(self._count - 1, step + ahead * self._stride)
        while self._next <= last:
            self._maker.announce(self._epoch, self._next, self._start)
            self._next += self._stride
