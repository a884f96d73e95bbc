"""Writing files so that a reader, or a crash, never sees half of one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def atomic_file(path: Path, mode: str = "w") -> Iterator[Any]:
    """A file that appears under `path` whole, once the block ends without an error, or not at all."""
    assert mode in ("w", "wb")
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: a rename is atomic only within one file system.
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        encoding = "utf-8" if mode == "w" else None
        with os.fdopen(descriptor, mode, encoding=encoding) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp makes files that only their owner reads; a run folder is often shared by a team.
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """The whole text under `path`, or the old file untouched."""
    with atomic_file(path) as stream:
        stream.write(text)


def write_bytes(path: Path, data: bytes) -> None:
    """The whole data under `path`, or the old file untouched."""
    with atomic_file(path, "wb") as stream:
        stream.write(data)


def sync_folder(folder: Path) -> None:
    """Makes a rename in this folder survive a power cut, where the file system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _umask() -> int:
    # The only portable way to read it is to set it; the thread-safe one is Linux's.
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("Umask:"):
            return int(line.split()[1], 8)
    return 0o022
