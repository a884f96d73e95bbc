"""OpenCV: the whole image, cut afterwards."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from stoker.data.images.crops import Box
from stoker.data.images.decoders.common import Refused, cut, is_plain, scaled_box
from stoker.data.images.headers import Bytes, ImageHeader

_MODES = {
    1: cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION,
    2: cv2.IMREAD_REDUCED_COLOR_2 | cv2.IMREAD_IGNORE_ORIENTATION,
    4: cv2.IMREAD_REDUCED_COLOR_4 | cv2.IMREAD_IGNORE_ORIENTATION,
    8: cv2.IMREAD_REDUCED_COLOR_8 | cv2.IMREAD_IGNORE_ORIENTATION,
}


def prepare() -> None:
    """Nothing to do: the import has failed where the library is missing."""


def region(data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
    """The pixels of a box, exactly `scale` times smaller; raises Refused."""
    layout = header.jpeg
    if layout is None or not is_plain(layout):
        raise Refused
    try:
        image: Any = cv2.imdecode(np.frombuffer(data, np.uint8), _MODES[scale])
    except cv2.error as error:
        raise Refused from error
    rows, columns = -(-header.stored_height // scale), -(-header.stored_width // scale)
    if image is None or image.shape != (rows, columns, 3):
        raise Refused
    # Blue first is OpenCV's order; only the crop is worth turning round.
    pixels: Any = cv2.cvtColor(cut(image, scaled_box(box, scale, columns, rows)), cv2.COLOR_BGR2RGB)
    return pixels  # type: ignore[no-any-return]
