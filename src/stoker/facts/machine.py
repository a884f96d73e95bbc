"""The host as a process on it may use it."""

from __future__ import annotations

from dataclasses import dataclass


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
