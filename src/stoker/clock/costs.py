"""What the making of a batch cost: wall time by stage, and how the thread spent it.

on-CPU and run-queue time come from the kernel's own accounting of this thread; what is left of the wall
time was spent blocked, on storage or a lock. High run-queue time asks for fewer workers, low for more.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

STAGES = ("fetch", "decode", "augment", "collate")


@dataclass
class BatchCost:
    """Seconds and bytes that one batch took to make."""

    fetch_s: float = 0.0
    """Waiting for and reading the samples' bytes."""
    decode_s: float = 0.0
    """Headers, decoding, cropping, resizing into the batch."""
    augment_s: float = 0.0
    """Augmentation on the CPU; 0 where everything happens on the device."""
    collate_s: float = 0.0
    """Making the batch's buffers and handing it over."""
    wall_s: float = 0.0
    """From the first to the last moment of the making."""
    on_cpu_s: float | None = None
    run_queue_s: float | None = None
    """Ready to run while others ran."""
    blocked_s: float | None = None
    """Neither running nor ready: storage, network, locks."""
    bytes_read: int = 0
    samples: int = 0

    def add(self, other: BatchCost) -> None:
        """Adds another batch's cost to this sum; a part that was not measured once stays unmeasured."""
        for part in fields(self):
            mine, theirs = getattr(self, part.name), getattr(other, part.name)
            setattr(self, part.name, None if mine is None or theirs is None else mine + theirs)

    def per_image(self) -> dict[str, float | None]:
        """Seconds for each sample, by stage and by how the thread spent them."""
        names = [*(f"{stage}_s" for stage in STAGES), "wall_s", "on_cpu_s", "run_queue_s", "blocked_s"]
        times = {name.removesuffix("_s"): getattr(self, name) for name in names}
        count = max(1, self.samples)
        return {name: None if seconds is None else seconds / count for name, seconds in times.items()}

    @classmethod
    def zero(cls) -> BatchCost:
        """A sum to add to."""
        return cls(on_cpu_s=0.0, run_queue_s=0.0, blocked_s=0.0)


class BatchClock:
    """Measures one batch; each worker thread uses its own."""

    def __init__(self) -> None:
        self.cost = BatchCost()
        self._start = time.perf_counter()
        self._schedule = read_schedule()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Counts the block's wall time for a stage. About a microsecond: not for single pixels."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start)

    def add(self, stage: str, seconds: float) -> None:
        """Counts time that was measured elsewhere, in a loop over samples say."""
        setattr(self.cost, f"{stage}_s", getattr(self.cost, f"{stage}_s") + seconds)

    def finish(self) -> BatchCost:
        """The batch is made: splits the wall time into on-CPU, run-queue and blocked."""
        cost = self.cost
        cost.wall_s = time.perf_counter() - self._start
        now, before = read_schedule(), self._schedule
        if now is not None and before is not None:
            cost.on_cpu_s = (now[0] - before[0]) / 1e9
            cost.run_queue_s = (now[1] - before[1]) / 1e9
            cost.blocked_s = max(0.0, cost.wall_s - cost.on_cpu_s - cost.run_queue_s)
        return cost


class _ScheduleFile:
    """The kernel's account of the thread that opened it, kept open: opening costs ten times the reading."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:  # with the thread, whose own it is
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


_local = threading.local()


def read_schedule() -> tuple[int, int] | None:
    """Nanoseconds that this thread has run and has been ready without running; None where the kernel does
    not say."""
    file: _ScheduleFile | None = getattr(_local, "file", None)
    try:
        # A forked child inherits the file of its parent's thread, and would read that one's times.
        if file is None or file.process != os.getpid():
            file = _local.file = _ScheduleFile()
        running, waiting, _ = os.pread(file.descriptor, 64, 0).split()
    except (OSError, ValueError):
        return None
    return int(running), int(waiting)
