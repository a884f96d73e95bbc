"""Looks at the stack of the thread that prepares batches, some forty times a second: which line of the user's code
takes the time, and which library function it calls there.

A second thread only runs when it gets Python's lock. A C function that keeps the lock delays the look until it returns;
Python then switches threads at that very call, so the look still sees it, and counts for the time by which it was late.
"""

from __future__ import annotations

import _thread
import atexit
import os
import sys
import time
from types import CodeType, FrameType
from typing import Any

from stoker.attach import ring
from stoker.attach.stage_clock import StageClock

# Different intervals in turn: with a single one, a loop of the same period would always be seen at the same line.
INTERVALS_S = (0.021, 0.029, 0.024, 0.031, 0.022)
# A look takes 2 µs, waking up for it and getting Python's lock 50 to 100. After a thousand looks a share is known to
# within 2 %; from then on they are rarer, for runs of hours.
MANY_LOOKS, THEN_RARER = 1000, 4
# Sorting and writing the spots takes 60 µs.
WRITE_EVERY_NS = 250_000_000
MOST_SPOTS = 2000
MOST_CODES = 10_000
DEEPEST = 200

OURS, LIBRARY, USERS = range(3)
_OUR_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep  # noqa: PTH100, PTH120 - pathlib is slow to import
_PACKAGE = os.path.dirname(os.path.dirname(_OUR_FOLDER)) + os.sep  # noqa: PTH120
# What measures is not the user's, and not a library that the user could leave out.
_MEASURING = (_OUR_FOLDER, os.path.join(_PACKAGE, "profile") + os.sep)  # noqa: PTH118
_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, _PACKAGE)  # noqa: PTH120
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
# Names of functions that only call another one.
PASSING_ON = frozenset(
    {"wrapper", "wrapped", "inner", "decorated", "decorator", "func", "fun", "call", "__call__", "forward"}
)

# Our own functions around the user's: frames further out are torch, or the training loop.
OUR_ENDS = frozenset({"fetch", "timed_collate", "__getitem__", "__getitems__", "__next__"})

Spot = tuple[CodeType, int, str]
"""The user's function, the line in it, and the library function that is called there, or an empty string."""
NAMES_BYTES = 244
MOST_LETTERS = 80


class Spots:
    """The time of preparing batches by line of the user's code, with the largest ones in a file's header."""

    def __init__(self, memory: Any, clock: StageClock) -> None:
        self._memory = memory
        self.clock = clock
        self._taken: dict[Spot, int] = {}
        self._written_ns = 0
        self.sampled_ns = self.looks = 0

    def add(self, spot: Spot, took_ns: int, now_ns: int) -> None:
        """Counts a look, with the time that it stands for."""
        self.sampled_ns += took_ns
        self.looks += 1
        if spot in self._taken or len(self._taken) < MOST_SPOTS:
            self._taken[spot] = self._taken.get(spot, 0) + took_ns
        if now_ns - self._written_ns > WRITE_EVERY_NS:
            self._written_ns = now_ns
            self._write()

    def _write(self) -> None:
        rows = []
        for (code, line, callee), took_ns in sorted(self._taken.items(), key=lambda item: -item[1])[: ring.SPOTS.count]:
            names = f"{_name(code)}\t{callee or ''}\t".encode(errors="replace")
            path = os.fsencode(os.path.abspath(code.co_filename))  # noqa: PTH100
            # The end of a path tells more than its beginning.
            rows.append((took_ns, line, names + path[-max(1, NAMES_BYTES - len(names)) :]))
        ring.SPOTS.write(self._memory, rows)


def _name(code: CodeType) -> str:
    return str(getattr(code, "co_qualname", code.co_name)).replace("<locals>.", "")[:MOST_LETTERS]


def _public_name(frame: FrameType) -> str:
    """scipy.ndimage.median_filter for what is defined in scipy.ndimage._filters: as a user would import it."""
    name, parts = _name(frame.f_code), str(frame.f_globals.get("__name__", "")).split(".")
    for count in range(1, len(parts) + 1):
        module = sys.modules.get(".".join(parts[:count]))
        if module is not None and name.split(".")[0] in vars(module):
            return ".".join([*parts[:count], name])[:MOST_LETTERS]
    return ".".join([part for part in parts if not part.startswith("_")] + [name])[:MOST_LETTERS]


