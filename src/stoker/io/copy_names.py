"""Names in a local copy: which are allowed, which are temporary, and how a copy names its source."""

from __future__ import annotations

import itertools
import os
import re
import socket
from contextlib import suppress

import xxhash

from stoker.core.redact import redact_text
from stoker.io.stores import ReadFailure, is_url

LONGEST_PART_BYTES = 255
"""Longest name between two slashes of a path, on the usual Linux file systems."""
LONGEST_PATH_BYTES = 4000
_numbers = itertools.count()
# Process ids mean nothing on another host that shares the disk.
_HOST = xxhash.xxh3_64_hexdigest(socket.gethostname().encode())[:6]
_TEMPORARY = re.compile(rf"\.stage-{_HOST}-(\d+)-\d+\.tmp")


def check_name(path: str) -> None:
    """Raises ReadFailure for a name that cannot be a file inside the copy, or could be taken for one of our own."""
    parts = path.split("/")
    if path.startswith("/"):
        raise ReadFailure(path, "bad name", "it begins with a slash")
    if ".." in parts or "." in parts:
        raise ReadFailure(path, "bad name", "it contains a part '.' or '..', which would lead elsewhere")
    if "" in parts:
        raise ReadFailure(path, "bad name", "it has an empty part: a file system cannot keep two slashes in a row")
    if "\0" in path:
        raise ReadFailure(path, "bad name", "it contains a zero byte")
    if len(path) > LONGEST_PART_BYTES // 4:  # a character has up to four bytes
        encoded = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
        if max(encoded) > LONGEST_PART_BYTES:
            raise ReadFailure(path, "bad name", f"a part of it has {max(encoded)} bytes; file systems allow 255")
        if sum(encoded) + len(parts) > LONGEST_PATH_BYTES:
            raise ReadFailure(path, "bad name", f"it has {sum(encoded) + len(parts)} bytes; the limit is 4,000")
    if parts[0].startswith(".stage"):
        raise ReadFailure(path, "bad name", "names that begin with .stage are the copy's own records")


def source_name(source: str) -> str:
    """How a copy identifies its source: a URL without secrets, or the absolute path of a folder."""
    if is_url(source) and not source.startswith("file://"):
        return redact_text(source).rstrip("/")
    return os.path.realpath(os.path.expanduser(source.removeprefix("file://")))  # noqa: PTH111


def temporary_name(folder: str) -> str:
    """A new name for a file that is being written; it names this process, so that the next one knows who left it."""
    return f"{folder}/.stage-{_HOST}-{os.getpid()}-{next(_numbers)}.tmp"


def remove_abandoned(folder: str) -> int:
    """Removes the temporary files of processes of this host that are gone; returns how many."""
    removed = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            found = _TEMPORARY.fullmatch(entry.name)
            if found is not None and not _is_running(int(found[1])):
                with suppress(OSError):
                    os.unlink(entry.path)  # noqa: PTH108
                    removed += 1
    return removed


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True
