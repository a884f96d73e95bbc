"""Loads the config that a command works with, and says what is odd about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stoker.config import Resolved, load_config
from stoker.output.crash_log import remember_config
from stoker.output.text import say_warnings


def load_for_command(path: Path | None, overrides: Sequence[str] | None, set_options: Sequence[str] | None) -> Resolved:
    """The config of file and overrides; warnings go to stderr; a later crash will show it in its log."""
    resolved = load_config(path, [*(overrides or ()), *(set_options or ())])
    remember_config(resolved.config)
    say_warnings(resolved.warnings)
    return resolved
