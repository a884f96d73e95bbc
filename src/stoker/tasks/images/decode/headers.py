"""The kind, size and orientation of an image file, read from its bytes: never from its name, never by decoding.

JPEG is parsed here because it is the hot path and decoders need its layout. PNG and WebP are parsed here because Pillow
does more than read their headers when it opens them: it inflates a PNG's text and colour profile, looks for a late EXIF
chunk by decoding all pixels, and reserves a WebP's whole canvas (1.1 GB for 12000x12000) before any limit of ours.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.TiffImagePlugin import TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from stoker.core.units import size_text

Bytes = Any
"""bytes, bytearray or a contiguous memoryview."""

# Opened by class, not by Image.open: no other of Pillow's fifty formats is ever tried on hostile bytes, and Pillow's
# own limit on pixels, a global variable, does not apply (only in GIF, WebP and TIFF, above 178 million).
PILLOW_CLASSES: dict[str, type[ImageFile]] = {
    "jpeg": JpegImageFile,
    "png": PngImageFile,
    "webp": WebPImageFile,
    "gif": GifImageFile,
    "bmp": BmpImageFile,
    "tiff": TiffImageFile,
}
MAX_DECODED_BYTES = 1_000_000_000
"""The default of the config key `max_decoded_bytes`."""
# What Pillow holds at once for a pixel: as it is stored, as RGB (four bytes), and as an array; WebP's library has two
# canvases besides, and a TIFF may be turned.
_BYTES_PER_PIXEL = {"png": 8, "gif": 8, "bmp": 8, "webp": 16, "tiff": 12}
# A progressive JPEG has about ten scans. Each costs a pass over the whole image, even if it is empty.
USUAL_SCANS, MOST_SCANS = 20, 100
# Passes take one core a second for each 200 to 500 million pixels; ImageNet's largest, of 61 million, would have 600.
MOST_SCANNED_PIXELS, MOST_SCANNED_PIXELS_OF_UNUSUAL = 1_000_000_000, 200_000_000
_ORIENTATION_TAG = 0x0112
_SUBSAMPLING = {(1, 1): "444", (2, 1): "422", (2, 2): "420", (1, 2): "440", (4, 1): "411"}
# Start-of-frame markers: Huffman-coded baseline, extended and progressive; the other kinds hardly exist.
_BASELINE, _PROGRESSIVE = (0xC0, 0xC1), 0xC2
_OTHER_FRAMES = frozenset({0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF})
_TABLES = frozenset({0xC4, 0xDB})
_STANDALONE = frozenset({0x01, *range(0xD0, 0xD8)})


class BadImage(Exception):
    """A sample cannot be decoded; `reason` says why, for people."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Box(NamedTuple):
    """A rectangle in pixels: in the image as a person sees it, unless stated otherwise."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True, slots=True)
class JpegLayout:
    """What a decoder must know about a JPEG before it decodes a region."""

    subsampling: str
    """444, 422, 420, 440, 411, grey, or other."""
    colour: str
    """ycc, grey, rgb, or cmyk (also for YCCK)."""
    precision: int
    progressive: bool
    interleaved: bool
    """Whether the first scan holds all components."""
    frame_offset: int
    """Offset of the start-of-frame marker."""
    huffman: bool
    """False for arithmetic-coded and lossless files, which hardly exist."""
    blocks: int
    """8x8 blocks, each of which takes at least one bit in a Huffman-coded file; 0 for other files."""
    scans: int = 1
    """Passes over the image; a few bytes are enough for each of them."""


@dataclass(frozen=True, slots=True)
class ImageHeader:
    """The size of an image as a person sees it (after applying its EXIF orientation), and as it is stored."""

    kind: str
    width: int
    height: int
    orientation: int
    stored_width: int
    stored_height: int
    jpeg: JpegLayout | None = None


def read_header(data: Bytes, max_pixels: int, max_bytes: int = MAX_DECODED_BYTES) -> ImageHeader:
    """Kind, size and orientation of an image; raises BadImage, also if decoding it would take too much memory or time.

    Both are bounded here, from the headers: once a library decodes, nothing can stop it."""
    kind, width, height, orientation, jpeg = _sniff(data)
    if width <= 0 or height <= 0:
        raise BadImage(f"{kind} with no pixels ({width}x{height})")
    if width * height > max_pixels:
        raise BadImage(f"decompression bomb: {kind} of {width}x{height} pixels; the limit is {max_pixels}")
    if jpeg is not None and not _is_bearable(jpeg.scans, width * height):
        raise BadImage(f"decompression bomb: {jpeg.scans} scans of {width}x{height} pixels; usual are 10")
    if (needed := bytes_to_decode(kind, width, height, jpeg)) > max_bytes:
        raise BadImage(
            f"decompression bomb: {kind} of {width}x{height} pixels takes about {size_text(needed)} to decode; "
            f"the limit is {size_text(max_bytes)}"
        )
    if jpeg is not None and len(data) * 8 < jpeg.blocks:
        # A few bytes that claim millions of pixels would cost seconds and decode to grey.
        raise BadImage(f"truncated: {len(data)} bytes cannot hold {width}x{height} pixels")
    seen = (height, width) if orientation >= 5 else (width, height)
    return ImageHeader(kind, *seen, orientation, width, height, jpeg)


def bytes_to_decode(kind: str, width: int, height: int, jpeg: JpegLayout | None) -> int:
    """About the memory that decoding the whole image takes."""
    if jpeg is None:
        return width * height * _BYTES_PER_PIXEL[kind]
    # RGB; with several scans the coefficients of all blocks are kept as well, two bytes each.
    coefficients = 0 if jpeg.scans == 1 and not jpeg.progressive else 128 * jpeg.blocks or 6 * width * height
    return 3 * width * height + coefficients


def _is_bearable(scans: int, pixels: int) -> bool:
    most = MOST_SCANNED_PIXELS if scans <= USUAL_SCANS else MOST_SCANNED_PIXELS_OF_UNUSUAL
    return scans == 1 or (scans <= MOST_SCANS and scans * pixels <= most)


_Found = tuple[str, int, int, int, JpegLayout | None]


def _sniff(data: Bytes) -> _Found:
    if len(data) == 0:
        raise BadImage("empty file")
    start = bytes(data[:32])
    try:
        if start.startswith(b"\xff\xd8\xff"):
            return _read_jpeg(data)
        if start.startswith(b"\x89PNG\r\n\x1a\n"):
            return _read_png(data)
        if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
            return _read_webp(data)
        if start[:6] in (b"GIF87a", b"GIF89a"):
            return "gif", *struct.unpack_from("<HH", start, 6), 1, None
        if start[:2] == b"BM":
            return _read_by_pillow(data, "bmp")
        if start[:4] in (b"II*\0", b"MM\0*"):
            # Pillow applies a TIFF's orientation while it decodes: for us it is stored as it is seen.
            return _read_by_pillow(data, "tiff")
    except (IndexError, struct.error):
        raise BadImage(f"truncated within its header ({len(data)} bytes)") from None
    raise BadImage(f"not an image of a supported kind (it begins with {start[:8]!r})")


def _read_jpeg(data: Bytes) -> _Found:
    """Walks the markers up to the first scan."""
    position, orientation, jfif, adobe = 2, 1, False, None
    frame: tuple[int, int] | None = None
    while True:
        if data[position] != 0xFF:
            raise BadImage("damaged JPEG: a marker is missing")
        marker = data[position + 1]
        if marker == 0xFF:  # fill bytes are allowed before a marker
            position += 1
            continue
        if marker in _STANDALONE:
            position += 2
            continue
        if marker == 0xD9:
            raise BadImage("damaged JPEG: it ends before its first scan")
        length = data[position + 2] << 8 | data[position + 3]
        if length < 2:
            raise BadImage("damaged JPEG: a marker segment has no length")
        if marker == 0xDA:
            break
        if marker in _TABLES:  # most segments of most files
            pass
        elif marker in _BASELINE or marker == _PROGRESSIVE or marker in _OTHER_FRAMES:
            frame = marker, position
        elif marker == 0xE1 and orientation == 1 and bytes(data[position + 4 : position + 10]) == b"Exif\0\0":
            orientation = read_orientation(bytes(data[position + 10 : position + 2 + length]))
        elif marker == 0xE0 and bytes(data[position + 4 : position + 9]) == b"JFIF\0":
            jfif = True
        elif marker == 0xEE and length >= 14 and bytes(data[position + 4 : position + 9]) == b"Adobe":
            adobe = data[position + 15]
        position += 2 + length
    if frame is None:
        raise BadImage("damaged JPEG: no frame header before its first scan")
    marker, offset = frame
    # Within a scan 0xFF is followed by 0 or a restart marker, so this counts the scans; the first one ends a file whose
    # first scan has all components and all their bits.
    several = marker not in _BASELINE or data[position + 4] != data[offset + 9]
    scans = bytes(data[position:]).count(b"\xff\xda") if several else 1
    precision, height, width, count = struct.unpack_from(">BHHB", data, offset + 4)
    subsampling, ids, factors = _read_components(bytes(data[offset + 10 : offset + 10 + 3 * count]))
    huffman = marker in _BASELINE or marker == _PROGRESSIVE
    layout = JpegLayout(
        subsampling=subsampling,
        colour=_colour(ids, jfif, adobe),
        precision=precision,
        progressive=marker == _PROGRESSIVE,
        interleaved=data[position + 4] == count,
        frame_offset=offset,
        huffman=huffman,
        blocks=_blocks(width, height, factors) if huffman else 0,
        scans=scans,
    )
    return "jpeg", width, height, orientation, layout


@lru_cache(256)  # millions of files share a handful of values
def _read_components(part: bytes) -> tuple[str, bytes, tuple[tuple[int, int], ...]]:
    """Subsampling, identifiers, and sampling factors (across, down) of the components of a frame."""
    ids = part[::3]
    factors = tuple((sampling >> 4, sampling & 15) for sampling in part[1::3])
    if len(ids) not in (1, 3, 4) or any(not 1 <= h <= 4 or not 1 <= v <= 4 for h, v in factors):
        raise BadImage(f"damaged JPEG: {len(ids)} components with sampling {factors}")
    if factors == ((1, 1),):
        return "grey", ids, factors
    if len(factors) == 3 and factors[1] == factors[2] == (1, 1):
        return _SUBSAMPLING.get(factors[0], "other"), ids, factors
    return "other", ids, factors


def _colour(ids: bytes, jfif: bool, adobe: int | None) -> str:
    """The colour space by libjpeg's rules."""
    if len(ids) == 1:
        return "grey"
    if len(ids) == 4:
        return "cmyk"
    if jfif:
        return "ycc"
    if adobe is not None:
        return "rgb" if adobe == 0 else "ycc"
    return "rgb" if ids == b"RGB" else "ycc"


