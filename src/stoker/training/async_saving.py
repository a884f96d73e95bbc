"""Saving while training goes on: the loop pays for a copy in memory, a thread for the disk.

The copy goes into one buffer that is allocated once and reused: the kernel gives fresh memory page by page, which takes
many times as long as the copy itself. It costs as much memory as the state's tensors have.

One save is under way at a time. A second one waits for it instead of replacing it: nothing that was asked for is
dropped, and what the disk holds is never older than one interval. How long it waited is told.
"""

from __future__ import annotations

import ctypes
import math
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import torch

from stoker.training.checkpoints import Checkpoints, Outcome, State
from stoker.training.state_tree import FlatState, contiguous_strides, flatten, is_dense

ALIGNMENT = 64


@dataclass(frozen=True)
class HandedOver:
    """A save that is under way."""

    pause_s: float
    """How long the loop stood still for the copy."""
    waited_s: float
    """How long it stood still before that, for the save before; 0 where that was done."""
    finished: tuple[Outcome, ...]
    """What became of earlier saves, each told once."""


class Snapshot:
    """A copy of a state in a buffer; `state()` is its content, once that has arrived."""

    def __init__(self, flat: FlatState, memory: torch.Tensor, places: list[int], event: Any) -> None:
        self._text = flat.text
        # Types and layouts only: the tensors themselves change from now on.
        self._layouts = [(name, tensor.dtype, tensor.shape, tensor.stride()) for name, tensor in flat.tensors.items()]
        self._memory = memory
        self._places = places
        self._event = event

    def state(self) -> FlatState:
        """Waits for copies from a device that are under way; called in the thread that writes."""
        if self._event is not None:
            self._event.synchronize()
        tensors = {}
        for (name, dtype, shape, strides), start in zip(self._layouts, self._places, strict=True):
            end = start + math.prod(shape) * dtype.itemsize
            tensors[name] = self._memory[start:end].view(dtype).as_strided(shape, _copied_strides(shape, strides))
        return FlatState(self._text, tensors)


class SnapshotBuffer:
    """Memory for a copy of all tensors of a state; grows when it must, and is otherwise reused."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Memory of this size that the kernel has already given."""
        if self._memory.numel() >= size_bytes and self._memory.is_pinned() >= pinned:
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # The old one goes first.
        if pinned:
            self._memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            # By numpy, which asks for huge pages.
            self._memory = torch.from_numpy(np.empty(size_bytes, dtype=np.uint8))
        self._memory.numpy().fill(0)

    def take(self, flat: FlatState) -> Snapshot:
        """A copy of the state as it is now: CPU tensors are copied on return, those of a GPU in its stream."""
        on_cuda = any(tensor.is_cuda for tensor in flat.tensors.values())
        self.reserve(_size_of(flat), pinned=on_cuda)
        base, places, position = self._memory.data_ptr(), [], 0
        for tensor in flat.tensors.values():
            shape, strides, size = tensor.shape, tensor.stride(), tensor.nbytes
            source = tensor if is_dense(shape, strides) else tensor.detach().contiguous()
            if source.is_cpu:
                # In physical order, whatever the strides. Not by torch's copy_: its team of threads waits for its
                # slowest member at every tensor, which on cores busy with decoding took twenty times as long.
                ctypes.memmove(base + position, source.data_ptr(), size)
            else:
                place = self._memory[position : position + size].view(tensor.dtype)
                place.as_strided(shape, source.stride()).copy_(source.detach(), non_blocking=on_cuda)
            places.append(position)
            position += _aligned(size)
        event = None
        if on_cuda:
            # The loop does not wait: later updates stand behind the copies in the same stream.
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Snapshot(flat, self._memory, places, event)


class AsyncSaver:
    """Saves to `checkpoints` in a thread; use it as a context manager, whose end waits for what is under way.

    Before the process ends for a signal: `wait()`, then `checkpoints.save_last(state)`; `save_now` does both.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints = checkpoints
        self._buffer = SnapshotBuffer()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._under_way: Future[list[Outcome]] | None = None
        self._finished: list[Outcome] = []

    def prepare(self, state: State) -> None:
        """Allocates the buffer in the thread; after the first step, when the optimizer has its state, is the time."""
        self._settle()
        flat = flatten(state)
        size, on_cuda = _size_of(flat), any(tensor.is_cuda for tensor in flat.tensors.values())
        self._under_way = self._writer.submit(self._reserve, size, on_cuda)

    def save(self, state: State, *, best: tuple[int, float] | None = None) -> HandedOver:
        """Copies the state and returns; the thread writes it as last and, given `best` (epoch, value), as a best one.

        Raises what went wrong with an earlier save, unless it is a disk that is full or the like: that is an outcome.
        """
        began = time.perf_counter()
        self._settle()
        settled = time.perf_counter()
        snapshot = self._buffer.take(flatten(state))
        self._under_way = self._writer.submit(self._write, snapshot, best)
        return HandedOver(time.perf_counter() - settled, settled - began, self._told())

    def save_now(self, state: State) -> tuple[Outcome, ...]:
        """Waits for what is under way, then saves as last before it returns."""
        self._settle()
        self._finished.append(self.checkpoints.save_last(state))
        return self._told()

    def wait(self) -> tuple[Outcome, ...]:
        """Returns when nothing is under way any more; what became of the saves that were not told yet."""
        self._settle()
        return self._told()

    def close(self) -> tuple[Outcome, ...]:
        """The same, and ends the thread."""
        try:
            return self.wait()
        finally:
            self._writer.shutdown()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settle(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._finished += under_way.result()

    def _told(self) -> tuple[Outcome, ...]:
        finished, self._finished = self._finished, []
        return tuple(finished)

    def _reserve(self, size_bytes: int, pinned: bool) -> list[Outcome]:
        self._buffer.reserve(size_bytes, pinned=pinned)
        return []

    def _write(self, snapshot: Snapshot, best: tuple[int, float] | None) -> list[Outcome]:
        state = snapshot.state()
        # The best first: a crash between the two then repeats the validation, and does not lose its checkpoint.
        kept = None if best is None else self.checkpoints.save_best(state, *best)
        return [*([] if kept is None else [kept]), self.checkpoints.save_last(state)]


def _copied_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    return strides if is_dense(shape, strides) else contiguous_strides(shape)


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _size_of(flat: FlatState) -> int:
    return sum(_aligned(tensor.nbytes) for tensor in flat.tensors.values())
