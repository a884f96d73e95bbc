"""TIFF stacks: uncompressed pages are mapped; compressed ones are decoded page by page, only those that are needed."""

from __future__ import annotations

import logging
import mmap
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray

from stoker.data.store.stores import ReadFailure
from stoker.data.volumes.volume import (
    ArrayVolume,
    DecodedCache,
    ReadingOptions,
    Region,
    Shape,
    Volume,
    Voxels,
    check_extent,
    decoded_cache,
    failure_of,
    map_file,
)

# It writes complaints about harmless tags to the terminal; what matters is checked here.
logging.getLogger("tifffile").addHandler(logging.NullHandler())

# A sound compressed page is never much larger than its voxels, and deflate expands at most 1,032 times.
_LARGEST_OVERHEAD = 2
_MOST_PAGES = 1_000_000
_MOST_CHANNELS = 4


def open_tiff(path: str, options: ReadingOptions) -> Volume:
    """A stack of equal grey pages as a volume."""
    memory, identity = map_file(path)
    _check_chain(path, memory)
    try:
        with tifffile.TiffFile(path) as file:
            return _open_stack(path, file, memory, identity, options)
    except (ReadFailure, MemoryError):
        raise
    except OSError as error:
        raise failure_of(path, error) from None
    except Exception as error:  # damaged headers make tifffile divide by zero, among much else
        reason = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        raise ReadFailure(path, "unreadable", f"its headers are damaged ({reason})"[:200]) from None


def _open_stack(path: str, file: Any, memory: mmap.mmap, identity: str, options: ReadingOptions) -> Volume:
    series = file.series
    if not series:
        raise ReadFailure(path, "not a volume", "it has no pages")
    if len(series) > 1:
        shapes = " and ".join(str(one.shape) for one in series[:3])
        raise ReadFailure(path, "not a volume", f"its pages differ: {shapes}")
    stack = series[0]
    dtype = np.dtype(stack.dtype).newbyteorder(file.byteorder)
    shape = check_extent(path, _shape_zyx(path, stack.shape, stack.axes), dtype, options)
    if stack.dataoffset is not None:
        return ArrayVolume(path, _mapped(path, memory, shape, dtype, stack.dataoffset), identity)
    pages = [_whole_page(path, page) for page in stack.pages]
    if len(pages) != shape[0]:
        raise ReadFailure(path, "short", f"{len(pages)} pages; {shape[0]} were announced")
    _check_segments(path, memory, pages, options)
    if all(page.is_contiguous for page in pages):
        offsets = [int(page.dataoffsets[0]) for page in pages]
        steps = {b - a for a, b in pairwise(offsets)}
        if len(steps) <= 1 and min(steps, default=1) > 0:
            # Pages at equal distances, with their headers in between: still one array.
            step = steps.pop() if steps else dtype.itemsize * shape[1] * shape[2]
            strides = (step, dtype.itemsize * shape[2], dtype.itemsize)
            array: Any = np.ndarray(shape, dtype, memory, offsets[0], strides)
            return ArrayVolume(path, array, identity)
    segments = np.array([[page.dataoffsets, page.databytecounts] for page in pages], np.int64)
    mapped = np.array([page.is_contiguous for page in pages])
    # A page holds its file, and that holds all the others, with a Python object for each of their tags. Their offsets
    # are enough, and one page that knows how all are encoded: the first of a file in which no other was looked at.
    with tifffile.TiffFile(path) as fresh:
        first = fresh.pages.first
    return PagedVolume(
        path, shape, dtype, identity, memory, segments, mapped, first, decoded_cache(options.cache_bytes)
    )


@dataclass(frozen=True)
class PagedVolume:
    """Pages that cannot be mapped as one array; decoded pages are kept while there is room."""

    name: str
    shape: Shape
    stored: np.dtype[Any]
    identity: str
    memory: mmap.mmap
    segments: NDArray[np.int64]
    """(pages, 2, segments): where each segment of a page begins, and its bytes."""
    mapped: NDArray[np.bool_]
    """Pages whose voxels lie in the file as they are."""
    first: Any
    """tifffile's first page, which decodes the segments of any."""
    cache: DecodedCache
    affine: None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.stored.newbyteorder("=")

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        target = np.empty(region.shape, self.dtype) if out is None else out
        depth, *plane = region.slices
        for slot, number in enumerate(range(depth.start, depth.stop)):
            target[slot] = self._page(number)[tuple(plane)]
        return target

    def _page(self, number: int) -> Voxels:
        if self.mapped[number]:
            found: Voxels = np.ndarray(self.shape[1:], self.stored, self.memory, int(self.segments[number, 0, 0]))
            return found
        return self.cache.get((self.identity, number), lambda: self._decode(number))

    def _decode(self, number: int) -> Voxels:
        image = np.zeros(self.shape[1:], self.dtype)
        for index, (offset, size) in enumerate(self.segments[number].T.tolist()):
            if not size:
                continue  # a sparse file: the segment is zero throughout
            try:
                segment, (_, _, y, x, _), extent = self.first.decode(self.memory[offset : offset + size], index)
                # Tiles at the border stick out of the page.
                height, width = min(extent[1], self.shape[1] - y), min(extent[2], self.shape[2] - x)
                image[y : y + height, x : x + width] = segment[0, :height, :width, 0]
            except MemoryError:
                raise
            except Exception as error:  # each codec has an error of its own, and a short segment does not fit its place
                raise ReadFailure(self.name, "unreadable", f"page {number} cannot be decoded: {error}"[:200]) from None
        return image


