"""Weights & Biases, in a process of its own that is fed through a pipe.

Not in a thread: its import takes seconds of Python's one lock, its own exit hooks wait for the network, and a
process can be ended where a thread cannot.
"""

from __future__ import annotations

import json
import os
import secrets
import string
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.config import Config, config_values
from stoker.files import write_text
from stoker.redact import redact
from stoker.run.folder import RunFolder
from stoker.run.metrics import metrics_of
from stoker.run.wandb_process import kill_tree


class WandbTracker:
    """Online where there is a key and a network, offline otherwise; the same run after a resume."""

    name = "W&B"

    def __init__(self, config: Config, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._say = say
        self._hello = {
            "id": run_id(folder.wandb_id_file),
            "project": config.wandb_project,
            "name": config.wandb_name or folder.root.name,
            "folder": str(folder.root.resolve()),
            "config": redact(config_values(config)),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None
        self._failure: str | None = None
        self._kept_in: str | None = None
        self._abandoned = False

    def open(self) -> None:
        # -P: a folder named wandb lies in many a working folder, and is not the package.
        # A session of its own: Ctrl-C is for the training, which then closes its trackers in order.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "stoker.run.wandb_process"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, name="W&B's notes", daemon=True)
        self._listener.start()
        self._send(self._hello)
        if self._abandoned:
            self._kill()

    def log(self, record: Mapping[str, Any]) -> None:
        self._send({"step": record["step"], "epoch": record["epoch"], **metrics_of(record)})

    def close(self) -> None:
        assert self._process is not None
        assert self._listener is not None
        # Said, not only closed: a forked worker may hold the pipe open as well.
        self._send({"end": True})
        self._process.wait()
        self._listener.join(1.0)
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def abandon(self) -> str | None:
        self._abandoned = True
        self._kill()
        return f"to send the rest: wandb sync {self._kept_in}" if self._kept_in else None

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            if self._listener is not None:
                self._listener.join(1.0)
            raise RuntimeError(self._failure or "its process has ended") from None

    def _listen(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(ValueError):
                message = json.loads(line)
                if "note" in message:
                    self._say(f"{self.name}: {message['note']}")
                self._kept_in = message.get("folder", self._kept_in)
                self._failure = message.get("failed", self._failure)

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            kill_tree(self._process.pid)
            self._process.wait()


def run_id(file: Path) -> str:
    """The run's id at W&B: the one it was given first, so that a resumed run goes on under it."""
    with suppress(FileNotFoundError):
        known = file.read_text(encoding="utf-8").strip()
        if known:
            return known
    letters = string.ascii_lowercase + string.digits
    new = os.environ.get("WANDB_RUN_ID") or "".join(secrets.choice(letters) for _ in range(8))
    write_text(file, new + "\n")
    return new
