"""The host: the cores, memory and devices that this process may use, how busy they are during a run, and which cores a
rank runs on."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from stoker.config.schema import Config
from stoker.core.cgroups import (
    CGROUP_ROOT,
    PROC,
    cgroup_folders,
    cpu_quota,
    memory_limit,
    read_throttling,
    throttled_share,
)
from stoker.profile.memory import read_host_memory, read_memory
from stoker.profile.observed import HostFacts

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only its size is read
CPU_TOPOLOGY = Path("/sys/devices/system/cpu")
# Reading it takes 0.3 ms, in the loop of a training that calls `look` for every line of its clock.
MEMORY_EVERY_S = 0.9


@dataclass(frozen=True)
class Machine:
    """The host as this process may use it: CPU affinity and container limits are already applied."""

    cpus: int
    """CPUs this process may run on, after affinity and cgroup quota (at least 1); two hyper-threads count as two."""
    ram_bytes: int | None = None
    """Memory this process may use: the smaller of the host's and the cgroup's."""
    shm_bytes: int | None = None
    """Size of /dev/shm, through which worker processes hand over batches."""
    accelerators: int | None = None
    """Accelerators that the kernel shows; None where it does not say."""
    ranks: int | None = None
    """Processes that share these cores, if a launcher says so; None: as many as devices."""
    cores: int | None = None
    """Physical cores behind these CPUs; None where the kernel does not say."""


def read_machine() -> Machine:
    """What this process may use here. Cheap: reads a few files under /proc, /sys and /dev."""
    shm = _filesystem(SHARED_MEMORY)
    cpus = usable_cpus()
    return Machine(
        cpus=cpus,
        ram_bytes=usable_ram_bytes(),
        shm_bytes=None if shm is None else shm.f_frsize * shm.f_blocks,
        accelerators=count_accelerators(),
        ranks=ranks_sharing_cores(cpus),
        cores=physical_cores(cpus),
    )


class HostConfig(Config):
    """A config resolved for one machine: the numbers of workers and devices are known, and it asks for nothing that
    the machine lacks."""

    num_workers: Annotated[int, Field(ge=0)]
    devices: Annotated[int, Field(ge=1)]


def fit_to_machine(config: Config, machine: Machine) -> tuple[HostConfig, list[str]]:
    """The config with settings that this machine cannot run replaced by the nearest that work, and a note for each.

    A config that asks for 16-bit precision is valid, just not here: a note, not a config error.
    """
    changes: dict[str, object] = {}
    notes: list[str] = []
    if machine.accelerators == 0:
        if config.precision == "16-mixed":
            changes["precision"] = "32"
            notes.append("precision: 16-mixed needs a GPU; using 32 on this machine")
        changes["pin_memory"] = False  # not worth a note: without a GPU there is no copy to speed up
        if config.sync_batchnorm:
            changes["sync_batchnorm"] = False
            notes.append("sync_batchnorm: true needs GPUs; each process keeps its own statistics on this machine")
    devices = config.devices if isinstance(config.devices, int) else max(1, machine.accelerators or 1)
    workers = config.num_workers
    if not isinstance(workers, int):
        workers = workers_for(machine.cpus, machine.ranks or devices, on_gpu=machine.accelerators != 0)
    changes |= {"devices": devices, "num_workers": workers}
    # A number of workers that the user chose stays.
    changes["adjust_loader"] = config.adjust_loader and not isinstance(config.num_workers, int)
    return HostConfig.model_construct(config.model_fields_set, **dict(config) | changes), notes


def workers_for(cpus: int, ranks: int, *, on_gpu: bool) -> int:
    """Loader workers of one rank: its share of the cores, less one for the thread that launches the GPU's kernels.

    Without a GPU that thread computes on all cores anyway, and none is set aside.
    """
    return max(1, cpus // ranks - (1 if on_gpu else 0))


def ranks_sharing_cores(cpus: int, environment: Mapping[str, str] = os.environ) -> int | None:
    """Processes that a launcher started on this node and that share these cores; None without a launcher."""
    if "LOCAL_RANK" in environment and environment.get("LOCAL_WORLD_SIZE", "").isdigit():
        return max(1, int(environment["LOCAL_WORLD_SIZE"]))
    if "SLURM_STEP_ID" not in environment or "SLURM_PROCID" not in environment:
        return None
    if environment.get("SLURM_CPUS_PER_TASK", "").isdigit():
        # If srun binds its tasks, all visible cores are this task's; if not, this many tasks share them.
        return max(1, cpus // max(1, int(environment["SLURM_CPUS_PER_TASK"])))
    # For each node in turn, runs of equal counts folded: 4(x2),3. Nodes of one job hardly ever differ.
    first = re.match(
        r"\d+", environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    )
    return None if first is None else max(1, int(first[0]))


def usable_cpus(cgroup_root: Path = CGROUP_ROOT) -> int:
    """Cores by affinity or cgroup quota, whichever is less.

    os.cpu_count() is the host's number; in a container it starts workers that only wait for each other.
    """
    affinity = len(allowed_cores())
    quota = cpu_quota(cgroup_root)
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def physical_cores(cpus: int, allowed: Collection[int] | None = None, topology: Path = CPU_TOPOLOGY) -> int | None:
    """Physical cores behind this many of the allowed CPUs, as the kernel reports them; None if it does not.

    A hypervisor may hide that two CPUs share a core.
    """
    try:
        siblings = {
            (topology / f"cpu{number}" / "topology" / "thread_siblings_list").read_text()
            for number in allowed or allowed_cores()
        }
    except OSError:
        return None
    return min(cpus, len(siblings))


def allowed_cores() -> set[int]:
    """Numbers of the cores that this process may run on; all of them on systems without affinity, such as macOS."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def usable_ram_bytes(cgroup_root: Path = CGROUP_ROOT) -> int:
    """The host's memory or the tightest cgroup limit on this process, whichever is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [memory_limit(folder) for folder in cgroup_folders("memory", cgroup_root)]
    return min([total, *(limit for limit in limits if limit is not None)])


def count_accelerators() -> int | None:
    """NVIDIA and AMD devices that the kernel shows. torch knows more, but takes seconds to import."""
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


def _filesystem(path: Path) -> os.statvfs_result | None:
    with suppress(OSError):
        return os.statvfs(path)
    return None


class HostWatch:
    """Samples the host's load during a run. Cheap: reads a few small files in half a millisecond."""

    def __init__(self) -> None:
        self._machine = read_machine()
        self._shm_used: int | None = None
        self._available: int | None = None
        self._memory_due_s = 0.0
        self._begin()

    def look(self) -> None:
        """Call it between two `facts` to catch short peaks of memory."""
        shm = _filesystem(SHARED_MEMORY)
        if shm is not None:
            self._shm_used = max(shm.f_frsize * (shm.f_blocks - shm.f_bfree), self._shm_used or 0)
        now_s = time.monotonic()
        if now_s < self._memory_due_s:
            return
        self._memory_due_s = now_s + MEMORY_EVERY_S
        memory = read_memory()
        if memory is not None:
            before = self._available
            self._available = memory.available_bytes if before is None else min(before, memory.available_bytes)

    def facts(self) -> HostFacts:
        """Measurements since the last call; shares are over that time."""
        self.look()
        machine, shm_used, available = self._machine, self._shm_used, self._available
        elapsed_s = time.monotonic() - self._began_s
        throttled = throttled_share(self._throttling, read_throttling(), elapsed_s, len(allowed_cores()))
        before, after = self._ticks, _read_ticks()
        busy = None
        if before is not None and after is not None and after[1] > before[1]:
            busy = 1.0 - (after[0] - before[0]) / (after[1] - before[1])
        host = read_host_memory()
        self._begin()
        return HostFacts(
            cpus=machine.cpus,
            ram_bytes=machine.ram_bytes,
            throttled_share=throttled,
            shm_bytes=machine.shm_bytes,
            shm_used_bytes=shm_used,
            cpu_busy_share=busy,
            # Memory of other programs in a container is not subtracted: their share of its use cannot be read.
            page_cache_bytes=None if host is None else min(host.available_bytes, machine.ram_bytes or host.limit_bytes),
            available_bytes=available,
        )

    def _begin(self) -> None:
        self._shm_used = self._available = None
        self._memory_due_s = 0.0
        self._began_s = time.monotonic()
        self._throttling = read_throttling()
        self._ticks = _read_ticks()


