"""The log of an error that should not have happened: versions, command, config, traceback; no secrets."""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.environment import describe_environment
from stoker.redact import redact_text

if TYPE_CHECKING:
    from stoker.config import Config

_config_in_use: Config | None = None


def remember_config(config: Config) -> None:
    """Keeps the config that the current command works with, for the log of a crash."""
    global _config_in_use
    _config_in_use = config


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
    if _config_in_use is not None:
        from stoker.config import config_as_yaml

        parts.append(config_as_yaml(_config_in_use, "the resolved config"))
    return "\n".join(parts)
