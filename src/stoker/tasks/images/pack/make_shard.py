"""Makes one shard of a pack, in a worker process: read, check, encode, write, read back."""

from __future__ import annotations

import os
import pickle
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from stoker.core.child import Parent
from stoker.core.files import sync_folder
from stoker.io import outage
from stoker.io.stores import ReadFailure, Store
from stoker.tasks.images.decode.crops import MAX_PIXELS, has_end, turned
from stoker.tasks.images.decode.decoders import PILLOW, Refused, load_decoder
from stoker.tasks.images.decode.headers import BadImage, Box, ImageHeader, read_header
from stoker.tasks.images.layouts.parquet_files import open_sample_store
from stoker.tasks.images.layouts.sample_index import SampleIndex
from stoker.tasks.images.pack.pack_folder import PackFolder
from stoker.tasks.images.pack.tar_shards import (
    ShardDamaged,
    ShardRecord,
    ShardWriter,
    read_record,
    verify_shard,
    write_record,
)

# For images that are resized without a given quality: little loss compared with the original.
QUALITY_AFTER_RESIZE = 95
EXTENSIONS = {"jpeg": "jpg", "tiff": "tif"}
"""Extensions of formats whose name is not their extension."""
PNG_END = b"\0\0\0\0IEND\xaeB`\x82"


@dataclass(frozen=True)
class PackOptions:
    """Everything that determines the content of the shards; by default no image is changed."""

    shard_bytes: int = 256_000_000
    """The maximum size of a shard. Images that are re-encoded count with the source's bytes, which are known
    beforehand: their shards turn out smaller."""
    longest: int | None = None
    """Pixels of the longer side, at most."""
    shortest: int | None = None
    """Pixels of the shorter side, at most; excludes `longest`."""
    quality: int | None = None
    """JPEG quality of every image; None keeps the bytes of images that need no resizing."""

    @property
    def changes_images(self) -> bool:
        return (self.longest, self.shortest, self.quality) != (None, None, None)

    def as_dict(self) -> dict[str, Any]:
        """As they are recorded and spelled."""
        sides = {"longest": self.longest, "shortest": self.shortest}
        return {"shard_size": f"{self.shard_bytes}B", **sides, "quality": self.quality}

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing: never larger than before."""
        limit, side = (self.longest, max(width, height)) if self.longest else (self.shortest, min(width, height))
        if limit is None or side <= limit:
            return width, height
        return max(1, round(width * limit / side)), max(1, round(height * limit / side))


class Encoded(NamedTuple):
    """An image file: its extension, according to its content, and its bytes."""

    extension: str
    data: bytes


def prepare(data: bytes, how: PackOptions) -> Encoded:
    """The bytes to pack; raises BadImage. The same input gives the same bytes with the same library versions."""
    header = read_header(data, MAX_PIXELS)
    stored = header.stored_width, header.stored_height
    size = how.size_of(*stored)
    if how.quality is None and size == stored:
        if not _seems_whole(data, header):
            _decode(data, header)
        return Encoded(EXTENSIONS.get(header.kind, header.kind), data)
    pixels = _decode(data, header)
    if size != stored:
        # INTER_AREA averages: antialiased for any factor.
        pixels = np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), np.uint8)
    # Upright: the new file has no EXIF orientation.
    upright = np.ascontiguousarray(turned(pixels, header.orientation))
    quality = QUALITY_AFTER_RESIZE if how.quality is None else how.quality
    try:
        jpeg = simplejpeg.encode_jpeg(upright, quality=quality, colorspace="RGB", colorsubsampling="420")
    except ValueError as error:  # a side is too long for a JPEG
        raise BadImage(f"cannot be encoded: {error}") from None
    return Encoded("jpg", jpeg)


def _seems_whole(data: bytes, header: ImageHeader) -> bool:
    """Whether the file has an end. A truncated one has none, and training would leave it out: so it is decoded."""
    if header.kind == "png":
        return data.endswith(PNG_END)
    # A WebP has its length in its header, which was compared.
    return header.kind == "webp" or (header.kind == "jpeg" and has_end(data))


def _decode(data: bytes, header: ImageHeader) -> NDArray[np.uint8]:
    """The whole image as RGB, as it is stored. Always the same library: another one would change the bits."""
    whole = Box(0, 0, header.stored_height, header.stored_width)
    if header.jpeg is not None:
        try:
            return load_decoder("simplejpeg").region(data, header, whole, 1)
        except Refused:
            pass  # CMYK, or a warning that may be harmless: Pillow decides
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about unusual palettes
        return PILLOW.region(data, header, whole, 1)


# Reads in flight for each process: enough to hide a network's latency, few enough for a hard disk.
READERS = 8
AHEAD_BYTES = 32_000_000
REPORT_EVERY_S = 0.2
SAMPLED = 16

Report = Callable[[int], None]
"""Takes the number of images done since the last report."""


@dataclass(frozen=True)
class ShardSource:
    index: SampleIndex
    pack: PackFolder
    options: PackOptions


@dataclass(frozen=True)
class ShardTask:
    number: int
    first_key: int
    samples: NDArray[np.int64]
    sizes: NDArray[np.int64]
    planned_bytes: int

    def as_message(self) -> dict[str, Any]:
        """The task as it travels to a worker process."""
        return vars(self) | {"samples": self.samples.tobytes(), "sizes": self.sizes.tobytes()}

    @classmethod
    def of_message(cls, parts: dict[str, Any]) -> ShardTask:
        arrays = {name: np.frombuffer(parts[name], np.int64) for name in ("samples", "sizes")}
        return cls(**parts | arrays)


@dataclass(frozen=True)
class ShardDone:
    number: int
    kept: bool
    images: int
    bytes: int
    skipped: list[dict[str, Any]]
    error: str | None = None
    """Why the shard could not be made."""


def make_shards(pickled_source: bytes, parent: Parent) -> None:
    """A worker's loop: makes one shard after the other, reporting images as they are done."""
    source: ShardSource = pickle.loads(pickled_source)  # noqa: S301 - from our own parent process, over a private socket
    outage.adopt_from_parent()
    for message in parent.messages():
        parent.answer(asdict(make_shard(source, ShardTask.of_message(message), parent.send)))


