"""The cores, memory and devices that this process may really use."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

from stoker.facts import Machine

CGROUP_ROOT = Path("/sys/fs/cgroup")


def read_machine() -> Machine:
    """What this process may use here. Cheap: reads a few files under /proc, /sys and /dev."""
    return Machine(
        cpus=usable_cpus(),
        ram_bytes=usable_ram_bytes(),
        shm_bytes=_disk_size(Path("/dev/shm")),  # noqa: S108 - asked about, not written
        accelerators=count_accelerators(),
    )


def usable_cpus(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Cores by affinity and cgroup quota, whichever is less: os.cpu_count() shows the host's, which in
    a container starts workers that only wait for each other."""
    affinity = len(own_cores())
    quota = _cgroup_cpu_quota(cgroup_root)
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def own_cores() -> set[int]:
    """Numbers of the cores that this process may run on; all of them where nobody can choose, as on macOS."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def usable_ram_bytes(cgroup_root: Path = CGROUP_ROOT) -> int:
    """The host's memory or the tightest cgroup limit above this process, whichever is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_read_number(folder / "memory.max") for folder in _cgroup_folders(cgroup_root)]
    limits.append(_read_number(cgroup_root / "memory" / "memory.limit_in_bytes"))  # cgroup v1
    return min([total, *(limit for limit in limits if limit is not None)])


def count_accelerators() -> int | None:
    """NVIDIA and AMD devices that the kernel shows. torch knows better but takes seconds to import."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return 0
    try:
        found = sum(
            1
            for entry in Path("/dev").iterdir()
            if entry.name.removeprefix("nvidia").isdigit() and entry.name.startswith("nvidia")
        )
        if found == 0 and Path("/dev/kfd").exists():
            found = sum(1 for entry in Path("/dev/dri").glob("renderD*"))
    except OSError:
        return None
    if visible is not None:
        found = min(found, len(visible.split(",")))
    return found


def _cgroup_folders(root: Path) -> list[Path]:
    """The cgroup v2 folders from this process's own up to the root: a limit on any of them counts."""
    try:
        line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return [root]
    folder = root / line[3:].lstrip("/")
    folders = [folder]
    while folder != root and root in folder.parents:
        folder = folder.parent
        folders.append(folder)
    return folders


def _cgroup_cpu_quota(root: Path) -> float | None:
    """Cores' worth of time that the cgroup grants; None where it grants all."""
    quotas: list[float] = []
    for folder in _cgroup_folders(root):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            if quota != "max":
                quotas.append(int(quota) / int(period))
    quota_us = _read_number(root / "cpu" / "cpu.cfs_quota_us")  # cgroup v1; -1 grants all
    period_us = _read_number(root / "cpu" / "cpu.cfs_period_us")
    if quota_us is not None and quota_us > 0 and period_us:
        quotas.append(quota_us / period_us)
    return min(quotas) if quotas else None


def _read_number(path: Path) -> int | None:
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _disk_size(path: Path) -> int | None:
    with suppress(OSError):
        status = os.statvfs(path)
        return status.f_frsize * status.f_blocks
    return None
