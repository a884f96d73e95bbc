"""The machines that a plan is made for: this one, or one that is only described."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.errors import UsageError
from stoker.planning.storage import Storage
from stoker.probe.datasheets import Datasheet


@dataclass(frozen=True)
class Hardware:
    """Nodes of one kind. What is None is not known, and nothing is refused for it."""

    gpus: int
    """Accelerators in each node; on a CPU the processes that train, 1."""
    nodes: int
    cpus: int
    """Cores of each node."""
    sheet: Datasheet | None = None
    """The accelerator; None where it is none that we know, or the CPU."""
    vram_bytes: int | None = None
    """Of one accelerator, as torch shows it."""
    on_cpu: bool = False
    """The model computes on the host: its memory is the host's."""
    ram_bytes: int | None = None
    shm_bytes: int | None = None
    disk_bytes: int | None = None
    storage: Storage | None = None
    price_per_hour: float | None = None
    """Of one node."""
    is_here: bool = True
    """Whether it is the machine that this runs on."""
    stated: tuple[str, ...] = ()
    """What nobody described and had to be taken from somewhere, each in a line."""

    @property
    def world(self) -> int:
        return self.gpus * self.nodes

    def describe(self) -> str:
        """In a line, as people would say it."""
        device = "CPU" if self.on_cpu else (self.sheet.name if self.sheet is not None else "unknown accelerator")
        parts = [f"{self.gpus} x {device}" if not self.on_cpu else device, f"{self.cpus} cores"]
        if self.ram_bytes is not None:
            parts.append(f"{self.ram_bytes / 1e9:.0f} GB of RAM")
        nodes = f"{self.nodes} nodes of " if self.nodes > 1 else ""
        return nodes + ", ".join(parts) + (" (this machine)" if self.is_here else "")


def check_counts(gpus: int | None, nodes: int, cpus: int | None) -> None:
    """Refuses what no machine has."""
    for option, value in (("--gpus", gpus), ("--nodes", nodes), ("--cpus", cpus)):
        if value is not None and value < 1:
            raise UsageError(
                "nothing-to-plan",
                f"{option} {value} leaves nothing that could train",
                hint=f"{option} 1; without --gpu and --gpus the plan is for this machine",
            )
