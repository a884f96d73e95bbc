"""EXIF orientation: from the image as a person sees it to the one that is stored, and back."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stoker.data.crops import Box

# seen = stored, transposed for 5..8, then mirrored left-right and top-bottom.
_MIRRORED = frozenset({2, 3, 6, 7})
_UPSIDE_DOWN = frozenset({3, 4, 7, 8})


def stored_box(orientation: int, width: int, height: int, box: Box) -> Box:
    """Where a box of an image that a person sees as width x height lies in the stored one."""
    assert 0 <= box.top < box.top + box.height <= height, (box, width, height)
    assert 0 <= box.left < box.left + box.width <= width, (box, width, height)
    if orientation == 1:
        return box
    left = width - box.left - box.width if orientation in _MIRRORED else box.left
    top = height - box.top - box.height if orientation in _UPSIDE_DOWN else box.top
    if orientation >= 5:
        return Box(left, top, box.width, box.height)
    return Box(top, left, box.height, box.width)


def stored_shape(orientation: int, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns before turning of what has these rows and columns after it."""
    return (columns, rows) if orientation >= 5 else (rows, columns)


def turned(stored: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """The stored pixels as a person sees them, as a view."""
    seen = stored.transpose(1, 0, 2) if orientation >= 5 else stored
    return seen[:: -1 if orientation in _UPSIDE_DOWN else 1, :: -1 if orientation in _MIRRORED else 1]


def turn_into(stored: NDArray[np.uint8], orientation: int, out: NDArray[np.uint8]) -> None:
    """Writes the stored pixels as a person sees them."""
    np.copyto(out, turned(stored, orientation))
