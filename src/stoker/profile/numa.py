"""NUMA: runs a rank on the cores next to its GPU.

On a host with several sockets, memory and PCIe slots belong to one of them. A batch that is decoded on one and copied
from another crosses the link between them, and so does every call to the driver.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.profile.host import allowed_cores

SYS = Path("/sys")
PROC_TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Binding:
    """The cores that a rank should run on; `cores` is None if it should stay where it is."""

    cores: frozenset[int] | None
    node: int | None = None

    def describe(self) -> str | None:
        """In a line; None if nothing changes."""
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
