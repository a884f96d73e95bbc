"""Finds a run folder and reads it, with the checks' opinion of it: what `report` and `watch` begin with."""

from __future__ import annotations

from pathlib import Path

from stoker.errors import StokerError
from stoker.facts.diagnosis import Diagnosis
from stoker.output.report.document import Document, RunReader
from stoker.run_folder import find_run


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
