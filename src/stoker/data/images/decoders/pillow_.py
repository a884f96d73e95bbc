"""Pillow: every kind of image, and the last word on damaged ones."""

from __future__ import annotations

import importlib
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.data.images.crops import Box
from stoker.data.images.decoders.common import cut, scaled_box
from stoker.data.images.headers import BadImage, Bytes, ImageHeader

# Opened by class, not by Image.open: no other of Pillow's fifty formats is ever tried on hostile bytes, and
# its own limit on pixels, a global variable, has no say beside ours (in GIF, WebP and TIFF it has, above 178 million).
_CLASSES = {
    "jpeg": ("PIL.JpegImagePlugin", "JpegImageFile"),
    "png": ("PIL.PngImagePlugin", "PngImageFile"),
    "webp": ("PIL.WebPImagePlugin", "WebPImageFile"),
    "gif": ("PIL.GifImagePlugin", "GifImageFile"),
    "bmp": ("PIL.BmpImagePlugin", "BmpImageFile"),
    "tiff": ("PIL.TiffImagePlugin", "TiffImageFile"),
}


def prepare() -> None:
    """Nothing to do: Pillow is always here."""


def region(data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
    """The pixels of a box of the first frame, `scale` times smaller for JPEGs; raises BadImage."""
    try:
        with _open(data, header.kind) as image:
            if image.size != (header.stored_width, header.stored_height):
                raise BadImage(f"damaged: {image.size} pixels, {header.stored_width}x{header.stored_height} announced")
            if header.kind == "jpeg" and scale > 1:
                image.draft("RGB", (max(1, image.width // scale), max(1, image.height // scale)))
            image.load()
            reduced = round(header.stored_width / image.width)
            return _rgb(image, scaled_box(box, reduced, image.width, image.height))
    except BadImage:
        raise
    except MemoryError:
        raise BadImage(f"no memory for {header.stored_width}x{header.stored_height} pixels") from None
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        raise BadImage(_reason(error)) from None


def _open(data: Bytes, kind: str) -> Any:
    module, name = _CLASSES[kind]
    return getattr(importlib.import_module(module), name)(io.BytesIO(data))


def _rgb(image: Image.Image, box: Box) -> NDArray[np.uint8]:
    """The box as RGB: alpha dropped, palette looked up, grey three times, 16 bit by their upper 8."""
    if image.mode.startswith("I;16"):
        grey = (cut(np.asarray(image), box) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    # Pillow's crop warns about its own limit on pixels; for boxes as large as that it is not needed.
    if box.height * box.width <= (Image.MAX_IMAGE_PIXELS or 0) and (box.width, box.height) != image.size:
        image = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        box = Box(0, 0, box.height, box.width)
    return cut(np.asarray(image if image.mode == "RGB" else image.convert("RGB")), box)


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    if "truncated" in text or "broken data stream" in text:
        return f"truncated or damaged: {text}"
    return f"cannot be decoded: {text}"
