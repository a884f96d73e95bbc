"""Memory for batches that is used again once nobody looks at it any more.

A fresh buffer costs a page fault for every 4 KB of it, in kernel time that no thread can decode in.
"""

from __future__ import annotations

import mmap
import sys
import threading
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray

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
