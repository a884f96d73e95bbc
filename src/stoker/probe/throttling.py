"""How long a container's CPU quota kept this process from running."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.probe.host import CGROUP_ROOT


@dataclass(frozen=True)
class Throttling:
    """What the kernel has counted since the cgroup was made."""

    stopped_s: float
    """Of all cores together: two cores that stand still for a second are two."""


def read_throttling(root: Path = CGROUP_ROOT, cgroup_file: Path = Path("/proc/self/cgroup")) -> Throttling | None:
    """The count of the cgroup, this process's own or one above it, that was stopped longest; None where no quota is
    set or the kernel does not say."""
    counts = [found for folder in _folders(root, cgroup_file) if (found := _stopped_s(folder / "cpu.stat")) is not None]
    return Throttling(max(counts)) if counts else None


def throttled_share(before: Throttling | None, after: Throttling | None, wall_s: float, cpus: int) -> float | None:
    """Share of the time in which the quota stopped this process; None where it was not counted.

    The kernel counts each core that had work and stood still, so with fewer busy threads than cores this is too low.
    """
    if before is None or after is None or wall_s <= 0:
        return None
    return min(1.0, max(0.0, (after.stopped_s - before.stopped_s) / (wall_s * max(1, cpus))))


def _folders(root: Path, cgroup_file: Path) -> Iterator[Path]:
    """Where this process's counts may be, from its own cgroup up: version 2, or the cpu controller of version 1."""
    with suppress(OSError):
        for line in cgroup_file.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                top = root
            elif "cpu" in controllers.split(","):
                top = root / "cpu"
            else:
                continue
            folder = top / path.lstrip("/")
            yield folder
            while folder != top and top in folder.parents:
                folder = folder.parent
                yield folder


def _stopped_s(file: Path) -> float | None:
    try:
        values = dict(line.split() for line in file.read_text().splitlines())
        if int(values.get("nr_periods", 0)) == 0:  # no quota: nothing was ever counted
            return None
        if "throttled_usec" in values:
            return int(values["throttled_usec"]) / 1e6
        return int(values["throttled_time"]) / 1e9  # version 1
    except (OSError, ValueError, KeyError):
        return None
