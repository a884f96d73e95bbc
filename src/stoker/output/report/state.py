"""Whether a run is going on, has ended, or was left: read without touching its lease."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from stoker.lease import STALE_AFTER_S

State = Literal["running", "finished", "stopped"]

_FLOCK = "hhqqi4x"
"""struct flock of 64-bit Linux: type, whence, start, length, process."""


def is_held(lease_file: Path) -> bool:
    """Whether a process works in the folder now. Asks the kernel who holds the lock, and never takes it: a run that
    starts in that moment must not be refused."""
    try:
        descriptor = os.open(lease_file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        holder = _holder(os.pread(descriptor, 4096, 0))
        if holder.get("host") == socket.gethostname() and sys.platform == "linux":
            with suppress(OSError):
                return _is_locked(descriptor)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    # Another host's lock may not reach us: its heartbeat does.
    renewed = holder.get("renewed")
    return isinstance(renewed, (int, float)) and abs(time.time() - renewed) < STALE_AFTER_S


def _is_locked(descriptor: int) -> bool:
    # A shared lock is asked for: the descriptor can only read, and the trainer's exclusive one conflicts with it.
    question = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
    return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)


def _holder(text: bytes) -> dict[str, Any]:
    try:
        holder = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        return {}
    return holder if isinstance(holder, dict) else {}
