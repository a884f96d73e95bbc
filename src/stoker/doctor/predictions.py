"""predictions.jsonl of a run folder: what was predicted, from which settings, and what was measured afterwards."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from stoker.core.console import say
from stoker.core.files import open_to_append
from stoker.core.finding import Estimate
from stoker.doctor.diagnosis import Confirmation, Diagnosis, Prediction
from stoker.profile.observed import LoaderShape, Observed
from stoker.run.folder import RunFolder
from stoker.run.json_lines import read_records


def keep_predictions(folder: Path, diagnosis: Diagnosis) -> None:
    """Appends the predictions that can be tried to predictions.jsonl, with the settings that they started from."""
    shape = diagnosis.observed.loader
    if shape is None:
        return
    start = _settings(shape, diagnosis.observed)
    lines = [
        prediction.as_dict() | {"from": start, "before": diagnosis.observed.images_per_second}
        for prediction in diagnosis.predictions
        if prediction.settings
    ]
    # Diagnosing a run twice is not a second prediction.
    known = [(line.get("label"), line.get("from"), line.get("before")) for line in _read(folder)]
    _append(folder, [line for line in lines if (line["label"], line["from"], line["before"]) not in known])


def settle_predictions(folder: Path, observed: Observed) -> Confirmation | None:
    """The newest prediction about the settings that are observed now, with its error; appended to the file once."""
    shape, rate = observed.loader, observed.images_per_second
    if shape is None or not rate:
        return None
    now = _settings(shape, observed)
    for line in reversed(_read(folder)):
        if "measured_speedup" in line:
            return None  # the newest line is a measurement already: no prediction is open
        before, start = line.get("before"), line.get("from")
        if not before or not isinstance(start, dict) or start == now or start | line.get("settings", {}) != now:
            continue
        prediction = _prediction(line)
        if prediction is not None:
            confirmation = Confirmation(prediction, rate, rate / before)
            keep_confirmation(folder, confirmation)
            return confirmation
    return None


def keep_confirmation(folder: Path, confirmation: Confirmation) -> None:
    _append(folder, [confirmation.as_dict()])


def _settings(shape: LoaderShape, observed: Observed) -> dict[str, Any]:
    """What must be the same, apart from the change, for two measurements to be comparable: also the consumer's pace."""
    found = {"num_workers": shape.workers, "prefetch_factor": shape.prefetch or 2, "batch_size": shape.batch_size}
    pace = observed.rates.pace
    return found if pace is None else found | {"pace": round(pace, 3)}


def _prediction(line: dict[str, Any]) -> Prediction | None:
    try:
        return Prediction(
            id=line["id"],
            label=line["label"],
            speedup=Estimate(**line["speedup"]),
            images_per_second=Estimate(**line["images_per_second"]),
            settings=tuple(line["settings"].items()),
        )
    except (KeyError, TypeError, AttributeError):
        return None  # written by another version


def _read(folder: Path) -> list[dict[str, Any]]:
    try:
        return list(read_records(RunFolder(folder).predictions_file))
    except OSError:
        return []


def _append(folder: Path, lines: list[dict[str, Any]]) -> None:
    if not lines:
        return
    path = RunFolder(folder).predictions_file
    text = "".join(json.dumps(line | {"time": time.time()}) + "\n" for line in lines)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with os.fdopen(open_to_append(path), "a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        # A read-only run can still be diagnosed.
        say(f"note: {path} cannot be written: {error.strerror or error}")
