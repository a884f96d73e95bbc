"""The process that talks to Weights & Biases: JSON lines in, notes for the user out.

The first line says which run it is; each further one is a row; `{"end": true}` finishes. It ends by itself
within seconds after the training process has died, however that died.
"""

from __future__ import annotations

import json
import netrc
import os
import select
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PROBE_S = 3.0
INIT_S = 20.0
GRACE_S = 2.0
"""What is left after the training process died: the rows are on disk, and `wandb sync` can send them."""


def main() -> int:
    training = os.getppid()
    # The cores belong to the steps and to the loader's workers; W&B's service inherits this.
    os.nice(10)
    threading.Thread(target=_leave_after, args=(training,), daemon=True).start()
    # Our own pipe to the training process; whatever else is printed here goes nowhere.
    notes = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 1)

    def tell(**message: str) -> None:
        notes.write(json.dumps(message) + "\n")

    rows = _messages(training)
    try:
        run = _start(next(rows), tell)
        for row in rows:
            run.log(row)
        run.finish()
    except StopIteration:
        pass
    except ImportError as error:
        tell(failed=f"the wandb package cannot be imported ({error}); pip install 'stoker[trackers]'")
    except Exception as error:
        tell(failed=f"{type(error).__name__}: {error}".splitlines()[0])
    return 0


def _start(hello: dict[str, Any], tell: Callable[..., None]) -> Any:
    """The run at W&B; WANDB_MODE=disabled never comes here."""
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode in ("offline", "dryrun"):
        why: str | None = f"WANDB_MODE={mode}"
    else:
        why = _why_offline(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai")
    run = None
    if why is None:
        try:
            run = _init(wandb, hello, "online")
        except Exception as error:
            why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            wandb.teardown()
    if run is None:
        run = _init(wandb, hello, "offline")
        folder = Path(run.dir).parent
        tell(folder=str(folder), note=f"offline ({why}); to send it later: wandb sync {folder}")
    else:
        tell(folder=str(Path(run.dir).parent), note=run.url)
    # Rows carry our own step: W&B's counter only grows, and would refuse what a resumed run does again.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def _init(wandb: Any, hello: dict[str, Any], mode: str) -> Any:
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
        project=hello["project"], name=hello["name"], id=hello["id"], dir=hello["folder"], config=hello["config"],
        resume="allow", mode=mode, settings=wandb.Settings(**known),
    )  # fmt: skip


def _why_offline(base_url: str) -> str | None:
    """Why nothing can be sent: no key, or nobody who answers; None where it can."""
    if not _has_key(base_url):
        return "no key: neither WANDB_API_KEY nor `wandb login`"
    try:
        # Whatever is answered, there is somebody.
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


def _messages(training: int) -> Iterator[dict[str, Any]]:
    """What the training process sends, until it says that it is done, or is no more."""
    buffer = b""
    while os.getppid() == training:
        if not select.select([0], [], [], 0.5)[0]:
            continue
        data = os.read(0, 65_536)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if message.get("end"):
                return
            yield message


def _leave_after(training: int) -> None:
    """Ends this process and W&B's service soon after the training process, even where W&B waits for a network."""
    while os.getppid() == training:
        time.sleep(0.25)
    time.sleep(GRACE_S)
    kill_tree(os.getpid())


def kill_tree(pid: int) -> None:
    """Ends a process and all that it started: W&B's service has a session of its own, which killpg does not reach."""
    doomed = [pid]
    for parent in doomed:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                doomed += [int(child) for child in children.read_text().split()]
    # Children first: this process may be the one at the top.
    for process in reversed(doomed):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
