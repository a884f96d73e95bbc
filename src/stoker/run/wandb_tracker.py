"""Weights & Biases, in a child process.

Not in a thread: importing wandb holds Python's lock for seconds, its exit hooks wait for the network, and a process can
be killed where a thread cannot.
"""

from __future__ import annotations

import os
import secrets
import string
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.child import Child, ChildDied, ChildFailed
from stoker.config import Config, config_values
from stoker.errors import StokerError
from stoker.files import read_regular, write_text
from stoker.redact import redact
from stoker.run.folder import RunFolder
from stoker.run.metrics import metrics_of
from stoker.run.wandb_process import GRACE_S, report_to_wandb


class WandbTracker:
    """Online if there is a key and a network, offline otherwise; a resumed run keeps its id."""

    name = "W&B"

    def __init__(self, config: Config, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._say = say
        self._about = {
            "id": run_id(folder.wandb_id_file),
            "project": config.wandb_project,
            "name": config.wandb_name or folder.root.name,
            "folder": str(folder.root.resolve()),
            "config": redact(config_values(config)),
        }
        self._child: Child | None = None
        self._listener = threading.Thread(target=self._listen, name="W&B's notes", daemon=True)
        self._failure: Exception | None = None
        self._kept_in: str | None = None
        self._abandoned = False

    def open(self) -> None:
        self._child = Child(report_to_wandb, self._about, grace_s=GRACE_S)
        self._listener.start()
        if self._abandoned:
            self._child.end(at_once=True)

    def log(self, record: Mapping[str, Any]) -> None:
        assert self._child is not None
        try:
            self._child.send({"step": record["step"], "epoch": record["epoch"], **metrics_of(record)})
        except ChildDied as died:
            self._listener.join(1.0)
            raise self._failure or died from None

    def close(self) -> None:
        assert self._child is not None
        self._child.finish()
        self._listener.join()
        self._child.end()
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> str | None:
        self._abandoned = True
        if self._child is not None:
            self._child.end(at_once=True)
        return f"to send the rest: wandb sync {self._kept_in}" if self._kept_in else None

    def _listen(self) -> None:
        assert self._child is not None
        try:
            self._child.wait(self._hear)
        except (StokerError, ChildFailed) as error:
            self._failure = error

    def _hear(self, message: dict[str, str]) -> None:
        self._kept_in = message["folder"]
        self._say(f"{self.name}: {message['note']}")


def run_id(file: Path) -> str:
    """The run's id at W&B, which a resumed run keeps."""
    with suppress(OSError, ValueError):
        known = read_regular(file, 1000).decode().strip()
        if known:
            return known
    letters = string.ascii_lowercase + string.digits
    new = os.environ.get("WANDB_RUN_ID") or "".join(secrets.choice(letters) for _ in range(8))
    write_text(file, new + "\n")
    return new