def _shape_zyx(path: str, shape: tuple[int, ...], axes: str) -> tuple[int, ...]:
    """The stack's shape without axes of length one; refuses axes that are not z, y, x."""
    named = [(name, size) for name, size in zip(axes, shape, strict=True) if size > 1 or name in "YX"]
    names = "".join(name for name, _ in named)
    if len(named) == 2 and names == "YX":
        return (1, *(size for _, size in named))
    # ImageJ's writers call the planes of a stack channels unless told otherwise; a few planes may well be colours.
    if len(named) == 3 and names.endswith("YX") and (names[0] not in "SC" or named[0][1] > _MOST_CHANNELS):
        return tuple(size for _, size in named)
    colour = (
        " (S and C are colours or channels, which belong into files of their own)" if set(names) & set("SC") else ""
    )
    raise ReadFailure(path, "wrong axes", f"they are {axes} with sizes {shape}; a volume has z, y, x{colour}")


def _mapped(path: str, memory: mmap.mmap, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> Voxels:
    wanted = offset + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(memory) < wanted:
        raise ReadFailure(path, "short", f"{len(memory):,} bytes; its header promises {wanted:,}")
    array: Voxels = np.ndarray(shape, dtype, memory, offset)
    return array


def _whole_page(path: str, page: Any) -> Any:
    if page is None:
        raise ReadFailure(path, "short", "a page is missing")
    whole = page if isinstance(page, tifffile.TiffPage) else page.aspage()
    if getattr(whole, "imagedepth", 1) != 1:
        raise ReadFailure(path, "wrong axes", "each of its pages is a volume; save one plane in each")
    return whole


def _check_segments(path: str, memory: mmap.mmap, pages: list[Any], options: ReadingOptions) -> None:
    """Refuses pages whose bytes are not in the file, or whose size on decoding is absurd."""
    first = pages[0]
    for number, page in enumerate(pages):
        # tifffile's hash covers shape, kind of voxels, strips or tiles, and compression.
        if page.dtype is None or page.hash != first.hash or len(page.dataoffsets) != len(first.dataoffsets):
            raise ReadFailure(path, "not a volume", f"page {number} is stored in another way than the first")
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
        if end > len(memory):
            raise ReadFailure(path, "short", f"page {number} ends at byte {end:,}; the file has {len(memory):,}")
        if sum(page.databytecounts) > _LARGEST_OVERHEAD * decoded + (1 << 20):
            raise ReadFailure(path, "unreadable", f"page {number} takes more bytes than its voxels")


def _check_chain(path: str, memory: mmap.mmap) -> None:
    """Follows the pages' headers to the end: who stops at the first damaged one would see a thinner volume."""
    order = {b"II": "<", b"MM": ">"}.get(memory[:2])
    if order is None or len(memory) < 16:
        raise ReadFailure(path, "unreadable", "it is not a TIFF file")
    version = struct.unpack_from(f"{order}H", memory, 2)[0]
    if version not in (42, 43):
        raise ReadFailure(path, "unreadable", "it is not a TIFF file")
    count_format, entry_bytes, next_format, first = ("Q", 20, "Q", 8) if version == 43 else ("H", 12, "I", 4)
    position = struct.unpack_from(order + next_format, memory, first)[0]
    seen: set[int] = set()
    while position:
        if position in seen or len(seen) >= _MOST_PAGES:
            raise ReadFailure(path, "unreadable", "its pages form a circle")
        seen.add(position)
        try:
            entries = struct.unpack_from(order + count_format, memory, position)[0]
            after = position + struct.calcsize(count_format) + entries * entry_bytes
            position = struct.unpack_from(order + next_format, memory, after)[0]
        except struct.error:
            raise ReadFailure(
                path, "short", f"page {len(seen) - 1} is described at byte {position:,}; the file has {len(memory):,}"
            ) from None
