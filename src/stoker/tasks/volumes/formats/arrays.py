"""Files that hold one array: .npy and NIfTI (.nii, .nii.gz). Uncompressed voxels are mapped, or fetched row by row from
an object store; .nii.gz is decompressed once.

NIfTI's fastest axis is x, so a file's bytes are an array (z, y, x) without any copy.
"""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.formats.byte_source import ByteSource, RemoteBytes, SourceStream, coalesced
from stoker.tasks.volumes.formats.volume import (
    ArrayVolume,
    LruCache,
    ReadingOptions,
    Region,
    Shape,
    Volume,
    VolumeView,
    Voxels,
    as_shape,
    check_extent,
    decoded_cache,
    failure_of,
    whole,
)

# Compressed or not, a header is shorter than this, unless it was crafted.
_LONGEST_HEADER = 1 << 16
_LARGEST_NIFTI_HEADER = 540


def open_npy(source: ByteSource, options: ReadingOptions) -> Volume:
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
    shape = check_extent(name, shape, dtype, options)
    if not is_fortran:
        return array_in(source, StoredArray(shape, dtype, stream.tell()))
    turned = array_in(source, StoredArray(as_shape(shape[::-1]), dtype, stream.tell()))
    if isinstance(turned, ArrayVolume):
        return replace(turned, array=turned.array.transpose(2, 1, 0))
    return TurnedVolume(turned)


class StoredArray(NamedTuple):
    """How a file stores an array."""

    shape: Shape
    dtype: np.dtype[Any]
    offset: int
    affine: NDArray[np.float64] | None = None
    scale: tuple[float, float] | None = None
    """Slope and intercept, if the file's numbers are not the voxels' values."""


def array_in(source: ByteSource, stored: StoredArray, step: int | None = None) -> Volume:
    """An uncompressed array, with `step` bytes from plane to plane; raises ReadFailure if the file is too short."""
    shape, dtype, offset, affine, scale = stored
    row = shape[2] * dtype.itemsize
    step = shape[1] * row if step is None else step
    wanted = offset + (shape[0] - 1) * step + shape[1] * row
    if len(source) < wanted:
        raise ReadFailure(source.name, "short", f"{len(source):,} bytes; its header promises {wanted:,}")
    if source.memory is None:
        return RangedVolume(source, stored, step)
    array: Any = np.ndarray(shape, dtype, source.memory, offset, (step, row, dtype.itemsize))
    return ArrayVolume(source.name, array, source.identity, affine, scale)


@dataclass(frozen=True)
class StoredVolume:
    """A volume whose voxels are not in memory."""

    source: ByteSource
    stored: StoredArray

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shape(self) -> Shape:
        return self.stored.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32) if self.stored.scale is not None else self.stored.dtype.newbyteorder("=")

    @property
    def identity(self) -> str:
        return self.source.identity

    @property
    def affine(self) -> NDArray[np.float64] | None:
        return self.stored.affine


@dataclass(frozen=True)
class RangedVolume(StoredVolume):
    """An array in an object: the rows of a region are fetched from each plane, many planes at once."""

    step: int
    """Bytes from plane to plane."""

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        target = np.empty(region.shape, self.dtype) if out is None else out
        if not region.voxels:
            return target
        (first, top, left), (last, bottom, right) = region
        dtype = self.stored.dtype
        size, row = dtype.itemsize, self.shape[2] * dtype.itemsize
        begins = [self.stored.offset + plane * self.step + top * row + left * size for plane in range(first, last)]
        length = (bottom - top - 1) * row + (right - left) * size
        groups, owners = coalesced([(begin, begin + length) for begin in begins])
        parts = self.source.parts(groups)
        for slot, (begin, owner) in enumerate(zip(begins, owners, strict=True)):
            inside = begin - groups[owner][0]
            plane: Any = np.ndarray(region.shape[1:], dtype, parts[owner], inside, (row, size))
            found = ArrayVolume(self.name, plane[None], scale=self.stored.scale)
            found.read(whole(found.shape), target[slot][None])
        return target


@dataclass(frozen=True)
class TurnedVolume(VolumeView):
    """A volume stored with its axes in the order x, y, z, as Fortran does."""

    @property
    def shape(self) -> Shape:
        x, y, z = self.volume.shape
        return z, y, x

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        (z, y, x), (z_end, y_end, x_end) = region
        found = self.volume.read(Region((x, y, z), (x_end, y_end, z_end))).transpose(2, 1, 0)
        if out is None:
            return found
        out[...] = found
        return out


