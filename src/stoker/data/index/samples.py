"""The samples that take part: all of an index, or a subset with labels of its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.data.index.sample_index import SampleIndex


@dataclass(frozen=True)
class SampleSet:
    """Numbers 0 .. n-1 for the order to permute, and what they stand for."""

    index: SampleIndex
    classes: tuple[str, ...]
    chosen: NDArray[np.int64] | None = None
    """Numbers in the index; None where all take part."""
    chosen_labels: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.index) if self.chosen is None else len(self.chosen)

    def numbers(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """The members' numbers in the index."""
        return members if self.chosen is None else self.chosen[members]

    def labels(self, members: NDArray[np.int64]) -> NDArray[np.int64]:
        """The members' classes."""
        labels = self.index.labels if self.chosen_labels is None else self.chosen_labels
        return labels[members].astype(np.int64)


def all_samples(index: SampleIndex) -> SampleSet:
    """Every sample of an index."""
    return SampleSet(index, index.classes)