def _blocks(width: int, height: int, factors: tuple[tuple[int, int], ...]) -> int:
    if len(factors) == 1:
        return -(-width // 8) * -(-height // 8)
    most_h, most_v = max(h for h, _ in factors), max(v for _, v in factors)
    units = -(-width // (8 * most_h)) * -(-height // (8 * most_v))
    return units * sum(h * v for h, v in factors)


def _read_png(data: Bytes) -> _Found:
    if bytes(data[12:16]) != b"IHDR":
        raise BadImage("damaged PNG: its first chunk is not IHDR")
    width, height = struct.unpack_from(">II", data, 16)
    position, orientation, end = 8, 1, len(data)
    while position + 8 <= end:
        length, name = struct.unpack_from(">I4s", data, position)
        if name == b"eXIf":
            orientation = read_orientation(bytes(data[position + 8 : position + 8 + length]))
        if name == b"IEND":
            break
        position += 12 + length
    return "png", width, height, orientation, None


def _read_webp(data: Bytes) -> _Found:
    (declared,) = struct.unpack_from("<I", data, 4)
    if declared + 8 > len(data) + 1:  # some writers count a padding byte they do not write
        raise BadImage(f"truncated: {len(data)} of the {declared + 8} bytes of a WebP")
    name = bytes(data[12:16])
    if name == b"VP8X":
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
        return "webp", width, height, _webp_orientation(data), None
    if name == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return "webp", 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF), 1, None
    if name == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return "webp", width & 0x3FFF, height & 0x3FFF, 1, None
    raise BadImage(f"damaged WebP: its first chunk is {name!r}")


def _webp_orientation(data: Bytes) -> int:
    position, end = 12, len(data)
    while position + 8 <= end:
        name, length = struct.unpack_from("<4sI", data, position)
        if name == b"EXIF":
            return read_orientation(bytes(data[position + 8 : position + 8 + length]).removeprefix(b"Exif\0\0"))
        position += 8 + length + (length & 1)
    return 1


def _read_by_pillow(data: Bytes, kind: str) -> _Found:
    try:
        with PILLOW_CLASSES[kind](io.BytesIO(data)) as image:
            return kind, image.width, image.height, 1, None
    except Exception as error:  # a damaged file makes Pillow raise nearly anything
        raise BadImage(f"damaged {kind.upper()}: {error}") from None


def read_orientation(exif: bytes) -> int:
    """The EXIF orientation 1..8 in a TIFF structure; 1 if it is missing or invalid."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (offset,) = struct.unpack_from(order + "I", exif, 4)
        (entries,) = struct.unpack_from(order + "H", exif, offset)
        for number in range(entries):
            tag, kind, _, short = struct.unpack_from(order + "HHIH", exif, offset + 2 + 12 * number)
            if tag == _ORIENTATION_TAG:
                return short if kind == 3 and 1 <= short <= 8 else 1
    except struct.error:
        pass
    return 1
