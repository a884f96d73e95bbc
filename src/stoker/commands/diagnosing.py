"""From an observation to a diagnosis: what the checks say, with what each change would bring."""

from __future__ import annotations

from pathlib import Path

from stoker.checks import judge, workers_stand_in_line
from stoker.facts.diagnosis import Diagnosis
from stoker.facts.observed import Observed
from stoker.tuning.what_if import what_if


def diagnosis_of(observed: Observed) -> Diagnosis:
    """Verdict, findings and predictions."""
    return judge(observed, what_if(observed, takes_turns=workers_stand_in_line(observed)))


def diagnosis_of_watched(folder: Path) -> Diagnosis:
    """The same of the record that `stoker.watch()` left in a folder."""
    from stoker.attach.reading import read_attached

    return diagnosis_of(read_attached(folder))
