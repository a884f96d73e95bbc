"""The document of a watched script or of a config's trials: an observation, without a run folder."""

from __future__ import annotations

import time
from typing import Any

from stoker.clock.observed import Observed
from stoker.clock.reading import PARTS, StepTimes
from stoker.doctor.records import Diagnosis
from stoker.report.document import SHOWN_FINDINGS, SHOWN_SLOW_SAMPLES, Document, finding_row, need_row
from stoker.report.figures import rounded, stage_rows, timeline_columns
from stoker.report.run_files import clip, describe_predictions

STATES = {"script": "watched", "trial": "tried", "run": "read"}


def diagnosis_document(diagnosis: Diagnosis, name: str) -> Document:
    """Like `RunReader.document`; what only a run folder has is empty."""
    observed = diagnosis.observed
    confirmed = [] if diagnosis.confirmation is None else [diagnosis.confirmation.as_dict()]
    predicted = [prediction.as_dict() for prediction in diagnosis.predictions]
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
        "timeline": timeline_columns(_intervals(observed)),
        "epochs": {},
        "steps": {},
        "memory": {},
        "stages": _stages(observed),
        "slowest": [
            {"name": clip(slow.name), "ms": rounded(1e3 * slow.seconds), "typical_ms": rounded(1e3 * slow.typical_s)}
            for slow in observed.slow_samples[:SHOWN_SLOW_SAMPLES]
        ],
        "findings": [finding_row(finding) for finding in diagnosis.findings[:SHOWN_FINDINGS]],
        "needs": [need_row(need) for need in diagnosis.needs[:SHOWN_FINDINGS]],
        "predictions": describe_predictions([*predicted, *confirmed]),
        "preview": None,
        "evaluation": None,
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
    """Seconds of all steps by part; all but the wait as one part if compute was not measured."""
    if not observed.steps:
        return {}
    known = {part: getattr(observed, f"{part}_s") for part in PARTS}
    if known["compute"] is None:
        known = {"wait": observed.wait_s, "rest": observed.elapsed_s - observed.wait_s}
    return {part: rounded(seconds) for part, seconds in known.items() if seconds is not None}


def _besides(observed: Observed) -> dict[str, float | None]:
    found = {"epoch_starts": sum(observed.epoch_starts_s), "validation": observed.validation_s or 0.0}
    return {name: rounded(seconds) for name, seconds in found.items() if seconds > 0}


def _intervals(observed: Observed) -> list[StepTimes]:
    """One interval for each of the newest steps."""
    images = observed.samples / observed.steps if observed.steps else 0.0
    first = max(0, observed.steps - len(observed.waits_s))
    return [
        StepTimes(
            first + number, None, 1, {"wait": wait_s, "rest": rest_s},
            images / (wait_s + rest_s) if images and wait_s + rest_s > 0 else None,
        )
        for number, (wait_s, rest_s) in enumerate(zip(observed.waits_s, observed.steps_s, strict=False), 1)
    ]  # fmt: skip


def _stages(observed: Observed) -> list[dict[str, Any]]:
    """The time of one image is that of the newest batches; its split into stages is that of all batches."""
    total_s = sum(stage.wall_s for stage in observed.stages.values())
    samples = sum(batch.samples for batch in observed.batches)
    if total_s <= 0 or not samples:
        return []
    return stage_rows(observed.stages, scale=sum(batch.wall_s for batch in observed.batches) / samples / total_s)


def _facts(observed: Observed) -> dict[str, str]:
    """What is known about the machine and the set-up of the loop."""
    shape, host, storage, accelerator = observed.loader, observed.host, observed.storage, observed.accelerator
    facts: dict[str, object] = {"torch": observed.torch_version}
    if host is not None:
        facts["cores"] = host.cpus
    if accelerator is not None:
        facts["accelerator"] = accelerator.name
    if shape is not None:
        one, several = {"process": ("process", "processes")}.get(shape.engine, ("thread", "threads"))
        kind = one if shape.workers == 1 else several
        facts["workers"] = f"{shape.workers} {kind}" if shape.workers else "none (the training loop makes the batches)"
        facts |= {"prefetch": shape.prefetch, "batch size": shape.batch_size, "start method": shape.start_method}
    if storage is not None:
        facts["storage"] = storage.kind
    return {name: clip(value) for name, value in facts.items() if value is not None}
