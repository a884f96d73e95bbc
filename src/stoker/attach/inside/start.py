"""Hangs the clock into this process: now for what is imported, and on import for what is not yet."""

from __future__ import annotations

import os
from contextlib import suppress

from stoker.attach.inside import session
from stoker.attach.inside.import_hook import patch_on_import


def start_from_environment() -> None:
    """Starts in a process that run_attached or a watching parent has started; else does nothing."""
    folder = os.environ.get(session.FOLDER_VARIABLE)
    # A process that outlives the doctor finds the folder gone and is left alone.
    if folder and os.path.isdir(folder):  # noqa: PTH112 - in every Python process of the script: few imports
        start(folder, _number(session.STEPS_VARIABLE), _number(session.SECONDS_VARIABLE))


def start(folder: str, steps: float | None = None, seconds: float | None = None) -> session.Session:
    """Records this process into the folder, until it ends or the limit is reached."""
    opened = session.begin(folder, None if steps is None else int(steps), seconds)
    try:
        patch_on_import()
    except Exception as error:  # the script comes first
        opened.failed("the clock could not be hung in", error)
    return opened


def _number(variable: str) -> float | None:
    with suppress(KeyError, ValueError):
        return float(os.environ[variable])
    return None
