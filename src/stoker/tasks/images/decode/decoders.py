"""The libraries that decode JPEGs, and Pillow for everything else.

A decoder's `region` returns the RGB pixels of a box of the image as it is stored, up to 8 times smaller. At full size
every decoder returns exactly Pillow's pixels, so choosing the fastest one does not change results; only `decode_mode:
draft` reduces while decoding. A library is imported when its decoder is first loaded, so a missing or broken one is
merely unavailable.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.core.console import silent_libraries
from stoker.tasks.images.decode.headers import (
    MOST_SCANS,
    PILLOW_CLASSES,
    BadImage,
    Box,
    Bytes,
    ImageHeader,
    JpegLayout,
    read_header,
)

# libjpeg-turbo takes the colour of a 4:2:0 region of one or two pixels at the left border from the wrong place.
NARROWEST = 8


LIBTURBOJPEG = "STOKER_LIBTURBOJPEG"


class Refused(Exception):
    """This decoder does not handle this file, or noticed damage: Pillow decides."""


class Decoder(Protocol):
    def region(self, data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
        """The pixels of `box`, which is in stored pixels; raises Refused.

        `scale` is 1, 2, 4 or 8: how many times smaller than stored the result may be. The array belongs to the calling
        thread, whose next call overwrites it."""


def plain_layout(header: ImageHeader) -> JpegLayout:
    """The layout of a JPEG on which all decoders agree: 8 bit, YCbCr or grey, baseline or progressive; raises Refused
    for any other file."""
    layout = header.jpeg
    if layout is None or layout.colour not in ("ycc", "grey") or layout.precision != 8 or not layout.huffman:
        raise Refused
    return layout


class Scratch(threading.local):
    """Memory for one image of each thread, reused: fresh memory costs a page fault for every 4 KB, up to a tenth of
    the decoding time. Images of more than `kept_bytes` are rare, and their memory is freed."""

    def __init__(self, kept_bytes: int) -> None:
        self._kept_bytes = kept_bytes
        self._buffer = np.empty(0, np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        """At least `size` bytes that belong to this thread until its next call."""
        if self._buffer.size >= size:
            return self._buffer
        buffer = np.empty(max(size, 1 << 20), np.uint8)
        if size <= self._kept_bytes:
            self._buffer = buffer
        return buffer


scratch = Scratch(kept_bytes=64 << 20)


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
    return image[box.top : box.top + box.height, box.left : box.left + box.width]


class SimpleJpeg:
    """simplejpeg: whole rows, from the top of the image to the bottom of the crop."""

    def __init__(self) -> None:
        import simplejpeg

        self._decode = simplejpeg.decode_jpeg

    def region(self, data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
        layout = plain_layout(header)
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
                buffer=scratch.take(rows * columns * 3),
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
        plain_layout(header)
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
        if plain_layout(header).subsampling not in self._SUBSAMPLINGS:
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


PILLOW = Pillow()


class CropRegion(ctypes.Structure):
    """tjregion"""

    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


class Scale(ctypes.Structure):
    """tjscalingfactor"""

    _fields_ = (("num", ctypes.c_int), ("denom", ctypes.c_int))


@dataclass(frozen=True)
class Library:
    """The same library, bound twice."""

    keeps_lock: Any
    """Keeps the GIL: for calls that take a microsecond, which releasing the lock would double."""
    releases_lock: Any
    """Releases the GIL: for the decoding."""


def candidates() -> Iterator[str]:
    """Where a library may be, the one the user named first."""
    named = os.environ.get(LIBTURBOJPEG)
    if named:
        yield named
    with suppress(metadata.PackageNotFoundError):  # of the wheel, only the library is used
        for file in metadata.files("turbojpeg") or ():
            if file.name.startswith(("libturbojpeg", "turbojpeg.dll")):
                yield str(file.locate())
    for folder in (Path(sys.prefix) / "lib", Path(sys.base_prefix) / "lib"):  # conda
        yield from map(str, sorted(folder.glob("libturbojpeg*.so*")))
        yield from map(str, sorted(folder.glob("libturbojpeg*.dylib")))
    system = ctypes.util.find_library("turbojpeg")
    if system:
        yield system


def bind(path: str) -> Library:
    """The library's functions with their types; raises OSError or AttributeError if it is not version 3."""
    keeps_lock, releases_lock = ctypes.PyDLL(path), ctypes.CDLL(path)
    pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    signatures = {
        "tj3Init": ([number], pointer),
        "tj3Destroy": ([pointer], None),
        "tj3Set": ([pointer, number, number], number),
        "tj3Get": ([pointer, number], number),
        "tj3DecompressHeader": ([pointer, pointer, size], number),
        "tj3SetScalingFactor": ([pointer, Scale], number),
        "tj3SetCroppingRegion": ([pointer, CropRegion], number),
        "tj3Decompress8": ([pointer, pointer, size, pointer, number, number], number),
    }
    for library in (keeps_lock, releases_lock):
        for name, (arguments, result) in signatures.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
    return Library(keeps_lock, releases_lock)