# Columns of /proc/stat: user nice system idle iowait irq softirq steal; those that follow are part of user.
_COUNTED, _IDLE = 8, (3, 4)


def _read_ticks() -> tuple[int, int] | None:
    """Idle ticks and all ticks of the cores that this process may run on."""
    wanted = {f"cpu{number}" for number in allowed_cores()}
    idle = total = 0
    try:
        for line in (PROC / "stat").read_text().splitlines():
            name, *columns = line.split()
            if name in wanted:
                counts = [int(column) for column in columns[:_COUNTED]]
                total += sum(counts)
                idle += sum(counts[at] for at in _IDLE)
    except (OSError, ValueError, IndexError):
        return None
    return (idle, total) if total else None


# On a host with several sockets, memory and PCIe slots belong to one of them. A batch that is decoded on one and copied
# from another crosses the link between them, and so does every call to the driver.

SYS = Path("/sys")
PROC_TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Binding:
    """The cores that a rank should run on; `cores` is None if it should stay where it is."""

    cores: frozenset[int] | None
    node: int | None = None

    def describe(self) -> str | None:
        if self.cores is None:
            return None
        plural = "core" if len(self.cores) == 1 else "cores"
        return f"this rank runs on the {len(self.cores)} {plural} of NUMA node {self.node}, next to its GPU"


