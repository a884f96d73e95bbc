"""What staging passes around: a file of the source, and what happens to it."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Protocol

from stoker.data.store.copy_manifest import CopiedFile
from stoker.data.store.local_copy import LocalCopy
from stoker.errors import UserError


class SourceFile(NamedTuple):
    """A file of the source as it was listed."""

    path: str
    size: int
    version: str
    """Its ETag, or a file's time of last change; "" if the store has none."""


class Events(Protocol):
    """Who is told what happens while files are copied; called from any thread."""

    def done(self, file: SourceFile, record: CopiedFile) -> None:
        """A file is complete under its own name."""
        ...

    def failed(self, file: SourceFile, reason: str) -> None:
        """A file could not be copied, and is not tried again in this run."""
        ...

    def retried(self, reason: str) -> None:
        """A request failed and is made again."""
        ...


Tick = Callable[[], None]
"""Called a few times a second while files are copied; may raise to stop."""


class writing:  # noqa: N801 - reads as a statement
    """Within it, an OSError is the target's, not the source's: it ends the run with an error that says so."""

    def __init__(self, copy: LocalCopy) -> None:
        self._copy = copy

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, OSError):
            raise target_failed(self._copy.folder, error) from None


def target_failed(folder: str, error: OSError) -> UserError:
    """The error if the copy cannot be written to."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            "disk-full",
            f"the disk of {folder} is full: {error.strerror}",
            why="what was copied so far is whole and stays; nothing is half-written",
            hint="free some space or choose a part (--classes), then run the same command again: it continues",
        )
    return UserError(
        "copy-not-writable",
        f"{folder} cannot be written to: {error.strerror or error}",
        why="what was copied so far is whole and stays",
        hint=f"ls -ld {folder}",
    )


def jitter(least: float, most: float) -> float:
    """A number between these two, so that clients which failed together do not come back together."""
    return random.uniform(least, most)  # noqa: S311
