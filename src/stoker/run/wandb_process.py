"""The part of the W&B tracker that runs in a child process: it takes rows, and sends notes for the user."""

from __future__ import annotations

import netrc
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from stoker.child import Parent
from stoker.errors import UserError

PROBE_S = 3.0
INIT_S = 20.0
GRACE_S = 2.0
"""Time left after the training process died: the rows are on disk, and `wandb sync` can send them."""


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
