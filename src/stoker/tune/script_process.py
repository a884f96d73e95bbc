"""One trial of somebody's script: run with the doctor's timers attached, its output kept. Runs in a child process
(`stoker.tune.script` starts it), so that the script ends even if stoker is killed."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from stoker.child import Parent
from stoker.clock.observed import Observed
from stoker.doctor.attach.running import run_attached
from stoker.tune.guard import be_killed_first

TRIAL_VARIABLE = "STOKER_TUNE_TRIAL"
"""In the environment of the script and all that it starts: by it they are found, wherever they went."""
OUTPUT = "output"
"""File in the trial's folder that gets what the script prints."""
MOST_TAIL_BYTES = 4000
PARTS = 5
"""Windows of a trial."""
FEWEST_STEPS = 8
"""With fewer a rate says little."""


def run_script(job: dict[str, Any], parent: Parent) -> dict[str, Any]:
    """How the command ended, what was observed, and the end of its output.

    `job`: `command`, `seconds` of training, `folder` for temporary files."""
    be_killed_first()
    parent.send(0.0)
    folder = Path(job["folder"])
    # What run_attached writes goes where our parent can clean up, if this process is killed. The script's own
    # temporary files stay where they are.
    tempfile.tempdir = str(folder)
    os.environ[TRIAL_VARIABLE] = str(folder)
    descriptor = os.open(folder / OUTPUT, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    ended = run_attached(job["command"], seconds=job["seconds"])
    return {
        "exit_code": ended.exit_code,
        "stopped": ended.stopped,
        "notes": list(ended.notes),
        "observed": None if ended.observed is None else asdict(ended.observed),
    }


def tail_of(folder: Path) -> str:
    """The last lines that the script printed."""
    try:
        with (folder / OUTPUT).open("rb") as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - MOST_TAIL_BYTES))
            return stream.read().decode(errors="replace").strip()
    except OSError:
        return ""


def windows_of(observed: Observed) -> tuple[float, ...]:
    """Samples per second in consecutive parts of the time that the steps took, without the first of them."""
    times = [wait + work for wait, work in zip(observed.waits_s, observed.steps_s, strict=False)]
    if len(times) < FEWEST_STEPS or not observed.steps or not observed.samples:
        return ()
    shape = observed.loader
    # While the loop waited for the first batch, every worker made some: these came faster than workers can.
    ahead = shape.workers * (shape.prefetch or 2) if shape is not None else 0
    steady = times[min(len(times) // 3, max(2, ahead)) :]
    ends_s = np.cumsum([0.0, *steady])
    if ends_s[-1] <= 0:
        return ()
    # Of equal lengths, or a stall would count no more than a quick step: their mean is one over time.
    edges = np.linspace(0.0, ends_s[-1], min(PARTS, len(steady) // 2) + 1)
    steps = np.diff(np.interp(edges, ends_s, np.arange(len(ends_s))))
    rates = observed.samples / observed.steps * steps / np.diff(edges)
    return tuple(float(rate) for rate in rates)
