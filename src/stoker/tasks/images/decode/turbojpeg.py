"""libturbojpeg 3 through ctypes: decodes a region, and scales within the decoder.

Only version 3 can decode a region. The first library that is found and returns Pillow's exact pixels is used.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.tasks.images.decode.decoders import NARROWEST, PILLOW, Refused, cut, is_plain, scaled_box, scratch
from stoker.tasks.images.decode.headers import MOST_SCANS, Box, Bytes, ImageHeader, read_header

VARIABLE = "STOKER_LIBTURBOJPEG"


class CropRegion(ctypes.Structure):
    """tjregion"""

    _fields_ = (("x", ctypes.c_int), ("y", ctypes.c_int), ("w", ctypes.c_int), ("h", ctypes.c_int))


class Scale(ctypes.Structure):
    """tjscalingfactor"""

    _fields_ = (("num", ctypes.c_int), ("denom", ctypes.c_int))


@dataclass(frozen=True)
class Library:
    """The same library, bound twice."""

    path: str
    keeps_lock: Any
    """Keeps the GIL: for calls that take a microsecond, which releasing the lock would double."""
    releases_lock: Any
    """Releases the GIL: for the decoding."""


def candidates() -> Iterator[str]:
    """Where a library may be, the one the user named first."""
    named = os.environ.get(VARIABLE)
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
    return Library(path, keeps_lock, releases_lock)


# enum TJPARAM of turbojpeg.h
_SUBSAMPLING, _WIDTH, _HEIGHT, _PRECISION, _SCAN_LIMIT, _LOSSLESS = 4, 5, 6, 7, 13, 15
_DECOMPRESS, _RGB = 1, 0
# enum TJSAMP, and the size in pixels of the units that such a JPEG is made of. 4:1:1 is rare and left to Pillow.
_UNITS = {"444": (0, 8, 8), "422": (1, 16, 8), "420": (2, 16, 16), "grey": (3, 8, 8), "440": (4, 8, 16)}
_SCALES = {scale: Scale(1, scale) for scale in (1, 2, 4, 8)}
_WHOLE = CropRegion(0, 0, 0, 0)


class TurboJpeg:
    """The decoder; raises ImportError if no library is found that passes the self-test."""

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
        """The pixels of a box, exactly `scale` times smaller; raises Refused."""
        layout = header.jpeg
        if layout is None or not is_plain(layout) or layout.subsampling not in _UNITS:
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
        from PIL import Image

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
    buffer = scratch(width * height * 3)
    # A warning counts as a failure: it means that the data is damaged.
    if library.releases_lock.tj3Decompress8(handle, address, size, buffer.ctypes.data, width * 3, _RGB) != 0:
        raise Refused
    pixels = buffer[: width * height * 3].reshape(height, width, 3)
    return cut(pixels, Box(inner.top - top, inner.left - left, inner.height, inner.width))
