"""A volume: three axes (z, y, x) of voxels, of which any region can be read, whatever the file's format."""

from __future__ import annotations

import math
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.io.cache import CopyPlace
from stoker.io.stores import ReadFailure

Shape = tuple[int, int, int]
Voxels = NDArray[Any]
Key = TypeVar("Key")
Made = TypeVar("Made")
# Voxels keep their type until they are on the device. Larger integers are rare, and complex numbers are not voxels.
DTYPES = frozenset(("u1", "i1", "u2", "i2", "u4", "i4", "f2", "f4", "f8"))


class Region(NamedTuple):
    """A box of voxels: from `start` up to, but not including, `stop`. It may stick out of a volume."""

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        (z, y, x), (z_end, y_end, x_end) = self
        return z_end - z, y_end - y, x_end - x

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        (z, y, x), (z_end, y_end, x_end) = self
        return slice(z, z_end), slice(y, y_end), slice(x, x_end)

    @property
    def voxels(self) -> int:
        return math.prod(self.shape)

    def within(self, shape: Shape) -> Region:
        """The part of it inside a volume; empty if there is none."""
        start = [min(max(0, a), size) for a, size in zip(self.start, shape, strict=True)]
        stop = [min(max(0, a), size) for a, size in zip(self.stop, shape, strict=True)]
        return Region(as_shape(start), as_shape([max(a, b) for a, b in zip(start, stop, strict=True)]))

    def moved(self, by: Shape) -> Region:
        start, stop = ([a + b for a, b in zip(corner, by, strict=True)] for corner in self)
        return Region(as_shape(start), as_shape(stop))


def whole(shape: Shape) -> Region:
    return Region((0, 0, 0), shape)


def slab(shape: Shape, axis: int, first: int, last: int) -> Region:
    """The planes of a volume from `first` up to, but not including, `last` across an axis."""
    start, stop = [0, 0, 0], list(shape)
    start[axis], stop[axis] = first, last
    return Region(as_shape(start), as_shape(stop))


def box_at(start: Shape, shape: Shape) -> Region:
    """The region of this shape that begins at `start`."""
    return Region(start, as_shape([a + size for a, size in zip(start, shape, strict=True)]))


def as_shape(values: Iterable[int]) -> Shape:
    """Three numbers along z, y and x."""
    z, y, x = values
    return z, y, x


def sizes_text(sizes: Iterable[int]) -> str:
    """Sizes along the axes, as in '72 x 136 x 136'."""
    return " x ".join(map(str, sizes))


@dataclass(frozen=True)
class ReadingOptions:
    """How volumes are read, and the sizes above which a header cannot be right."""

    max_voxels: int = 1 << 38
    """Limit for one volume; a 6,500³ scan fits, a damaged or made-up header usually does not."""
    max_decoded_bytes: int = 8 << 30
    """Limit for the output of one compressed file, page or chunk: a few kilobytes can claim to hold terabytes."""
    cache_bytes: int = 1 << 30
    """Decoded pages, files and chunks that a process keeps, for all its threads and volumes together."""
    missing_chunks: Literal["error", "fill"] = "error"
    """Zarr does not store chunks that hold only the fill value, so a missing one may also be a lost one: `fill` says
    that it means the fill value."""
    copy: CopyPlace | None = None
    """The local copy of files: a cache, into which each file of an object store is fetched whole when it is opened, or
    a copy that is filled while the data is read."""


class Volume(Protocol):
    """Voxels that can be read, a region at a time, by several threads at once."""

    @property
    def name(self) -> str:
        """Its file or URL, for messages."""

    @property
    def shape(self) -> Shape: ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """In this machine's byte order."""

    @property
    def identity(self) -> str:
        """Changes if the file changes: data derived from a volume is kept under it."""

    @property
    def affine(self) -> NDArray[np.float64] | None:
        """From voxels to the scanner's space, where the format records it."""

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        """The voxels of a region inside the volume, in `out` if given; raises ReadFailure."""
        ...


@dataclass(frozen=True)
class ArrayVolume:
    """Voxels that are an array already: mapped from a file, or in memory."""

    name: str
    array: Voxels
    identity: str = ""
    affine: NDArray[np.float64] | None = None
    scale: tuple[float, float] | None = None
    """Slope and intercept, if the file's numbers are not the voxels' values."""

    @property
    def shape(self) -> Shape:
        z, y, x = self.array.shape
        return z, y, x

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32) if self.scale is not None else self.array.dtype.newbyteorder("=")

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        check_length(self.name, self.array)
        target = np.empty(region.shape, self.dtype) if out is None else out
        found = self.array[region.slices]
        if self.scale is None:
            target[...] = found
        else:
            slope, intercept = self.scale
            # In double precision first: an intercept can be much larger than the differences that matter.
            target[...] = found.astype(np.float64) * slope + intercept
        return target


@dataclass(frozen=True)
class VolumeView:
    """Another view of a volume, with the name, type and affine of that."""

    volume: Volume

    @property
    def name(self) -> str:
        return self.volume.name

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.volume.dtype

    @property
    def identity(self) -> str:
        return self.volume.identity

    @property
    def affine(self) -> NDArray[np.float64] | None:
        return self.volume.affine


@dataclass(frozen=True)
class CroppedVolume(VolumeView):
    """A box of a volume as a separate volume: nothing outside the box can be read through it."""

    box: Region

    @property
    def shape(self) -> Shape:
        return self.box.shape

    @property
    def identity(self) -> str:
        return f"{self.volume.identity} {tuple(self.box)}"

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        assert region.within(self.shape) == region, "a region outside the box"
        return self.volume.read(region.moved(self.box.start), out)


