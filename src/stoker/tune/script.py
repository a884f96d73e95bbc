"""Tries values in somebody's command line: `python train.py -j {num_workers}`. Each trial runs the command with the
doctor's timers attached, under a memory limit and a time limit."""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.child import Child, ChildDied, ChildFailed, ChildTooSlow
from stoker.clock.observed import Observed
from stoker.doctor.attach.running import kill_all, refuse_what_cannot_work
from stoker.errors import StokerError, UserError
from stoker.tune.guard import MemoryWatch, memory_left, patience_after
from stoker.tune.journal import from_record
from stoker.tune.placeholders import Template
from stoker.tune.records import Measured, Result, Settings
from stoker.tune.script_process import FEWEST_STEPS, TRIAL_VARIABLE, run_script, tail_of, windows_of

SHOWN_LINES = 12
ENOUGH_STEPS = 1.5 * FEWEST_STEPS
"""The first of an epoch do not count."""
_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|(can't|cannot) allocate memory|CUDNN_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_KILLED = re.compile(r"killed by signal|exited unexpectedly")

Report = Callable[[float], None]


class ScriptTrier:
    """Runs a command with the values of its placeholders."""

    def __init__(
        self,
        template: Template,
        *,
        memory_limit_bytes: int | None = None,
        patience_s: float | None = None,
        report: Report = lambda _seconds: None,
    ) -> None:
        refuse_what_cannot_work(template.filled(template.start))
        self.report = report
        self._template = template
        self._limit_bytes = memory_limit_bytes
        self._patience_s = patience_s
        self._first_took_s: float | None = None
        self._least_s = 0.0

    def run(self, settings: Settings, seconds: float) -> Measured:
        """Never raises because of the settings. Where steps are long, a trial takes longer than asked for."""
        seconds = max(seconds, self._least_s)
        measured = self._in_folder(settings, seconds)
        if self._least_s > seconds:
            measured = self._in_folder(settings, self._least_s)  # it had too few steps to measure a speed
        if self._first_took_s is None and measured.result == "measured":
            self._first_took_s = measured.took_s
        return measured

    def _in_folder(self, settings: Settings, seconds: float) -> Measured:
        folder = Path(tempfile.mkdtemp(prefix="stoker-tune-"))
        try:
            return self._run(settings, seconds, folder, time.monotonic())
        finally:
            kill_all(f"{TRIAL_VARIABLE}={folder}")  # also what left the group of processes
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, settings: Settings, seconds: float, folder: Path, began_s: float) -> Measured:
        job = {"command": self._template.filled(settings), "seconds": seconds, "folder": str(folder)}
        patience_s = self._patience_s or patience_after(self._first_took_s, seconds)
        answer: dict[str, Any] | None = None
        result: Result = "measured"
        detail = ""
        limit_bytes = memory_left(self._limit_bytes)
        with Child(run_script, job, timeout_s=patience_s) as child, MemoryWatch(limit_bytes) as watch:
            watch.begin(child.pid)
            try:
                answer = child.wait(self.report)
            except ChildTooSlow:
                result, detail = "hung", f"not finished after {patience_s:.0f} s"
            except ChildDied as died:
                result, detail = "killed", f"the process {died.how}"
            except ChildFailed as failed:
                result, detail = "crashed", str(failed).partition("\n")[0]
            except StokerError as error:
                result, detail = "crashed", error.seen
        took_s = time.monotonic() - began_s
        if watch.exceeded_bytes is not None:
            result, detail = "out-of-memory", watch.words()
        if answer is None:
            return Measured(result, took_s=took_s, peak_bytes=watch.peak_bytes, detail=_with_output(detail, folder))
        observed = _observed(answer["observed"])
        windows = () if observed is None else windows_of(observed)
        result, detail = _ending(answer, windows, tail_of(folder))
        if observed is not None and observed.steps and not windows and answer["stopped"]:
            self._least_s = ENOUGH_STEPS * observed.elapsed_s / observed.steps
        if observed is None or result != "measured":
            return Measured(result, took_s=took_s, peak_bytes=watch.peak_bytes, detail=_with_output(detail, folder))
        starts = observed.epoch_starts_s
        return Measured(
            "measured", windows=windows, wait_share=observed.wait_share, took_s=took_s, peak_bytes=watch.peak_bytes,
            first_batch_s=sum(starts) / len(starts) if starts else None, observed=observed,
            epoch_samples=None if observed.loader is None else observed.loader.samples,
        )  # fmt: skip


def _observed(record: Any) -> Observed | None:
    measured = from_record(Measured, {"result": "measured", "observed": record})
    return None if measured is None else measured.observed


def _ending(answer: dict[str, Any], windows: tuple[float, ...], output: str) -> tuple[Result, str]:
    """How a script that ended counts, and why."""
    code = answer["exit_code"]
    if code and not answer["stopped"]:
        if _NO_MEMORY.search(output):
            return "out-of-memory", "the script ran out of memory"
        if code > 128 or _KILLED.search(output):
            return "killed", f"the script ended with exit code {code}"
        return "crashed", f"the script ended with exit code {code}"
    if not windows:
        return "crashed", next(iter(answer["notes"]), "too few batches were taken to measure a speed")
    return "measured", ""


def _with_output(detail: str, folder: Path) -> str:
    lines = tail_of(folder).splitlines()[-SHOWN_LINES:]
    return "\n".join([detail, *lines])


def refuse_broken(command: str, measured: Measured) -> None:
    """Raises UserError with what a command said that does not run as it was given."""
    what, _, output = measured.detail.partition("\n")
    raise UserError(
        "script-not-measured",
        f"{command}: {what}",
        why=f"its last lines:\n{output}" if output else "a search needs a script that trains with torch's DataLoader",
        hint=f"stoker doctor -- {command}",
    )
