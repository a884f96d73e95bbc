"""TIFF stacks: uncompressed pages are mapped; compressed ones are decoded page by page, only those that are needed."""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray

from stoker.io.stores import Buffer, ReadFailure, StoreDown
from stoker.tasks.volumes.formats.arrays import StoredArray, StoredVolume, array_in
from stoker.tasks.volumes.formats.byte_source import (
    ByteSource,
    HeaderSource,
    RemoteBytes,
    Scattered,
    SourceStream,
    parts_of,
)
from stoker.tasks.volumes.formats.volume import (
    LruCache,
    ReadingOptions,
    Region,
    Volume,
    Voxels,
    check_extent,
    decoded_cache,
    failure_of,
)

# It prints warnings about harmless tags to the terminal; everything that matters is checked here.
logging.getLogger("tifffile").addHandler(logging.NullHandler())

# A sound compressed page is never much larger than its voxels, and deflate expands at most 1,032 times.
_LARGEST_OVERHEAD = 2
_MOST_PAGES = 1_000_000
_MOST_CHANNELS = 4


def open_tiff(source: ByteSource, options: ReadingOptions) -> Volume:
    """A stack of equal grey pages as a volume."""
    try:
        headers = HeaderSource(**vars(source)) if isinstance(source, RemoteBytes) else source
        return _open(source, headers, options)
    except Scattered:
        assert isinstance(source, RemoteBytes)
        return _open(source, source.fetched(), options)


def _open(source: ByteSource, headers: ByteSource, options: ReadingOptions) -> Volume:
    path = source.name
    _check_chain(headers)
    try:
        with tifffile.TiffFile(_stream(headers)) as file:
            return _open_stack(source, headers, file, options)
    except (ReadFailure, StoreDown, Scattered, MemoryError):
        raise
    except OSError as error:
        raise failure_of(path, error) from None
    except Exception as error:  # damaged headers make tifffile divide by zero, among much else
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        raise ReadFailure(path, "unreadable", f"its headers are damaged ({reason})"[:200]) from None


def _stream(headers: ByteSource) -> Any:
    """A file that can only be read: less than typing.IO promises, and all that tifffile uses."""
    return SourceStream(headers)


def _open_stack(source: ByteSource, headers: ByteSource, file: Any, options: ReadingOptions) -> Volume:
    path, series = source.name, file.series
    if not series:
        raise ReadFailure(path, "not a volume", "it has no pages")
    if len(series) > 1:
        shapes = " and ".join(str(one.shape) for one in series[:3])
        raise ReadFailure(path, "not a volume", f"its pages differ: {shapes}")
    stack = series[0]
    dtype = np.dtype(stack.dtype).newbyteorder(file.byteorder)
    shape = check_extent(path, _shape_zyx(path, stack.shape, stack.axes), dtype, options)
    if stack.dataoffset is not None:
        return array_in(source, StoredArray(shape, dtype, int(stack.dataoffset)))
    pages = [_whole_page(path, page) for page in stack.pages]
    if len(pages) != shape[0]:
        raise ReadFailure(path, "short", f"{len(pages)} pages; {shape[0]} were announced")
    _check_segments(path, len(source), pages, options)
    if all(page.is_contiguous for page in pages):
        offsets = [int(page.dataoffsets[0]) for page in pages]
        steps = {b - a for a, b in pairwise(offsets)}
        if len(steps) <= 1 and min(steps, default=1) > 0:
            # Pages at equal distances, with their headers in between: still one array.
            return array_in(source, StoredArray(shape, dtype, offsets[0]), steps.pop() if steps else None)
    segments = np.array([[page.dataoffsets, page.databytecounts] for page in pages], np.int64)
    stored = np.array([page.is_contiguous for page in pages])
    # A page holds its file, and that holds all the others, with a Python object for each of their tags. Their offsets
    # are enough, and one page that knows how all are encoded: the first of a file in which no other was looked at.
    with tifffile.TiffFile(_stream(headers)) as fresh:
        first = fresh.pages.first
        # The page would keep the stream, and with it everything fetched for the headers.
        first.parent.filehandle._fh = None
    array = StoredArray(shape, dtype, int(pages[0].dataoffsets[0]))
    return PagedVolume(source, array, segments, stored, first, decoded_cache(options.cache_bytes))


@dataclass(frozen=True)
class PagedVolume(StoredVolume):
    """Pages that cannot be mapped as one array; decoded pages are kept while there is room."""

    segments: NDArray[np.int64]
    """(pages, 2, segments): where each segment of a page begins, and its bytes."""
    plain: NDArray[np.bool_]
    """Pages whose voxels are uncompressed in the file."""
    first: Any
    """tifffile's first page, which decodes the segments of any."""
    cache: LruCache[tuple[str, int], Voxels]

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        target = np.empty(region.shape, self.dtype) if out is None else out
        depth, *plane = region.slices
        numbers = range(depth.start, depth.stop)
        missing = [number for number in numbers if self.plain[number] or not self.cache.has(self._key(number))]
        fetched = dict(zip(missing, self._fetch(missing), strict=True))
        for slot, number in enumerate(numbers):
            target[slot] = self._page(number, fetched)[tuple(plane)]
        return target

    def _key(self, number: int) -> tuple[str, int]:
        return self.identity, number

    def _fetch(self, numbers: Sequence[int]) -> list[list[Buffer]]:
        """The bytes of each page's segments; neighbouring pages are fetched together."""
        ranges = [(offset, offset + size) for number in numbers for offset, size in self.segments[number].T.tolist()]
        parts = parts_of(self.source, ranges)
        each = self.segments.shape[2]
        return [parts[first : first + each] for first in range(0, len(parts), each)]

    def _page(self, number: int, fetched: Mapping[int, list[Buffer]]) -> Voxels:
        if self.plain[number]:
            found: Voxels = np.ndarray(self.shape[1:], self.stored.dtype, fetched[number][0])
            return found
        # Fetched a moment ago, or again if it was dropped from the cache in the meantime.
        return self.cache.get(
            self._key(number), lambda: self._decode(number, fetched.get(number) or self._fetch([number])[0])
        )

    def _decode(self, number: int, parts: Sequence[Buffer]) -> Voxels:
        image = np.zeros(self.shape[1:], self.dtype)
        for index, part in enumerate(parts):
            if not len(part):
                continue  # a sparse file: the segment is zero throughout
            try:
                segment, (_, _, y, x, _), extent = self.first.decode(bytes(part), index)
                # Tiles at the border stick out of the page.
                height, width = min(extent[1], self.shape[1] - y), min(extent[2], self.shape[2] - x)
                image[y : y + height, x : x + width] = segment[0, :height, :width, 0]
            except MemoryError:
                raise
            except Exception as error:  # each codec raises a different error; a short segment does not fit its place
                raise ReadFailure(self.name, "unreadable", f"page {number} cannot be decoded: {error}"[:200]) from None
        return image