def make_shard(source: ShardSource, task: ShardTask, report: Report) -> ShardDone:
    """Writes the shard and its record; keeps a shard that is already complete."""
    cv2.setNumThreads(1)  # one core for each process
    try:
        kept = _kept(source, task)
        if kept is not None:
            report(len(task.samples))
        record = kept or _write(source, task, report)
    except (OSError, ShardDamaged) as error:
        return ShardDone(task.number, False, 0, 0, [], error=str(error))
    return ShardDone(task.number, kept is not None, len(record.samples), record.bytes, record.skipped)


def sampled_ratio(source: ShardSource, tasks: list[ShardTask]) -> float:
    """Estimated output bytes per input byte, from a few samples; 1 if nothing is re-encoded."""
    if not source.options.changes_images or not tasks:
        return 1.0
    task = tasks[0]
    before = after = 0
    for _, size, read in _read_ahead(source.index, task.samples[:SAMPLED], task.sizes[:SAMPLED]):
        try:
            after += len(prepare(read.result(), source.options).data)
            before += size
        except BadImage:
            continue
    return after / before if before else 1.0


def _write(source: ShardSource, task: ShardTask, report: Report) -> ShardRecord:
    pack = source.pack
    temporary = pack.temporary(task.number)
    unreported, last_s = 0, time.monotonic()
    with temporary.open("wb", buffering=1 << 20) as stream:
        writer = ShardWriter(stream, pack.shard(task.number).name)
        found = _read_ahead(source.index, task.samples, task.sizes)
        for key, (sample, _, read) in enumerate(found, task.first_key):
            try:
                image = prepare(read.result(), source.options)
            except BadImage as error:
                bad = {"sample": sample, "name": source.index.name(sample), "reason": error.reason}
                writer.record.skipped.append(bad)
            else:
                writer.add(key, sample, image.extension, image.data, int(source.index.labels[sample]))
            unreported += 1
            if time.monotonic() - last_s > REPORT_EVERY_S:
                report(unreported)
                unreported, last_s = 0, time.monotonic()
        record = writer.finish()
        stream.flush()
        os.fsync(stream.fileno())
    verify_shard(temporary, record)
    temporary.replace(pack.shard(task.number))
    sync_folder(pack.folder)
    write_record(pack.record(task.number), record)
    report(unreported)
    return record


def _kept(source: ShardSource, task: ShardTask) -> ShardRecord | None:
    """The record of an earlier run's shard, if it is complete and none of its skipped samples can be read now."""
    record = read_record(source.pack.record(task.number))
    if record is None:
        return None
    try:
        skipped = {int(bad["sample"]) for bad in record.skipped}
        # In this order: the index takes each sample's class from the source, and its place from the record.
        if record.samples != [sample for sample in task.samples.tolist() if sample not in skipped]:
            return None  # planned by another version, or damaged
        # Every entry of the record against the shard, not only its checksum: the index is made from the record.
        verify_shard(source.pack.shard(task.number), record)
    except (OSError, ValueError, TypeError, KeyError, ShardDamaged):
        return None
    left_out = np.array(sorted(skipped), np.int64)
    for _, _, read in _read_ahead(source.index, left_out, np.zeros_like(left_out)):
        try:
            prepare(read.result(), source.options)
        except BadImage:
            continue
        return None
    return record


def _read_ahead(
    index: SampleIndex, samples: NDArray[np.int64], sizes: NDArray[np.int64]
) -> Iterator[tuple[int, int, Future[bytes]]]:
    """Each sample's index, planned size and bytes (or BadImage), in this order; the next ones are read meanwhile."""
    coming: deque[tuple[int, int, Future[bytes]]] = deque()
    ahead_bytes = 0
    with ThreadPoolExecutor(READERS) as pool:
        try:
            for sample, size in zip(samples.tolist(), sizes.tolist(), strict=True):
                while coming and (ahead_bytes + size > AHEAD_BYTES or len(coming) >= 4 * READERS):
                    ahead_bytes -= coming[0][1]
                    yield coming.popleft()
                coming.append((sample, size, pool.submit(_read, index, sample)))
                ahead_bytes += size
            while coming:
                yield coming.popleft()
        finally:
            pool.shutdown(cancel_futures=True)


def _read(index: SampleIndex, sample: int) -> bytes:
    path, offset, size = index.location(sample)
    try:
        return bytes(_store(index).read(path, offset, size, whole=not index.shards))
    except ReadFailure as error:
        raise BadImage(f"{error.reason} ({error.detail})" if error.detail else error.reason) from None


_stores: dict[tuple[str, str | None], Store] = {}


def _store(index: SampleIndex) -> Store:
    key = index.root, index.facts.get("version")
    if key not in _stores:
        _stores[key] = open_sample_store(index)
    return _stores[key]
