"""The folder of predictions: the record of how its files were made, unfinished results, TIFF, Zarr and zip.

All files of a folder are made with one set of checkpoints and options. While a volume is predicted, its voxels go into
a plain file that takes any box, so that a killed prediction resumes at its layer of windows, whatever the final format.
The final file is made from it at the end, and appears under its name when it is whole.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.core.console import some
from stoker.core.errors import UsageError, UserError
from stoker.core.files import atomic_file, read_json, sync_folder, write_text
from stoker.core.units import count
from stoker.run.lease import Lease, LeaseHeld
from stoker.tasks.volumes.formats.opening import library
from stoker.tasks.volumes.formats.volume import Region, Shape, Volume
from stoker.tasks.volumes.pack.write_volume import bytes_codec, create_zarr, remove
from stoker.tasks.volumes.predict.postprocess import PostStep, check_chain
from stoker.tasks.volumes.predict.segmenter import Carried, Scale, mask_dtype
from stoker.tasks.volumes.predict.windows import PredictionSize, SlidingWindow, WindowGrid
from stoker.tasks.volumes.segment import TrainedVolumeModel

MANIFEST, UNFINISHED, LEASE = "prediction.json", ".unfinished", "lease"
FORMAT = 1
LARGEST_MANIFEST_BYTES = 256 << 20
FileFormat = Literal["tiff", "zarr"]
SUFFIX = {"tiff": ".tif", "zarr": ".zarr"}
# Classic TIFF has 32-bit offsets; the headers of a hundred thousand pages fit into what is left.
LARGEST_CLASSIC_TIFF = (1 << 32) - (1 << 26)
CHUNK = 128
"""Edge of a Zarr chunk in voxels."""
_COPY_BYTES = 1 << 24


@dataclass(frozen=True)
class PredictionOptions:
    """What to predict, and into which files."""

    sliding: SlidingWindow = field(default_factory=SlidingWindow)
    threshold: float | None = None
    """Class 1 wherever it is more probable than this; None for the most probable class."""
    probabilities: Scale | None = None
    """Store probabilities in this form, not the classes."""
    file_format: FileFormat = "tiff"
    post: tuple[PostStep, ...] = ()
    submission: bool = False
    """Also write submission.zip with all files."""
    force: bool = False
    """Replace what was predicted with other settings."""

    def stored_as(self, classes: int) -> tuple[np.dtype[Any], int]:
        """Type and channels of a voxel of the result."""
        if self.probabilities is not None:
            return np.dtype(self.probabilities), classes - 1
        return mask_dtype(classes), 1

    def check(self, classes: int) -> None:
        """Refuses options that exclude each other, or do not fit the network."""
        check_chain(self.post, classes)
        if self.threshold is not None and classes != 2:
            raise UsageError(
                "threshold-for-two-classes",
                f"predict_threshold is {self.threshold:g}, and the network knows {classes} classes",
                why="with more than two, the most probable one is chosen",
                hint="leave out predict_threshold",
            )
        if self.probabilities is not None:
            masks = {
                "predict_threshold": self.threshold is not None, "predict_postprocess": self.post,
                "--submission": self.submission,
            }  # fmt: skip
            if used := [name for name, is_set in masks.items() if is_set]:
                raise UsageError(
                    "probabilities-are-no-mask", f"--probabilities with {', '.join(used)}",
                    why="these need classes", hint="leave out --probabilities",
                )  # fmt: skip
            if classes > 2 and self.file_format == "tiff":
                raise UsageError(
                    "tiff-has-one-channel", f"probabilities of {classes - 1} classes as TIFF",
                    why="a TIFF stack holds one volume", hint="--format zarr",
                )  # fmt: skip
        if self.submission and self.file_format != "tiff":
            raise UsageError(
                "submission-is-tiff", f"--submission with --format {self.file_format}", hint="--format tiff"
            )


@dataclass(frozen=True)
class PredictedVolume:
    id: str
    path: Path
    shape: Shape
    windows: int
    seconds: float | None
    """None if an earlier start finished it."""
    foreground: float | None
    """Share of voxels of a class other than 0; None for probabilities."""


@dataclass(frozen=True)
class Job:
    id: str
    images: tuple[Volume, ...]
    target: Path
    size: PredictionSize

    @property
    def shape(self) -> Shape:
        return self.images[0].shape


def settings_of(trained: Sequence[TrainedVolumeModel], options: PredictionOptions) -> dict[str, Any]:
    """Everything that the voxels of a prediction depend on, apart from the volume."""
    config = trained[0].config
    return {
        "checkpoints": [
            {"xxh128": _checksum(one.path), "weights": "averaged" if one.averaged else "raw"} for one in trained
        ],
        "patch_size": list(config.patch_size or ()),
        "normalize": config.normalize,
        "precision": config.precision,
        "overlap": options.sliding.overlap,
        "flips": "".join(sorted(options.sliding.flips, reverse=True)),
        "output": options.probabilities or "classes",
        "threshold": options.threshold,
        "post": ",".join(map(str, options.post)),
        "format": options.file_format,
    }


class Manifest:
    """The file in a folder of predictions that says how they were made."""

    def __init__(self, out: Path, settings: dict[str, Any], force: bool) -> None:
        self.path, self._out, self._settings, self._force = out / MANIFEST, out, settings, force
        self._volumes: dict[str, dict[str, Any]] = {}
        known = self._read()
        if known is None:
            return
        different = sorted(key for key in settings if known.get("settings", {}).get(key) != settings[key])
        if not different:
            self._volumes = dict(known.get("volumes", {}))
        elif not force:
            lines = [f"  {key}: {known['settings'].get(key)} there, {settings[key]} now" for key in different]
            raise UserError(
                "out-of-other-settings",
                f"{out} has predictions made with other settings\n" + "\n".join(lines),
                why="half of the volumes would be predicted in one way and half in another",
                hint="--out ANOTHER_FOLDER, or --force to replace them",
            )

    def unfinished(self, job: Job) -> Path:
        return self._out / UNFINISHED / job.id

    def key_of(self, job: Job) -> str:
        """Changes with the settings and with the volume."""
        identity = " ".join(image.identity for image in job.images)
        document = json.dumps([FORMAT, self._settings, identity, job.shape], sort_keys=True)
        return hashlib.blake2b(document.encode(), digest_size=16).hexdigest()

    def has(self, job: Job) -> bool:
        """Whether this volume, as it is now, was predicted with these settings, and the file is there."""
        return self._volumes.get(job.id, {}).get("key") == self.key_of(job) and job.target.exists()

    def known(self, job: Job) -> PredictedVolume:
        entry = self._volumes[job.id]
        return PredictedVolume(job.id, job.target, job.shape, job.size.windows, None, entry.get("foreground"))

    def check_targets(self, jobs: Sequence[Job]) -> None:
        """Refuses to replace files that this prediction did not write."""
        if self._force:
            return
        strange = [
            job.target.name
            for job in jobs
            if job.target.exists()
            and job.id not in self._volumes
            and _finished_layers(self.unfinished(job), self.key_of(job)) is None
        ]
        if strange:
            raise UserError(
                "out-exists",
                f"{self._out} has {count(len(strange), 'file')} from elsewhere: {some(strange)}",
                why=f"{MANIFEST} does not list them, so they would be lost",
                hint="--out ANOTHER_FOLDER, or --force to replace them",
            )

    def add(self, job: Job, made: PredictedVolume) -> None:
        self._volumes[job.id] = {"key": self.key_of(job), "file": made.path.name, "foreground": made.foreground}
        self.write()

    def write(self) -> None:
        document = {"format": FORMAT, "settings": self._settings, "volumes": self._volumes}
        write_text(self.path, json.dumps(document, indent=1) + "\n")

    def _read(self) -> dict[str, Any] | None:
        try:
            document = read_json(self.path, LARGEST_MANIFEST_BYTES)
            if not isinstance(document, dict) or not isinstance(document.get("settings"), dict):
                raise ValueError
        except FileNotFoundError:
            return None
        except ValueError:
            if self._force:
                return None
            raise UserError(
                "bad-manifest", f"{self.path} is damaged, or was not written by stoker predict",
                why="it says how the files beside it were made", hint="--out ANOTHER_FOLDER, or --force",
            ) from None  # fmt: skip
        return document


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Keeps a second prediction out of the folder, and removes the folder of unfinished ones if nothing is in it."""
    lease = Lease(out / UNFINISHED / LEASE)
    try:
        with disk_errors(out):
            lease.acquire()
    except LeaseHeld as held:
        raise UserError(
            "out-busy", held.seen, why="two predictions would write the same files",
            hint="wait for the other one, or --out ANOTHER_FOLDER",
        ) from None  # fmt: skip
    try:
        yield
    finally:
        lease.release()
        with suppress(OSError):
            if [one.name for one in (out / UNFINISHED).iterdir()] == [LEASE]:
                (out / UNFINISHED / LEASE).unlink()
                (out / UNFINISHED).rmdir()


