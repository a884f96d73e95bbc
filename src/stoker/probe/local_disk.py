"""How fast this host's own disk gives back what would be staged on it: files are written, put out of memory, read."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from stoker.probe.storage_speed import drop_from_cache

MOST_BYTES = 32 << 20
MOST_FILES = 200
LEAST_FREE = 10 * MOST_BYTES
"""Bytes that must be free: nobody's disk is filled for a measurement."""


def measure_local_disk(folder: Path | None, sample_bytes: float, seconds: float = 1.0) -> float | None:
    """Bytes a second of reading files of a sample's size, one after the other, cold where the kernel lets us; writing
    them and reading them take at most so many seconds each.

    In `folder`, or where temporary files go; None where nothing can be written there. Leaves nothing behind.
    """
    size = max(1024, min(int(sample_bytes), MOST_BYTES))
    place = folder if folder is not None and folder.is_dir() else None
    data = os.urandom(size)  # a disk that packs or finds doubles would be measured wrong with zeros
    try:
        with tempfile.TemporaryDirectory(prefix="stoker-disk-", dir=place) as name:
            disk = os.statvfs(name)
            if disk.f_bavail * disk.f_frsize < LEAST_FREE:
                return None
            files = _write(Path(name), data, seconds)
            for file in files:
                drop_from_cache(str(file))
            return _read(files, seconds)
    except OSError:
        return None


def _write(folder: Path, data: bytes, seconds: float) -> list[Path]:
    files, ends = list[Path](), time.perf_counter() + seconds
    while len(files) < min(MOST_FILES, max(1, MOST_BYTES // len(data))):
        file = folder / f"{len(files)}"
        file.write_bytes(data)
        files.append(file)
        if time.perf_counter() > ends:
            break
    return files


def _read(files: list[Path], seconds: float) -> float:
    began, read = time.perf_counter(), 0
    for file in files:
        read += len(file.read_bytes())
        if time.perf_counter() - began > seconds:
            break
    return read / (time.perf_counter() - began)