class Sampler:
    """A thread that looks at the one that prepares batches; there is one in a process."""

    def __init__(self) -> None:
        self.thread = 0
        """The thread that is preparing a batch; 0 between batches."""
        self.began_ns = 0
        self.spots: Spots | None = None
        self._waits = self._looks = 0
        self._kinds: dict[CodeType, tuple[int, bool]] = {}
        self._names: dict[CodeType, str] = {}
        self._stop: _thread.LockType | None = None
        self._ended: _thread.LockType | None = None

    def begin(self, spots: Spots, began_ns: int) -> None:
        """This thread prepares a batch from here on, until `thread` is 0 again."""
        self.spots, self.began_ns = spots, began_ns
        self.thread = _thread.get_ident()

    def start(self) -> None:
        """Starts looking, once. The thread is not one of `threading`: a script sees the threads that it started."""
        if self._stop is not None:
            return
        self._stop, self._ended = _thread.allocate_lock(), _thread.allocate_lock()
        self._stop.acquire()
        self._ended.acquire()
        _thread.start_new_thread(self._look_again_and_again, (self._stop, self._ended))

    def stop(self) -> None:
        """Ends the thread, within a fraction of a millisecond."""
        stop, ended = self._stop, self._ended
        self._stop = self._ended = None
        if stop is not None and ended is not None:
            stop.release()
            ended.acquire(timeout=1.0)

    def forget(self) -> None:
        """After a fork: the thread stayed in the parent."""
        self.__init__()  # type: ignore[misc]

    def _look_again_and_again(self, stop: _thread.LockType, ended: _thread.LockType) -> None:
        try:
            while True:
                interval_s = INTERVALS_S[self._waits % len(INTERVALS_S)]
                interval_s *= 1 if self._looks < MANY_LOOKS else THEN_RARER
                self._waits += 1
                due_ns = time.perf_counter_ns() + int(interval_s * 1e9)
                if stop.acquire(timeout=interval_s):
                    return
                if self.thread and self.spots is not None:
                    self._look(int(interval_s * 1e9), due_ns)
        except Exception:  # noqa: S110 - without looks there are no spots, and the script goes on
            pass
        finally:
            ended.release()

    def _look(self, interval_ns: int, due_ns: int) -> None:
        thread, spots, began_ns, now_ns = self.thread, self.spots, self.began_ns, time.perf_counter_ns()
        self._looks += 1
        frame = sys._current_frames().get(thread)
        if frame is None or spots is None:
            return
        found = self._spot(frame, spots.clock.calling)
        if found is not None and self.thread == thread:
            # How late we are is time of this batch too, as far as it had begun.
            late_ns = max(0, min(now_ns - due_ns, now_ns - began_ns))
            spots.add(found, interval_ns + late_ns, now_ns)

    def _spot(self, innermost: FrameType, calling: str) -> Spot | None:
        """The innermost line of the user's code, and the library function that it has called."""
        frame: FrameType | None = innermost
        called = public = outermost = None
        for _ in range(DEEPEST):
            if frame is None:
                break
            code = frame.f_code
            kind, is_public = self._kind(code)
            if kind == USERS:
                # A function written in C has no frame; we know its name if it is timed.
                return code, frame.f_lineno, self._named(public or called) or calling
            if kind == LIBRARY:
                # Going outwards, the last one found is the one that was called first.
                called = outermost = frame
                public = frame if is_public else public
            elif code.co_name in OUR_ENDS:
                break
            frame = frame.f_back
        # No line of the user's: a data set that belongs to a library.
        return None if outermost is None else (outermost.f_code, outermost.f_lineno, "")

    def _named(self, frame: FrameType | None) -> str:
        if frame is None:
            return ""
        name = self._names.get(frame.f_code)
        if name is None:
            name = self._names[frame.f_code] = _public_name(frame)
        return name

    def _kind(self, code: CodeType) -> tuple[int, bool]:
        """Whose code it is, and whether its name means something to a user."""
        known = self._kinds.get(code)
        if known is None:
            path, name = code.co_filename, code.co_name
            if path.startswith(_MEASURING):
                kind = OURS
            elif path.startswith("<frozen") or any(part in path for part in _INSTALLED) or path.startswith(_LIBRARIES):
                kind = LIBRARY
            else:
                kind = USERS
            known = kind, name not in PASSING_ON and not name.startswith(("_", "<"))
            if len(self._kinds) < MOST_CODES:
                self._kinds[code] = known
        return known


sampler = Sampler()


def survive_forks() -> None:
    """Stops the thread around a fork (Python warns of forks of a process with threads), and at the end."""
    running = [False]

    def before() -> None:
        running[0] = sampler._stop is not None
        sampler.stop()

    def in_parent() -> None:
        if running[0]:
            sampler.start()

    os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=sampler.forget)
    atexit.register(sampler.stop)
