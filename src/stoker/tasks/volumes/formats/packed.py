"""Volumes that `stoker pack` wrote: in one piece, in blocks, or in chunks of a sharded Zarr array.

The first two are `.npy` files that any numpy opens, and are read from the mapped file, without a library. One piece has
the axes z, y, x. Blocks have six: the block's place, then the place within it; the last ones are filled up with zeros.
The voxels begin on a page of memory.

What is known about a volume is in the pack's index and comes with its `VolumeRef`, so its values are not checked again.
Size and header are checked when it is opened, checksums by `--verify`.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.formats.volume import (
    ArrayVolume,
    ReadingOptions,
    Region,
    Shape,
    Volume,
    Voxels,
    check_extent,
    check_length,
    failure_of,
    map_file,
)

Kind = Literal["raw", "blocks", "zarr"]
KINDS: tuple[Kind, ...] = ("raw", "blocks", "zarr")
HEADER_BYTES = 4096
PAGE = mmap.PAGESIZE
_MAGIC = b"\x93NUMPY\x01\x00"
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class PackedFacts:
    """What the index of a pack says about one volume."""

    kind: Kind
    block: int
    """Length of a block or of a Zarr chunk along every axis; 0 for a volume in one piece."""
    shape: Shape
    dtype: str
    bytes: int
    """Size of the file, or of all files of a Zarr array."""
    xxh3: str
    """Checksum of the voxels as they are stored."""
    mean: float | None = None
    std: float | None = None
    """Standard deviation of all voxels of an image, 1 if they are all equal; None for labels."""
    labels: tuple[int, ...] | None = None
    """The values that a label volume has. None for images, and for more values than are worth listing."""
    affine: tuple[float, ...] | None = None
    """The sixteen numbers of the source's affine, if its format has one."""

    def has_only(self, classes: int, ignore: int | None) -> bool:
        """Whether every label is known to be a class or the ignore label."""
        return self.labels is not None and all(0 <= one < classes or one == ignore for one in self.labels)


