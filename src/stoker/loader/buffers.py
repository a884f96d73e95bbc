"""Memory for batches, reused: a pool for threads, and slots shared with worker processes; page-locked for a GPU.

Fresh memory costs a page fault for every 4 KB, in kernel time that no thread can decode in; in shared memory that was a
fifth of the time of decoding.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.core.units import size_text

# What getrefcount returns for an array that only the pool holds: the list, the loop variable, the argument.
_FREE = 3
# The same for a slot: the list and the argument.
_FREE_SLOT = 2
_LIBC = ctypes.CDLL(None)
# From this size on numpy asks for huge pages, which make the first touch of a large buffer cheaper; so do we.
_HUGE_FROM = 1 << 22


def not_locked(reason: str) -> str:
    return (
        f"warning: pin_memory: batches could not be page-locked ({reason}), so copies to the GPU are slower; "
        "lower prefetch_factor if memory is short, or set pin_memory=false"
    )


class PageLock:
    """Page-locks memory that is already mapped, so that the GPU copies from it directly; undoes it exactly once.

    After the first failure it says so once, and all later memory stays pageable: correct, but slower.
    `cudart` is torch's binding of the CUDA runtime.
    """

    def __init__(self, say: Say = lambda _line: None, cudart: Any = None) -> None:
        self._say = say
        self._cudart = cudart
        self._locked: set[int] = set()
        # Re-entrant: the garbage collector may run `unlock` inside `unlock`.
        self._lock = threading.RLock()
        self._failed = False
        self._process = os.getpid()

    def is_locked(self, address: int) -> bool:
        return address in self._locked

    def lock(self, address: int, size: int) -> bool:
        with self._lock:
            if self._failed:
                return False
            assert address not in self._locked, "a range is locked once"
            reason = self._register(address, size)
            self._failed = reason is not None
            if reason is None:
                self._locked.add(address)
        if reason is not None:
            self._say(not_locked(reason))
        return reason is None

    def unlock(self, address: int) -> None:
        """Undoes `lock`; does nothing for a range that is not locked, or in a forked child."""
        # A forked child has a copy of all this, but not the CUDA context that the lock belongs to.
        if os.getpid() != self._process:
            return
        with self._lock:
            if address not in self._locked:
                return
            self._locked.discard(address)
            if int(self._cudart.cudaHostUnregister(address)) != 0:
                self._clear_error()

    def _register(self, address: int, size: int) -> str | None:
        """Registers the range with CUDA; returns the reason if that fails."""
        try:
            self._cudart = self._cudart or torch.cuda.cudart()  # type: ignore[no-untyped-call]
            code = self._cudart.cudaHostRegister(address, size, 0)
        except (RuntimeError, AssertionError) as error:  # no driver, or a torch without CUDA
            return str(error).splitlines()[0]
        if int(code) == 0:
            return None
        self._clear_error()
        return str(self._cudart.cudaGetErrorString(code))

    def _clear_error(self) -> None:
        """Clears the runtime's last error: otherwise torch would find it after the next kernel and blame that."""
        # torch 2.15 does not offer this call, but loads the runtime's library with global symbols.
        for library, name in (
            (self._cudart, "cudaGetLastError"), (_LIBC, "cudaGetLastError"), (_LIBC, "hipGetLastError")
        ):  # fmt: skip
            if hasattr(library, name):
                getattr(library, name)()
                return


