"""A batch: what the model gets, and what its making cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.clock.costs import BatchCost


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
