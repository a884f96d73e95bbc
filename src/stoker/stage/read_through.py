"""Reads whole files with many threads and throws the bytes away, so that a lazy file system has fetched them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stoker.stage.concurrency import RateLimit

READERS = 32
CHUNK = 1 << 20
TICK_S = 0.1


class Allowance:
    """At most so many bytes a second, for all threads together; None: no limit."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._limit = RateLimit(bytes_per_second)
        self._lock = threading.Lock()
        self.chunk = CHUNK if not bytes_per_second else min(CHUNK, max(4096, int(bytes_per_second / READERS)))
        """Bytes of one read: the slower, the smaller, so that no thread waits for longer than a second."""

    def reserve(self, size: int) -> float:
        """Seconds to wait before these bytes may be used."""
        with self._lock:
            wait_s = self._limit.wait_s()
            self._limit.take(size)
        return wait_s


@dataclass
class _Shared:
    """What the threads and their caller both see."""

    waiting: deque[int]
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    read_bytes: int = 0
    ended: dict[int, str | None] = field(default_factory=dict)
    """By file: None, or why it could not be read."""


def read_through(
    paths: Sequence[bytes],
    allowance: Allowance,
    *,
    readers: int = READERS,
    stall_s: float,
    progress: Callable[[int, int], None],
) -> dict[bytes, str]:
    """Reads every file once; returns those that could not be read, with the reason.

    `progress` gets the files and bytes read so far. When not a byte arrives for `stall_s`, the rest counts as not read.
    """
    shared = _Shared(deque(range(len(paths))))
    for _ in range(min(readers, len(paths))):
        # Daemons: a read that a dead server never answers must not keep the program from ending.
        threading.Thread(target=_read_files, args=(paths, allowance, shared), daemon=True).start()
    try:
        _wait(shared, len(paths), stall_s, progress)
    finally:
        shared.stop.set()
    with shared.lock:
        ended = dict(shared.ended)
    never = f"not a byte for {stall_s:.0f} s"
    return {path: reason for number, path in enumerate(paths) if (reason := ended.get(number, never)) is not None}


def _wait(shared: _Shared, files: int, stall_s: float, progress: Callable[[int, int], None]) -> None:
    before, since = (-1, -1), time.monotonic()
    while True:
        with shared.lock:
            now = (len(shared.ended), shared.read_bytes)
        progress(*now)
        if now[0] == files:
            return
        if now != before:
            before, since = now, time.monotonic()
        elif time.monotonic() - since > stall_s:
            return
        shared.stop.wait(TICK_S)


def _read_files(paths: Sequence[bytes], allowance: Allowance, shared: _Shared) -> None:
    buffer = bytearray(allowance.chunk)
    while not shared.stop.is_set():
        with shared.lock:
            if not shared.waiting:
                return
            number = shared.waiting.popleft()
        reason: str | None = None
        try:
            _read_file(paths[number], buffer, allowance, shared)
        except OSError as error:
            reason = error.strerror or str(error)
        with shared.lock:
            shared.ended[number] = reason


def _read_file(path: bytes, buffer: bytearray, allowance: Allowance, shared: _Shared) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        left = os.fstat(descriptor).st_size
        while left > 0:
            if shared.stop.wait(allowance.reserve(min(left, len(buffer)))):
                return
            size = os.readv(descriptor, [buffer])
            if size == 0:
                return  # it has become shorter
            left -= size
            with shared.lock:
                shared.read_bytes += size
    finally:
        os.close(descriptor)
