"""A batch: what the model gets, what it cost, the samples that could not be read; and what all makers of batches share.

The makers of images and patches are in tasks/images/image_loader.py and tasks/volumes/patches/patch_collate.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.io.prefetch import HeldBack
from stoker.loader.rng import REPLACEMENT, mix
from stoker.loader.sampler import Steps
from stoker.profile.batch_costs import BatchCost

# One bad sample is already a large share of the first few, and of a small data set: as many are allowed as in this many
# samples, but not more than this share of the set, or one.
FEWEST_JUDGED = 1000
MOST_OF_A_SMALL_SET = 0.1
SHOWN = 20


def allowed_bad(max_bad_fraction: float, seen: int, samples: int) -> float:
    """How many of the samples may be bad, after so many of them were seen."""
    small = min(max_bad_fraction * FEWEST_JUDGED, max(1, MOST_OF_A_SMALL_SET * samples))
    return max(max_bad_fraction * min(seen, samples), small)


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read or decoded, and what replaces it."""

    index: int
    name: str
    reason: str
    replaced_by: int
    """Index of the sample in its place."""

    def line(self) -> str:
        record = {"sample": self.index, "name": self.name, "reason": self.reason, "replaced_by": self.replaced_by}
        return json.dumps(record) + "\n"


@dataclass(kw_only=True)
class LoadedBatch:
    """The samples of one step on one rank. A kind of data adds what its samples are, beside their bytes."""

    images: Any
    """The batch's memory, uint8, the samples first: a numpy array while the batch is made, then a slot's number or a
    tensor."""
    keys: NDArray[np.uint64]
    """Each sample's key, from which every further random choice about it follows (stoker.loader.rng)."""
    epoch: int
    step: int
    next_position: int
    """The position at which a run resumes after this batch."""
    cost: BatchCost = field(default_factory=BatchCost)
    bad: tuple[BadSample, ...] = ()

    def __len__(self) -> int:
        return len(self.keys)


class TooManyBad(UserError):
    """More samples cannot be read than the config allows."""


class Quarantine:
    """The bad samples of one process: written to a file, and an error if there are too many."""

    def __init__(self, file: Path | None, max_bad_fraction: float, samples: int) -> None:
        self._file = file
        self._max_bad_fraction = max_bad_fraction
        self._samples = samples
        self._bad: dict[int, BadSample] = {}
        self._seen = 0

    @property
    def bad(self) -> list[BadSample]:
        return list(self._bad.values())

    def admit(self, bad: Iterable[BadSample], seen: int) -> None:
        """Records the bad samples of a batch of `seen` samples; raises TooManyBad above the limit."""
        self._seen += seen
        # By index: several patches of a batch may be of one volume.
        new = list({sample.index: sample for sample in bad if sample.index not in self._bad}.values())
        for sample in new:
            self._bad[sample.index] = sample
        if new and self._file is not None:
            lines = "".join(sample.line() for sample in new)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # One write with O_APPEND: lines of several ranks never interleave.
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, lines.encode())
            finally:
                os.close(descriptor)
        if len(self._bad) > allowed_bad(self._max_bad_fraction, self._seen, self._samples):
            judged = max(min(self._seen, self._samples), min(self._samples, FEWEST_JUDGED))
            listed = [f"{sample.name}: {sample.reason}" for sample in self.bad[:SHOWN]]
            if (more := len(self._bad) - len(listed)) > 0:
                listed.append(f"and {more} more" + (f", all in {self._file}" if self._file else ""))
            raise TooManyBad(
                "too-many-bad-samples",
                f"{len(self._bad)} of {judged} samples cannot be read; "
                f"max_bad_fraction allows {self._max_bad_fraction:g}\n" + "\n".join(listed),
                why="each one is replaced by another sample, so the run would train on different data than you expect",
                hint="repair these files, or raise max_bad_fraction to train without them",
            )


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


@dataclass
class Announcer:
    """Keeps about `budget` bytes of upcoming steps announced to the reader, so that their bytes are fetched early."""

    maker: Maker[Any]
    epoch: int
    start: int
    count: int
    budget: int
    stride: int = 1
    next: int = 0
    """The first step that is not announced yet."""

    def before(self, step: int) -> None:
        """Call before a step is made: announces it, and as many later steps as fit the budget."""
        batch_bytes = max(1.0, self.maker.plan.steps.batch_size * self.maker.reader.mean_bytes)
        # At least two, so that the next batch is fetched while this one is decoded.
        ahead = max(2, int(self.budget / batch_bytes))
        last = min(self.count - 1, step + ahead * self.stride)
        while self.next <= last:
            self.maker.announce(self.epoch, self.next, self.start)
            self.next += self.stride
