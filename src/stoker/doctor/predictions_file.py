"""predictions.jsonl in a run folder: one line for each prediction, or for one with what a trial of it measured."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from stoker.clock.observed import LoaderShape, Observed
from stoker.console import say
from stoker.doctor.records import Confirmation, Diagnosis, Prediction
from stoker.plan.records import Estimate
from stoker.run.folder import RunFolder
from stoker.run.json_lines import Record, read_records


def keep_predictions(folder: Path, diagnosis: Diagnosis) -> None:
    """Writes down what was predicted and can be tried, with the setting that it started from."""
    shape = diagnosis.observed.loader
    if shape is None:
        return
    start = _settings(shape, diagnosis.observed)
    lines = [
        prediction.as_dict() | {"from": start, "before": diagnosis.observed.images_per_second}
        for prediction in diagnosis.predictions
        if prediction.settings
    ]
    # Looking at a run twice is no second prediction.
    known = [{key: line.get(key) for key in ("label", "from", "before")} for line in _read(folder)]
    fresh = [line for line in lines if {key: line[key] for key in ("label", "from", "before")} not in known]
    _append(folder, fresh)


def keep_confirmation(folder: Path, confirmation: Confirmation) -> None:
    """Writes down a prediction with what was measured."""
    _append(folder, [confirmation.as_dict()])


def settle_predictions(folder: Path, observed: Observed) -> Confirmation | None:
    """The newest prediction about the setting that is observed now, with its error; written down once."""
    shape, rate = observed.loader, observed.images_per_second
    if shape is None or not rate:
        return None
    now = _settings(shape, observed)
    for line in reversed(_read(folder)):
        if "measured_speedup" in line:
            return None  # the newest line is a measurement already: nothing is open
        before, start = line.get("before"), line.get("from")
        if not before or not isinstance(start, dict) or start == now or start | line.get("settings", {}) != now:
            continue
        prediction = _prediction(line)
        if prediction is not None:
            confirmation = Confirmation(prediction, rate, rate / before)
            keep_confirmation(folder, confirmation)
            return confirmation
    return None


def _settings(shape: LoaderShape, observed: Observed) -> dict[str, Any]:
    """What has to be alike, but for the change, for two measurements to be compared: also who took the batches."""
    found = {"num_workers": shape.workers, "prefetch_factor": shape.prefetch or 2, "batch_size": shape.batch_size}
    pace = observed.pace_images_per_second
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
        return None  # of another version


def _read(folder: Path) -> list[Record]:
    try:
        return list(read_records(RunFolder(folder).predictions_file))
    except OSError:
        return []


def _append(folder: Path, lines: list[dict[str, Any]]) -> None:
    if not lines:
        return
    text = "".join(json.dumps(line | {"time": time.time()}) + "\n" for line in lines)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (RunFolder(folder).predictions_file).open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        # A read-only run can be looked at all the same.
        say(f"note: {RunFolder(folder).predictions_file} cannot be written: {error.strerror or error}")
