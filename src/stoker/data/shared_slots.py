"""Batches' memory that worker processes fill and this process looks at, used again and again.

A fresh piece of shared memory for each batch costs its pages anew every time: a fifth of the time of decoding.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from numpy.typing import NDArray

# What getrefcount counts for an array that only the list holds: the list and the argument.
_FREE = 2


class SharedSlots:
    """Slots of one shape, shared by all workers. A slot is free when no worker fills it and nobody looks at it."""

    def __init__(self, count: int, shape: tuple[int, ...], *, pinned: bool) -> None:
        size = int(np.prod(shape))
        self.tensors = [_shared(size).view(shape) for _ in range(count)]
        self._arrays: list[NDArray[np.uint8]] = [tensor.numpy() for tensor in self.tensors]
        self._filling: set[int] = set()
        if pinned:
            self._pin(size)

    def take(self) -> int | None:
        """A free slot for a worker to fill; None where the consumer holds on to more batches than was foreseen."""
        for number in range(len(self._arrays)):
            if number not in self._filling and sys.getrefcount(self._arrays[number]) == _FREE:
                self._filling.add(number)
                return number
        return None

    def look_at(self, number: int, samples: int) -> torch.Tensor:
        """The images in a slot that a worker has filled; the slot is theirs until this tensor and its views go."""
        self._filling.discard(number)
        return torch.from_numpy(self._arrays[number][:samples])

    def give_back_all(self) -> None:
        """Nothing is being filled any more: the workers are gone, or the epoch was left and they are idle."""
        self._filling.clear()

    def _pin(self, size: int) -> None:
        # GPU only: makes the shared pages page-locked where they are, so that nothing is copied into pinned memory.
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        for tensor in self.tensors:
            runtime.cudaHostRegister(tensor.data_ptr(), size, 0)


def _shared(size: int) -> torch.Tensor:
    tensor: torch.Tensor = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return tensor
