"""JPEGs whose parts can be decoded on their own: a restart marker begins every row of units, and every few units.

Between two markers nothing depends on what came before, so the segments that cover a crop, behind a header with the
size of the part, are a valid smaller JPEG with exactly the pixels of the whole image. For everybody else such a file is
an ordinary baseline JPEG.
"""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, cycle, pairwise

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from stoker.data.images.headers import BadImage, Box, Bytes, ImageHeader, JpegLayout

UNIT = 16
"""Pixels of a side of a unit (MCU) of a 4:2:0 JPEG, the only kind that is written."""
# Units between two markers, the best first. Fewer let more be left out of a crop, and take more bytes.
SEGMENT_UNITS = (8, 7, 6, 9, 5, 10, 4, 11, 12, 13, 3)
LONGEST_SEGMENT_BYTES = 0xFFFF
END_OF_IMAGE = b"\xff\xd9"
_FRAME, _TABLES, _INTERVAL, _SCAN = 0xC0, 0xC4, 0xDD, 0xDA
_SUBSAMPLED = bytes((3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1))
"""Of a frame: three components, of which the second and third have half the width and height."""
_NUMBERS = bytes(range(0xD0, 0xD8)) * 513
"""The second bytes of markers, which count from 0 to 7 again and again, for more segments than a row can have."""
_RECORD = struct.Struct("<HHH")


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What differs from image to image: the size, the Huffman tables, and where the segments are."""

    width: int
    height: int
    tables: bytes
    segment_bytes: tuple[int, ...]
    """Row by row. Each segment begins with the marker that separates it from the one before."""
    per_row: int
    """Segments in a row of units."""

    @property
    def rows(self) -> int:
        """Rows of units."""
        return -(-self.height // UNIT)

    def bytes_of(self, first_row: int, end_row: int) -> int:
        """Bytes of some rows."""
        return sum(self.segment_bytes[first_row * self.per_row : end_row * self.per_row])

    def as_record(self) -> bytes:
        """The layout as it is kept in an index."""
        head = _RECORD.pack(self.width, self.height, len(self.tables))
        return head + self.tables + struct.pack(f"<{len(self.segment_bytes)}H", *self.segment_bytes)

    @classmethod
    def of_record(cls, record: bytes) -> RowLayout:
        """The layout in a record; raises ValueError if it is damaged."""
        try:
            width, height, length = _RECORD.unpack_from(record)
            start = _RECORD.size + length
            segments = struct.unpack_from(f"<{max(0, len(record) - start) // 2}H", record, start)
        except struct.error as error:
            raise ValueError(str(error)) from None
        units, rows = -(-width // UNIT), -(-height // UNIT)
        per_row, odd = divmod(len(segments), rows) if rows else (0, 0)
        if odd or not per_row or not units or units % per_row or start + 2 * len(segments) != len(record):
            raise ValueError(f"{len(segments)} segments in {rows} rows of {units} units")
        if min(segments) < 2:
            raise ValueError("a segment without its marker")
        return cls(width, height, record[_RECORD.size : start], segments, per_row)


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

    data: Bytes
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
    scan = np.frombuffer(data, np.uint8)[template.header_bytes(tables) : -2]
    escapes = np.flatnonzero(scan[:-1] == 0xFF)
    markers = escapes[scan[escapes + 1] & 0xF8 == 0xD0]
    edges = [0, *markers.tolist(), len(scan)]
    segments = tuple(end - start for start, end in pairwise(edges))
    if len(segments) * interval != units * row_count or max(segments) > LONGEST_SEGMENT_BYTES:
        return None
    return template, RowLayout(width, height, tables, segments, units // interval)


def cut_out(template: Template, layout: RowLayout, first_row: int, end_row: int, data: Bytes, box: Box) -> Part:
    """The smallest JPEG that covers the box, from the bytes of some rows; raises BadImage if they are damaged.

    Plain lists and bytes: numpy takes twice as long for a hundred segments, and keeps Python's lock, too."""
    per_row = layout.per_row
    interval = -(-layout.width // UNIT) // per_row
    top, bottom = box.top // UNIT, -(-(box.top + box.height) // UNIT)
    assert first_row <= top < bottom <= end_row, (box, first_row, end_row)
    pixels = interval * UNIT
    first, last = box.left // pixels, -(-(box.left + box.width) // pixels)
    if first and layout.width - first * pixels < UNIT:
        first -= 1  # libjpeg-turbo interpolates colour differently in an image of fewer than five columns
    width = min(last * pixels, layout.width) - first * pixels
    height = min(bottom * UNIT, layout.height) - top * UNIT
    header = template.header(layout.tables, width, height, interval)

    before = first_row * per_row
    edges = list(accumulate(layout.segment_bytes[before : end_row * per_row], initial=0))
    if len(data) != edges[-1]:
        raise BadImage(f"damaged: {len(data)} of the {edges[-1]} bytes of its rows")
    pieces: list[Bytes] = [header]
    starts: list[int] = []
    numbers = b""
    places: list[int] = []  # of the markers' second bytes in the part
    moved = len(header) + 1 - (2 if top or first else 0)  # the first segment of a part has no marker
    for row in range(top * per_row, bottom * per_row, per_row):
        number = (row + first - 1) % 8
        kept = edges[row + first - before : row + last - before + 1]
        begin, end = kept[0], kept.pop()
        pieces.append(data[begin:end])
        starts += kept
        numbers += _NUMBERS[number : number + last - first]
        moved -= begin
        places += [at + moved for at in kept]
        moved += end
    if top or first:
        pieces[1] = pieces[1][2:]
    else:
        starts, numbers = starts[1:], numbers[1:]
    if [data[at] for at in starts].count(0xFF) != len(starts) or bytes([data[at + 1] for at in starts]) != numbers:
        raise BadImage("damaged: a restart marker is missing")
    pieces.append(END_OF_IMAGE)
    joined = bytearray().join(pieces)
    for place, new in zip(places[1:], cycle(_NUMBERS[:8]), strict=False):
        joined[place] = new
    part = ImageHeader("jpeg", width, height, 1, width, height, _jpeg_layout(template.size_offset - 5))
    return Part(joined, part, top * UNIT, first * pixels, layout.width, layout.height)


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
    while position + 5 <= len(data) and data[position] == 0xFF:
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
