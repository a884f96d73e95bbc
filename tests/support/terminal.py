"""A terminal for programs that look different on one."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path
from threading import Thread


def on_a_terminal(*command: str | Path) -> tuple[int, str]:
    """The exit code of a program and what it shows; all of it reads from and writes to the terminal."""
    ours, theirs = pty.openpty()
    parts: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(ours, 65_536):
                parts.append(data)
        except OSError:  # how Linux says that the other side is closed
            pass

    # Beside the program: a terminal that nobody reads is full after 4 KB, and the program waits.
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
