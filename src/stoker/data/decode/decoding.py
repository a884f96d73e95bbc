"""From a file's bytes to a crop of it in its slot of the batch: fast for training, faithful for validation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from stoker.data.crops import Box
from stoker.data.decode import calibration, decoders
from stoker.data.decode.decoders import pillow_
from stoker.data.decode.faithful import centre_into, resize_into
from stoker.data.decode.headers import BadImage, Bytes, ImageHeader, read_header
from stoker.data.decode.orientation import stored_box, stored_shape, turn_into, turned
from stoker.errors import UserError

__all__ = ["BadImage", "Box", "Decoding", "ImageHeader", "Interpolation", "available_decoders", "choose_decoder"]

Interpolation = Literal["bilinear", "bicubic"]
Slot = NDArray[np.uint8]
MAX_PIXELS = 178_956_970
"""The limit that Pillow has too."""
END_OF_IMAGE = b"\xff\xd9"
# How much smaller a JPEG can be decoded with its colours in place. At an eighth those of 4:2:2 and
# 4:4:0 were 5 grey levels off on a smooth picture, those of 4:1:1 at any scale.
LARGEST_REDUCTION = {"444": 8, "420": 8, "grey": 8, "422": 4, "440": 4}
# Each worker has a core of its own: threads of OpenCV's would only fight over them.
cv2.setNumThreads(0)


@dataclass(frozen=True)
class Decoding:
    """How images are decoded; every thread and process may use the same one."""

    decoder: str = "pillow"
    """Which library decodes JPEGs; what it refuses, and every other kind, Pillow decodes."""
    max_pixels: int = MAX_PIXELS
    """An image with more pixels is taken for a decompression bomb."""

    def read_header(self, data: Bytes) -> ImageHeader:
        """Kind, size and orientation, by the bytes; raises BadImage."""
        return read_header(data, self.max_pixels)

    def fast_crop_into(self, data: Bytes, header: ImageHeader, box: Box, out: Slot) -> None:
        """Fills `out` with the box: no more is decoded than it needs, and there is no antialiasing for a
        reduction of less than two. Raises BadImage."""
        _check_slot(out)
        rows, columns = stored_shape(header.orientation, out.shape[0], out.shape[1])
        inner = stored_box(header.orientation, header.width, header.height, box)
        largest = LARGEST_REDUCTION.get(header.jpeg.subsampling, 1) if header.jpeg is not None else 1
        pixels = self._region(data, header, inner, min(_reduction(inner, rows, columns), largest))
        if header.orientation == 1:
            _resize(pixels, out)
        else:
            small = np.empty((rows, columns, 3), np.uint8)
            _resize(pixels, small)
            turn_into(small, header.orientation, out)

    def faithful_crop_into(
        self, data: Bytes, header: ImageHeader, box: Box, out: Slot, interpolation: Interpolation
    ) -> None:
        """Fills `out` with the box as torchvision's resized_crop does on a Pillow image; raises BadImage."""
        _check_slot(out)
        inner = stored_box(header.orientation, header.width, header.height, box)
        pixels = self._region(data, header, inner, 1)
        resize_into(turned(pixels, header.orientation), out, interpolation)

    def faithful_centre_into(
        self, data: Bytes, header: ImageHeader, resize: int, out: Slot, interpolation: Interpolation
    ) -> None:
        """Fills `out` as torchvision's Resize and CenterCrop do on a Pillow image; raises BadImage."""
        _check_slot(out)
        pixels = self._region(data, header, Box(0, 0, header.stored_height, header.stored_width), 1)
        centre_into(turned(pixels, header.orientation), resize, out, interpolation)

    def _region(self, data: Bytes, header: ImageHeader, box: Box, scale: int) -> Slot:
        """The pixels of a box of the stored image; about what the decoder refuses, Pillow decides."""
        if header.jpeg is not None and self.decoder != "pillow" and _ends_whole(data):
            try:
                return decoders.load_decoder(self.decoder).region(data, header, box, scale)
            except decoders.Refused:
                pass
        return pillow_.region(data, header, box, scale)


def available_decoders() -> list[str]:
    """The decoders that work here; Pillow always does."""
    return list(decoders.available_decoders())


def choose_decoder(
    wanted: str, sample_files: Callable[[], list[bytes]], size: int, *, max_pixels: int = MAX_PIXELS
) -> tuple[Decoding, calibration.CalibrationResult | None]:
    """The decoder of that name, or for 'auto' the one that is fastest on these files at this size of crops,
    with what was measured."""
    available = available_decoders()
    if wanted == "auto":
        result = calibration.choose_fastest(available, sample_files(), size, max_pixels)
        return Decoding(result.choice, max_pixels), result
    if wanted not in available:
        raise UserError(
            "decoder-missing",
            f"decoder: {wanted} is not installed or does not work here",
            why=f"what works here: {', '.join(available)}",
            hint="decoder=auto takes the fastest of these",
        )
    return Decoding(wanted, max_pixels), None


def _ends_whole(data: Bytes) -> bool:
    """Whether a JPEG ends where JPEGs end. A truncated one does not, even where the crop lies above the cut."""
    if bytes(data[-2:]) == END_OF_IMAGE:
        return True
    return bytes(data[-4096:]).rstrip(b"\0").endswith(END_OF_IMAGE)


def _check_slot(out: Slot) -> None:
    # OpenCV silently writes elsewhere when its destination does not fit.
    assert out.dtype == np.uint8, out.dtype
    assert out.ndim == 3, out.shape
    assert out.shape[2] == 3, out.shape
    assert out.flags.c_contiguous, out.strides


def _reduction(box: Box, rows: int, columns: int) -> int:
    """How much smaller a box may be decoded and still have the rows and columns that are wanted.

    Only halves, quarters and eighths: the other scales of a JPEG's blocks are slower than the full one."""
    surplus = min(box.height / rows, box.width / columns)
    return 1 if surplus < 2 else 2 if surplus < 4 else 4 if surplus < 8 else 8


def _resize(pixels: Any, out: Slot) -> None:
    """Linear; what came twice too large or more is averaged first, as a scaled decoding would have done."""
    rows, columns = out.shape[:2]
    surplus = _reduction(Box(0, 0, pixels.shape[0], pixels.shape[1]), rows, columns)
    if surplus > 1:
        smaller = (pixels.shape[1] // surplus, pixels.shape[0] // surplus)
        pixels = cv2.resize(pixels, smaller, interpolation=cv2.INTER_AREA)
    cv2.resize(pixels, (columns, rows), dst=out, interpolation=cv2.INTER_LINEAR)
