"""simplejpeg: whole rows from the top of the image to the bottom of the crop."""

from __future__ import annotations

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from stoker.data.images.crops import Box
from stoker.data.images.decoders.common import Refused, cut, is_plain, scaled_box, scratch
from stoker.data.images.headers import Bytes, ImageHeader


def prepare() -> None:
    """Nothing to do: the import has failed where the library is missing."""


def region(data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
    """The pixels of a box, exactly `scale` times smaller; raises Refused."""
    layout = header.jpeg
    if layout is None or not is_plain(layout):
        raise Refused
    height, strict = header.stored_height, True
    # The decoder has no notion of a region, but it stops where the header says that the image ends: a
    # crop ends at 75 % of the height on average, and the rest is never decoded. With several scans there is
    # no such end. One row more than the crop: its lowest row takes colour from the row below it.
    unit = 16 if layout.subsampling in ("420", "440") else 8
    bottom = -(-(box.top + box.height + 1) // unit) * unit
    if bottom < height and layout.interleaved and not layout.progressive and layout.subsampling != "other":
        patched = bytearray(data)
        patched[layout.frame_offset + 5 : layout.frame_offset + 7] = bottom.to_bytes(2, "big")
        # What follows the last row would count as damage in strict mode.
        data, height, strict = patched, bottom, False
    rows, columns = -(-height // scale), -(-header.stored_width // scale)
    try:
        image: NDArray[np.uint8] = simplejpeg.decode_jpeg(
            data,
            "RGB",
            min_height=rows if scale > 1 else 0,
            min_width=columns if scale > 1 else 0,
            min_factor=scale,
            buffer=scratch(rows * columns * 3),
            strict=strict,
        )
    except ValueError as error:
        raise Refused from error
    if image.shape[:2] != (rows, columns):
        raise Refused
    return cut(image, scaled_box(box, scale, columns, rows))
