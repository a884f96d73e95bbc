"""logs/train_<time>.log: everything that training said, as plain lines with the time before them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TextIO

from stoker.redact import redact_text


class TrainLog:
    """A line is in the file when `write` returns; a disk that takes no more is no reason to stop training."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self._stream = _new_file(folder)

    def write(self, text: str) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            for line in redact_text(text).splitlines():
                self._stream.write(f"{when} {line}\n" if line else "\n")
        except (OSError, ValueError):
            return

    def close(self) -> None:
        try:
            self._stream.close()
        except OSError:
            return


def _new_file(folder: Path) -> tuple[Path, TextIO]:
    stem = f"train_{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = folder / (f"{stem}.log" if number == 1 else f"{stem}-{number}.log")
        try:
            return path, path.open("x", encoding="utf-8", buffering=1)
        except FileExistsError:
            number += 1
