"""Which store is being waited for, as all processes of a run see it: workers wait, and the main process says so.

A program with a progress line of its own shows `text` there and calls `told_elsewhere`; otherwise a thread says it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from stoker.core.console import say

SLOTS = 128
"""One for each process that may wait; if two share a slot, only a message is lost."""
SAID_AFTER_S = 2.0
SAID_EVERY_S = 10.0
_LOOK_EVERY_S = 0.5
_URL_BYTES = 248
_ENDPOINTS = 16
_FILE_VARIABLE = "STOKER_OUTAGES_FILE"


class _Slot(ctypes.Structure):
    _fields_ = (("since_s", ctypes.c_double), ("url", ctypes.c_char * _URL_BYTES))


class _State(ctypes.Structure):
    _fields_ = (("slots", _Slot * SLOTS), ("reached", ctypes.c_uint64 * _ENDPOINTS))


class Wait(NamedTuple):
    """A store that does not respond."""

    url: str
    since_s: float
    """Seconds since the first request that failed."""


_lock = threading.Lock()
_waits: list[tuple[float, str]] = []
_leaving = threading.Event()
_state: Any = _State()
_file: str | None = None
"""Where the state is, once it is shared."""
_is_told_elsewhere = False
_teller: threading.Thread | None = None


def shared() -> str | None:
    """The file that the state is in from now on, for `adopt` in a process that this one starts; None if there can be
    none."""
    global _state, _file
    with _lock, suppress(OSError):  # a limit on file sizes: then the others report nothing
        if _file is None:
            # In memory; its name leads there for as long as this process lives.
            number = os.memfd_create("stoker-outages")
            os.ftruncate(number, ctypes.sizeof(_State))
            kept, _state = _state, _mapped(number)
            ctypes.memmove(ctypes.addressof(_state), ctypes.addressof(kept), ctypes.sizeof(_State))
            _file = f"/proc/{os.getpid()}/fd/{number}"
    _tell()  # only the others may have to wait
    return _file


def adopt(file: str | None) -> None:
    """Makes this process report to, and see, the state of the process that started it; does nothing if that is gone."""
    global _state, _file
    if file is not None:
        with suppress(OSError, ValueError), Path(file).open("r+b") as opened:
            _state, _file = _mapped(opened.fileno()), file
        told_elsewhere()


def share_with_children() -> None:
    """Does the same for programs that are started with this process's environment, and call `adopt_from_parent`."""
    if (file := shared()) is not None:
        os.environ[_FILE_VARIABLE] = file


def adopt_from_parent() -> None:
    """Makes this program report to, and see, the state of the one that started it, if that asked for it."""
    adopt(os.environ.get(_FILE_VARIABLE))


def _mapped(number: int) -> _State:
    return _State.from_buffer(mmap.mmap(number, ctypes.sizeof(_State)))


def told_elsewhere() -> None:
    """Stops this process from printing by itself."""
    global _is_told_elsewhere
    _is_told_elsewhere = True


@contextmanager
def waiting(url: str, since_s: float) -> Iterator[None]:
    """Reports a wait for a store, since a moment of `time.monotonic`, which is the same in all processes."""
    mark = since_s, url
    _change(mark, begins=True)
    _tell()
    try:
        yield
    finally:
        _change(mark, begins=False)


def pause(seconds: float) -> bool:
    """Waits before the next attempt; False if the process is about to end, and should not retry."""
    return not _leaving.wait(seconds)


def leave() -> None:
    """Ends all waits of this process, whose loader is being closed."""
    if _waits:
        _leaving.set()


def abandon() -> None:
    """Reports that no reader will be waited for: the process is about to end."""
    _leaving.set()


def is_left() -> bool:
    """Whether to leave readers behind, because a store may not respond for minutes."""
    return _leaving.is_set() or current() is not None


def current() -> Wait | None:
    """The longest wait for a store, of any process of the run."""
    found = [(slot.since_s, slot.url) for slot in _state.slots if slot.since_s]
    if not found:
        return None
    since_s, url = min(found)
    return Wait(url.decode("utf-8", "replace"), time.monotonic() - since_s)


def text() -> str | None:
    """The same in words, once it has lasted long enough to be worth a message."""
    wait = current()
    return None if wait is None or wait.since_s < SAID_AFTER_S else f"waiting for {wait.url} since {wait.since_s:.0f} s"


def _tell() -> None:
    """Starts the thread that reports waits, unless another part of the program does."""
    global _teller
    with _lock:
        if not _is_told_elsewhere and _teller is None:
            _teller = threading.Thread(target=_say_waits, name="stoker-waiting", daemon=True)
            _teller.start()


def _say_waits() -> None:
    said, due_s = "", 0.0
    while not _is_told_elsewhere:
        time.sleep(_LOOK_EVERY_S)
        found, now_s = text(), time.monotonic()
        if found is None and said:
            say(f"{said}: it responds again" if not _leaving.is_set() else said)
            said, due_s = "", 0.0
        elif found is not None and now_s >= due_s:
            say(found)
            due_s = now_s + SAID_EVERY_S
        said = found or said


def note_reached(endpoint: str) -> None:
    """A process of this run has reached this endpoint: if it does not respond later, no setting is wrong."""
    if not was_reached(endpoint):
        mark = _mark(endpoint)
        with _lock:
            free = next((place for place, known in enumerate(_state.reached) if not known), 0)
            _state.reached[free] = mark


def was_reached(endpoint: str) -> bool:
    return _mark(endpoint) in list(_state.reached)


def _mark(endpoint: str) -> int:
    return xxhash.xxh3_64_intdigest(endpoint.encode()) or 1


def _change(mark: tuple[float, str], *, begins: bool) -> None:
    slot = _state.slots[os.getpid() % SLOTS]
    with _lock:
        (_waits.append if begins else _waits.remove)(mark)
        since_s, url = min(_waits) if _waits else (0.0, "")
        if url:
            slot.url = url.encode()[: _URL_BYTES - 1]
        slot.since_s = since_s