def stored_shape(shape: Shape, block: int) -> tuple[int, ...]:
    """The axes in the file: those of the volume, or of its blocks."""
    if block == 0:
        return shape
    z, y, x = (-(-size // block) for size in shape)
    return z, y, x, block, block, block


def npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """The header of a `.npy` file, filled up so that the voxels begin on a page."""
    described = repr({"descr": dtype.newbyteorder("<").str, "fortran_order": False, "shape": shape}).encode()
    length = HEADER_BYTES - len(_MAGIC) - 2
    return _MAGIC + length.to_bytes(2, "little") + described.ljust(length - 1) + b"\n"


def open_packed(location: str, facts: PackedFacts, options: ReadingOptions) -> Volume:
    """A volume of a pack; raises ReadFailure if its file is not the one that the index describes."""
    dtype = np.dtype(facts.dtype)
    check_extent(location, facts.shape, dtype, options)
    found_bytes = stored_bytes(location)
    if found_bytes != facts.bytes:
        reason = "short" if found_bytes < facts.bytes else "changed"
        raise ReadFailure(location, reason, f"{found_bytes:,} bytes; the pack's index says {facts.bytes:,}")
    affine = None if facts.affine is None else np.array(facts.affine, np.float64).reshape(4, 4)
    identity = packed_identity(location, facts)
    if facts.kind == "zarr":
        from stoker.tasks.volumes.formats.zarr_volume import open_zarr

        volume = open_zarr(location, 0, options)
        if volume.shape != facts.shape or volume.dtype != dtype:
            raise ReadFailure(location, "changed", f"it is {volume.dtype} {volume.shape}, and not as in the index")
        return replace(volume, identity=identity, affine=affine)
    stored = stored_shape(facts.shape, facts.block)
    memory, _ = map_file(location)
    header = npy_header(dtype, stored)
    if memory[: len(header)] != header:
        raise ReadFailure(location, "changed", "its header is not the one that stoker pack wrote")
    if len(memory) != len(header) + int(np.prod(stored, dtype=object)) * dtype.itemsize:
        raise ReadFailure(location, "changed", f"{len(memory):,} bytes do not hold the voxels {stored}")
    array = np.ndarray(stored, dtype.newbyteorder("<"), memory, HEADER_BYTES)
    if facts.block == 0:
        return MappedVolume(location, array, identity, affine)
    return BlockedVolume(location, array, facts.shape, facts.block, identity, affine)


def stored_bytes(location: str) -> int:
    """Bytes of a packed volume; raises ReadFailure if it is not there."""
    try:
        if not os.path.isdir(location):  # noqa: PTH112 - called for every volume of a data set
            return os.stat(location).st_size  # noqa: PTH116
        return sum(path.stat().st_size for path in Path(location).rglob("*") if path.is_file())
    except OSError as error:
        raise failure_of(location, error) from None


def packed_identity(location: str, facts: PackedFacts) -> str:
    """Depends on the content only, so that data derived from a pack stays valid when it is moved or copied."""
    return f"packed {facts.kind} {facts.xxh3} {facts.dtype} {facts.shape} {stored_bytes(location)}"


@dataclass(frozen=True)
class MappedVolume(ArrayVolume):
    """A volume in one piece."""

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        check_length(self.name, self.array)
        target = np.empty(region.shape, self.dtype) if out is None else out
        found = self.array[region.slices]
        _read_ahead(found, 1)
        _copy_rows(found, target)
        return target


@dataclass(frozen=True)
class BlockedVolume:
    """A volume in blocks, each of them in one piece: a patch touches fewer pages, but more blocks than it needs."""

    name: str
    array: Voxels
    """(z, y, x) of the block, then (z, y, x) within it."""
    shape: Shape
    block: int
    identity: str = ""
    affine: NDArray[np.float64] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array.dtype.newbyteorder("=")

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        check_length(self.name, self.array)
        target = np.empty(region.shape, self.dtype) if out is None else out
        pieces = [list(_pieces(a, b, self.block)) for a, b in zip(region.start, region.stop, strict=True)]
        first = self.array[pieces[0][0][0] : pieces[0][-1][0] + 1, pieces[1][0][0] : pieces[1][-1][0] + 1,
                           pieces[2][0][0] : pieces[2][-1][0] + 1]  # fmt: skip
        _read_ahead(first, 2)
        for (bz, z, to_z), (by, y, to_y), (bx, x, to_x) in itertools.product(*pieces):
            _copy_rows(self.array[bz, by, bx][z, y, x], target[to_z, to_y, to_x])
        return target


def _pieces(start: int, stop: int, block: int) -> Iterator[tuple[int, slice, slice]]:
    """The blocks along an axis that a range touches: its number, the part of it, and where that part goes."""
    for number in range(start // block, -(-stop // block)):
        low, high = max(start, number * block), min(stop, (number + 1) * block)
        yield number, slice(low - number * block, high - number * block), slice(low - start, high - start)


def _copy_rows(source: Voxels, target: Voxels) -> None:
    """Copies voxels, a row at a time: numpy's loop over single bytes takes a third longer for rows of a patch."""
    width = source.shape[-1] * source.itemsize
    if source.dtype != target.dtype or not width or target.strides[-1] != target.itemsize:
        target[...] = source
        return
    row = np.dtype((np.void, width))
    # A view needs a contiguous last axis; the mapped one has it, the target's was checked.
    target.view(row)[...] = source.view(row)


def _read_ahead(found: Voxels, axes: int) -> None:
    """Asks the kernel for all missing pages at once: page faults would wait for one piece after another,
    and read four times as much around them (11 MB and 9 ms for a patch of 2.7 MB, instead of 4 MB and 4 ms).

    `found` is made of pieces that are each contiguous, or nearly: its first `axes` axes count them."""
    begin, end = np.lib.array_utils.byte_bounds(found)
    begin -= begin % PAGE
    resident = np.empty(-(-(end - begin) // PAGE), np.uint8)
    # Looking takes a few hundredths of a patch's time. Without permission to know, the kernel reports all as resident.
    if _LIBC.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), ctypes.c_void_p(resident.ctypes.data)) != 0:
        return
    if resident.all():  # the lowest bit counts, and the others are zero
        return
    starts = np.full((1,) * axes, found.__array_interface__["data"][0] - begin)
    for axis in range(axes):
        place = np.arange(found.shape[axis]) * found.strides[axis]
        starts = starts + place.reshape([-1 if axis == other else 1 for other in range(axes)])
    low, high = np.lib.array_utils.byte_bounds(found[(0,) * axes])
    firsts = starts.reshape(-1) // PAGE
    pages = (int(high - low) + PAGE - 1) // PAGE + 1
    # Pages between the pieces are not needed: they may never be resident.
    needed = np.minimum(firsts[:, None] + np.arange(pages), len(resident) - 1)
    for first in firsts[~resident[needed].all(axis=1)].tolist():
        _LIBC.madvise(ctypes.c_void_p(begin + first * PAGE), ctypes.c_size_t(pages * PAGE), mmap.MADV_WILLNEED)
