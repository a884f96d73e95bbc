"""The libraries that decode JPEGs, and Pillow for everything else.

A decoder's `region` returns the RGB pixels of a box of the image as it is stored, up to 8 times smaller. At full size
every decoder returns exactly Pillow's pixels, so choosing the fastest one does not change results; only `decode_mode:
draft` reduces while decoding. A library is imported when its decoder is first loaded, so a missing or broken one is
merely unavailable.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.core.console import silent_libraries
from stoker.tasks.images.decode.headers import PILLOW_CLASSES, BadImage, Box, Bytes, ImageHeader, JpegLayout

# Fresh memory for an image costs a page fault for every 4 KB, up to a tenth of the decoding time.
# Images larger than this are rare, and their memory is freed.
_KEPT_BYTES = 64 << 20
# libjpeg-turbo takes the colour of a 4:2:0 region of one or two pixels at the left border from the wrong place.
NARROWEST = 8
_local = threading.local()


class Refused(Exception):
    """This decoder does not handle this file, or noticed damage: Pillow decides."""


class Decoder(Protocol):
    """Decodes regions of images in one library."""

    def region(self, data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
        """The pixels of `box`, which is in stored pixels; raises Refused.

        `scale` is 1, 2, 4 or 8: how many times smaller than stored the result may be. The array belongs to the calling
        thread, whose next call overwrites it."""


def is_plain(layout: JpegLayout) -> bool:
    """Whether all decoders agree on such a file: 8 bit, YCbCr or grey, baseline or progressive."""
    return layout.colour in ("ycc", "grey") and layout.precision == 8 and layout.huffman


def scratch(size: int) -> NDArray[np.uint8]:
    """At least `size` bytes that belong to this thread until its next call."""
    buffer: NDArray[np.uint8] | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.size < size:
        buffer = np.empty(max(size, 1 << 20), np.uint8)
        if size <= _KEPT_BYTES:
            _local.buffer = buffer
    return buffer


def scaled_box(box: Box, scale: int, width: int, height: int) -> Box:
    """The box in an image that is `scale` times smaller: at least one pixel, and within width x height."""
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


class SimpleJpeg:
    """simplejpeg: whole rows, from the top of the image to the bottom of the crop."""

    def __init__(self) -> None:
        import simplejpeg

        self._decode = simplejpeg.decode_jpeg

    def region(self, data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
        """The pixels of a box, exactly `scale` times smaller."""
        layout = header.jpeg
        if layout is None or not is_plain(layout):
            raise Refused
        height, strict = header.stored_height, True
        # The library cannot decode a region, but it stops where the header says the image ends: a crop ends at 75 % of
        # the height on average, and the rest is never decoded. With several scans there is no such end. One row more
        # than the crop: its lowest row takes colour from the row below it.
        unit = 16 if layout.subsampling in ("420", "440") else 8
        bottom = -(-(box.top + box.height + 1) // unit) * unit
        if bottom < height and layout.interleaved and not layout.progressive and layout.subsampling != "other":
            patched = bytearray(data)
            patched[layout.frame_offset + 5 : layout.frame_offset + 7] = bottom.to_bytes(2, "big")
            # Data after the last row would count as damage in strict mode.
            data, height, strict = patched, bottom, False
        rows, columns = -(-height // scale), -(-header.stored_width // scale)
        try:
            image: NDArray[np.uint8] = self._decode(
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


class OpenCV:
    """OpenCV: the whole image, cropped afterwards."""

    def __init__(self) -> None:
        import cv2

        self._cv2: Any = cv2
        modes = (cv2.IMREAD_COLOR, cv2.IMREAD_REDUCED_COLOR_2, cv2.IMREAD_REDUCED_COLOR_4, cv2.IMREAD_REDUCED_COLOR_8)
        self._modes = {1 << power: mode | cv2.IMREAD_IGNORE_ORIENTATION for power, mode in enumerate(modes)}

    def region(self, data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
        """The pixels of a box, exactly `scale` times smaller."""
        layout = header.jpeg
        if layout is None or not is_plain(layout):
            raise Refused
        cv2 = self._cv2
        try:
            image = cv2.imdecode(np.frombuffer(data, np.uint8), self._modes[scale])
        except cv2.error as error:
            raise Refused from error
        rows, columns = -(-header.stored_height // scale), -(-header.stored_width // scale)
        if image is None or image.shape != (rows, columns, 3):
            raise Refused
        # OpenCV puts blue first. Only the crop is worth reordering.
        pixels: NDArray[np.uint8] = cv2.cvtColor(cut(image, scaled_box(box, scale, columns, rows)), cv2.COLOR_BGR2RGB)
        return pixels


class NvImageCodec:
    """nvImageCodec on the CPU: decodes a region, never scaled."""

    # The library's number for 'no GPU at all'.
    _CPU = -99999
    _SUBSAMPLINGS = frozenset({"444", "422", "420", "440", "grey"})

    def __init__(self) -> None:
        # Only located: importing it takes long, so that waits until the first image.
        if find_spec("nvidia") is None or find_spec("nvidia.nvimgcodec") is None:
            raise ImportError("nvimgcodec")
        self._local = threading.local()
        self._loading = threading.Lock()

    def region(self, data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:  # noqa: ARG002
        """The pixels of a box at full size."""
        layout = header.jpeg
        if layout is None or not is_plain(layout) or layout.subsampling not in self._SUBSAMPLINGS:
            raise Refused
        codec, decoder, parameters = self._of_this_thread()
        try:
            stream = codec.CodeStream(data if isinstance(data, bytes) else bytes(data))
            if (stream.width, stream.height) != (header.stored_width, header.stored_height):
                raise Refused
            right = min(max(box.left + box.width, NARROWEST), header.stored_width)
            area = codec.Region((box.top, box.left), (box.top + box.height, right))
            image = decoder.decode(stream.get_sub_code_stream(region=area), params=parameters)
        except RuntimeError as error:
            raise Refused from error
        if image is None:
            raise Refused
        pixels: NDArray[np.uint8] = np.asarray(image.cpu())
        if pixels.shape != (box.height, right - box.left, 3) or pixels.dtype != np.uint8:
            raise Refused
        return pixels[:, : box.width]

    def _of_this_thread(self) -> tuple[Any, Any, Any]:
        """The library, this thread's decoder, and its parameters."""
        if not hasattr(self._local, "decoder"):
            with self._loading, silent_libraries():
                from nvidia import nvimgcodec

                backend = nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)
                decoder = nvimgcodec.Decoder(device_id=self._CPU, max_num_cpu_threads=1, backends=[backend])
            parameters = nvimgcodec.DecodeParams(allow_any_depth=False, apply_exif_orientation=False)
            self._local.decoder = nvimgcodec, decoder, parameters
        found: tuple[Any, Any, Any] = self._local.decoder
        return found


