"""Voxels that are stored uncompressed, as in `.npy` files: mapped, or fetched row by row from an object store."""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.formats.byte_source import ByteSource, coalesced
from stoker.tasks.volumes.formats.volume import ArrayVolume, ReadingOptions, Region, Shape, Volume, Voxels, check_extent

_LONGEST_HEADER = 1 << 16


def open_npy(source: ByteSource, options: ReadingOptions) -> Volume:
    """A `.npy` file."""
    name = source.name
    start = bytes(source.parts([(0, min(_LONGEST_HEADER, len(source)))])[0])
    if start[:2] == b"PK":
        raise ReadFailure(name, "not a volume", "it is a .npz archive")
    stream = io.BytesIO(start)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, is_fortran, dtype = read(stream)
    except Exception as error:  # numpy parses the header as Python's syntax, which can fail in many ways
        reason = "short" if len(start) < 128 else "unreadable"
        raise ReadFailure(name, reason, str(error).split("\n", 1)[0][:200]) from None
    if dtype == np.bool_:
        dtype = np.dtype(np.uint8)  # masks are often saved as truth values
    check_extent(name, shape, dtype, options)
    z, y, x = shape
    if is_fortran:
        turned = array_in(source, (x, y, z), dtype, stream.tell())
        if isinstance(turned, ArrayVolume):
            return replace(turned, array=turned.array.transpose(2, 1, 0))
        return TurnedVolume(turned)
    return array_in(source, (z, y, x), dtype, stream.tell())


def array_in(
    source: ByteSource,
    shape: Shape,
    dtype: np.dtype[Any],
    offset: int,
    *,
    step: int | None = None,
    affine: NDArray[np.float64] | None = None,
    scale: tuple[float, float] | None = None,
) -> Volume:
    """The array at an offset of a file, with `step` bytes from plane to plane; raises ReadFailure if the file is too
    short."""
    row = shape[2] * dtype.itemsize
    step = shape[1] * row if step is None else step
    wanted = offset + (shape[0] - 1) * step + shape[1] * row
    if len(source) < wanted:
        raise ReadFailure(source.name, "short", f"{len(source):,} bytes; its header promises {wanted:,}")
    if source.memory is None:
        return RangedVolume(source.name, shape, dtype, source.identity, source, offset, step, affine, scale)
    array: Any = np.ndarray(shape, dtype, source.memory, offset, (step, row, dtype.itemsize))
    return ArrayVolume(source.name, array, source.identity, affine, scale)


@dataclass(frozen=True)
class RangedVolume:
    """An array in an object: the rows of a region are fetched from each plane, many planes at once."""

    name: str
    shape: Shape
    stored: np.dtype[Any]
    identity: str
    source: ByteSource
    offset: int
    step: int
    """Bytes from plane to plane."""
    affine: NDArray[np.float64] | None = None
    scale: tuple[float, float] | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32) if self.scale is not None else self.stored.newbyteorder("=")

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        target = np.empty(region.shape, self.dtype) if out is None else out
        if not region.voxels:
            return target
        (first, top, left), (last, bottom, right) = region
        size, row = self.stored.itemsize, self.shape[2] * self.stored.itemsize
        begins = [self.offset + plane * self.step + top * row + left * size for plane in range(first, last)]
        length = (bottom - top - 1) * row + (right - left) * size
        groups, owners = coalesced([(begin, begin + length) for begin in begins])
        parts = self.source.parts(groups)
        for slot, (begin, owner) in enumerate(zip(begins, owners, strict=True)):
            inside = begin - groups[owner][0]
            plane: Any = np.ndarray(region.shape[1:], self.stored, parts[owner], inside, (row, size))
            whole = ArrayVolume(self.name, plane[None], scale=self.scale)
            whole.read(Region((0, 0, 0), whole.shape), target[slot][None])
        return target


@dataclass(frozen=True)
class TurnedVolume:
    """A volume stored with its axes in the order x, y, z, as Fortran does."""

    stored: Volume

    @property
    def name(self) -> str:
        return self.stored.name

    @property
    def shape(self) -> Shape:
        x, y, z = self.stored.shape
        return z, y, x

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.stored.dtype

    @property
    def identity(self) -> str:
        return self.stored.identity

    @property
    def affine(self) -> NDArray[np.float64] | None:
        return self.stored.affine

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        (z, y, x), (z_end, y_end, x_end) = region
        found = self.stored.read(Region((x, y, z), (x_end, y_end, z_end))).transpose(2, 1, 0)
        if out is None:
            return found
        out[...] = found
        return out
