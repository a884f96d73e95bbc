"""JPEGs whose parts can be decoded on their own: a restart marker begins every row of units, and every few units.

Between two markers nothing depends on what came before, so the segments that cover a crop, behind a header with the
size of the part, are a valid smaller JPEG with exactly the pixels of the whole image. For everybody else such a file is
an ordinary baseline JPEG.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.data.images.headers import BadImage, Box, Bytes, ImageHeader, JpegLayout

UNIT = 16
"""Pixels of a side of a unit (MCU) of a 4:2:0 JPEG, the only kind that is written."""
# Units between two markers, the best first. Fewer let more be left out of a crop, and take more bytes: a marker every 4
# adds 0.9 % to a file and saves a quarter of the decoding, every 8 adds 0.4 % and saves a sixth (500 px, quality 90).
SEGMENT_UNITS = (4, 3, 5, 6, 7, 8, 2)
LONGEST_ROW_BYTES = 0xFFFF
END_OF_IMAGE = b"\xff\xd9"
_FRAME, _TABLES, _INTERVAL, _SCAN = 0xC0, 0xC4, 0xDD, 0xDA
_SUBSAMPLED = bytes((3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1))
"""Of a frame: three components, of which the second and third have half the width and height."""
_RECORD = struct.Struct("<HHH")


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What differs from image to image: the size, the Huffman tables, and where the rows of units are."""

    width: int
    height: int
    tables: bytes
    row_bytes: tuple[int, ...]
    """Each row begins with the marker that separates it from the row above."""

    def as_record(self) -> bytes:
        """The layout as it is kept in an index."""
        head = _RECORD.pack(self.width, self.height, len(self.tables))
        return head + self.tables + struct.pack(f"<{len(self.row_bytes)}H", *self.row_bytes)

    @classmethod
    def of_record(cls, record: bytes) -> RowLayout:
        """The layout in a record; raises ValueError if it is damaged."""
        try:
            width, height, length = _RECORD.unpack_from(record)
            start = _RECORD.size + length
            row_bytes = struct.unpack_from(f"<{-(-height // UNIT)}H", record, start)
        except struct.error as error:
            raise ValueError(str(error)) from None
        if not width or not row_bytes or start + 2 * len(row_bytes) != len(record):
            raise ValueError("it has another number of rows")
        return cls(width, height, record[_RECORD.size : start], row_bytes)


