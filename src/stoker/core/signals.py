"""A scheduler's notice to leave (SIGTERM, SIGUSR1, …), handled from the first line of the program on.

Importing torch takes seconds, and a notice that arrives meanwhile would end the program silently, with the exit code
of the signal. Here it becomes a `Notice`, which unwinds like Ctrl-C. Training replaces these handlers by its own,
which save first (`stoker.train.launch`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from stoker.core.errors import EXIT_PREEMPTED, Preempted

PREEMPTING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
"""A scheduler's notice, or a terminal that was closed."""
PATIENCE_S = 5.0
"""After this long in C code, which no exception can leave (ranks that wait for each other), the process ends without
unwinding; and a repeated notice unwinds again."""

Handler = Callable[[int, FrameType | None], None]


class Notice(BaseException):
    """Somebody asked this process to leave. Not an Exception: libraries that try one import after another would take it
    for a failed import."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)

    def as_error(self) -> Preempted:
        """The same for the user."""
        return Preempted(
            "preempted", f"stopped by {self.signal.name}", hint="the same command starts again, or resumes"
        )


_raised_at_s: float | None = None
_heard: signal.Signals | None = None


def heard() -> signal.Signals | None:
    """The notice that has arrived since the program began: an exception in a callback or a finalizer is lost."""
    return _heard


@contextmanager
def listening_from_the_start() -> Iterator[None]:
    """Turns signals into a Notice inside the block; does nothing outside the main thread, which alone gets them."""
    global _heard, _raised_at_s
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _heard = _raised_at_s = None
    own = os.getpid()

    def note(number: int, _frame: FrameType | None) -> None:
        global _heard, _raised_at_s
        if os.getpid() != own:  # a forked worker, which is ended as any other process is
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        _heard = signal.Signals(number)
        if _raised_at_s is None or time.monotonic() - _raised_at_s > PATIENCE_S:
            _raised_at_s = time.monotonic()
            raise Notice(number)

    try:
        with _leaving_c_code(note), handling(note, PREEMPTING):
            yield
    finally:
        _heard = None  # for a program that calls us again


@contextmanager
def handling(handler: Handler, numbers: tuple[signal.Signals, ...]) -> Iterator[None]:
    """Handles these signals with this function inside the block."""
    before: dict[int, Any] = {}
    for number in numbers:
        # Under nohup SIGHUP is ignored, and must stay so.
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        # Whoever started us may have held them back until somebody listens (`blocked_until_heard`).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        yield
    finally:
        for taken, earlier in before.items():
            signal.signal(taken, earlier)


@contextmanager
def _leaving_c_code(handler: Handler) -> Iterator[None]:
    """Ends the process for a notice that the main thread does not get to, while `handler` is the one in charge."""
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(reading, True)
    earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def watch() -> None:
        while number := os.read(reading, 1):
            if signal.getsignal(number[0]) is not handler:
                continue
            deadline_s = time.monotonic() + PATIENCE_S
            while _heard is None and time.monotonic() < deadline_s:
                time.sleep(0.05)
            if _heard is None:
                from stoker.core.console import say_error

                say_error(Notice(number[0]).as_error())
                os._exit(EXIT_PREEMPTED)

    thread = threading.Thread(target=watch, name="notices", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        os.close(writing)  # ends the thread
        thread.join(PATIENCE_S)
        if not thread.is_alive():
            os.close(reading)


def blocked_until_heard() -> None:
    """For a process between fork and exec: holds notices back until its program listens."""
    with suppress(OSError, ValueError):
        signal.pthread_sigmask(signal.SIG_BLOCK, PREEMPTING)
