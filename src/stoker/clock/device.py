"""Times on an accelerator: events in its queue, read when they have passed, never waited for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

# A step that never comes to an end on the device must not fill memory with events.
MOST_PENDING = 1024


class DeviceTimes:
    """Marks in the device's queue and what lay between them, once the device has come that far."""

    def __init__(self, new_event: Callable[[], Any]) -> None:
        self._new_event = new_event
        self._free: list[Any] = []
        self._step: list[Any] = []
        self._pending: deque[list[Any]] = deque()

    def mark(self) -> None:
        """Puts a mark behind everything that was queued so far; about five microseconds."""
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        self._step.append(event)

    def step_ends(self) -> None:
        """The marks since the last call belong together."""
        if len(self._step) > 1 and len(self._pending) < MOST_PENDING:
            self._pending.append(self._step)
        self._step = []

    def passed(self) -> Iterator[list[float]]:
        """For each step that the device has finished since: the seconds from each of its marks to the next."""
        while self._pending and self._pending[0][-1].query():
            events = self._pending.popleft()
            yield [a.elapsed_time(b) / 1e3 for a, b in pairwise(events)]
            self._free += events


def times_on(device: Any) -> DeviceTimes | None:
    """Events of this device; None on a CPU, whose time is the loop's own."""
    if device is None or device.type != "cuda":  # CUDA and ROCm
        return None
    import torch

    return DeviceTimes(lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
