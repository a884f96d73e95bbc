"""Weights & Biases, in a child process.

Not in a thread: importing wandb holds Python's lock for seconds, its exit hooks wait for the network, and a process can
be killed where a thread cannot.
"""

from __future__ import annotations

import netrc
import os
import secrets
import string
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stoker.config import Config, config_values
from stoker.core.child import Child, ChildDied, ChildFailed, Parent
from stoker.core.errors import StokerError, UserError
from stoker.core.files import read_regular, write_text
from stoker.core.redact import redact
from stoker.run.folder import RunFolder
from stoker.run.metrics import metrics_of

PROBE_S = 3.0
INIT_S = 20.0
GRACE_S = 2.0
"""Time left after the training process died: the rows are on disk, and `wandb sync` can send them."""


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


# In the child process: it takes rows, and sends notes for the user.


def report_to_wandb(about: dict[str, Any], parent: Parent) -> None:
    """Starts or resumes the run at W&B and logs every row until the parent has no more."""
    # The cores belong to the steps and to the loader's workers; W&B's service inherits this.
    os.nice(10)
    try:
        import wandb
    except ImportError as error:
        seen = f"the wandb package cannot be imported ({error}); pip install 'stoker[trackers]'"
        raise UserError("wandb-not-importable", seen) from None
    run = _start(wandb, about, parent.send)
    for row in parent.messages():
        run.log(row)
    run.finish()


def _start(wandb: Any, about: dict[str, Any], tell: Callable[[dict[str, str]], None]) -> Any:
    """The run at W&B; with WANDB_MODE=disabled no process is started."""
    mode = os.environ.get("WANDB_MODE")
    if mode in ("offline", "dryrun"):
        why: str | None = f"WANDB_MODE={mode}"
    else:
        why = why_offline()
    run = None
    if why is None:
        try:
            run = _init(wandb, about, "online")
        except Exception as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            wandb.teardown()
    if run is None:
        run = _init(wandb, about, "offline")
        folder = Path(run.dir).parent
        tell({"folder": str(folder), "note": f"offline ({why}); to send it later: wandb sync {folder}"})
    else:
        tell({"folder": str(Path(run.dir).parent), "note": run.url})
    # Rows carry our own step: W&B's counter only grows, and would refuse the steps that a resumed run repeats.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _init(wandb: Any, about: dict[str, Any], mode: str) -> Any:
    wishes = {
        "console": "off",
        "silent": True,
        "init_timeout": INIT_S,
        "x_stats_pid": os.getppid(),  # how busy the training process is, not how busy this one is
        "disable_code": True,
        "save_code": False,
    }
    known = {name: value for name, value in wishes.items() if name in wandb.Settings.model_fields}
    return wandb.init(
        project=about["project"], name=about["name"], id=about["id"], dir=about["folder"], config=about["config"],
        resume="allow", mode=mode, settings=wandb.Settings(**known),
    )  # fmt: skip


def why_offline() -> str | None:
    """Why nothing can be sent (no key, no answer); None if it can. Takes a few seconds at most."""
    base_url = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    if not _has_key(base_url):
        return "no key: neither WANDB_API_KEY nor `wandb login`"
    try:
        # Any answer will do.
        urllib.request.urlopen(base_url, timeout=PROBE_S).close()  # noqa: S310
    except urllib.error.HTTPError:
        return None
    except (OSError, ValueError) as error:
        return f"{base_url} does not answer: {getattr(error, 'reason', error)}"
    return None


def _has_key(base_url: str) -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        known = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return known.authenticators(urlsplit(base_url).hostname or "") is not None
