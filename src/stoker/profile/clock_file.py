"""clock.jsonl: where the time of a run's steps and batches went, one line for each interval and epoch.

The first line of every start says how the run is set up (`event: clock`), and so does one after each change of the
loader. A line of kind `step` holds sums over the steps since the previous line, one of kind `epoch` those of the
epoch's remaining steps, and validation: `elapsed_s` = `wait_s` + `transfer_s` + `compute_s` + `other_s`. Not included
are `epoch_starts_s` (waits for the first batch of an epoch), `validation_s` and `saving_s`. `stages` are sums over all
workers. `waits_s`, `steps_s` and `batches` (columns: the header's `batch_columns`) are the interval's newest single
steps and batches.
About 1.5 kB a line: 156 kB for an epoch of 5,004 steps with a line every 50 (results/clock_cost).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.core.console import Say
from stoker.core.console import say as say_on_stderr
from stoker.profile.memory import own_and_children_bytes
from stoker.profile.observed import AcceleratorFacts, LoaderShape, StorageFacts
from stoker.profile.step_clock import BATCH_COLUMNS, Interval
from stoker.run.metrics import MetricsFile

if TYPE_CHECKING:
    from stoker.profile.host import HostWatch

FORMAT = 1
HEADER = "clock"
# The kernel's counters only mean something over seconds, and a run may write a line every 20 ms.
HOST_EVERY_S = 10.0

NameSamples = Callable[[Sequence[int]], list[str]]


@dataclass(frozen=True)
class ClockHeader:
    """The first line of a start: how the run of the lines below it is set up."""

    loader: LoaderShape
    cpus: int
    world: int
    torch: str
    """Its version."""
    device: str
    convolves_3d: bool | None = None
    accelerator: AcceleratorFacts | None = None
    storage: StorageFacts | None = None
    may_grow_bytes: int | None = None
    """How much its caches and buffers may grow from their initial size."""

    def as_record(self) -> dict[str, Any]:
        parts = _known({"format": FORMAT, **asdict(self), "batch_columns": list(BATCH_COLUMNS)})
        return {name: _known(part) if isinstance(part, dict) else part for name, part in parts.items()}


class ClockFile:
    """Appends what the clock measured; like metrics.jsonl, a full disk delays nothing."""

    def __init__(
        self,
        path: Path,
        header: ClockHeader,
        host: HostWatch,
        *,
        step: int = 0,
        name_samples: NameSamples | None = None,
        say: Say = say_on_stderr,
    ) -> None:
        self._file = MetricsFile(path, say)
        self._name_samples = name_samples
        self._watch = host
        self._host_due_s = time.monotonic() + HOST_EVERY_S
        self._host_told = False
        self._header = header
        self._file.event(HEADER, step, **header.as_record())

    def loader_changed(self, step: int, **values: Any) -> None:
        """The loader has other workers or another prefetch from this step on: earlier lines do not describe it."""
        changed = replace(self._header, loader=replace(self._header.loader, **values))
        if changed != self._header:
            self._header = changed
            self._file.event(HEADER, step, **changed.as_record())

    def step(self, step: int, epoch: int, interval: Interval) -> None:
        """The steps since the previous line, up to this one."""
        self._file.step(step, epoch, self._record(interval, tell_host=False))

    def epoch(self, step: int, epoch: int, interval: Interval) -> None:
        """The remaining steps of an epoch, and its validation."""
        # A run that takes only seconds gets the host's facts as well.
        self._file.epoch(step, epoch, self._record(interval, tell_host=not self._host_told))

    def close(self) -> None:
        self._file.close()

    def _record(self, interval: Interval, *, tell_host: bool) -> dict[str, Any]:
        record = interval_record(interval, self._name_samples)
        self._watch.look()
        if tell_host or time.monotonic() >= self._host_due_s:
            self._host_due_s, self._host_told = time.monotonic() + HOST_EVERY_S, True
            host = self._watch.facts()
            record["host"] = _known(asdict(host))
            record["memory"] = _memory(host.page_cache_bytes, host.shm_used_bytes)
        return record


def interval_record(interval: Interval, name_samples: NameSamples | None) -> dict[str, Any]:
    """An interval as a line holds it, with the names of its slowest samples."""
    record, cost = interval.as_record(), interval.cost
    if interval.slowest and name_samples is not None:
        found = sorted(interval.slowest, reverse=True)
        names = name_samples([sample for _, sample in found])
        record["slowest"] = [
            # A file name may hold bytes that are not text.
            {"name": name.encode("utf-8", "replace").decode(), "seconds": round(seconds, 6)}
            for (seconds, _), name in zip(found, names, strict=True)
        ]
        record["typical_sample_s"] = round(cost.wall_of("decode") / max(1, cost.samples), 6)
    return record


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _memory(available: int | None, shm_used: int | None) -> dict[str, int]:
    """Bytes at the end of the interval: this process, available, shared memory, the device's allocator; and the private
    memory of this process and its workers."""
    own, children = own_and_children_bytes() or (None, None)
    found = {"available_bytes": available, "shm_used_bytes": shm_used, "process_bytes": None}
    found |= {"own_bytes": own, "children_bytes": children}
    with suppress(OSError, ValueError):
        found["process_bytes"] = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    torch = sys.modules.get("torch")  # imported in every process that trains
    if torch is not None and torch.cuda.is_initialized():
        found["device_bytes"] = torch.cuda.max_memory_reserved()
    return _known(found)