def read_padded(
    volume: Volume, region: Region, out: Voxels, fill: float, read: Callable[..., Voxels] | None = None
) -> None:
    """Reads a region that may stick out of the volume; voxels outside get the fill value. `read` reads the part
    inside, if the volume itself does not."""
    read = read or volume.read
    inside = region.within(volume.shape)
    if inside == region:
        read(region, out)
        return
    out[...] = fill
    if inside.voxels:
        back = as_shape([-a for a in region.start])
        place = out[inside.moved(back).slices]
        place[...] = read(inside)


def check_finite(voxels: Voxels, name: str) -> None:
    """Raises ReadFailure if a voxel is NaN or infinite: one is enough to ruin every weight of a network."""
    # The extremes propagate NaN, and need no mask of all voxels.
    if voxels.dtype.kind == "f" and voxels.size and not (np.isfinite(voxels.min()) and np.isfinite(voxels.max())):
        bad = int((~np.isfinite(voxels)).sum())
        raise ReadFailure(name, "not finite", f"{bad:,} of {voxels.size:,} voxels read are NaN or infinite")


def check_extent(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], options: ReadingOptions) -> Shape:
    """The shape as (z, y, x); raises ReadFailure if it cannot be that of a volume."""
    if len(shape) != 3:
        raise ReadFailure(name, "not a volume", f"it has {len(shape)} axes, {shape}; a volume has three: z, y, x")
    z, y, x = (int(size) for size in shape)
    if min(z, y, x) < 1:
        raise ReadFailure(name, "not a volume", f"its shape is {shape}")
    if z * y * x > options.max_voxels:
        raise ReadFailure(name, "too large", f"{z} x {y} x {x} voxels; the limit is {options.max_voxels:,} voxels")
    if dtype.str[1:] not in DTYPES:
        raise ReadFailure(name, "not a volume", f"its voxels are {dtype}; integers up to 32 bits and floats are read")
    return z, y, x


def map_file(path: str) -> tuple[mmap.mmap, str]:
    """A file's bytes, mapped, and its identity; raises ReadFailure."""
    try:
        # Without O_NONBLOCK a named pipe called x.tif would block forever; regular files ignore it.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            now = os.fstat(descriptor)
            if now.st_size == 0:
                raise ReadFailure(path, "short", "it is empty")
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), identity_of(path, now)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise failure_of(path, error) from None


def check_length(name: str, memory: Any) -> None:
    """Raises ReadFailure if this is mapped from a file that has become shorter: touching what is gone would end the
    process, by SIGBUS. Only what goes while a patch is copied is not noticed."""
    while memory is not None and not isinstance(memory, mmap.mmap):
        memory = memory.obj if isinstance(memory, memoryview) else getattr(memory, "base", None)
    if memory is not None and memory.size() < len(memory):
        raise ReadFailure(name, "short", f"it had {len(memory):,} bytes when it was opened, and has {memory.size():,}")


def identity_of(path: str, now: os.stat_result | None = None) -> str:
    """A file's identity, which changes with its size and its time of change."""
    now = now or Path(path).stat()
    return f"{os.path.realpath(path)} {now.st_size} {now.st_mtime_ns}"


def failure_of(path: str, error: Exception) -> ReadFailure:
    """An operating system's error as the failure of this file."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return ReadFailure(path, "missing")
    if isinstance(error, PermissionError):
        return ReadFailure(path, "permission", error.strerror)
    if isinstance(error, IsADirectoryError) or Path(path).is_dir():
        return ReadFailure(path, "is a directory")
    return ReadFailure(path, "unreadable", str(error).split("\n", 1)[0][:300])


class LruCache(Generic[Key, Made]):
    """The values that were used last, up to a limit on their total size; for all threads of a process."""

    def __init__(self, limit: int, size: Callable[[Made], int] = lambda _made: 1) -> None:
        self._limit = limit
        self._size = size
        self._lock = threading.Lock()
        self._entries: OrderedDict[Key, Made] = OrderedDict()
        self._making: dict[Key, threading.Lock] = {}
        self.held = 0

    def get(self, key: Key, make: Callable[[], Made]) -> Made:
        """The value under a key, made by one thread at a time; do not change it."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None:
                self._entries.move_to_end(key)
                return found
            making = self._making.setdefault(key, threading.Lock())
        with making:
            # Another thread may have made it while we waited: two whole volumes at once could exceed memory.
            if (found := self.peek(key)) is not None:
                return found
            try:
                made = make()
                with self._lock:
                    self._keep(key, made)
                return made
            finally:
                with self._lock:
                    self._making.pop(key, None)

    def peek(self, key: Key) -> Made | None:
        with self._lock:
            return self._entries.get(key)

    def has(self, key: Key) -> bool:
        """Whether there is a value under a key, or one is being made; it may be gone a moment later."""
        with self._lock:
            return key in self._entries or key in self._making

    def drop(self, key: Key) -> None:
        with self._lock:
            if (dropped := self._entries.pop(key, None)) is not None:
                self.held -= self._size(dropped)

    def _keep(self, key: Key, made: Made) -> None:
        size = self._size(made)
        if size > self._limit or key in self._entries:
            return
        self._entries[key] = made
        self.held += size
        while self.held > self._limit:
            _, dropped = self._entries.popitem(last=False)
            self.held -= self._size(dropped)


@cache
def decoded_cache(limit_bytes: int) -> LruCache[Any, Voxels]:
    """This process's cache of decoded pages and files, for all its volumes."""
    return LruCache(limit_bytes, lambda array: array.nbytes)
