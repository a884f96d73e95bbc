"""The files of a prediction: the unfinished result, the sums that layers of windows share, TIFF, Zarr and zip.

While a volume is predicted, its voxels go into a plain file that takes any box, so that a killed prediction resumes at
its layer of windows, whatever the final format. The final file is made from it at the end, and appears under its name
when it is whole.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.core.files import atomic_file, read_json, sync_folder, write_text
from stoker.tasks.volumes.formats.opening import library
from stoker.tasks.volumes.formats.volume import Region, Shape
from stoker.tasks.volumes.predict.windows import WindowGrid

FileFormat = Literal["tiff", "zarr"]
SUFFIX = {"tiff": ".tif", "zarr": ".zarr"}
# Classic TIFF has 32-bit offsets; the headers of a hundred thousand pages fit into what is left.
LARGEST_CLASSIC_TIFF = (1 << 32) - (1 << 26)
CHUNK = 128
"""Edge of a Zarr chunk in voxels."""
_COPY_BYTES = 1 << 24


class RawVolume:
    """A file of voxels (channels, z, y, x) without a header; any planes or rows of it can be read and written.

    Read and written by calls, not mapped: mapped pages would count as this process's memory until the kernel takes
    them back."""

    def __init__(self, path: Path, shape: Shape, dtype: Any, channels: int = 1) -> None:
        self.path, self.shape, self.channels = path, shape, channels
        self.dtype = np.dtype(dtype)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if os.fstat(self._file).st_size != self.size_bytes:
            os.ftruncate(self._file, self.size_bytes)

    @property
    def size_bytes(self) -> int:
        depth, height, width = self.shape
        return self.channels * depth * height * width * int(self.dtype.itemsize)

    def write(self, region: Region, voxels: NDArray[Any]) -> None:
        """Writes (channels, z, y, x), or (z, y, x) for a single channel; the region spans the whole x axis."""
        assert region.shape[2] == self.shape[2], "rows are written whole"
        for channel, planes in enumerate(voxels.reshape(self.channels, *region.shape)):
            for rows, offset in self._stretches(region, planes, channel):
                _write_all(self._file, np.ascontiguousarray(rows), offset)

    def read(self, region: Region, channel: int = 0) -> NDArray[Any]:
        """The voxels of a region that spans the whole x axis."""
        assert region.shape[2] == self.shape[2], "rows are read whole"
        found = np.empty(region.shape, self.dtype)
        for rows, offset in self._stretches(region, found, channel):
            _read_all(self._file, rows, offset)
        return found

    def planes(self, start: int, stop: int, channel: int = 0) -> NDArray[Any]:
        """The planes from `start` up to `stop`."""
        return self.read(Region((start, 0, 0), (stop, *self.shape[1:])), channel)

    def write_planes(self, start: int, voxels: NDArray[Any]) -> None:
        """Writes planes (z, y, x) of the single channel."""
        self.write(Region((start, 0, 0), (start + len(voxels), *self.shape[1:])), voxels)

    def sync(self) -> None:
        """Makes what was written survive a power cut."""
        os.fdatasync(self._file)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _stretches(self, region: Region, voxels: NDArray[Any], channel: int) -> Iterator[tuple[NDArray[Any], int]]:
        """The parts of a region's voxels that are one stretch of the file, and where each begins."""
        depth, height, width = self.shape
        (first, y, _), row_bytes = region.start, width * int(self.dtype.itemsize)
        if region.shape[1] == height:
            yield voxels, (channel * depth + first) * height * row_bytes
            return
        for z, rows in enumerate(voxels, first):
            yield rows, ((channel * depth + z) * height + y) * row_bytes


