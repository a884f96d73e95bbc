"""The host: the cores, memory and devices that this process may use, and what a run uses of them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.clock.observed import HostFacts
from stoker.config.schema import Config

# The host as a process on it may use it.


@dataclass(frozen=True)
class Machine:
    """The host as a process on it may use it: affinity and container limits already applied."""

    cpus: int
    """Cores this process may run on, after affinity and cgroup quota (at least 1)."""
    ram_bytes: int | None = None
    """Memory this process may use: the smaller of the host's and the cgroup's."""
    shm_bytes: int | None = None
    """Size of /dev/shm, through which worker processes hand over batches."""
    accelerators: int | None = None
    """Accelerators that the kernel shows; None where it could not be told."""


# What a config asks for and this machine cannot do: the nearest that works, and a sentence about it.


def fit_to_machine(config: Config, machine: Machine) -> tuple[Config, list[str]]:
    """The config as it will run on this machine, and what was changed for it.

    A config that names 16-bit precision is right, only not here; it is no config error.
    """
    changes: dict[str, object] = {}
    notes: list[str] = []
    if machine.accelerators == 0:
        if config.precision == "16-mixed":
            changes["precision"] = "32"
            notes.append("precision: 16-mixed needs a GPU; this run computes in 32")
        changes["pin_memory"] = False  # not worth a note: without a GPU there is nobody to copy for
        if config.sync_batchnorm:
            changes["sync_batchnorm"] = False
            notes.append("sync_batchnorm: true needs GPUs; this run keeps statistics for each process")
        if config.devices == "auto":
            changes["devices"] = 1
    elif machine.accelerators is not None and config.devices == "auto":
        changes["devices"] = machine.accelerators
    if config.num_workers == "auto":
        devices = changes.get("devices", config.devices)
        ranks = devices if isinstance(devices, int) else 1
        changes["num_workers"] = max(1, machine.cpus // ranks)
    return config.model_copy(update=changes), notes


# The cores, memory and devices that this process may really use.

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


# How long a container's CPU quota kept this process from running.


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


# What a run uses of its host while it goes on: cores, quota, shared memory, memory that is left.

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written
# Of the columns of /proc/stat: user nice system idle iowait irq softirq steal; what follows is part of user.
_COUNTED, _IDLE = 8, (3, 4)


class HostWatch:
    """Looks at the host now and then; cheap: a few small files a time, a third of a millisecond."""

    def __init__(self) -> None:
        self._machine = read_machine()
        self._shm_used: int | None = None
        self._begin()

    def look(self) -> None:
        """Between two `facts`, where something may be short-lived: keeps the most that was used of shared memory."""
        used = _shm_used_bytes()
        if used is not None:
            self._shm_used = max(used, self._shm_used or 0)

    def facts(self) -> HostFacts:
        """What was seen since the last call; the shares are over that time."""
        self.look()
        machine, shm_used = self._machine, self._shm_used
        elapsed_s = time.monotonic() - self._began_s
        throttled = throttled_share(self._throttling, read_throttling(), elapsed_s, len(own_cores()))
        busy = _busy_share(self._ticks, _ticks())
        self._begin()
        return HostFacts(
            cpus=machine.cpus,
            ram_bytes=machine.ram_bytes,
            throttled_share=throttled,
            shm_bytes=machine.shm_bytes,
            shm_used_bytes=shm_used,
            cpu_busy_share=busy,
            page_cache_bytes=available_bytes(machine.ram_bytes),
        )

    def _begin(self) -> None:
        self._shm_used = None
        self._began_s = time.monotonic()
        self._throttling = read_throttling()
        self._ticks = _ticks()


def available_bytes(limit: int | None) -> int | None:
    """Memory that files or new programs may take: what the kernel thinks is available, within a container's limit.

    Of a container's use only what belongs to nobody else can be told, so its limit alone is applied."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]) * 1024
        return available if limit is None else min(available, limit)
    return None


def _shm_used_bytes() -> int | None:
    with suppress(OSError):
        status = os.statvfs(SHARED_MEMORY)
        return status.f_frsize * (status.f_blocks - status.f_bfree)
    return None


def _ticks() -> tuple[int, int] | None:
    """Idle and all ticks of the cores that this process may run on."""
    wanted = {f"cpu{number}" for number in own_cores()}
    idle = total = 0
    try:
        for line in Path("/proc/stat").read_text().splitlines():
            name, *columns = line.split()
            if name in wanted:
                counts = [int(column) for column in columns[:_COUNTED]]
                total += sum(counts)
                idle += sum(counts[at] for at in _IDLE)
    except (OSError, ValueError, IndexError):
        return None
    return (idle, total) if total else None


def _busy_share(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None or after[1] <= before[1]:
        return None
    return 1.0 - (after[0] - before[0]) / (after[1] - before[1])
