"""A batch: what the model gets, what its making cost, and the samples that could not be read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.clock.costs import BatchCost
from stoker.errors import UserError

# A batch: what the model gets, and what its making cost.


class BadSample(NamedTuple):
    """A sample that could not be read or decoded, and what stands in its place."""

    sample: int
    name: str
    reason: str
    replaced_by: int


@dataclass
class Batch:
    """The samples of one step on one rank, as bytes: float, flip and mixing belong to the device."""

    images: Any
    """uint8 (samples, height, width, 3): a numpy array while it is made, a tensor when it is handed over."""
    labels: NDArray[np.int64]
    samples: NDArray[np.int64]
    """The numbers of the samples in the index, as the order asked for them."""
    flips: NDArray[np.bool_]
    """Which images the device should mirror."""
    keys: NDArray[np.uint64]
    """From which every further random choice about each sample follows (stoker.data.draws)."""
    epoch: int
    step: int
    next_position: int
    """Where in the epoch the run would resume after this batch."""
    cost: BatchCost = field(default_factory=BatchCost)
    bad: tuple[BadSample, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


# Samples that could not be read: named in a file, and too many of them stop the run.

# Of the first few samples one bad one is already a large share; the share is taken of at least so many.
FEWEST_JUDGED = 1000
SHOWN = 20


class TooManyBad(UserError):
    """More samples are unreadable than the config allows."""


class Quarantine:
    """Keeps the bad samples of one process."""

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
        """Notes the bad ones of a batch with `seen` samples; raises TooManyBad above the ceiling."""
        self._seen += seen
        new = [sample for sample in bad if sample.sample not in self._bad]
        for sample in new:
            self._bad[sample.sample] = sample
        if new and self._file is not None:
            lines = "".join(json.dumps(sample._asdict()) + "\n" for sample in new)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # One write with O_APPEND: lines of several ranks do not mix.
            descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                os.write(descriptor, lines.encode())
            finally:
                os.close(descriptor)
        judged = max(min(self._seen, self._samples), min(self._samples, FEWEST_JUDGED))
        if len(self._bad) > self._max_bad_fraction * judged:
            raise self._too_many(judged)

    def _too_many(self, judged: int) -> TooManyBad:
        listed = [f"{sample.name}: {sample.reason}" for sample in self.bad[:SHOWN]]
        more = len(self._bad) - len(listed)
        if more > 0:
            listed.append(f"and {more} more" + (f", all in {self._file}" if self._file else ""))
        return TooManyBad(
            "too-many-bad-samples",
            f"{len(self._bad)} of {judged} samples cannot be read; "
            f"max_bad_fraction allows {self._max_bad_fraction:g}\n" + "\n".join(listed),
            why="a run that replaces so many samples trains on something else than you think",
            hint="mend or remove these files, or raise max_bad_fraction",
        )
