"""Which file system a path is on, by the kernel's own list, and whether a network lies behind it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")
# What the kernel and the usual clients call themselves.
NETWORK_KINDS = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "beegfs", "beegfs_nodev", "ceph", "gpfs", "wekafs", "afs",
        "glusterfs", "orangefs", "pvfs2", "panfs", "ocfs2", "gfs2", "9p", "davfs",
    }
)  # fmt: skip
LOCAL_FUSE = frozenset(
    {"fuse.fuse-overlayfs", "fuse.ntfs", "fuse.ntfs-3g", "fuse.exfat", "fuse.bindfs", "fuse.mergerfs"}
)
"""FUSE is most often a bucket or another host (mountpoint-s3, gcsfuse, goofys, sshfs); these are not."""

UNTOLD = frozenset({"fuse", "virtiofs", "fuse.portal"})
NETWORK_SOURCES = frozenset({"mountpoint-s3", "s3fs", "gcsfuse", "goofys", "JuiceFS"})
"""Clients whose kind is a bare `fuse`, by what stands in the column of the device."""


@dataclass(frozen=True)
class Mount:
    """The file system under a path."""

    kind: str
    remote: bool | None
    """None where its name does not tell: a FUSE file system may be anything."""


def mount_of(path: str | Path, mountinfo: Path = MOUNTINFO) -> Mount | None:
    """The file system that holds a path; None where the kernel does not say."""
    real = os.path.realpath(path)
    best: tuple[int, list[str]] | None = None
    try:
        lines = mountinfo.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        left, _, right = line.partition(" - ")
        columns = left.split()
        if len(columns) < 5 or not right:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), columns[4])
        # The last of several on one point is the one that is seen.
        if _holds(point, real) and (best is None or len(point) >= best[0]):
            best = (len(point), right.split())
    if best is None:
        return None
    kind, *source = best[1][:2]
    return Mount(kind, is_remote(kind, *source))


def is_remote(kind: str, source: str = "") -> bool | None:
    """Whether a network lies behind a file system of this kind, mounted from this source."""
    if kind in NETWORK_KINDS or source in NETWORK_SOURCES:
        return True
    if kind in LOCAL_FUSE or kind == "fuseblk":
        return False
    if kind in UNTOLD:
        return None
    return kind.startswith("fuse.")


def _holds(point: str, path: str) -> bool:
    return point == "/" or path == point or path.startswith(point.rstrip("/") + "/")
