"""Batches' memory that worker processes fill and this process looks at, used again and again.

A fresh piece of shared memory for each batch costs its pages anew every time: a fifth of the time of decoding.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import torch
from numpy.typing import NDArray

# What getrefcount counts for an array that only the list holds: the list and the argument.
_FREE_SLOT = 2
_LIBC = ctypes.CDLL(None)


class SharedSlots:
    """Slots of one shape, shared by all workers. A slot is free when no worker fills it and nobody looks at it."""

    def __init__(self, count: int, shape: tuple[int, ...], *, pinned: bool) -> None:
        self._size = int(np.prod(shape))
        self.tensors = [_shared(self._size).view(shape) for _ in range(count)]
        self._arrays: list[NDArray[np.uint8]] = [tensor.numpy() for tensor in self.tensors]
        self._filling: set[int] = set()
        self._kept = count
        self._emptied: set[int] = set()
        self._pinned = pinned
        if pinned:
            for number in range(count):
                self._pin(number)

    def take(self) -> int | None:
        """A free slot for a worker to fill; None where the consumer holds on to more batches than was foreseen."""
        self._empty_the_rest()
        for number in range(self._kept):
            if self._is_free(number):
                self._filling.add(number)
                return number
        return None

    def look_at(self, number: int, samples: int) -> torch.Tensor:
        """The images in a slot that a worker has filled; the slot is theirs until this tensor and its views go."""
        self._filling.discard(number)
        self._empty_the_rest(but=number)
        return torch.from_numpy(self._arrays[number][:samples])

    def give_back_all(self) -> None:
        """Nothing is being filled any more: the workers are gone, or the epoch was left and they are idle."""
        self._filling.clear()
        if not self._pinned:
            self._emptied.clear()  # a worker that was in the middle of one may have filled it again

    def keep(self, count: int) -> None:
        """Hands out so many slots from now on; the memory of the others goes back to the system once they are free."""
        self._kept = max(1, min(count, len(self._arrays)))
        for number in [number for number in self._emptied if number < self._kept]:
            self._emptied.discard(number)
            if self._pinned:
                self._pin(number)
        self._empty_the_rest()

    def _is_free(self, number: int) -> bool:
        return number not in self._filling and sys.getrefcount(self._arrays[number]) == _FREE_SLOT

    def _empty_the_rest(self, but: int | None = None) -> None:
        if self._kept + len(self._emptied) == len(self._arrays):
            return
        for number in range(self._kept, len(self._arrays)):
            if number != but and number not in self._emptied and self._is_free(number):
                if self._pinned:
                    torch.cuda.cudart().cudaHostUnregister(self._address(number))  # type: ignore[no-untyped-call]
                # Takes the pages away from all processes at once; they would read zeros there, and new pages come
                # with the next write. Where the system refuses, the slot only stays as large as it was.
                _LIBC.madvise(
                    ctypes.c_void_p(self._address(number)), ctypes.c_size_t(self._size), getattr(mmap, "MADV_REMOVE", 0)
                )
                self._emptied.add(number)

    def _address(self, number: int) -> int:
        return self.tensors[number].data_ptr()

    def _pin(self, number: int) -> None:
        # GPU only: makes the shared pages page-locked where they are, so that nothing is copied into pinned memory.
        torch.cuda.cudart().cudaHostRegister(self._address(number), self._size, 0)  # type: ignore[no-untyped-call]


def _shared(size: int) -> torch.Tensor:
    tensor: torch.Tensor = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return tensor
