"""Files that a dataset opens for reading: their reads count as fetching, and their names name the samples."""

from __future__ import annotations

import builtins
import io
import os
from typing import Any

from stoker.attach.inside.stages import here
from stoker.attach.inside.targets import FETCH

_open = builtins.open
BINARY_READING = ("rb", "br")


class TimedFile(io.FileIO):
    """The file under what `open(path, "rb")` gives, with a clock on what really reads.

    Under the buffer, not in place of it: Pillow reads a JPEG's header in 40 small pieces, most of which come from the
    buffer; a clock on each of them took 0.2 ms a sample."""

    def readinto(self, buffer: Any, /) -> int | None:
        clock = here.clock
        if clock is None:
            return super().readinto(buffer)
        clock.enter(FETCH)
        try:
            return super().readinto(buffer)
        finally:
            clock.leave()

    def readall(self) -> bytes | None:  # type: ignore[override]
        clock = here.clock
        if clock is None:
            return super().readall()
        clock.enter(FETCH)
        try:
            return super().readall()
        finally:
            clock.leave()


def open_timed(*args: Any, **kwargs: Any) -> Any:
    """`open`, as it always was; inside the making of a batch, opening and reading count as fetching."""
    clock = here.clock
    if clock is None:
        return _open(*args, **kwargs)
    clock.enter(FETCH)
    try:
        # Only the plain case is ours: a path, for reading bytes, with the default buffer.
        if len(args) == 2 and not kwargs and args[1] in BINARY_READING and isinstance(args[0], (str, os.PathLike)):
            clock.opened = args[0]
            raw = TimedFile(args[0], "rb")
            size = getattr(raw, "_blksize", 0)  # as Python's own `open` chooses it
            return io.BufferedReader(raw, size if size > 1 else io.DEFAULT_BUFFER_SIZE)
        if args and isinstance(args[0], (str, os.PathLike)):
            clock.opened = args[0]
        return _open(*args, **kwargs)
    finally:
        clock.leave()


def take_over_open() -> None:
    """Puts our `open` in place of Python's; done in a process only once it makes batches."""
    if builtins.open is _open:
        for name in ("__module__", "__qualname__", "__name__", "__doc__", "__text_signature__"):
            if hasattr(_open, name):
                setattr(open_timed, name, getattr(_open, name))
        builtins.open = open_timed
        io.open = open_timed