@dataclass(frozen=True, slots=True)
class Template:
    """The parts of a header that all images of a pack share: what is before the Huffman tables, and what follows."""

    before: bytes
    after: bytes
    size_offset: int
    """Of height and width, in `before`; the interval of the markers is at the start of `after`."""

    def header(self, tables: bytes, width: int, height: int, interval: int) -> bytes:
        """The header of an image of this size."""
        at = self.size_offset
        size = struct.pack(">HH", height, width)
        return b"".join(
            (self.before[:at], size, self.before[at + 4 :], tables, self.after[:4], interval.to_bytes(2, "big"),
             self.after[6:])
        )  # fmt: skip

    def header_bytes(self, tables: bytes) -> int:
        """The length of a header with these tables."""
        return len(self.before) + len(tables) + len(self.after)

    def as_text(self) -> str:
        return f"{self.before.hex()} {self.after.hex()}"

    @classmethod
    def of_text(cls, text: str) -> Template:
        """The template in the text; raises ValueError."""
        before, after = (bytes.fromhex(part) for part in text.split())
        found = _parse(before + after)
        if found is None:
            raise ValueError("it is not the header of a JPEG with restart markers")
        return found[0]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an image as a JPEG of its own, and where it lies in the whole image."""

    data: bytes
    header: ImageHeader
    top: int
    left: int
    whole_width: int
    whole_height: int


def encode_with_rows(pixels: NDArray[np.uint8], quality: int) -> bytes:
    """The pixels, which are RGB, as a JPEG with restart markers; raises ValueError if a side is too long."""
    stream = io.BytesIO()
    interval = segment_units(-(-pixels.shape[1] // UNIT))
    try:
        # Huffman tables of its own save 3.4 % of an image's bytes.
        Image.fromarray(pixels).save(
            stream, "JPEG", quality=quality, subsampling="4:2:0", optimize=True, restart_marker_blocks=interval
        )
    except OSError as error:
        raise ValueError(str(error)) from None
    return stream.getvalue()


def segment_units(units: int) -> int:
    """Units from one marker to the next in rows of `units`: a divisor, so that every row begins with a marker."""
    return next((length for length in SEGMENT_UNITS if units % length == 0), units)


def read_layout(data: bytes) -> tuple[Template, RowLayout] | None:
    """Where the rows are in a JPEG that `encode_with_rows` made; None for any other file, or rows that are too long."""
    found = _parse(data)
    if found is None or not data.endswith(END_OF_IMAGE):
        return None
    template, tables, width, height, interval = found
    units, row_count = -(-width // UNIT), -(-height // UNIT)
    if not width or not height or not interval or units % interval:
        return None
    scan = memoryview(data)[template.header_bytes(tables) : -2]
    try:
        edges, segments = _segment_edges(scan, 0, row_count, units)
    except BadImage:
        return None
    row_bytes = [end - start for start, end in pairwise(edges[::segments])]
    if segments * interval != units or max(row_bytes) > LONGEST_ROW_BYTES:
        return None
    return template, RowLayout(width, height, tables, tuple(row_bytes))


def cut_out(template: Template, layout: RowLayout, first_row: int, end_row: int, data: Bytes, box: Box) -> Part:
    """The smallest JPEG that covers the box, from the bytes of some rows; raises BadImage if they are damaged."""
    units = -(-layout.width // UNIT)
    top, bottom = box.top // UNIT, -(-(box.top + box.height) // UNIT)
    assert first_row <= top < bottom <= end_row, (box, first_row, end_row)
    edges, segments = _segment_edges(data, first_row, end_row - first_row, units)
    interval = units // segments
    pixels = interval * UNIT
    first, last = box.left // pixels, -(-(box.left + box.width) // pixels)
    if first and layout.width - first * pixels < UNIT:
        first -= 1  # libjpeg-turbo interpolates colour differently in an image of fewer than five columns
    width = min(last * pixels, layout.width) - first * pixels
    height = min(bottom * UNIT, layout.height) - top * UNIT
    view, kept = memoryview(data), []
    for row in range((top - first_row) * segments, (bottom - first_row) * segments, segments):
        kept += [view[edges[at] + 2 : edges[at + 1]] for at in range(row + first, row + last)]
    if top == first == 0:
        kept[0] = view[: edges[1]]  # the image's first segment has no marker before it
    # Plain lists: for a hundred segments they take half of numpy's time.
    pieces: list[Bytes] = [END_OF_IMAGE] * (2 * len(kept) + 1)
    pieces[0] = template.header(layout.tables, width, height, interval)
    pieces[1::2] = kept
    pieces[2:-1:2] = _markers(len(kept) - 1)
    header = ImageHeader("jpeg", width, height, 1, width, height, _jpeg_layout(template.size_offset - 5))
    return Part(b"".join(pieces), header, top * UNIT, first * pixels, layout.width, layout.height)


def _segment_edges(data: Bytes, first_row: int, row_count: int, units: int) -> tuple[list[int], int]:
    """Where the segments of these rows begin, each with its marker, and the last one ends; and how many there are in a
    row. Raises BadImage."""
    source = np.frombuffer(data, np.uint8)
    escapes = (source[:-1] == 0xFF).nonzero()[0]
    follows = source[escapes + 1]
    is_marker = follows & 0xF8 == 0xD0
    edges: list[int] = escapes[is_marker].tolist()
    numbers = follows[is_marker].tobytes()
    if first_row == 0:
        edges.insert(0, 0)
    segments, odd = divmod(len(edges), row_count)
    if odd or not segments or units % segments or edges[0] != 0:
        raise BadImage(f"damaged: {len(numbers)} restart markers in {row_count} rows of {units} units")
    if numbers != _numbers(max(0, first_row * segments - 1) % 8, len(numbers)):
        raise BadImage("damaged: its restart markers are out of order")
    edges.append(len(source))
    return edges, segments


@lru_cache(1024)
def _numbers(first: int, count: int) -> bytes:
    """The second bytes of `count` markers: they count from 0 to 7 again and again."""
    return bytes(0xD0 | number & 7 for number in range(first, first + count))


@lru_cache(1024)
def _markers(count: int) -> list[bytes]:
    return [bytes((0xFF, number)) for number in _numbers(0, count)]


@cache
def _jpeg_layout(frame_offset: int) -> JpegLayout:
    return JpegLayout(
        subsampling="420", colour="ycc", precision=8, progressive=False, interleaved=True, frame_offset=frame_offset,
        huffman=True, blocks=0,
    )  # fmt: skip


def _parse(data: bytes) -> tuple[Template, bytes, int, int, int] | None:
    """The parts of the header of a JPEG that rows can be cut from: template, tables, width, height, and interval."""
    position, size_offset, tables, interval = 2, 0, 0, 0
    if data[:2] != b"\xff\xd8":
        return None
    while position + 4 <= len(data) and data[position] == 0xFF:
        marker, end = data[position + 1], position + 2 + (data[position + 2] << 8 | data[position + 3])
        if marker == _FRAME and data[position + 4] == 8:
            size_offset = position + 5
            tables = end
        elif marker == _INTERVAL and size_offset:
            interval = position
        elif marker == _SCAN:
            break
        elif (marker != _TABLES or interval) if size_offset else 0xC1 <= marker <= 0xCF:
            return None  # another order, or another kind of JPEG
        position = end
    else:
        return None
    components = bytearray(data[size_offset + 4 : size_offset + 14])
    if not interval or end > len(data) or len(components) != 10:
        return None
    components[3::3] = _SUBSAMPLED[3::3]  # the numbers of the quantisation tables
    if components != _SUBSAMPLED or data[position + 4] != 3:
        return None
    height, width = struct.unpack_from(">HH", data, size_offset)
    (units,) = struct.unpack_from(">H", data, interval + 4)
    before = bytearray(data[:tables])
    before[size_offset : size_offset + 4] = bytes(4)
    after = bytearray(data[interval:end])
    after[4:6] = bytes(2)
    return Template(bytes(before), bytes(after), size_offset), bytes(data[tables:interval]), width, height, units
