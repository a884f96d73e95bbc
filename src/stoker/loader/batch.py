"""A batch: what the model gets, what it cost to make, and the samples that could not be read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.profile.batch_costs import BatchCost

# One bad sample is already a large share of the first few: the share is computed over at least this many samples.
FEWEST_JUDGED = 1000
SHOWN = 20


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read or decoded, and what replaces it."""

    index: int
    name: str
    reason: str
    replaced_by: int
    """Index of the sample in its place."""


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
            lines = "".join(json.dumps(_record(sample)) + "\n" for sample in new)
            self._file.parent.mkdir(parents=True, exist_ok=True)
            # One write with O_APPEND: lines of several ranks never interleave.
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
            why="each one is replaced by another sample, so the run would train on different data than you expect",
            hint="repair these files, or raise max_bad_fraction to train without them",
        )


def _record(sample: BadSample) -> dict[str, Any]:
    """The line of a bad sample in the quarantine file."""
    return {"sample": sample.index, "name": sample.name, "reason": sample.reason, "replaced_by": sample.replaced_by}
