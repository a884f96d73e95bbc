"""What several decoders need: scratch memory of each thread, boxes at a smaller scale."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from stoker.data.images.crops import Box
from stoker.data.images.headers import JpegLayout

# Fresh memory of an image's size costs a page fault for each 4 KB, as much as a tenth of the decoding.
# Above this an image is rare, and its memory is given back.
_KEPT_BYTES = 64 << 20
# libjpeg-turbo takes the colour of a 4:2:0 region of one or two pixels at the left border from the wrong place.
NARROWEST = 8
_local = threading.local()


class Refused(Exception):
    """This decoder does not take this file on, or noticed damage."""


def is_plain(layout: JpegLayout) -> bool:
    """Whether all decoders agree on such a file: 8 bit, YCbCr or grey, baseline or progressive."""
    return layout.colour in ("ycc", "grey") and layout.precision == 8 and layout.huffman


def scratch(size: int) -> NDArray[np.uint8]:
    """At least `size` bytes that belong to this thread until it asks again."""
    buffer: NDArray[np.uint8] | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.size < size:
        buffer = np.empty(max(size, 1 << 20), np.uint8)
        if size <= _KEPT_BYTES:
            _local.buffer = buffer
    return buffer


def scaled_box(box: Box, scale: int, width: int, height: int) -> Box:
    """The box in an image that is `scale` times smaller, at least a pixel large and within width x height."""
    if scale == 1:
        return box
    half = scale // 2
    top, left = min((box.top + half) // scale, height - 1), min((box.left + half) // scale, width - 1)
    bottom = min(max((box.top + box.height + half) // scale, top + 1), height)
    right = min(max((box.left + box.width + half) // scale, left + 1), width)
    return Box(top, left, bottom - top, right - left)


def cut(image: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
    """The box of an image, as a view."""
    return image[box.top : box.top + box.height, box.left : box.left + box.width]
