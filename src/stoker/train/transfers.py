"""Copies between host and device that the loop never waits for, and how long the host's memory has to stay as it is.

An asynchronous copy holds no reference to its source: with the loop running ahead of the device, a loader that reuses
memory by reference counts overwrote batches before they were copied (53 of 200, at a lag of three). So every copy to
the device goes through an `Uploader`, which keeps the source alive until the device has passed the batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor


class OnDevice(Protocol):
    """Something made of tensors on the device."""

    @property
    def tensors(self) -> Sequence[Tensor]: ...


T = TypeVar("T", bound=OnDevice)
SMALL_BYTES = 4 << 20
MOST_AHEAD = 2
"""Batches that are prepared before the model is done with them; each one more would take the memory of its inputs."""


class CudaQueue:
    """Streams of a CUDA (or ROCm) device: one for the model, one beside it for the next batch. GPU only: tests use
    stand-ins with the same methods."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned: deque[Tensor] = deque()

    def aside(self) -> AbstractContextManager[Any]:
        """Work queued inside the block runs beside the model's work."""
        return torch.cuda.stream(self._side)

    def copy(self, source: Tensor) -> Tensor:
        """A copy on the device, made when its turn comes; the source must not change before."""
        if source.nbytes <= SMALL_BYTES and not source.is_pinned():
            # From ordinary memory the driver may wait for the queue before it copies. Labels and choices go through
            # page-locked memory that torch keeps, and reuses when their copies have passed; images are there already.
            source = source.pin_memory()
        return source.to(self._device, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        """A point after everything that is queued so far, in the queue of the current context."""
        # Blocking: a host that waits must leave its core to the workers.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def join(self, ready: torch.cuda.Event, tensors: Sequence[Tensor]) -> None:
        """The model's queue waits for `ready`; the tensors made aside are used there from now on."""
        model = torch.cuda.current_stream(self._device)
        model.wait_event(ready)
        for tensor in tensors:
            tensor.record_stream(model)  # the allocator must not reuse it while the model reads it

    def fetch(self, source: Tensor) -> Callable[[], list[float]]:
        """Starts to copy a few numbers to the host; the function waits for that copy, and for nothing after it."""
        there = self._pinned.popleft() if self._pinned else torch.empty(source.shape, pin_memory=True)
        there.copy_(source, non_blocking=True)
        arrived = self.mark()

        def read() -> list[float]:
            arrived.synchronize()
            values: list[float] = there.tolist()
            self._pinned.append(there)
            return values

        return read


def queue_of(device: torch.device) -> CudaQueue | None:
    """The queues of a device; None if it computes in the host's memory while the host waits."""
    return CudaQueue(device) if device.type == "cuda" else None


def batches_in_hand(accumulation: int, *, on_gpu: bool) -> int:
    """Batches whose host memory the loop holds when it asks for the next: those of an update and, on a GPU, those that
    are still being copied."""
    return accumulation + (MOST_AHEAD if on_gpu else 0)


class Uploader:
    """Prepares batches on the device, at most a few ahead of the model, and owns the copies that this takes."""

    def __init__(self, queue: CudaQueue | None) -> None:
        self.queue = queue
        self._copying: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._sources: list[Tensor] = []
        self._in_flight: deque[tuple[torch.cuda.Event, list[Tensor]]] = deque()
        self._model_work: deque[torch.cuda.Event] = deque()

    def copy(self, source: Tensor) -> Tensor:
        """A copy on the device; call it inside `prepare`."""
        if self.queue is None:
            return source
        self._sources.append(source)
        with self._copying():
            return self.queue.copy(source)

    def prepare(
        self,
        make: Callable[[], T],
        copying: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> T:
        """What `make` queues beside the model's work: copies by `copy`, then augmentation; the model's queue gets the
        result. Waits only if the host is more than MOST_AHEAD batches ahead of the device. `copying` is entered for
        each copy, in the queue that makes it."""
        if self.queue is None:
            return make()
        self._hold_back(self.queue)
        self._copying = copying
        with self.queue.aside():
            try:
                made = make()
            finally:
                # Also after an error: copies that were started still read their sources.
                ready = self.queue.mark()
                self._in_flight.append((ready, self._sources))
                self._sources = []
        self.queue.join(ready, made.tensors)
        return made

    def fetch(self, source: Tensor) -> Callable[[], list[float]]:
        """A few numbers from the device, read now but looked at later."""
        if self.queue is None:
            return source.tolist
        return self.queue.fetch(source)

    def _hold_back(self, queue: CudaQueue) -> None:
        self._model_work.append(queue.mark())
        if len(self._model_work) > MOST_AHEAD:
            self._model_work.popleft().synchronize()
        while self._in_flight and self._in_flight[0][0].query():  # type: ignore[no-untyped-call]
            self._in_flight.popleft()

    def finish(self) -> None:
        """Waits for all copies: their sources may go."""
        while self._in_flight:
            self._in_flight[0][0].synchronize()
            self._in_flight.popleft()  # only now: it holds the sources
        self._model_work.clear()