class BufferPool:
    """Arrays of one shape; `get` returns one whose tensors and views are all gone, or a new one."""

    def __init__(self, *, pinned: bool = False, say: Say = lambda _line: None) -> None:
        self._pinned = pinned
        self._has_pinned = False
        self._say = say
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
        if self._has_pinned:
            torch._C._host_emptyCache()  # GPU only: torch would keep the page-locked memory

    def __len__(self) -> int:
        return len(self._arrays)

    def _allocate(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        if self._pinned:
            try:
                pinned: NDArray[np.uint8] = torch.empty(shape, dtype=torch.uint8, pin_memory=True).numpy()
                self._has_pinned = True
                return pinned
            except RuntimeError as error:  # no more page-locked memory, or no driver; torch has cleared CUDA's error
                self._pinned = False
                self._say(not_locked(str(error).splitlines()[0]))
        # Mapped, not from malloc, whose mmap threshold rises to the size of freed blocks: it returned none of twelve
        # buffers of 5 MB to the system after they were freed, allocated again and freed again.
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

    def __init__(self, count: int, shape: tuple[int, ...], *, page_lock: PageLock | None = None) -> None:
        self._size = int(np.prod(shape))
        try:
            fresh = (torch.empty(self._size, dtype=torch.uint8) for _ in range(count))
            self.tensors: list[torch.Tensor] = [one.share_memory_().view(shape) for one in fresh]  # type: ignore[no-untyped-call]
        except (RuntimeError, OSError) as error:
            raise no_shared_memory(count * self._size, error) from error
        self._arrays: list[NDArray[np.uint8]] = [tensor.numpy() for tensor in self.tensors]
        self._filling: set[int] = set()
        self._kept = count
        self._emptied: set[int] = set()
        self._page_lock = page_lock
        if page_lock is not None:
            for slot in range(count):
                # Every tensor of a slot holds its array, and the array holds the mapping: once it is freed, nobody
                # reads the memory any more, and it is still mapped. Registered memory that is unmapped stays locked
                # for good. Also called when the interpreter exits, and so after Ctrl-C.
                weakref.finalize(self._arrays[slot], page_lock.unlock, self._address(slot))
                page_lock.lock(self._address(slot), self._size)

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
        self._emptied.clear()  # a worker may have been filling one

    def keep(self, count: int) -> None:
        """Uses only `count` slots from now on; the memory of the others returns to the system once they are free."""
        before, self._kept = self._kept, max(1, min(count, len(self._arrays)))
        if self._page_lock is not None:
            for slot in range(before, self._kept):
                # One that is still in use, or was never free in between, is locked already.
                if not self._page_lock.is_locked(self._address(slot)):
                    self._page_lock.lock(self._address(slot), self._size)
        self._emptied = {slot for slot in self._emptied if slot >= self._kept}
        self._empty_the_rest()

    def close(self) -> None:
        """Frees the memory: each slot's at once if it is free, else when its last tensor is gone."""
        self._kept = 0
        self._arrays.clear()
        self.tensors.clear()  # the data set that is sent to workers holds the same list
        self._filling.clear()
        self._emptied.clear()

    def _is_free(self, slot: int) -> bool:
        return slot not in self._filling and sys.getrefcount(self._arrays[slot]) == _FREE_SLOT

    def _empty_the_rest(self, but: int | None = None) -> None:
        if self._kept + len(self._emptied) == len(self._arrays):
            return
        for slot in range(self._kept, len(self._arrays)):
            if slot != but and slot not in self._emptied and self._is_free(slot):
                if self._page_lock is not None:
                    self._page_lock.unlock(self._address(slot))
                # Removes the pages from all processes at once; reads would return zeros, and the next write gets new
                # pages. If the system refuses, the slot merely keeps its size.
                _LIBC.madvise(
                    ctypes.c_void_p(self._address(slot)), ctypes.c_size_t(self._size), getattr(mmap, "MADV_REMOVE", 0)
                )
                self._emptied.add(slot)

    def _address(self, slot: int) -> int:
        return self.tensors[slot].data_ptr()


def no_shared_memory(size: int, error: Exception) -> UserError:
    return UserError(
        "shm-full",
        f"/dev/shm has no room for {size_text(size)} of batches: {str(error).splitlines()[0]}",  # noqa: S108 - a name
        why="worker processes hand their batches over in shared memory",
        hint="loader=thread, or a lower prefetch_factor=; a container gets more by --shm-size",
    )
