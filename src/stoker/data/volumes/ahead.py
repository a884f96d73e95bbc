"""Reads regions of remote volumes before they are needed: a step's patches are known long before it is made.

Local volumes are not read ahead: copying from a mapping takes less than handing voxels from thread to thread.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.data.priority import step_back
from stoker.data.store.reader import HeldBack
from stoker.data.store.stores import is_url
from stoker.data.volumes.opening import OpenVolumes, VolumeRef
from stoker.data.volumes.volume import ArrayVolume, Region, Shape, Volume, Voxels

# Regions in flight, each of them many requests: first these few, then one more for each that has arrived. Without this
# the first batch, which is needed at once, would share the bandwidth with all that follow it.
FIRST_IN_FLIGHT = 4
MOST_IN_FLIGHT = 32
CLOSING_S = 5.0


@dataclass(frozen=True)
class Wanted:
    """A region that will be read; it may stick out of the volume."""

    ref: VolumeRef
    box: Region | None
    region: Region


class _Read:
    """A region that is to be read, is being read, or has been."""

    __slots__ = ("bytes", "done", "error", "is_dropped", "is_started", "voxels", "wanted")

    def __init__(self, wanted: Wanted, size: int) -> None:
        self.wanted = wanted
        self.bytes = size
        self.voxels: Voxels | None = None
        self.error: BaseException | None = None
        self.done = threading.Event()
        self.is_started = False
        self.is_dropped = False


class ReadAhead:
    """Reads announced regions with threads of its own, up to a number of bytes; for one process and all its threads."""

    def __init__(self, volumes: OpenVolumes, budget_bytes: int) -> None:
        self._volumes = volumes
        self._budget = budget_bytes
        self._most_in_flight = MOST_IN_FLIGHT
        self._lock = threading.Lock()
        self._work_to_do = threading.Condition(self._lock)
        self._queue: deque[_Read] = deque()
        self._known: dict[Wanted, deque[_Read]] = {}
        self._held = self._ready = 0
        self._in_flight = 0
        self._allowed = FIRST_IN_FLIGHT
        self._idle = 0
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        _open.add(self)

    @property
    def requests(self) -> int:
        """Regions under way at once, each of them many requests."""
        return self._most_in_flight

    @property
    def held_bytes(self) -> int:
        """Bytes of regions that are read, or being read, and not yet taken."""
        return self._held

    @property
    def ready_bytes(self) -> int:
        """Bytes of regions that are read and not yet taken."""
        return self._ready

    def allow(self, budget_bytes: int, requests: int) -> None:
        """Changes how much is read ahead, from the next region on."""
        with self._lock:
            self._budget, self._most_in_flight = budget_bytes, requests
            self._allowed = min(self._allowed, requests)
            self._wake_a_thread()

    def held_back_by(self) -> HeldBack | None:
        """What keeps it from reading more regions: its bytes are full, or as many as allowed are under way."""
        with self._lock:
            if not self._queue:
                return "lookahead_bytes" if self._in_flight else None
            if self._in_flight >= self._most_in_flight:
                return "requests"
            return "lookahead_bytes" if self._held and self._held + self._queue[0].bytes > self._budget else None

    def expect(self, wanted: Wanted, size: int) -> None:
        """Announces a region of about this many bytes; regions are read in the order of their announcements."""
        if not is_url(wanted.ref.location) or isinstance(self._volumes.opened(wanted.ref), ArrayVolume):
            return
        read = _Read(wanted, size)
        with self._lock:
            self._queue.append(read)
            self._known.setdefault(wanted, deque()).append(read)
            self._wake_a_thread()

    def volume(self, ref: VolumeRef, box: Region | None, region: Region) -> Volume:
        """The volume for reading that region of it, once; what was read ahead is handed over."""
        read = self._taken(Wanted(ref, box, region)) if is_url(ref.location) else None
        volume = self._volumes.get(ref, box)
        return volume if read is None else _AheadVolume(volume, read)

    def forget(self) -> None:
        """Drops what was announced and not taken."""
        with self._lock:
            for reads in self._known.values():
                for read in reads:
                    read.is_dropped = True
                    if read.done.is_set():
                        self._let_go(read)
            self._known.clear()
            self._queue.clear()
            self._allowed = FIRST_IN_FLIGHT

    def close(self) -> None:
        """Ends the threads, after what they are reading."""
        self.forget()
        with self._lock:
            self._is_closed = True
            self._work_to_do.notify_all()
        deadline = time.monotonic() + CLOSING_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        _open.discard(self)

    def _taken(self, wanted: Wanted) -> _Read | None:
        with self._lock:
            reads = self._known.get(wanted)
            if not reads:
                return None
            read = reads.popleft()
            if not reads:
                del self._known[wanted]
            read.is_dropped = True
            if not read.is_started:
                return None  # its turn has not come: the caller reads it now
            if read.done.is_set():
                self._let_go(read)
            self._wake_a_thread()
            return read

    def _let_go(self, read: _Read) -> None:
        self._held -= read.bytes
        self._ready -= read.bytes

    def _wake_a_thread(self) -> None:
        """Wakes or starts one thread if there is work; each that finds some wakes the next."""
        if not self._has_work():
            return
        if self._idle:
            self._work_to_do.notify()
        elif len(self._threads) < self._most_in_flight and not self._is_closed:
            thread = threading.Thread(target=self._work, name="stoker-volumes", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _has_work(self) -> bool:
        while self._queue and self._queue[0].is_dropped:
            self._queue.popleft()
        if not self._queue or self._in_flight >= self._allowed:
            return False
        # A region larger than the whole budget is read alone.
        return not self._held or self._held + self._queue[0].bytes <= self._budget

    def _next(self) -> _Read | None:
        with self._lock:
            while not self._is_closed:
                if self._has_work():
                    read = self._queue.popleft()
                    read.is_started = True
                    self._held += read.bytes
                    self._in_flight += 1
                    self._wake_a_thread()
                    return read
                self._idle += 1
                self._work_to_do.wait()
                self._idle -= 1
        return None

    def _work(self) -> None:
        step_back()
        while (read := self._next()) is not None:
            try:
                volume = self._volumes.get(read.wanted.ref, read.wanted.box)
                inside = read.wanted.region.within(volume.shape)
                read.voxels = volume.read(inside) if inside.voxels else None
            except BaseException as error:  # raised to who takes it
                read.error = error
            with self._lock:
                self._in_flight -= 1
                self._allowed = min(self._allowed + 1, self._most_in_flight)
                # Its bytes count until it is taken; if somebody waits for it already, or nobody will, until now.
                self._ready += read.bytes
                if read.is_dropped:
                    self._let_go(read)
                read.done.set()
                self._wake_a_thread()
            del read


@dataclass(frozen=True)
class _AheadVolume:
    """A volume of which one region is read already, or will be in a moment."""

    volume: Volume
    ahead: _Read

    @property
    def name(self) -> str:
        return self.volume.name

    @property
    def shape(self) -> Shape:
        return self.volume.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.volume.dtype

    @property
    def identity(self) -> str:
        return self.volume.identity

    @property
    def affine(self) -> NDArray[np.float64] | None:
        return self.volume.affine

    def read(self, region: Region, out: Voxels | None = None) -> Voxels:
        assert region == self.ahead.wanted.region.within(self.shape), "another region than was announced"
        self.ahead.done.wait()
        if self.ahead.error is not None:
            raise self.ahead.error
        found = self.ahead.voxels
        assert found is not None, "an empty region is never read"
        if out is None:
            return found
        out[...] = found
        return out


_open: weakref.WeakSet[ReadAhead] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # A thread that returns from native code while the interpreter shuts down is undefined behaviour.
    for ahead in list(_open):
        ahead.close()
