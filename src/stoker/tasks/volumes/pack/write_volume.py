"""Writes one volume of a pack, in any of its layouts, a bounded piece at a time; and reads it again to check it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from stoker.core.files import sync_folder
from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.formats.opening import library
from stoker.tasks.volumes.formats.packed import Kind, PackedFacts, npy_header, stored_bytes, stored_shape
from stoker.tasks.volumes.formats.volume import Region, Shape, Voxels
from stoker.tasks.volumes.pack.preprocessing import PreparedVolume

# Voxels that are held at a time; a row of blocks or shards may be larger.
_PIECE_VOXELS = 1 << 24
SHARD = 128
"""Voxels of a Zarr shard along an axis: a file of two megabytes if voxels are bytes, not a file for each chunk."""
MOST_LABELS = 1024
_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class Layout:
    """How the volumes of a pack are stored."""

    name: str
    kind: Kind
    block: int
    suffix: str
    words: str


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("raw", "raw", 0, ".npy", "in rows, as they are"),
        Layout("blocks32", "blocks", 32, ".blocks32.npy", "in blocks of 32"),
        Layout("blocks64", "blocks", 64, ".blocks64.npy", "in blocks of 64"),
        Layout("zarr", "zarr", 32, ".zarr", "in compressed chunks of 32"),
    )
}

Report = Callable[[int], None]
"""Takes the number of voxels written since the last report."""


def write_volume(
    path: Path, prepared: PreparedVolume, layout: Layout, *, is_label: bool, report: Report = lambda _voxels: None
) -> PackedFacts:
    """Writes a volume under a temporary name, then renames it. The same voxels give the same bytes.

    `is_label` decides what is measured: the values that occur, or mean and standard deviation."""
    temporary = path.with_name(f".{path.name}.tmp")
    remove(temporary)
    path.parent.mkdir(parents=True, exist_ok=True)
    measured = _Values() if is_label else _Moments()
    try:
        write = _write_zarr if layout.kind == "zarr" else _write_npy
        digest = write(temporary, prepared, layout, measured, report)
        remove(path)
        temporary.replace(path)
    except BaseException:
        remove(temporary)
        raise
    sync_folder(path.parent)
    affine = None if prepared.affine is None else tuple(float(one) for one in prepared.affine.reshape(-1))
    return PackedFacts(
        kind=layout.kind,
        block=layout.block,
        shape=prepared.shape,
        dtype=prepared.dtype.name,
        bytes=stored_bytes(str(path)),
        xxh3=digest,
        affine=affine,
        **measured.facts(),
    )


def checksum(path: Path, facts: PackedFacts) -> str:
    """The checksum of a packed volume as it is now; raises ReadFailure."""
    try:
        digest = xxhash.xxh3_128()
        if facts.kind == "zarr":
            _add_folder(digest, path)
        else:
            _add_file(digest, path)
        return digest.hexdigest()
    except OSError as error:
        raise ReadFailure(str(path), "unreadable", error.strerror or str(error)) from None


def remove(path: Path) -> None:
    """Removes a file or folder of ours, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_npy(path: Path, prepared: PreparedVolume, layout: Layout, measured: Any, report: Report) -> str:
    block, dtype = layout.block, prepared.dtype
    digest = xxhash.xxh3_128()
    with path.open("wb") as stream:

        def put(data: Any) -> None:
            digest.update(data)
            stream.write(data)

        put(npy_header(dtype, stored_shape(prepared.shape, block)))
        for piece in pieces(prepared.shape, max(1, block), whole_planes=block == 0):
            voxels = prepared.read(piece)
            measured.add(voxels)
            stored = np.ascontiguousarray(_in_blocks(voxels, block) if block else voxels, dtype.newbyteorder("<"))
            put(stored.reshape(-1).view(np.uint8).data)
            report(piece.voxels)
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _write_zarr(path: Path, prepared: PreparedVolume, layout: Layout, measured: Any, report: Report) -> str:
    itemsize = prepared.dtype.itemsize
    blosc = {
        "cname": "zstd", "clevel": 1, "shuffle": "shuffle" if itemsize > 1 else "noshuffle", "typesize": itemsize,
        "blocksize": 0,
    }  # fmt: skip
    codecs = [bytes_codec(prepared.dtype), {"name": "blosc", "configuration": blosc}]
    sharding = {"chunk_shape": [layout.block] * 3, "codecs": codecs}
    array = create_zarr(
        path, prepared.shape, prepared.dtype, [SHARD] * 3, [{"name": "sharding_indexed", "configuration": sharding}]
    )
    for piece in pieces(prepared.shape, SHARD):
        voxels = prepared.read(piece)
        measured.add(voxels)
        array[piece.slices].write(voxels).result()
        report(piece.voxels)
    digest = xxhash.xxh3_128()
    _add_folder(digest, path)
    return digest.hexdigest()


