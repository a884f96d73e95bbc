"""A device that copies late, as a GPU does behind a busy stream: it reads a batch's memory after the call returned.

It holds no Python reference to what it copies from, as a GPU does not, and so shows who reuses memory too early.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

LATEST = 6


@dataclass(frozen=True)
class _Copy:
    address: int
    target: torch.Tensor
    wanted: torch.Tensor
    """What the source held when the copy was asked for."""


class DelayedDevice:
    """Executes copies in order, each `delay` copies after it was asked for; None draws the delays from a seed."""

    def __init__(self, delay: int | None = None, seed: int = 0) -> None:
        assert delay is None or 0 <= delay <= LATEST
        self._delay = delay
        self._random = random.Random(seed)
        self._waiting: deque[_Copy] = deque()
        self.asked = 0
        self.executed = 0
        self.corrupted = 0
        """Copies that read something else than what their source held when they were asked for."""

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """The target, at once; its content arrives later. Executes those earlier copies that are due now."""
        assert source.is_contiguous()
        target = torch.zeros_like(source)
        self._waiting.append(_Copy(source.data_ptr(), target, source.clone()))
        self.asked += 1
        delay = self._random.randint(0, LATEST) if self._delay is None else self._delay
        while len(self._waiting) > delay:
            self._execute()
        return target

    def event(self) -> Event:
        """Marks this place in the stream: after the copies asked for so far."""
        return Event(self, self.asked)

    def finish(self) -> None:
        """Executes all copies."""
        while self._waiting:
            self._execute()

    def execute_up_to(self, count: int) -> None:
        while self.executed < count:
            self._execute()

    def _execute(self) -> None:
        copy = self._waiting.popleft()
        size = copy.target.numel() * copy.target.element_size()
        try:
            # Through the kernel: memory that is gone is an error here, and not the end of the process.
            with Path("/proc/self/mem").open("rb", buffering=0) as memory:
                memory.seek(copy.address)
                found = memory.read(size)
        except OSError:
            found = b""
        if len(found) == size and size:
            read = torch.frombuffer(bytearray(found), dtype=copy.target.dtype).view(copy.target.shape)
            copy.target.copy_(read)
        self.corrupted += not torch.equal(copy.target, copy.wanted)
        self.executed += 1


class Event:
    """As torch.cuda.Event: whether the device has come this far."""

    def __init__(self, device: DelayedDevice, position: int) -> None:
        self._device = device
        self._position = position

    def query(self) -> bool:
        """Whether all copies before it are executed; executes none."""
        return self._device.executed >= self._position

    def synchronize(self) -> None:
        """Waits for them: executes them now."""
        self._device.execute_up_to(self._position)
