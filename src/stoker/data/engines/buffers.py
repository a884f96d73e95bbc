"""Memory for batches, reused: a pool for threads, and slots shared with worker processes.

Fresh memory costs a page fault for every 4 KB, in kernel time that no thread can decode in; in shared memory that was a
fifth of the time of decoding.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

# What getrefcount returns for an array that only the pool holds: the list, the loop variable, the argument.
_FREE = 3
# The same for a slot: the list and the argument.
_FREE_SLOT = 2
_LIBC = ctypes.CDLL(None)
# From this size on numpy asks for huge pages, which make the first touch of a large buffer cheaper; so do we.
_HUGE_FROM = 1 << 22


class BufferPool:
    """Arrays of one shape; `get` returns one whose tensors and views are all gone, or a new one."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._arrays: list[NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def get(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """An array with arbitrary content, which belongs to the caller until the last reference is dropped."""
        with self._lock:
            for array in self._arrays:
                if sys.getrefcount(array) == _FREE and array.shape == shape:
                    # A second reference while the lock is held: the next caller must not find it free.
                    return array.view()
            self._arrays = [array for array in self._arrays if array.shape == shape]
            array = self._allocate(shape)
            self._arrays.append(array)
            return array.view()

    def keep(self, count: int) -> None:
        """Returns the memory of free arrays to the system, until at most `count` arrays are left."""
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
            torch._C._host_emptyCache()  # GPU only: torch would keep the page-locked memory

    def __len__(self) -> int:
        return len(self._arrays)

    def _allocate(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        if self._pinned:
            pinned: NDArray[np.uint8] = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
            return pinned
        # Mapped, not from malloc, whose threshold for mapping rises to the size of what was freed: of twelve buffers of
        # 5 MB that were freed, made again and freed again, it returned none to the system.
        size = int(np.prod(shape))
        memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if size >= _HUGE_FROM and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel built without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return np.ndarray(shape, np.uint8, buffer=memory)


def shared_array(shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """An array in shared memory, which a worker process can send without a copy."""
    count = int(np.prod(shape))
    # The call by which torch's own collate makes batches in workers, so that sending them copies nothing.
    storage = torch.UntypedStorage._new_shared(count)  # type: ignore[no-untyped-call]
    tensor = torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)
    array: NDArray[np.uint8] = tensor.numpy()
    return array


class SharedSlots:
    """Slots of one shape, shared by all workers. A slot is free if no worker fills it and no tensor of it is alive."""

    def __init__(self, count: int, shape: tuple[int, ...], *, pinned: bool) -> None:
        self._size = int(np.prod(shape))
        self.tensors = [_shared(self._size).view(shape) for _ in range(count)]
        self._arrays: list[NDArray[np.uint8]] = [tensor.numpy() for tensor in self.tensors]
        self._filling: set[int] = set()
        self._kept = count
        self._emptied: set[int] = set()
        self._pinned = pinned
        if pinned:
            for slot in range(count):
                self._pin(slot)

    def take(self) -> int | None:
        """A free slot for a worker to fill; None if the consumer holds more batches than expected."""
        self._empty_the_rest()
        for slot in range(self._kept):
            if self._is_free(slot):
                self._filling.add(slot)
                return slot
        return None

    def look_at(self, slot: int, samples: int) -> torch.Tensor:
        """The images in a slot that a worker has filled; it is in use until the tensor and its views are gone."""
        self._filling.discard(slot)
        self._empty_the_rest(but=slot)
        return torch.from_numpy(self._arrays[slot][:samples])

    def give_back_all(self) -> None:
        """Call when no slot is being filled: the workers are gone, or idle because the epoch was left."""
        self._filling.clear()
        if not self._pinned:
            self._emptied.clear()  # a worker may have been filling one

    def keep(self, count: int) -> None:
        """Uses only `count` slots from now on; the memory of the others returns to the system once they are free."""
        self._kept = max(1, min(count, len(self._arrays)))
        for slot in [slot for slot in self._emptied if slot < self._kept]:
            self._emptied.discard(slot)
            if self._pinned:
                self._pin(slot)
        self._empty_the_rest()

    def _is_free(self, slot: int) -> bool:
        return slot not in self._filling and sys.getrefcount(self._arrays[slot]) == _FREE_SLOT

    def _empty_the_rest(self, but: int | None = None) -> None:
        if self._kept + len(self._emptied) == len(self._arrays):
            return
        for slot in range(self._kept, len(self._arrays)):
            if slot != but and slot not in self._emptied and self._is_free(slot):
                if self._pinned:
                    torch.cuda.cudart().cudaHostUnregister(self._address(slot))  # type: ignore[no-untyped-call]
                # Takes the pages away from all processes at once; reads would return zeros, and the next write gets new
                # pages. If the system refuses, the slot merely stays as large as it was.
                _LIBC.madvise(
                    ctypes.c_void_p(self._address(slot)), ctypes.c_size_t(self._size), getattr(mmap, "MADV_REMOVE", 0)
                )
                self._emptied.add(slot)

    def _address(self, slot: int) -> int:
        return self.tensors[slot].data_ptr()

    def _pin(self, slot: int) -> None:
        # GPU only: page-locks the shared memory in place, so that nothing is copied into pinned memory.
        torch.cuda.cudart().cudaHostRegister(self._address(slot), self._size, 0)  # type: ignore[no-untyped-call]


def _shared(size: int) -> torch.Tensor:
    tensor: torch.Tensor = torch.empty(size, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
    return tensor