class Pillow:
    """Pillow: every kind of image, and the final decision on damaged ones."""

    def region(self, data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
        """The pixels of a box of the first frame, `scale` times smaller for JPEGs; raises BadImage, never Refused."""
        try:
            with PILLOW_CLASSES[header.kind](io.BytesIO(data)) as image:
                if image.size != (header.stored_width, header.stored_height):
                    raise BadImage(
                        f"damaged: its header says {header.stored_width}x{header.stored_height} pixels, "
                        f"Pillow finds {image.width}x{image.height}"
                    )
                if header.kind == "jpeg" and scale > 1:
                    image.draft("RGB", (max(1, image.width // scale), max(1, image.height // scale)))
                image.load()
                reduced = round(header.stored_width / image.width)
                return _rgb(image, scaled_box(box, reduced, image.width, image.height))
        except BadImage:
            raise
        except MemoryError:
            raise BadImage(f"not enough memory for {header.stored_width}x{header.stored_height} pixels") from None
        except Exception as error:  # a damaged file makes Pillow raise nearly anything
            text = str(error) or type(error).__name__
            is_cut = "truncated" in text or "broken data stream" in text
            raise BadImage(f"{'truncated or damaged' if is_cut else 'cannot be decoded'}: {text}") from None


def _rgb(image: Image.Image, box: Box) -> NDArray[np.uint8]:
    """The box as RGB: alpha dropped, palette resolved, grey repeated, 16 bits cut to the upper 8."""
    if image.mode.startswith("I;16"):
        grey = (cut(np.asarray(image), box) >> 8).astype(np.uint8)
        return np.repeat(grey[:, :, None], 3, axis=2)
    # Pillow's crop warns above its own limit on pixels; boxes as large as that need no crop.
    if box.height * box.width <= (Image.MAX_IMAGE_PIXELS or 0) and (box.width, box.height) != image.size:
        image = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
        box = Box(0, 0, box.height, box.width)
    return cut(np.asarray(image if image.mode == "RGB" else image.convert("RGB")), box)


def _turbojpeg() -> Decoder:
    from stoker.tasks.images.decode.turbojpeg import TurboJpeg

    return TurboJpeg()


PILLOW = Pillow()
# In the order in which messages name them.
DECODERS: dict[str, Callable[[], Decoder]] = {
    "turbojpeg": _turbojpeg,
    "simplejpeg": SimpleJpeg,
    "nvimgcodec": NvImageCodec,
    "opencv": OpenCV,
    "pillow": lambda: PILLOW,
}


@cache
def load_decoder(name: str) -> Decoder:
    """The decoder of that name; raises ImportError if its library is missing or fails its self-test."""
    return DECODERS[name]()


@cache
def available_decoders() -> tuple[str, ...]:
    """The decoders that work here; Pillow is always one of them."""
    found = []
    for name in DECODERS:
        with suppress(Exception):  # ImportError if the library is missing; a broken one raises anything
            load_decoder(name)
            found.append(name)
    return tuple(found)
