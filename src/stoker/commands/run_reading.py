"""Finds a run folder and reads it, with the checks' opinion of it: what `report` and `watch` begin with."""

from __future__ import annotations

from pathlib import Path

from stoker.errors import StokerError, UserError
from stoker.facts.diagnosis import Diagnosis
from stoker.output.report.document import Document, RunReader
from stoker.run_folder import RunFolder

RUNS = Path("runs")
SHOWN_RUNS = 8


def find_run(path: Path) -> Path:
    """The run folder of this path, or of this name below runs/; raises where there is none."""
    for candidate in (path, RUNS / path):
        if _is_run(candidate):
            return candidate
    around = path if path.is_dir() else RUNS
    seen = "does not exist" if not path.exists() else "is no folder" if not path.is_dir() else "holds no run"
    try:
        runs = sorted(folder for folder in around.iterdir() if _is_run(folder))
    except OSError:
        runs = []
    raise UserError(
        "not-a-run-folder",
        f"{path} {seen}",
        why="a run folder has metrics.jsonl or config.yaml in it; `stoker train` makes it below runs/",
        hint="  ".join(map(str, runs[-SHOWN_RUNS:])) if runs else "stoker demo    # makes one in a minute",
    )


def read_document(path: Path) -> tuple[Path, Document]:
    """The folder, and what a page shows of the run or of the watched script in it."""
    from stoker.attach.records import has_records

    if not has_records(path):
        folder = find_run(path)
        return folder, read_run(folder).document()

    from stoker.commands.diagnosing import diagnosis_of_watched
    from stoker.output.report.diagnosis_document import diagnosis_document

    return path, diagnosis_document(diagnosis_of_watched(path), path.resolve().name)


def read_run(folder: Path) -> RunReader:
    """The run, to be asked for its document as often as one likes."""
    return RunReader(folder, judge_run)


def judge_run(folder: Path) -> Diagnosis | str:
    """What the checks say of the run so far, or in words why they cannot say anything."""
    from stoker.commands.diagnosing import diagnosis_of
    from stoker.output.clock_reading import read_observed

    try:
        observed = read_observed(folder)
    except StokerError as error:
        return f"a verdict: {error.seen}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        # A page from a broken file is worth more than none.
        return f"a verdict: clock.jsonl cannot be read ({type(error).__name__}: {error})"
    return diagnosis_of(observed) if observed.steps else "a verdict: the clock has seen no whole step yet"


def _is_run(folder: Path) -> bool:
    run = RunFolder(folder)
    try:
        return any(file.is_file() for file in (run.metrics_file, run.config_file, run.clock_file))
    except OSError:
        return False
