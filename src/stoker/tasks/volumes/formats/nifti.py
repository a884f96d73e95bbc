"""NIfTI files: the header by nibabel, the voxels mapped (.nii) or decompressed once (.nii.gz).

The file's fastest axis is x, so its bytes are an array (z, y, x) without any copy.
"""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import nibabel
import numpy as np
from numpy.typing import NDArray

from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.formats.arrays import array_in
from stoker.tasks.volumes.formats.byte_source import ByteSource, RemoteBytes, SourceStream
from stoker.tasks.volumes.formats.volume import (
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
)

_LARGEST_HEADER = 540
# A compressed header is shorter than this, unless it was crafted.
_HEADER_AND_MORE = 1 << 16


class _Header(NamedTuple):
    shape: Shape
    dtype: np.dtype[Any]
    offset: int
    affine: NDArray[np.float64]
    scale: tuple[float, float] | None


def open_nifti(source: ByteSource, options: ReadingOptions) -> Volume:
    """A NIfTI-1 or NIfTI-2 volume in a single file."""
    path = source.name
    start = bytes(source.parts([(0, min(_HEADER_AND_MORE, len(source)))])[0])
    if not _is_packed(path):
        header = _read_header(path, start[:_LARGEST_HEADER], options)
        return array_in(source, header.shape, header.dtype, header.offset, affine=header.affine, scale=header.scale)
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(start)) as stream:
            header = _read_header(path, stream.read(_LARGEST_HEADER), options)
    except (OSError, EOFError, zlib.error) as error:
        raise _gzip_failure(path, error) from None
    return InflatedVolume(path, header, source.identity, source, decoded_cache(options.cache_bytes))


def _is_packed(path: str) -> bool:
    return path.lower().endswith(".gz")


@dataclass(frozen=True)
class InflatedVolume:
    """A compressed file: gzip has no entry points, so all of it is decompressed, and kept while there is room.

    For data that does not fit the cache, every patch would decompress a whole volume: pack it first."""

    name: str
    header: _Header
    identity: str
    source: ByteSource
    cache: DecodedCache

    @property
    def shape(self) -> Shape:
        return self.header.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32) if self.header.scale else self.header.dtype.newbyteorder("=")

    @property
    def affine(self) -> NDArray[np.float64]:
        return self.header.affine

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        array = self.cache.get(self.identity, self._inflate)
        return ArrayVolume(self.name, array, scale=self.header.scale).read(region, out)

    def _inflate(self) -> Voxels:
        header = self.header
        # Exactly as many bytes as the header promises, even if the stream has more.
        array = np.empty(header.shape, header.dtype)
        target = array.reshape(-1).view(np.uint8).data
        try:
            packed = self.source.fetched() if isinstance(self.source, RemoteBytes) else self.source
            with gzip.GzipFile(fileobj=io.BufferedReader(SourceStream(packed))) as stream:
                stream.seek(header.offset)
                have = 0
                while have < len(target):
                    count = stream.readinto(target[have:])
                    if not count:
                        raise ReadFailure(self.name, "short", f"{have:,} bytes of voxels; it promises {len(target):,}")
                    have += count
        except (OSError, EOFError, zlib.error) as error:
            raise _gzip_failure(self.name, error) from None
        return array


def _read_header(path: str, start: bytes, options: ReadingOptions) -> _Header:
    kind: Any = nibabel.Nifti1Header
    if len(start) >= 4 and _LARGEST_HEADER in (int.from_bytes(start[:4], "little"), int.from_bytes(start[:4], "big")):
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
    if _is_packed(path) and np.prod(shape, dtype=object) * dtype.itemsize > options.max_decoded_bytes:
        raise ReadFailure(
            path,
            "too large",
            f"{shape} voxels of {dtype}; at most {options.max_decoded_bytes:,} bytes are decompressed",
        )
    plain = slope is None or (slope == 1 and not intercept)
    scale = None if plain else (float(slope), float(intercept or 0.0))
    return _Header(shape, dtype, offset, affine, scale)


def _gzip_failure(path: str, error: Exception) -> ReadFailure:
    if isinstance(error, EOFError):
        return ReadFailure(path, "short", "its compressed data ends early")
    if isinstance(error, gzip.BadGzipFile | zlib.error):
        return ReadFailure(path, "unreadable", f"its compressed data is damaged: {error}")
    return failure_of(path, error)