# enum TJPARAM of turbojpeg.h
_SUBSAMPLING, _WIDTH, _HEIGHT, _PRECISION, _SCAN_LIMIT, _LOSSLESS = 4, 5, 6, 7, 13, 15
_DECOMPRESS, _RGB = 1, 0
# enum TJSAMP, and the size in pixels of the units that such a JPEG is made of. 4:1:1 is rare and left to Pillow.
_UNITS = {"444": (0, 8, 8), "422": (1, 16, 8), "420": (2, 16, 16), "grey": (3, 8, 8), "440": (4, 8, 16)}
_SCALES = {scale: Scale(1, scale) for scale in (1, 2, 4, 8)}
_WHOLE = CropRegion(0, 0, 0, 0)


class TurboJpeg:
    """libturbojpeg through ctypes: decodes a region, and scales within the decoder. Only version 3 can decode a region;
    the first library that is found and returns exactly Pillow's pixels is used. Raises ImportError if there is none."""

    def __init__(self) -> None:
        for path in candidates():
            try:
                self._library = bind(path)
            except (OSError, AttributeError):
                continue
            self._local = threading.local()
            if self._passes_self_test():
                return
        raise ImportError("no libturbojpeg of version 3 found")

    def region(self, data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
        if plain_layout(header).subsampling not in _UNITS:
            raise Refused
        handle = getattr(self._local, "handle", None)
        if handle is None:
            handle = self._local.handle = _Handle(self._library)
        try:
            return _decode(self._library, handle.address, data, header, box, scale)
        except Refused:
            # After any error a handle keeps answering with that error.
            self._local.handle = None
            raise

    def _passes_self_test(self) -> bool:
        """Whether regions are exactly Pillow's, for every kind of JPEG that is handed to the library."""
        # Noise in blocks of five pixels: nothing in it repeats with the units of a JPEG.
        blocks = np.random.default_rng(0).integers(0, 256, (10, 12, 3), np.uint8)
        image = Image.fromarray(np.kron(blocks, np.ones((5, 5, 1), np.uint8)))
        boxes = [Box(0, 0, 50, 60), Box(17, 33, 9, 11), Box(16, 16, 16, 16), Box(49, 59, 1, 1), Box(5, 0, 40, 3)]
        for mode, subsampling in (("RGB", "4:4:4"), ("RGB", "4:2:2"), ("RGB", "4:2:0"), ("L", "4:4:4")):
            for progressive in (False, True):
                stream = io.BytesIO()
                image.convert(mode).save(stream, "JPEG", subsampling=subsampling, progressive=progressive)
                data = stream.getvalue()
                header = read_header(data, 1 << 20)
                for box in boxes:
                    try:
                        pixels = self.region(data, header, box, 1)
                    except Refused:
                        return False
                    if not np.array_equal(pixels, PILLOW.region(data, header, box, 1)):
                        return False
        return True


class _Handle:
    """One thread's decompressor, freed with the thread."""

    def __init__(self, library: Library) -> None:
        self._destroy = library.keeps_lock.tj3Destroy
        self.address: Any = library.keeps_lock.tj3Init(_DECOMPRESS)
        if not self.address:
            raise Refused
        # Fast upsampling and the fast DCT stay off, the default: the first crashes on crops of 4:2:0 that do not begin
        # with a unit, the second costs a grey level for 3 % of the time.
        library.keeps_lock.tj3Set(self.address, _SCAN_LIMIT, MOST_SCANS)

    def __del__(self) -> None:
        if getattr(self, "address", None):
            self._destroy(self.address)


def _decode(library: Library, handle: Any, data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
    assert header.jpeg is not None
    quick = library.keeps_lock
    source = np.frombuffer(data, np.uint8)
    address, size = source.ctypes.data, source.size
    quick.tj3SetCroppingRegion(handle, _WHOLE)  # the last image's region would be applied to this header
    if quick.tj3DecompressHeader(handle, address, size) != 0:
        raise Refused
    code, unit_width, unit_height = _UNITS[header.jpeg.subsampling]
    seen = [quick.tj3Get(handle, parameter) for parameter in (_WIDTH, _HEIGHT, _SUBSAMPLING, _PRECISION, _LOSSLESS)]
    if seen != [header.stored_width, header.stored_height, code, 8, 0]:
        raise Refused
    columns, rows = -(-header.stored_width // scale), -(-header.stored_height // scale)
    inner = scaled_box(box, scale, columns, rows)
    # The region must begin with a unit of the JPEG. Where colour is stored at half the size it is one pixel wider than
    # the crop on each side: pixels at its border would lack a neighbour to take colour from.
    margin = 1 if unit_width > 8 else 0
    left, top = max(0, inner.left - margin), inner.top
    left, top = left - left % (unit_width // scale), top - top % (unit_height // scale)
    right, bottom = min(max(inner.left + inner.width + 1, NARROWEST), columns), min(inner.top + inner.height + 1, rows)
    width, height = right - left, bottom - top
    if quick.tj3SetScalingFactor(handle, _SCALES[scale]) != 0:
        raise Refused
    if quick.tj3SetCroppingRegion(handle, CropRegion(left, top, width, height)) != 0:
        raise Refused
    buffer = scratch.take(width * height * 3)
    # A warning counts as a failure: it means that the data is damaged.
    if library.releases_lock.tj3Decompress8(handle, address, size, buffer.ctypes.data, width * 3, _RGB) != 0:
        raise Refused
    pixels = buffer[: width * height * 3].reshape(height, width, 3)
    return cut(pixels, Box(inner.top - top, inner.left - left, inner.height, inner.width))


# In the order in which messages name them.
DECODERS: dict[str, Callable[[], Decoder]] = {
    "turbojpeg": TurboJpeg,
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