def _shape_zyx(path: str, shape: tuple[int, ...], axes: str) -> tuple[int, ...]:
    """The stack's shape without axes of length one; refuses axes that are not z, y, x."""
    named = [(name, size) for name, size in zip(axes, shape, strict=True) if size > 1 or name in "YX"]
    names = "".join(name for name, _ in named)
    if len(named) == 2 and names == "YX":
        return (1, *(size for _, size in named))
    # ImageJ's writers call the planes of a stack channels by default; a few planes may well be colours.
    if len(named) == 3 and names.endswith("YX") and (names[0] not in "SC" or named[0][1] > _MOST_CHANNELS):
        return tuple(size for _, size in named)
    colour = " (S and C are colours or channels; store each in its own file)" if set(names) & set("SC") else ""
    raise ReadFailure(path, "wrong axes", f"they are {axes} with sizes {shape}; a volume has z, y, x{colour}")


def _whole_page(path: str, page: Any) -> Any:
    if page is None:
        raise ReadFailure(path, "short", "a page is missing")
    whole = page if isinstance(page, tifffile.TiffPage) else page.aspage()
    if getattr(whole, "imagedepth", 1) != 1:
        raise ReadFailure(path, "wrong axes", "each of its pages is a volume; save one plane in each")
    return whole


def _check_segments(path: str, file_bytes: int, pages: list[Any], options: ReadingOptions) -> None:
    """Refuses pages whose bytes are not in the file, or whose size on decoding is absurd."""
    first = pages[0]
    for number, page in enumerate(pages):
        # tifffile's hash covers shape, kind of voxels, strips or tiles, and compression.
        if page.dtype is None or page.hash != first.hash or len(page.dataoffsets) != len(first.dataoffsets):
            raise ReadFailure(path, "not a volume", f"page {number} is stored differently from the first")
        decoded = int(np.prod(page.shape, dtype=object)) * page.dtype.itemsize
        if page.is_tiled:
            # A tile is decoded whole, however much of it sticks out of the page.
            tile = page.tilewidth * page.tilelength * page.tiledepth * page.samplesperpixel * page.dtype.itemsize
            decoded = max(decoded, tile)
        if decoded > options.max_decoded_bytes:
            raise ReadFailure(path, "too large", f"page {number} has {decoded:,} bytes of voxels when decoded")
        if not page.dataoffsets or len(page.dataoffsets) != len(page.databytecounts):
            raise ReadFailure(path, "unreadable", f"page {number} has no data")
        end = max(offset + size for offset, size in zip(page.dataoffsets, page.databytecounts, strict=True))
        if end > file_bytes:
            raise ReadFailure(path, "short", f"page {number} ends at byte {end:,}; the file has {file_bytes:,}")
        if sum(page.databytecounts) > _LARGEST_OVERHEAD * decoded + (1 << 20):
            raise ReadFailure(path, "unreadable", f"page {number} takes more bytes than its voxels")


def _check_chain(headers: ByteSource) -> None:
    """Follows the pages' headers to the end: a reader that stops at a damaged one would see a thinner volume."""
    path, file_bytes = headers.name, len(headers)
    start = bytes(headers.parts([(0, min(16, file_bytes))])[0])
    order = {b"II": "<", b"MM": ">"}.get(start[:2])
    if order is None or len(start) < 16:
        raise ReadFailure(path, "unreadable", "it is not a TIFF file")
    version = struct.unpack_from(f"{order}H", start, 2)[0]
    if version not in (42, 43):
        raise ReadFailure(path, "unreadable", "it is not a TIFF file")
    count_format, entry_bytes, next_format, first = ("Q", 20, "Q", 8) if version == 43 else ("H", 12, "I", 4)
    position = struct.unpack_from(order + next_format, start, first)[0]

    def number(form: str, at: int) -> int:
        size = struct.calcsize(form)
        if at + size > file_bytes:
            raise struct.error
        return int(struct.unpack(form, headers.parts([(at, at + size)])[0])[0])

    seen: set[int] = set()
    while position:
        if position in seen or len(seen) >= _MOST_PAGES:
            raise ReadFailure(path, "unreadable", "its pages form a circle")
        seen.add(position)
        try:
            entries = number(order + count_format, position)
            after = position + struct.calcsize(order + count_format) + entries * entry_bytes
            position = number(order + next_format, after)
        except struct.error:
            raise ReadFailure(
                path, "short", f"page {len(seen) - 1} is described at byte {position:,}; the file has {file_bytes:,}"
            ) from None
