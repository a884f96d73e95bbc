"""Which kind of file system a path lies on, by the kernel's list of mounts."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")
NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "lustre", "cifs", "smb3", "smbfs", "ceph", "beegfs", "gpfs", "afs", "wekafs", "glusterfs", "pvfs2"}
)
# A fuse mount may be anything; these are clients of object stores or of other hosts.
NETWORK_FUSE = ("s3fs", "mount-s3", "mountpoint-s3", "goofys", "gcsfuse", "blobfuse", "rclone", "juicefs", "sshfs",
                "alluxio", "glusterfs", "ceph", "cunofs", "geesefs")  # fmt: skip


def file_system_of(path: Path, mounts: Path = MOUNTS) -> str | None:
    """nfs4, lustre, ext4, fuse.s3fs …; None where the kernel does not say."""
    with suppress(OSError):
        path = path.resolve()
    best, kind = -1, None
    with suppress(OSError):
        for line in mounts.read_text().splitlines():
            before, _, after = line.partition(" - ")
            place = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), before.split()[4]))
            if (place == path or place in path.parents) and len(place.parts) >= best:
                words = after.split()
                best, kind = len(place.parts), words[0]
                # mount-s3 and goofys call themselves plain 'fuse'; their source tells more.
                if kind == "fuse" and len(words) > 1:
                    kind = f"fuse.{words[1].split(':')[0]}"
    return kind


def is_remote(kind: str) -> bool | None:
    """None for a fuse mount of a name that we do not know."""
    if kind in NETWORK_FILE_SYSTEMS:
        return True
    if kind.startswith("fuse"):
        return True if any(name in kind for name in NETWORK_FUSE) else None
    return False