def open_nifti(source: ByteSource, options: ReadingOptions) -> Volume:
    """A NIfTI-1 or NIfTI-2 volume in a single file."""
    path = source.name
    start = bytes(source.parts([(0, min(_LONGEST_HEADER, len(source)))])[0])
    if not _is_gzip(path):
        return array_in(source, _read_header(path, start[:_LARGEST_NIFTI_HEADER], options))
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(start)) as stream:
            header = _read_header(path, stream.read(_LARGEST_NIFTI_HEADER), options)
    except (OSError, EOFError, zlib.error) as error:
        raise _gzip_failure(path, error) from None
    return InflatedVolume(source, header, decoded_cache(options.cache_bytes))


def _is_gzip(path: str) -> bool:
    return path.lower().endswith(".gz")


@dataclass(frozen=True)
class InflatedVolume(StoredVolume):
    """A compressed file: gzip has no entry points, so all of it is decompressed, and kept while there is room.

    For data that does not fit the cache, every patch would decompress a whole volume: pack it first."""

    cache: LruCache[str, Voxels]

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        array = self.cache.get(self.identity, self._inflate)
        return ArrayVolume(self.name, array, scale=self.stored.scale).read(region, out)

    def _inflate(self) -> Voxels:
        # Exactly as many bytes as the header promises, even if the stream has more.
        array = np.empty(self.shape, self.stored.dtype)
        target = array.reshape(-1).view(np.uint8).data
        try:
            packed = self.source.fetched() if isinstance(self.source, RemoteBytes) else self.source
            with gzip.GzipFile(fileobj=io.BufferedReader(SourceStream(packed))) as stream:
                stream.seek(self.stored.offset)
                have = 0
                while have < len(target):
                    count = stream.readinto(target[have:])
                    if not count:
                        raise ReadFailure(self.name, "short", f"{have:,} bytes of voxels; it promises {len(target):,}")
                    have += count
        except (OSError, EOFError, zlib.error) as error:
            raise _gzip_failure(self.name, error) from None
        return array


def _read_header(path: str, start: bytes, options: ReadingOptions) -> StoredArray:
    import nibabel

    kind: Any = nibabel.Nifti1Header
    if len(start) >= 4 and _LARGEST_NIFTI_HEADER in (int.from_bytes(start[:4], order) for order in ("little", "big")):
        kind = nibabel.Nifti2Header
    size = kind.template_dtype.itemsize
    if len(start) < size:
        raise ReadFailure(path, "short", f"{len(start)} bytes, less than a header")
    try:
        # Without checks: nibabel's print to the terminal, and repair files that we would rather refuse.
        header = kind(start[:size], check=False)
        magic = bytes(header["magic"].tobytes()[:3])
        dimensions = [int(size) for size in header["dim"]]
        dtype = np.dtype(header.get_data_dtype())
        offset = int(header["vox_offset"])
        slope, intercept = header.get_slope_inter()
        affine = np.asarray(header.get_best_affine(), np.float64)
    except Exception as error:  # nibabel raises a different error for each field
        raise ReadFailure(path, "unreadable", f"not a NIfTI header: {error}"[:200]) from None
    if magic[:2] != b"n+":
        raise ReadFailure(path, "unreadable", "not a NIfTI file in one piece (.nii)")
    axes = dimensions[1 : dimensions[0] + 1] if 1 <= dimensions[0] <= 7 else []
    while len(axes) > 3 and axes[-1] == 1:
        axes.pop()
    shape = check_extent(path, tuple(reversed(axes)), dtype, options)
    if offset < size or offset > 1 << 30:
        raise ReadFailure(path, "unreadable", f"its voxels would begin at byte {offset}")
    if _is_gzip(path) and np.prod(shape, dtype=object) * dtype.itemsize > options.max_decoded_bytes:
        raise ReadFailure(
            path,
            "too large",
            f"{shape} voxels of {dtype}; at most {options.max_decoded_bytes:,} bytes are decompressed",
        )
    plain = slope is None or (slope == 1 and not intercept)
    scale = None if plain else (float(slope), float(intercept or 0.0))
    return StoredArray(shape, dtype, offset, affine, scale)


def _gzip_failure(path: str, error: Exception) -> ReadFailure:
    if isinstance(error, EOFError):
        return ReadFailure(path, "short", "its compressed data ends early")
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return ReadFailure(path, "unreadable", f"its compressed data is damaged: {error}")
    return failure_of(path, error)
