"""The lease of a run folder: at most one process works there, and a crash frees it.

A POSIX record lock decides: the kernel drops it with the process, however that ends, and worker processes that outlive
a killed parent do not inherit it. On file systems whose locks do not reach other machines (Lustre mounted with
localflock, some NFS), the heartbeat in the file decides: a lease of another host that was renewed within the last
minute counts as held.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.core.errors import UserError
from stoker.run.json_lines import number, parse_line

HEARTBEAT_S = 15.0
# Four missed heartbeats: longer than a stalled shared file system, shorter than a person waits.
STALE_AFTER_S = 60.0

_FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: type, whence, start, length, process."""

# POSIX locks never conflict within one process, so we keep track of our own leases.
_held: set[str] = set()


class LeaseHeld(UserError):
    """Another process works in this folder."""


class Lease:
    """The exclusive right to write to a folder, until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stop = threading.Event()
        self._descriptor: int | None = None

    def acquire(self) -> Lease:
        name = os.path.realpath(self.path)
        if name in _held:
            raise self._refusal({"host": socket.gethostname(), "pid": os.getpid()})
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._lock(descriptor)
            holder = _read(descriptor)
            if _alive_elsewhere(holder):
                raise self._refusal(holder)
            _write(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        _held.add(name)
        self._descriptor = descriptor
        threading.Thread(target=self._beat, name="lease-heartbeat", daemon=True).start()
        return self

    def release(self) -> None:
        """Releases the lease; safe to call twice."""
        self._stop.set()
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
        os.close(descriptor)  # drops the lock
        _held.discard(os.path.realpath(self.path))

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            raise self._refusal(_read(descriptor)) from None
        except OSError:
            pass  # no locks on this file system: the heartbeat alone decides

    def _beat(self) -> None:
        pid = os.getpid()
        while not self._stop.wait(HEARTBEAT_S):
            descriptor = self._descriptor
            if descriptor is None or os.getpid() != pid:
                return
            with suppress(OSError):
                _write(descriptor)

    def _refusal(self, holder: dict[str, Any]) -> LeaseHeld:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', 'an unknown host')}"
        return LeaseHeld(
            "run-folder-busy",
            f"{self.path.parent} is in use by {who}",
            why="two runs in one folder would overwrite each other's checkpoints",
            hint="run_name=ANOTHER_NAME    # or stop the other run first",
        )


def _alive_elsewhere(holder: dict[str, Any]) -> bool:
    """Whether a lease that is not locked here is being renewed by another host."""
    if holder.get("host") in (None, socket.gethostname()):
        return False  # on this host the lock has already decided
    return time.time() - (number(holder, "renewed") or 0.0) < STALE_AFTER_S


def _read(descriptor: int) -> dict[str, Any]:
    try:
        return parse_line(os.pread(descriptor, 4096, 0)) or {}
    except OSError:
        return {}  # a pipe or a device, not a file


def _write(descriptor: int) -> None:
    record = {"host": socket.gethostname(), "pid": os.getpid(), "renewed": time.time()}
    data = json.dumps(record).encode()
    os.pwrite(descriptor, data, 0)
    os.ftruncate(descriptor, len(data))


def is_held(lease_file: Path) -> bool:
    """Whether a process works in the folder now."""
    holder, locked = _look(lease_file)
    if locked is not None and holder.get("host") == socket.gethostname():
        return locked
    # Another host's lock may not reach us, but its heartbeat does.
    renewed = number(holder, "renewed")
    return renewed is not None and abs(time.time() - renewed) < STALE_AFTER_S


def is_locked(path: Path) -> bool:
    """Whether a process of this host holds a record lock on the file, whatever is in it."""
    return bool(_look(path)[1])


def _look(path: Path) -> tuple[dict[str, Any], bool | None]:
    """What a lease says about its holder, and whether a process of this host has locked it; None if the kernel does not
    say. Asks without taking the lock: a run that starts at that moment must not be refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return {}, False
    try:
        holder = _read(descriptor)
        if sys.platform != "linux":
            return holder, None
        # We ask about a shared lock: the descriptor is read-only, and the trainer's exclusive lock conflicts with it.
        question = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
        return holder, bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
    except OSError:
        return holder, None
    finally:
        os.close(descriptor)
