"""The log of an error that should not have happened: versions, command, config, traceback; no secrets."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path

from stoker.environment import describe_environment
from stoker.redact import redact_text


def write_crash_log(error: BaseException) -> Path | None:
    """Writes the log to the first place that takes it, and says where; None where no place did."""
    text = redact_text(_log_text(error))
    for folder in _folders():
        path = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError:
            continue
        return path
    return None


def _folders() -> list[Path]:
    state = os.environ.get("XDG_STATE_HOME")
    home = Path(state) if state else Path("~/.local/state").expanduser()
    return [home / "stoker", Path(tempfile.gettempdir()) / "stoker"]


def _log_text(error: BaseException) -> str:
    parts = ["".join(traceback.format_exception(error)), json.dumps(describe_environment(), indent=2)]
    loading = sys.modules.get("stoker.config.loading")  # imported only where a command has read a config
    config = None if loading is None else loading.config_in_use()
    if config is not None:
        from stoker.config import config_as_yaml

        parts.append(config_as_yaml(config, "the resolved config"))
    return "\n".join(parts)
