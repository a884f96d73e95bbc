"""File systems of this host: which one a path is on, and which local disk has room for a copy of the data."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MOUNTINFO = Path("/proc/self/mountinfo")

# As the kernel and the usual clients name them.
NETWORK_KINDS = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "beegfs_nodev", "ceph", "gpfs", "wekafs", "afs",
        "glusterfs", "orangefs", "pvfs2", "panfs", "ocfs2", "gfs2", "9p", "davfs",
    }
)  # fmt: skip
LOCAL_FUSE = frozenset(
    {"fuseblk", "fuse.fuse-overlayfs", "fuse.ntfs", "fuse.ntfs-3g", "fuse.exfat", "fuse.bindfs", "fuse.mergerfs"}
)
"""Most FUSE file systems are a bucket or another host (mountpoint-s3, gcsfuse, goofys, sshfs); these are not."""
AMBIGUOUS_KINDS = frozenset({"fuse", "virtiofs", "fuse.portal"})
NETWORK_SOURCES = frozenset({"mountpoint-s3", "s3fs", "gcsfuse", "goofys", "JuiceFS"})
"""Clients whose kind is just `fuse`, by the device column of the mount list."""
DISK_KINDS = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "jfs", "overlay"})
"""File systems of disks; a container's root is `overlay` over one."""


@dataclass(frozen=True)
class Mount:
    """The file system under a path."""

    kind: str
    remote: bool | None
    """None where its kind does not say: a FUSE file system may be anything."""


@dataclass(frozen=True)
class LocalDisk:
    """A disk that a copy of the data could go to: a folder on it that we may write to."""

    folder: str
    free_bytes: int | None
    """None if not known."""


class _Line(NamedTuple):
    """A line of the kernel's list of mounts."""

    point: str
    options: str
    kind: str
    source: str


def mount_of(path: str | Path, mountinfo: Path = MOUNTINFO) -> Mount | None:
    """The file system that holds a path; None where the kernel does not say."""
    real = os.path.realpath(path)
    best: _Line | None = None
    for line in _mounts(mountinfo):
        holds = line.point == "/" or real == line.point or real.startswith(line.point.rstrip("/") + "/")
        # If several share a mount point, the last is visible.
        if holds and (best is None or len(line.point) >= len(best.point)):
            best = line
    return None if best is None else Mount(best.kind, is_remote(best.kind, best.source))


def is_remote(kind: str, source: str = "") -> bool | None:
    """Whether a file system of this kind and source is reached over a network; None where the kind does not say."""
    if kind in NETWORK_KINDS or source in NETWORK_SOURCES:
        return True
    if kind in AMBIGUOUS_KINDS:
        return None
    return kind.startswith("fuse.") and kind not in LOCAL_FUSE


def find_local_disk(mountinfo: Path = MOUNTINFO) -> LocalDisk | None:
    """The disk with the most free space that this user may write to; None if there is none."""
    folder, most = None, -1
    for line in _mounts(mountinfo):
        if line.kind not in DISK_KINDS or "rw" not in line.options.split(","):
            continue
        if (there := _writable_folder(line.point)) is None:
            continue
        with suppress(OSError):
            disk = os.statvfs(there)
            if (free := disk.f_bavail * disk.f_frsize) > most:
                folder, most = there, free
    return None if folder is None else LocalDisk(folder, most)


def _mounts(mountinfo: Path) -> Iterator[_Line]:
    with suppress(OSError):
        for line in mountinfo.read_text().splitlines():
            left, _, right = line.partition(" - ")
            columns, (kind, source) = left.split(), [*right.split(), "", ""][:2]
            if len(columns) > 5 and kind:
                point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), columns[4])
                yield _Line(point, columns[5], kind, source)


def _writable_folder(point: str) -> str | None:
    """A folder for data on the file system mounted there: its top, or a usual place on the system's own disk."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path's raises without a home
    own = [] if point == "/" else [point]
    for folder in (*own, home, "/var/tmp", tempfile.gettempdir()):  # noqa: S108 - a suggestion, nothing is written
        if Path(folder).is_dir() and os.access(folder, os.W_OK | os.X_OK) and same_device(folder, point):
            return folder
    return None


def same_device(one: str, other: str) -> bool:
    try:
        return os.stat(one).st_dev == os.stat(other).st_dev  # noqa: PTH116
    except OSError:
        return False