def create_zarr(
    path: Path, shape: Sequence[int], dtype: np.dtype[Any], chunk: Sequence[int], codecs: Sequence[Any]
) -> Any:
    """A new Zarr v3 array with the axes z, y, x, and before them the channels if there are four."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/"},
        "metadata": {
            "shape": list(shape),
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
            "codecs": list(codecs),
            "dimension_names": list("czyx"[-len(shape) :]),
        },
        # A chunk of zeros is stored like any other: a missing one is always a lost one.
        "store_data_equal_to_fill_value": True,
    }
    return library("tensorstore").open(spec, create=True).result()


def bytes_codec(dtype: np.dtype[Any]) -> dict[str, Any]:
    """The first codec of a chunk."""
    return {"name": "bytes", "configuration": {"endian": "little"}} if dtype.itemsize > 1 else {"name": "bytes"}


def pieces(shape: Shape, unit: int, *, whole_planes: bool = False) -> Iterator[Region]:
    """A volume in boxes of whole units and rows, in the order of the file; a limited number of voxels each."""
    depth, height, width = shape
    rows = -(-height // unit) * unit
    if not whole_planes:
        rows = min(rows, max(1, _PIECE_VOXELS // (unit * unit * width)) * unit)
    # More than one layer of units only if each is a whole one: the file has their blocks one layer after the other.
    layers = max(1, _PIECE_VOXELS // (unit * rows * width)) * unit if rows >= height else unit
    for z in range(0, depth, layers):
        for y in range(0, height, rows):
            yield Region((z, y, 0), (min(z + layers, depth), min(y + rows, height), width))


def _in_blocks(voxels: Voxels, block: int) -> Voxels:
    """Voxels in the order of their blocks, filled up with zeros."""
    short = [(0, -size % block) for size in voxels.shape]
    filled = np.pad(voxels, short) if any(after for _, after in short) else voxels
    z, y, x = (size // block for size in filled.shape)
    return filled.reshape(z, block, y, block, x, block).transpose(0, 2, 4, 1, 3, 5)


def _add_file(digest: Any, path: Path) -> None:
    with path.open("rb", buffering=0) as stream:
        while data := stream.read(_READ_BYTES):
            digest.update(data)


def _add_folder(digest: Any, folder: Path) -> None:
    """The files of a Zarr array with their names; a name is not part of a file's own bytes."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode())
        _add_file(digest, path)


class _Moments:
    """Mean and standard deviation of all voxels, added piece by piece."""

    def __init__(self) -> None:
        self._count = 0
        self._mean = self._squares = 0.0

    def add(self, voxels: Voxels) -> None:
        # Per piece first, then joined: sums over a whole volume would lose the digits that the deviation needs.
        count, mean = voxels.size, float(voxels.mean(dtype=np.float64))
        squares = sum(float(np.square(plane.astype(np.float64) - mean).sum()) for plane in voxels)
        total = self._count + count
        apart = mean - self._mean
        self._squares += squares + apart * apart * self._count * count / total
        self._mean += apart * count / total
        self._count = total

    def facts(self) -> dict[str, Any]:
        deviation = float(np.sqrt(self._squares / self._count))
        return {"mean": self._mean, "std": deviation if deviation > 0 else 1.0}


class _Values:
    def __init__(self) -> None:
        self._found: set[int] = set()

    def add(self, voxels: Voxels) -> None:
        if len(self._found) > MOST_LABELS:
            return
        if voxels.dtype == np.uint8:
            self._found |= set(np.flatnonzero(np.bincount(voxels.reshape(-1), minlength=256)).tolist())
        else:
            self._found |= set(np.unique(voxels).tolist())

    def facts(self) -> dict[str, Any]:
        return {"labels": tuple(sorted(self._found)) if len(self._found) <= MOST_LABELS else None}
