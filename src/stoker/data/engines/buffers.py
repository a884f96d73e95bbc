"""Memory for batches that is used again: of threads, and shared with worker processes."""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

# Memory for batches that is used again once nobody looks at it any more.
#
# A fresh buffer costs a page fault for every 4 KB of it, in kernel time that no thread can decode in.

# What getrefcount counts for an array that only the pool holds: the list, the loop variable, the argument.
_FREE = 3
# From here on numpy asks for huge pages, which make the first touch of a large buffer cheaper; so do we.
_HUGE_FROM = 1 << 22


class BufferPool:
    """Arrays of one shape; `get` hands out one whose tensors and views are all gone, or makes a new one."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._arrays: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def get(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """An array with arbitrary content that belongs to the caller until its last reference goes."""
        with self._lock:
            for array in self._arrays:
                if sys.getrefcount(array) == _FREE and array.shape == shape:
                    # A second reference within the lock: the next caller must not find it free.
                    return array.view()
            self._arrays = [array for array in self._arrays if array.shape == shape]
            array = self._allocate(shape)
            self._arrays.append(array)
            return array.view()

    def keep(self, count: int) -> None:
        """Gives the memory of free arrays back to the system, until no more than so many are left."""
        with self._lock:
            spare = len(self._arrays) - count
            if spare <= 0:
                return
            kept: list[NDArray[np.uint8]] = []
            for array in self._arrays:
                if spare > 0 and sys.getrefcount(array) == _FREE:
                    spare -= 1
                else:
                    kept.append(array)
            self._arrays = kept
        if self._pinned:
            torch._C._host_emptyCache()  # GPU only: torch would keep the page-locked memory for later

    def __len__(self) -> int:
        return len(self._arrays)

    def _allocate(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        if self._pinned:
            pinned: NDArray[np.uint8] = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned
        # Mapped, not from malloc: its threshold for mapping rises to what was freed, and it keeps the rest. Of twelve
        # buffers of 5 MB that were freed, made again and freed again, it gave none back.
        size = int(np.prod(shape))
        memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.ndarray(shape, np.uint8, buffer=memory)


def shared_array(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An array in shared memory, in which a worker process hands its batch over without a copy."""
    count = int(np.prod(shape))
    # The call by which torch's own collate makes batches in workers: no copy when they are sent.
    storage = torch.UntypedStorage._new_shared(count)  # type: ignore[no-untyped-call]
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
    array: NDArray[np.uint8] = tensor.numpy()
    return array


# Batches' memory that worker processes fill and this process looks at, used again and again.
#
# A fresh piece of shared memory for each batch costs its pages anew every time: a fifth of the time of decoding.

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
