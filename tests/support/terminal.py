"""A pseudo-terminal, for programs whose output differs on one."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path
from threading import Thread


def on_a_terminal(*command: str | Path) -> tuple[int, str]:
    """The exit code and the output of a program whose stdin, stdout and stderr are a terminal."""
    ours, theirs = pty.openpty()
    parts: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 65_536):
                parts.append(data)
        except OSError:  # how Linux reports that the other end is closed
            pass

    # In a thread: an unread terminal is full after 4 KB, and the program would block.
    reader = Thread(target=read)
    reader.start()
    try:
        done = subprocess.run(
            [*map(str, command)], stdin=theirs, stdout=theirs, stderr=theirs,
            env=os.environ | {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"},
        )  # fmt: skip
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return done.returncode, b"".join(parts).decode()
