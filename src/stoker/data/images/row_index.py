"""Which bytes of a sample its crop needs, for packs whose images have restart markers.

What the reader is asked for is a number: a sample's index stands for the whole sample, and some of its rows have a
number of their own. So repeats, read-ahead and what is taken early work the same for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.data.images.headers import Box, Bytes
from stoker.data.images.restart_rows import END_OF_IMAGE, UNIT, Part, RowLayout, Template, cut_out
from stoker.data.images.sample_index import SampleIndex

FACT = "restart_rows"
"""The fact of an index that holds the header its samples share."""
REMEMBERED = 8192
"""Layouts: those of the samples that are read ahead by default, about a kilobyte each."""
# A number has 38 bits for the index, and 12 for each of two rows: the longest JPEG has 4,094.
_INDEX_BITS, _ROW_BITS = 38, 12
_INDEX, _ROW = (1 << _INDEX_BITS) - 1, (1 << _ROW_BITS) - 1

NeededBox = Callable[[int, int, int], Box | None]
"""The part that is needed of the image in a slot of the batch, given its width and height; None for all of it."""


class RowSpan(NamedTuple):
    """Some rows of a sample."""

    sample: int
    first: int
    end: int
    """The first row that is not among them; 0 stands for the whole sample."""


def number_of(sample: int, first: int, end: int) -> int:
    """The number that stands for some rows of a sample."""
    return sample | first << _INDEX_BITS | end << _INDEX_BITS + _ROW_BITS


def span_of(number: int) -> RowSpan:
    """What a number stands for."""
    return RowSpan(number & _INDEX, number >> _INDEX_BITS & _ROW, number >> _INDEX_BITS + _ROW_BITS)


class RowIndex:
    """The rows of every sample of a pack."""

    def __init__(self, samples: SampleIndex, template: Template) -> None:
        assert samples.layout_ends is not None
        assert samples.layout_bytes is not None
        assert samples.sizes is not None
        self._ends, self._records, self._sizes = samples.layout_ends, samples.layout_bytes, samples.sizes
        self._template = template
        # A layout is needed when its sample is announced, when it is read, and when it is decoded.
        self.layout = lru_cache(REMEMBERED)(self._layout)

    def wanted(self, indices: NDArray[np.int64], needed: NeededBox) -> tuple[NDArray[np.int64], list[Box | None]]:
        """The numbers of the rows that a batch needs, and the box that each slot needs. Repeats of a sample share the
        rows that all of them need."""
        spans: dict[int, tuple[int, int]] = {}
        boxes: list[Box | None] = []
        listed: list[int] = indices.tolist()
        for slot, index in enumerate(listed):
            layout = self.layout(index)
            box = None if layout is None else needed(slot, layout.width, layout.height)
            boxes.append(box)
            span = (0, 0) if box is None else _rows_of_box(box)
            if index in spans:
                other = spans[index]
                span = (min(span[0], other[0]), max(span[1], other[1])) if span[1] and other[1] else (0, 0)
            spans[index] = span
        return np.array([number_of(index, *spans[index]) for index in listed], np.int64), boxes

    def range_in_sample(self, rows: RowSpan) -> tuple[int, int]:
        """Where these rows are among the bytes of their sample: offset and size."""
        layout = self.layout(rows.sample)
        assert layout is not None, "rows are only asked for if a sample has them"
        return self._range(layout, rows.first, rows.end)

    def part(self, number: int, data: Bytes, box: Box) -> Part:
        """The box of what was read for this number, as an image of its own; raises BadImage."""
        sample, first, end = span_of(number)
        layout = self.layout(sample)
        assert layout is not None
        if not end:
            first, end = _rows_of_box(box)
            offset, size = self._range(layout, first, end)
            data = memoryview(data)[offset : offset + size]
        return cut_out(self._template, layout, first, end, data, box)

    def _layout(self, index: int) -> RowLayout | None:
        """The rows of a sample; None if it has none, or they do not add up to its size."""
        start = int(self._ends[index - 1]) if index else 0
        try:
            layout = RowLayout.of_record(self._records[start : int(self._ends[index])].tobytes())
        except ValueError:
            return None
        size = self._template.header_bytes(layout.tables) + layout.bytes_of(0, layout.rows) + len(END_OF_IMAGE)
        return layout if size == int(self._sizes[index]) else None

    def _range(self, layout: RowLayout, first: int, end: int) -> tuple[int, int]:
        before = self._template.header_bytes(layout.tables)
        return before + layout.bytes_of(0, first), layout.bytes_of(first, end)


def _rows_of_box(box: Box) -> tuple[int, int]:
    """The first row of units of a box, and the first one below it."""
    return box.top // UNIT, -(-(box.top + box.height) // UNIT)


def open_row_index(samples: SampleIndex) -> RowIndex | None:
    """The rows of a pack's samples; None if it was made without `--restart-rows`."""
    text = samples.facts.get(FACT)
    if samples.layout_ends is None or samples.layout_bytes is None or samples.sizes is None or not samples.shards:
        return None
    try:
        return RowIndex(samples, Template.of_text(str(text)))
    except ValueError:
        return None  # of a later version: its samples are read whole


def pack_layouts(layouts: Iterable[bytes]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Records of layouts as the two arrays of an index."""
    records = list(layouts)
    ends = np.cumsum([len(record) for record in records], dtype=np.int64)
    return np.frombuffer(b"".join(records), np.uint8), ends
