"""This host's own disks: which one has room for a copy of the data."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

DISK_KINDS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "overlay"})
"""File systems of disks; a container's root is `overlay` over one."""

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True)
class LocalDisk:
    """A disk of this host, and a folder on it that we may write to."""

    folder: str
    kind: str
    free_bytes: int


def find_local_disk(mountinfo: Path = MOUNTINFO) -> LocalDisk | None:
    """The disk with the most free space that this user may write to; None if there is none."""
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return None
    best: LocalDisk | None = None
    for line in lines:
        left, _, right = line.partition(" - ")
        columns = left.split()
        kind = right.split()[0] if right else ""
        if len(columns) < 6 or kind not in DISK_KINDS or "rw" not in columns[5].split(","):
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), columns[4])
        folder = _writable_folder(point)
        if folder is None:
            continue
        with suppress(OSError):
            disk = os.statvfs(folder)
            free = disk.f_bavail * disk.f_frsize
            if best is None or free > best.free_bytes:
                best = LocalDisk(folder, kind, free)
    return best


def _writable_folder(point: str) -> str | None:
    """A folder for data on the file system mounted there: its top, or a usual place on the system's own disk."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path's raises without a home
    own = [] if point == "/" else [point]
    for folder in (*own, home, "/var/tmp", tempfile.gettempdir()):  # noqa: S108 - a suggestion, nothing is written
        if Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK) and same_device(folder, point):
            return folder
    return None


def same_device(one: str, other: str) -> bool:
    """Whether two paths are on the same file system."""
    try:
        return os.stat(one).st_dev == os.stat(other).st_dev  # noqa: PTH116
    except OSError:
        return False
