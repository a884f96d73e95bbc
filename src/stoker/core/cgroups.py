"""The limits that a container sets with cgroups: CPU quota, memory, and how long the quota stopped this process."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")


@dataclass(frozen=True)
class CgroupFolder:
    """The files of one cgroup."""

    version: int
    path: Path

    def number(self, name: str) -> int | None:
        """The number in a file; None where the file is missing or says `max`."""
        with suppress(OSError, ValueError):
            return int((self.path / name).read_text())
        return None


def cgroup_folders(controller: str, root: Path = CGROUP_ROOT, proc: Path = PROC) -> list[CgroupFolder]:
    """This process's cgroups for a controller (`cpu`, `memory`), from its own up to the root: any may set a limit.

    A container may see its own group as the root whatever path /proc shows, so missing folders are left out.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    found: list[CgroupFolder] = []
    for line in lines or [f"1:{controller}:/", "0::/"]:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        version, top = (1, root / controller) if controllers else (2, root)
        folder = top / path.lstrip("/")
        while folder != top and top in folder.parents:
            found.append(CgroupFolder(version, folder))
            folder = folder.parent
        found.append(CgroupFolder(version, top))
    return [folder for folder in found if folder.path.is_dir()]


def cpu_quota(root: Path = CGROUP_ROOT, proc: Path = PROC) -> float | None:
    """The tightest quota, in cores; None where none is set."""
    quotas: list[float] = []
    for folder in cgroup_folders("cpu", root, proc):
        if folder.version == 2:
            with suppress(OSError, ValueError):
                quota, period = (folder.path / "cpu.max").read_text().split()
                if quota != "max":
                    quotas.append(int(quota) / int(period))
        else:
            quota_us, period_us = folder.number("cpu.cfs_quota_us"), folder.number("cpu.cfs_period_us")
            if quota_us is not None and quota_us > 0 and period_us:  # -1: no quota
                quotas.append(quota_us / period_us)
    return min(quotas) if quotas else None


def memory_limit(folder: CgroupFolder) -> int | None:
    """Bytes that this cgroup may use; None where it has no limit."""
    if folder.version == 2:
        return folder.number("memory.max")
    limit = folder.number("memory.limit_in_bytes")
    # Version 1 writes 'no limit' as the largest multiple of a page.
    return limit if limit is not None and limit < 1 << 60 else None


def read_throttling(root: Path = CGROUP_ROOT, proc: Path = PROC) -> float | None:
    """Seconds for which the quota has stopped this process's most throttled cgroup, summed over cores: two that were
    stopped for a second count as two. None where no quota is set or the kernel does not count."""
    counts = [_stopped_s(folder.path / "cpu.stat") for folder in cgroup_folders("cpu", root, proc)]
    return max((count for count in counts if count is not None), default=None)


def throttled_share(before: float | None, after: float | None, wall_s: float, cpus: int) -> float | None:
    """Share of the time in which the quota stopped this process; None where it was not counted.

    The kernel counts only cores that had work, so with fewer busy threads than cores this is too low.
    """
    if before is None or after is None or wall_s <= 0:
        return None
    return min(1.0, max(0.0, (after - before) / (wall_s * max(1, cpus))))


def _stopped_s(file: Path) -> float | None:
    try:
        values = dict(line.split() for line in file.read_text().splitlines())
        if int(values.get("nr_periods", 0)) == 0:  # no quota was ever set
            return None
        if "throttled_usec" in values:
            return int(values["throttled_usec"]) / 1e6
        return int(values["throttled_time"]) / 1e9  # version 1
    except (OSError, ValueError, KeyError):
        return None


def oom_kills(root: Path = CGROUP_ROOT, proc: Path = PROC) -> int | None:
    """How many processes the kernel has killed in this process's cgroups because memory ran out; None where it does not
    count them."""
    counts = []
    for folder in cgroup_folders("memory", root, proc):
        name = "memory.events" if folder.version == 2 else "memory.oom_control"
        with suppress(OSError, ValueError):
            values = dict(line.split() for line in (folder.path / name).read_text().splitlines())
            if "oom_kill" in values:
                counts.append(int(values["oom_kill"]))
    # Version 2 counts a group's kills in its ancestors as well, version 1 does not.
    return max(counts) if counts else None
