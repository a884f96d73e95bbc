"""Whether a copy on a local disk pays off: how long copying takes, what an epoch saves, and what to type."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from typing import Any

ANY_DISK = "/local/disk"
ANY_CONFIG = "CONFIG"
"""Stand for a disk and for a config that we do not know."""
WORTH_COPYING = 1.02
"""Below it, an epoch from the copy is not noticeably shorter."""
USABLE = 0.9
"""Share of the free space that a copy or a cache may take: a full disk is everybody's trouble."""
LEAST_PART = 0.05
"""Share of the data from which a cache of a part is worth the space."""


@dataclass(frozen=True)
class BreakEven:
    """What a copy costs once, and what it saves in every epoch."""

    size_bytes: float
    copy_s: float
    epoch_s: float
    """An epoch from the source, as now."""
    local_epoch_s: float

    @property
    def saved_s(self) -> float:
        """By each epoch."""
        return self.epoch_s - self.local_epoch_s

    @property
    def epochs(self) -> float | None:
        """After how many the copy has paid for itself; None if it never does."""
        return self.copy_s / self.saved_s if self.epoch_s >= WORTH_COPYING * self.local_epoch_s else None

    def as_dict(self) -> dict[str, Any]:
        """The part of a `--json` document."""
        return {
            "bytes": self.size_bytes,
            "copy_s": self.copy_s,
            "epoch_s": self.epoch_s,
            "local_epoch_s": self.local_epoch_s,
            "epochs": self.epochs,
        }


def break_even(
    size_bytes: float, source: float, *, local: float | None = None, needed: float | None = None
) -> BreakEven | None:
    """From bytes a second: of the source, of the local disk, and of the consumer; None if the source's is not known.

    Without `local` the local disk is never the slowest part, without `needed` the consumer is not.
    """
    if source <= 0 or size_bytes <= 0:
        return None
    consumer = needed or math.inf
    nearby = min(local or math.inf, consumer)
    epoch_s = size_bytes / min(source, consumer)
    return BreakEven(size_bytes, size_bytes / source, epoch_s, 0.0 if nearby == math.inf else size_bytes / nearby)


def break_even_text(found: BreakEven) -> str:
    """`copying 147 GB first takes 83 min and pays off after 1.2 epochs`"""
    copying = f"copying {size_text(found.size_bytes)} first takes {duration_text(found.copy_s)}"
    if found.epochs is None:
        return f"{copying} and saves nothing: the source already delivers what is needed"
    return f"{copying} and pays off after {found.epochs:.1f} epochs"


@dataclass(frozen=True)
class Room:
    """A local disk that a copy could go to."""

    folder: str
    free_bytes: int | None
    """None if not known."""

    def holds(self, size_bytes: float | None) -> bool:
        """Whether data of this size fit; what is not known is taken to fit."""
        return size_bytes is None or self.free_bytes is None or size_bytes <= USABLE * self.free_bytes


@dataclass(frozen=True)
class StagingFix:
    """How to bring the data nearer."""

    fix: str
    """What to type."""
    about: str
    """Which disk, and how much is free there; may be empty."""
    share: float
    """Of the data that is read from the local disk afterwards."""


def staging_fix(
    source: str, *, is_config: bool, root: str | None, size_bytes: float | None, room: Room | None
) -> StagingFix:
    """The command that copies the data, if it fits; otherwise a cache for a part of it, or what is missing.

    `source` is a config file, perhaps with KEY=VALUE, or the folder that somebody's script reads.
    """
    room = room or Room(ANY_DISK, None)
    target = f"{room.folder.rstrip('/')}/{copy_name(root or source)}"
    free = "" if room.free_bytes is None else f"{room.folder} has {size_text(room.free_bytes)} free"
    if room.holds(size_bytes):
        target = shlex.quote(target)
        if is_config:
            return StagingFix(f"stoker stage {source} --to {target}", free, 1.0)
        return StagingFix(f"stoker stage {shlex.quote(source)} {target}, then let the script read {target}", free, 1.0)
    assert size_bytes is not None
    assert room.free_bytes is not None
    about = f"{size_text(size_bytes)} do not fit: {free}"
    usable = USABLE * room.free_bytes
    share = usable / size_bytes
    if is_config and share >= LEAST_PART:
        cache = shlex.quote(f"{room.folder.rstrip('/')}/stoker-cache")
        return StagingFix(
            f"cache_dir={cache} cache_size={size_text(usable).replace(' ', '')}: keeps {share:.0%} of the data nearby",
            about,
            share,
        )
    return StagingFix(f"a local disk with room for {size_text(size_bytes)}, or a smaller, packed copy", about, 0.0)


def copy_name(source: str) -> str:
    """A name for the copy, from the last part of a folder, URL or config file."""
    if source == ANY_CONFIG:
        return "data"
    config = re.match(r"(?:\S*/)?([^/\s]+)\.ya?ml(?:\s|$)", source)
    return config[1] if config else source.rstrip("/").rpartition("/")[2] or "data"


def size_text(size_bytes: float) -> str:
    """147 GB, 5.5 GB, 320 MB"""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size_bytes >= factor:
            return f"{size_bytes / factor:.{0 if size_bytes >= 100 * factor else 1}f} {unit}"
    return f"{size_bytes / 1e3:.1f} kB"


def duration_text(seconds: float) -> str:
    """40 s, 83 min, 7.5 h"""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
