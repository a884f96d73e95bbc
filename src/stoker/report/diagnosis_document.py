"""The same page for what the doctor saw of a script or of a config's trials: no run folder, only an observation."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from stoker.clock.costs import STAGES
from stoker.clock.observed import Observed
from stoker.console import say
from stoker.doctor.records import Diagnosis
from stoker.errors import UserError
from stoker.report.clock_intervals import PARTS, StepInterval, rounded
from stoker.report.document import SHOWN_FINDINGS, Document, finding_row, need_row
from stoker.report.figures import memory_columns, timeline_columns
from stoker.report.surroundings import clip, describe_predictions

# The same page for what the doctor saw of a script or of a config's trials: no run folder, only an observation.

STATES = {"script": "watched", "trial": "tried", "run": "read"}
SLOWEST_SAMPLES = 10


def diagnosis_document(diagnosis: Diagnosis, name: str) -> Document:
    """As `RunReader.document`, with what a run folder alone has left empty."""
    observed = diagnosis.observed
    confirmed = [] if diagnosis.confirmation is None else [diagnosis.confirmation.as_dict()]
    predicted = [prediction.as_dict() for prediction in diagnosis.predictions]
    intervals = _intervals(observed)
    return {
        "name": clip(name),
        "folder": clip(name),
        "state": STATES[observed.source],
        "ending": None,
        "verdict": {"id": clip(diagnosis.verdict), "line": clip(diagnosis.line)},
        "figures": _figures(observed),
        "parts": _parts(observed),
        "split": observed.compute_s is not None,
        "besides": _besides(observed),
        "timeline": timeline_columns(intervals),
        "epochs": {},
        "steps": {},
        "memory": memory_columns(intervals),
        "stages": _stages(observed),
        "slowest": [
            {"name": clip(slow.name), "ms": rounded(1e3 * slow.seconds), "typical_ms": rounded(1e3 * slow.typical_s)}
            for slow in observed.slow_samples[:SLOWEST_SAMPLES]
        ],
        "findings": [finding_row(finding) for finding in diagnosis.findings[:SHOWN_FINDINGS]],
        "needs": [need_row(need) for need in diagnosis.needs[:SHOWN_FINDINGS]],
        "predictions": describe_predictions([*predicted, *confirmed]),
        "quarantine": {"count": 0, "samples": []},
        "config": None,
        "environment": {"facts": _facts(observed)},
        "checkpoints": [],
        "events": [],
        "missing": [clip(text) for text in observed.missing],
    }


def _figures(observed: Observed) -> dict[str, Any]:
    steps = observed.steps
    return {
        "wait_share": rounded(observed.wait_share),
        "images_per_second": rounded(observed.images_per_second) if observed.samples else None,
        "step_ms": rounded(1e3 * observed.elapsed_s / steps) if steps else None,
        "elapsed_s": rounded(observed.elapsed_s) if steps else None,
        "step": steps,
        "updated": time.time(),
    }


def _parts(observed: Observed) -> dict[str, float | None]:
    """Seconds of all steps; as one where the device's and the loop's were not told apart."""
    if not observed.steps:
        return {}
    known = {part: getattr(observed, f"{part}_s") for part in PARTS}
    if known["compute"] is None:
        known = {"wait": observed.wait_s, "rest": observed.elapsed_s - observed.wait_s}
    return {part: rounded(seconds) for part, seconds in known.items() if seconds is not None}


def _besides(observed: Observed) -> dict[str, float | None]:
    found = {"epoch_starts": sum(observed.epoch_starts_s), "validation": observed.validation_s or 0.0}
    return {name: rounded(seconds) for name, seconds in found.items() if seconds > 0}


def _intervals(observed: Observed) -> list[StepInterval]:
    """A point for each of the newest steps."""
    images = observed.samples / observed.steps if observed.steps else 0.0
    first = max(0, observed.steps - len(observed.waits_s))
    return [
        StepInterval(
            first + number, None, 1, {"wait": wait_s, "rest": rest_s},
            images / (wait_s + rest_s) if images and wait_s + rest_s > 0 else None,
        )
        for number, (wait_s, rest_s) in enumerate(zip(observed.waits_s, observed.steps_s, strict=False), 1)
    ]  # fmt: skip


def _stages(observed: Observed) -> list[dict[str, Any]]:
    """Microseconds of one image: of the newest batches, as the stages of all of them are divided."""
    total_s = sum(stage.wall_s for stage in observed.stages.values())
    samples = sum(batch.samples for batch in observed.batches)
    if total_s <= 0 or not samples:
        return []
    scale = 1e6 * sum(batch.wall_s for batch in observed.batches) / samples / total_s
    found = []
    for name in sorted(observed.stages, key=lambda name: (*STAGES, name).index(name)):
        stage = observed.stages[name]
        row: dict[str, Any] = {"name": name, "wall_us": rounded(scale * stage.wall_s)}
        for part, seconds in (("cpu", stage.cpu_s), ("runq", stage.runq_s), ("blocked", stage.blocked_s)):
            if seconds is not None:
                row[f"{part}_us"] = rounded(scale * seconds)
        found.append(row)
    return found


def _facts(observed: Observed) -> dict[str, str]:
    """What is known of the machine and of how the loop was set up."""
    shape, host, storage, accelerator = observed.loader, observed.host, observed.storage, observed.accelerator
    facts: dict[str, object] = {"torch": observed.torch_version}
    if host is not None:
        facts["cores"] = host.cpus
    if accelerator is not None:
        facts["accelerator"] = accelerator.name
    if shape is not None:
        one, several = {"process": ("process", "processes")}.get(shape.engine, ("thread", "threads"))
        kind = one if shape.workers == 1 else several
        facts["workers"] = f"{shape.workers} {kind}" if shape.workers else "none: the loop makes its batches"
        facts |= {"prefetch": shape.prefetch, "batch size": shape.batch_size, "start method": shape.start_method}
    if storage is not None:
        facts["storage"] = storage.kind
    return {name: clip(value) for name, value in facts.items() if value is not None}


# `stoker doctor --report FILE`: the page about what the doctor saw.


def refuse_place(place: Path) -> None:
    """Raises where the page could not be written in the end."""
    folder = place.absolute().parent
    wrong = (
        "is a folder" if place.is_dir()
        else "is in a folder that does not exist" if not folder.is_dir()
        else "is in a folder that may not be written" if not os.access(folder, os.W_OK)
        else None
    )  # fmt: skip
    if wrong is not None:
        raise UserError("report-not-writable", f"{place} {wrong}", hint="--report report.html")


def write_diagnosis_page(place: Path, diagnosis: Diagnosis, name: str) -> None:
    """Writes the page, and says where it is."""
    from stoker.report.page import report_document, report_page, write_page

    write_page(place, report_page(report_document([diagnosis_document(diagnosis, name)])))
    say(f"page: {place}")