def _checksum(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, xxhash.xxh3_128).hexdigest()


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
        return self.channels * math.prod(self.shape) * int(self.dtype.itemsize)

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
        return self.read(Region((start, 0, 0), (stop, *self.shape[1:])), channel)

    def write_planes(self, start: int, voxels: NDArray[Any]) -> None:
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


class Workspace(Carried):
    """The folder of one unfinished volume: its raw result and the sums between layers.

    Sums are in two files that take turns: the layer that is being predicted reads one and writes the other, so that
    it can be done again after a kill."""

    def __init__(self, folder: Path, grid: WindowGrid, classes: int, dtype: Any, channels: int, key: str) -> None:
        super().__init__(grid, classes)
        self.folder, self._key = folder, key
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            known = _finished_layers(folder, key)
            if known is not None and 0 <= known <= grid.layers:
                self.first_layer = known
            else:
                for file in folder.iterdir():  # of other settings, and useless
                    remove(file)
            self.result = RawVolume(folder / "result.raw", grid.shape, dtype, channels)
            self._sums = [os.open(folder / f"sums.{n}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666) for n in (0, 1)]

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


def _finished_layers(folder: Path, key: str) -> int | None:
    """The layers in the folder of an unfinished volume; None if it was not begun with these settings."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        state = read_json(folder / "state.json")
        if state["key"] == key:
            return int(state["layers"])
    return None


def write_volume(raw: RawVolume, target: Path, file_format: FileFormat) -> None:
    """Writes a raw result as TIFF or Zarr; it appears under its name when it is whole, and replaces what was there."""
    draft = raw.path.parent / f"draft{SUFFIX[file_format]}"
    remove(draft)
    write = _write_tiff if file_format == "tiff" else _write_zarr
    write(raw, draft)
    if target.is_dir() and not target.is_symlink():
        # A folder cannot be replaced in one step: the old one moves away first.
        old = raw.path.parent / "old"
        remove(old)
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
    channels, chunk = ([], []) if raw.channels == 1 else ([raw.channels], [1])
    codecs = [bytes_codec(raw.dtype), {"name": "zstd", "configuration": {"level": 3}}]
    chunk += [min(CHUNK, size) for size in raw.shape]
    array = create_zarr(path, [*channels, *raw.shape], raw.dtype, chunk, codecs)
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


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turns an error of writing into one that says how to fix it."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                "disk-full",
                f"{folder}: {error.strerror}",
                why="what is finished is kept",
                hint="make room, and give the same command again: it resumes",
            ) from None
        seen = f"{folder} cannot be written: {error.strerror or error}"
        raise UserError("out-not-writable", seen, hint="--out FOLDER") from None


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