class Workspace:
    """The folder of one unfinished volume: its raw result and the sums between layers (`Carried`).

    Sums are in two files that take turns: the layer that is being predicted reads one and writes the other, so that
    it can be done again after a kill."""

    def __init__(self, folder: Path, grid: WindowGrid, classes: int, dtype: Any, channels: int, key: str) -> None:
        self.folder, self._grid, self._classes = folder, grid, classes
        self._key = key
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.first_layer = self._known_layer()
            self.result = RawVolume(folder / "result.raw", grid.shape, dtype, channels)
            self._sums = [os.open(folder / f"sums.{n}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666) for n in (0, 1)]
        except OSError as error:
            raise not_writable(folder, error) from None

    def read(self, layer: int, start: int, stop: int) -> NDArray[np.float32]:
        shape = self._grid.carried_shape(layer, self._classes)
        sums = np.empty((stop - start, *shape[1:]), np.float32)
        _read_all(self._sums[layer % 2], sums, start * sums[0].nbytes)
        return sums

    def write(self, layer: int, start: int, sums: NDArray[np.float32]) -> None:
        _write_all(self._sums[layer % 2], sums, start * sums[0].nbytes)

    def layer_done(self, layer: int) -> None:
        # The note says that the voxels are there, so they are written first, even on a machine that loses power.
        self.result.sync()
        os.fdatasync(self._sums[(layer + 1) % 2])
        write_text(self.folder / "state.json", json.dumps({"key": self._key, "layers": layer + 1}) + "\n")

    def close(self) -> None:
        """Leaves everything for the next start."""
        self.result.close()
        for file in self._sums:
            os.close(file)
        self._sums = []

    def remove(self) -> None:
        """Deletes everything: the volume is finished."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _known_layer(self) -> int:
        """The layers that an earlier start has finished with the same settings; files of other settings are useless."""
        known = _finished_layers(self.folder, self._key)
        if known is not None and 0 <= known <= self._grid.layers:
            return known
        for file in self.folder.iterdir():
            _remove(file)
        return 0


def is_begun(folder: Path, key: str) -> bool:
    """Whether a folder has an unfinished prediction with these settings."""
    return _finished_layers(folder, key) is not None


def _finished_layers(folder: Path, key: str) -> int | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        state = read_json(folder / "state.json")
        if state["key"] == key:
            return int(state["layers"])
    return None


def write_volume(raw: RawVolume, target: Path, file_format: FileFormat) -> None:
    """Writes a raw result as TIFF or Zarr; it appears under its name when it is whole, and replaces what was there."""
    draft = raw.path.parent / f"draft{SUFFIX[file_format]}"
    _remove(draft)
    write = _write_tiff if file_format == "tiff" else _write_zarr
    write(raw, draft)
    if target.is_dir() and not target.is_symlink():
        # A folder cannot be replaced in one step: the old one moves away first.
        old = raw.path.parent / "old"
        _remove(old)
        target.replace(old)
    draft.replace(target)
    sync_folder(target.parent)


def _write_tiff(raw: RawVolume, path: Path) -> None:
    """Pages one by one, compressed: masks shrink to a few percent, and every reader of TIFF knows deflate."""
    assert raw.channels == 1, "a TIFF stack has one channel"
    big = raw.size_bytes > LARGEST_CLASSIC_TIFF
    with library("tifffile").TiffWriter(path, bigtiff=big) as file:
        file.write(
            (raw.planes(z, z + 1)[0] for z in range(raw.shape[0])), shape=raw.shape, dtype=raw.dtype,
            photometric="minisblack", compression="zlib", maxworkers=1, software="stoker",
        )  # fmt: skip
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _write_zarr(raw: RawVolume, path: Path) -> None:
    """Zarr v3 in chunks, including those that are all zero, because a missing chunk may also be a lost one."""
    tensorstore = library("tensorstore")
    shape = [*([raw.channels] if raw.channels > 1 else []), *raw.shape]
    chunks = [*([1] if raw.channels > 1 else []), *(min(CHUNK, size) for size in raw.shape)]
    array = tensorstore.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "metadata": {
                "shape": shape,
                "data_type": raw.dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}}
                    if raw.dtype.itemsize > 1
                    else {"name": "bytes"},
                    {"name": "zstd", "configuration": {"level": 3}},
                ],
                "dimension_names": [*("c" if raw.channels > 1 else ""), "z", "y", "x"],
            },
            "store_data_equal_to_fill_value": True,
        },
        create=True,
        context=tensorstore.Context({"cache_pool": {"total_bytes_limit": 0}}),
    ).result()
    depth, height, width = raw.shape
    for channel in range(raw.channels):
        for z in range(0, depth, CHUNK):
            for y in range(0, height, CHUNK):
                box = Region((z, y, 0), (min(z + CHUNK, depth), min(y + CHUNK, height), width))
                place = array[(channel, *box.slices)] if raw.channels > 1 else array[box.slices]
                place.write(raw.read(box, channel)).result()


def write_submission(files: Sequence[Path], target: Path) -> None:
    """The files in one zip, stored as they are, since they are compressed already; the same files, the same bytes."""
    with atomic_file(target, "wb") as stream, zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
        for path in files:
            entry = zipfile.ZipInfo(path.name)  # dated 1980: with a real time, no two zips would be equal
            entry.external_attr = 0o644 << 16
            entry.file_size = path.stat().st_size
            with path.open("rb") as source, archive.open(entry, "w") as place:
                shutil.copyfileobj(source, place, _COPY_BYTES)


def free_bytes(folder: Path) -> int:
    """Free bytes on the folder's disk."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns an error of writing into one that says how to fix it."""
    try:
        yield
    except OSError as error:
        raise not_writable(folder, error) from None


def not_writable(folder: Path, error: OSError) -> UserError:
    """The error of a folder that cannot be written to, or whose disk is full."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            "disk-full",
            f"{folder}: {error.strerror}",
            why="what is finished is kept",
            hint="make room, and give the same command again: it resumes",
        )
    return UserError("out-not-writable", f"{folder} cannot be written: {error.strerror or error}", hint="--out FOLDER")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_all(file: int, array: NDArray[Any], offset: int) -> None:
    left = _bytes_of(array)
    while left:
        written = os.pwrite(file, left[:_COPY_BYTES], offset)
        left, offset = left[written:], offset + written


def _read_all(file: int, out: NDArray[Any], offset: int) -> None:
    left = _bytes_of(out)
    while left:
        got = os.preadv(file, [left[:_COPY_BYTES]], offset)
        if not got:
            raise OSError(errno.EIO, "the file of an unfinished prediction is too short")
        left, offset = left[got:], offset + got


def _bytes_of(array: Any) -> memoryview:
    # An empty array cannot be cast.
    return memoryview(array).cast("B") if array.size else memoryview(b"")