STAY = Binding(None)


def pci_address(domain: int, bus: int, device: int) -> str:
    """A device's name under /sys/bus/pci/devices, from the numbers that CUDA gives; GPUs are function 0."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_of_device(address: str, sys_root: Path = SYS) -> int | None:
    """The NUMA node of a PCI device; None if the kernel does not know, as in many virtual machines."""
    with suppress(OSError, ValueError):
        node = int((sys_root / "bus/pci/devices" / address / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def cores_of_nodes(sys_root: Path = SYS) -> dict[int, frozenset[int]]:
    """The cores of each NUMA node; empty where the kernel shows none. Nodes that only hold memory have no cores."""
    found = {}
    for folder in (sys_root / "devices/system/node").glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            cores = parse_cpu_list((folder / "cpulist").read_text())
            if cores:
                found[int(folder.name.removeprefix("node"))] = cores
    return found


def parse_cpu_list(text: str) -> frozenset[int]:
    """The numbers in the kernel's notation: `0-3,8,10-11`."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def choose_binding(
    own: int | None, others: Sequence[int | None], ranks: int, allowed: frozenset[int], sys_root: Path = SYS
) -> Binding:
    """The cores for a rank whose GPU is on the node `own`.

    `others` are the nodes of all `ranks` GPUs of this host, its own among them, or fewer if this process cannot see
    them all; `allowed` are the cores it may use now.
    """
    nodes = cores_of_nodes(sys_root)
    everything = frozenset().union(*nodes.values())
    if own not in nodes or own is None or len(nodes) < 2:
        return STAY
    if allowed < everything:
        return STAY  # srun, torchrun --numa-binding, taskset or a container has chosen already, and knows more
    cores = nodes[own] & allowed
    if not cores:
        return STAY
    # Ranks whose GPU cannot be seen from here are assumed to be spread evenly.
    beside = list(others).count(own) if len(others) == ranks else -(-ranks // len(nodes))
    # One GPU on a host with two sockets needs the cores of both: half of them, however near, are too few to feed it.
    if len(cores) // max(1, beside) < len(allowed) // max(1, ranks):
        return STAY
    return Binding(cores, own)


def bind_rank(device_index: int, ranks: int, sys_root: Path = SYS) -> Binding:
    """Binds this process, with its threads and all that it starts, to the cores next to its GPU."""
    import torch

    if not hasattr(os, "sched_setaffinity"):
        return STAY
    nodes = []
    for index in range(torch.cuda.device_count()):
        card: Any = torch.cuda.get_device_properties(index)  # torch's stub lacks the PCI numbers
        nodes.append(node_of_device(pci_address(card.pci_domain_id, card.pci_bus_id, card.pci_device_id), sys_root))
    binding = choose_binding(nodes[device_index], nodes[:ranks], ranks, frozenset(allowed_cores()), sys_root)
    if binding.cores is not None and not bind_threads(binding.cores):
        return STAY
    return binding


def bind_threads(cores: frozenset[int], tasks: Path = PROC_TASKS) -> bool:
    """Moves all threads of this process; false if the kernel refuses to move this one."""
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # a cpuset that changed in the meantime
        return False
    for task in tasks.iterdir():
        with suppress(OSError, ValueError):  # it has ended
            os.sched_setaffinity(int(task.name), cores)
    return True
