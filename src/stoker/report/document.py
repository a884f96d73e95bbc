"""Everything that a page shows of a run, or of a diagnosis without a run folder, as one plain document that `--json`
prints; and a comparison of two."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.core.errors import StokerError
from stoker.core.finding import Finding, as_json
from stoker.doctor.diagnosing import diagnosis_of, diagnosis_of_watched
from stoker.doctor.diagnosis import Diagnosis
from stoker.doctor.script.recording import has_records
from stoker.profile.clock_reading import PARTS, ClockSums, StepTimes
from stoker.profile.observed import Observed, SlowSample
from stoker.report.run_facts import (
    changed_from_defaults,
    clip,
    describe_predictions,
    describe_quarantine,
    epoch_columns,
    figures,
    list_checkpoints,
    memory_columns,
    preview_of,
    read_config,
    read_environment,
    read_evaluation,
    rounded,
    run_state,
    stage_rows,
    step_columns,
    sum_of_parts,
    timeline_columns,
)
from stoker.report.tune_document import TuneReader, find_journal
from stoker.run.folder import RunFolder, find_run, is_run
from stoker.run.json_lines import JsonLines, KeptRecords, Record, number
from stoker.run.lease import is_held
from stoker.run.metrics import ABOUT
from stoker.tasks.base import recorded_task
from stoker.train.loader_changes import outcome_text

JUDGE_EVERY_S = 5.0
JUDGING_SHARE = 0.05
"""Share of one core's time, at most."""
SHOWN_FINDINGS = 40
SHOWN_EVENTS = 60
SHOWN_SLOW_SAMPLES = 10

Document = dict[str, Any]


class RunReader:
    """A run folder to read again and again; each time costs only what is new in it."""

    def __init__(self, root: Path, diagnose: Callable[[Observed], Diagnosis] = diagnosis_of) -> None:
        self.folder = RunFolder(root)
        self._diagnose = diagnose
        self._diagnosis: Diagnosis | None = None
        self._no_verdict: str | None = None
        self._judge_due_s = 0.0
        self._unjudged = True
        self._metrics = JsonLines(self.folder.metrics_file, _MetricsLines)
        self._clock = JsonLines(self.folder.clock_file, ClockSums)
        self._predictions = JsonLines(self.folder.predictions_file, KeptRecords)
        self._quarantine = JsonLines(self.folder.quarantine_file, KeptRecords)
        self._document: Document | None = None
        self._seen: tuple[object, ...] = ()

    def document(self) -> Document:
        """What is known about the run now; the same object as before if nothing has changed."""
        changed = [file.refresh() for file in (self._metrics, self._predictions, self._quarantine)]
        self._unjudged |= self._clock.refresh()
        if self._unjudged and time.monotonic() >= self._judge_due_s:
            self._judge()
            changed.append(True)
        held = is_held(self.folder.lease_file)
        seen = (held, *map(_changed_ns, (self.folder.config_file, self.folder.evaluation_file)))
        if self._document is None or any(changed) or seen != self._seen:
            self._seen = seen
            self._document = self._build(held=held)
        return self._document

    def _judge(self) -> None:
        began_s = time.monotonic()
        self._unjudged, self._diagnosis, self._no_verdict = False, None, None
        try:
            observed = self._clock.records.observed(str(self.folder.clock_file))
        except StokerError as error:
            self._no_verdict = error.seen
        except (ValueError, KeyError, TypeError) as error:
            # A page from a damaged file is better than none.
            self._no_verdict = f"clock.jsonl cannot be read ({type(error).__name__}: {error})"
        else:
            if observed.steps:
                self._diagnosis = self._diagnose(observed)
            else:
                self._no_verdict = "no whole step was measured yet"
        # The checks simulate the loader, for a second or more: time that the training beside us would miss.
        ended_s = time.monotonic()
        self._judge_due_s = ended_s + max(JUDGE_EVERY_S, (ended_s - began_s) / JUDGING_SHARE)

    def _build(self, *, held: bool) -> Document:
        folder, records, clock, diagnosis = self.folder, self._metrics.records, self._clock.records, self._diagnosis
        config = read_config(folder.config_file)
        steps, epochs, events = (
            [record for record in records if record.get("kind") == kind] for kind in ("step", "epoch", "event")
        )
        state, ending = run_state(config, epochs, events, held=held)
        made = clock.run.totals.get("made_samples", 0.0)
        predicted = [] if diagnosis is None else [prediction.as_dict() for prediction in diagnosis.predictions]
        return {
            "name": clip(folder.root.resolve().name),
            "folder": clip(folder.root),
            "state": state,
            "ending": None if ending is None else clip(ending),
            "figures": figures(clock.intervals, epochs, records, config, held=held),
            "parts": sum_of_parts(clock.intervals),
            "split": bool(clock.intervals),
            "besides": {name: rounded(seconds) for name, seconds in clock.run.besides_s.items()},
            "timeline": timeline_columns(clock.intervals),
            "epochs": epoch_columns(epochs),
            "steps": step_columns(steps),
            "memory": memory_columns(clock.intervals),
            "stages": stage_rows(clock.run.stages, scale=1 / made, samples=made) if made else [],
            "slowest": _slow_samples(clock.run.slowest),
            **_judged(diagnosis),
            "predictions": describe_predictions([*predicted, *self._predictions.records]),
            "preview": preview_of(folder.preview_file),
            "evaluation": read_evaluation(folder.evaluation_file, folder.worst_file),
            "quarantine": describe_quarantine(self._quarantine.records),
            "config": {"changed": changed_from_defaults(config), "all": config},
            "environment": read_environment(folder.environment_file),
            "checkpoints": list_checkpoints(folder.checkpoints),
            "events": _describe_events(events, recorded_task(config).unit),
            "missing": self._missing(steps, config),
        }

    def _missing(self, steps: Sequence[Record], config: dict[str, Any]) -> list[str]:
        found = []
        scores = recorded_task(config).scores_of_eval
        if scores is not None and not self.folder.evaluation_file.exists():
            found.append(clip(f"{scores}: stoker eval {self.folder.root} adds them."))
        if not self._metrics.exists:
            found.append("metrics.jsonl does not exist: the run has not written anything.")
        elif not steps:
            found.append("metrics.jsonl has no steps.")
        if not self._clock.records.intervals:
            found.append(
                "clock.jsonl has no steps: where their time goes, what the workers do and a verdict are missing."
            )
        elif self._no_verdict is not None:
            found.append(clip(f"verdict: {self._no_verdict}"))
        for file in (self._metrics, self._clock, self._predictions, self._quarantine):
            if file.broken:
                found.append(f"{file.path.name}: {file.broken:,} lines are not JSON and were skipped.")
            if file.problem is not None:
                found.append(f"{file.path.name} was not read: {file.problem}.")
        for kept in (self._metrics, self._predictions, self._quarantine):
            if kept.records.left_out:
                found.append(f"{kept.path.name}: {kept.records.left_out:,} lines are too many, and were left out.")
        observed = () if self._diagnosis is None else self._diagnosis.observed.missing
        return [*found, *(clip(text) for text in observed)]


class _MetricsLines(KeptRecords):
    """Lines of metrics.jsonl without the costs of batches, which the page has from clock.jsonl."""

    def append(self, record: Record, /) -> None:
        super().append({name: value for name, value in record.items() if not name.startswith("batch/")})


def _judged(diagnosis: Diagnosis | None) -> dict[str, Any]:
    """The verdict, the findings and the needs as the page shows them."""
    if diagnosis is None:
        return {"verdict": None, "findings": [], "needs": []}
    return {
        "verdict": {"id": clip(diagnosis.verdict), "line": clip(diagnosis.line)},
        "findings": [_finding_row(finding) for finding in diagnosis.findings[:SHOWN_FINDINGS]],
        "needs": [
            {
                "what": clip(need.what), "unit": clip(need.unit), "wants": rounded(need.wants),
                "has": rounded(need.has), "how": clip(need.how),
            }
            for need in diagnosis.needs[:SHOWN_FINDINGS]
        ],
    }  # fmt: skip


def _finding_row(finding: Finding) -> dict[str, Any]:
    row = as_json(finding, "id", "message", "fix", "speedup", "refuses")
    row |= {key: clip(row[key], 1000) for key in ("id", "message", "fix") if row[key] is not None}
    return row | {"speedup": row["speedup"] and {name: rounded(value) for name, value in row["speedup"].items()}}


def _slow_samples(slowest: Sequence[SlowSample]) -> list[dict[str, Any]]:
    return [
        {"name": clip(slow.name), "ms": rounded(1e3 * slow.seconds), "typical_ms": rounded(1e3 * slow.typical_s)}
        for slow in slowest[:SHOWN_SLOW_SAMPLES]
    ]


def _describe_events(events: Sequence[Record], unit: str) -> list[dict[str, Any]]:
    """Everything but checkpoints, the newest last."""
    found = []
    for event in events:
        name, details = event.get("event"), event_text(event, unit)
        if name != "checkpoint" and details is not None:
            found.append({"event": clip(name), "step": rounded(number(event, "step")), "details": clip(details)})
    return found[-SHOWN_EVENTS:]


def event_text(event: Record, unit: str) -> str | None:
    """What happened, in words where we have them; None if another event says it better."""
    if event.get("event") == "loader_adjusted":
        with suppress(KeyError, TypeError, ValueError):  # a damaged line
            return outcome_text(event, unit)
    return ", ".join(f"{name}: {value}" for name, value in event.items() if name not in ABOUT)


def _changed_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


# A watched script, or the trials of a config: an observation without a run folder.

STATES = {"script": "watched", "trial": "tried", "run": "read"}


def diagnosis_document(diagnosis: Diagnosis, name: str) -> Document:
    """Like `RunReader.document`; what only a run folder has is empty."""
    observed, steps = diagnosis.observed, diagnosis.observed.steps
    # All but the wait is one part if compute was not measured.
    parts = {part: getattr(observed.times, f"{part}_s") for part in PARTS}
    if parts["compute"] is None:
        parts = {"wait": observed.times.wait_s, "rest": observed.times.elapsed_s - observed.times.wait_s}
    besides = {"epoch_starts": sum(observed.times.epoch_starts_s), "validation": observed.times.validation_s or 0.0}
    confirmed = [] if diagnosis.confirmation is None else [diagnosis.confirmation.as_dict()]
    predicted = [prediction.as_dict() for prediction in diagnosis.predictions]
    return {
        "name": clip(name),
        "folder": clip(name),
        "state": STATES[observed.source],
        "ending": None,
        "figures": {
            "wait_share": rounded(observed.times.wait_share),
            "images_per_second": rounded(observed.images_per_second) if observed.samples else None,
            "step_ms": rounded(1e3 * observed.times.elapsed_s / steps) if steps else None,
            "elapsed_s": rounded(observed.times.elapsed_s) if steps else None,
            "step": steps,
            "updated": time.time(),
        },
        "parts": {part: rounded(seconds) for part, seconds in parts.items() if seconds is not None} if steps else {},
        "split": observed.times.compute_s is not None,
        "besides": {name: rounded(seconds) for name, seconds in besides.items() if seconds > 0},
        "timeline": timeline_columns(_intervals(observed)),
        "epochs": {},
        "steps": {},
        "memory": {},
        "stages": _stages(observed),
        "slowest": _slow_samples(observed.slow_samples),
        **_judged(diagnosis),
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


def _intervals(observed: Observed) -> list[StepTimes]:
    """One interval for each of the newest steps."""
    images = observed.samples / observed.steps if observed.steps else 0.0
    first = max(0, observed.steps - len(observed.times.waits_s))
    return [
        StepTimes(
            first + number, None, 1, {"wait": wait_s, "rest": rest_s},
            images / (wait_s + rest_s) if images and wait_s + rest_s > 0 else None,
        )
        for number, (wait_s, rest_s) in enumerate(zip(observed.times.waits_s, observed.times.steps_s, strict=False), 1)
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


# Two runs beside each other.

_ABSENT = object()
COMPARED_FIGURES = {
    "images_per_second": ("images/s", True),
    "wait_share": ("waiting for data", False),
    "step_ms": ("step time", False),
    "epoch_s": ("last epoch", False),
    "best": ("best validation", True),
    "last_loss": ("last train/loss", False),
    "epochs_done": ("epochs", None),
    "step": ("steps", None),
}
"""Figure: its label, and whether more is better; None if neither is."""


def compare(a: Document, b: Document) -> dict[str, Any]:
    """The config keys, figures and machine facts in which two runs differ."""
    # A watched script has no config.
    ours, theirs = ((run["config"] or {}).get("all", {}) for run in (a, b))
    keys = [*ours, *(key for key in theirs if key not in ours)]
    config = [
        {"key": key, "a": ours.get(key), "b": theirs.get(key), "in_a": key in ours, "in_b": key in theirs}
        for key in keys
        if ours.get(key, _ABSENT) != theirs.get(key, _ABSENT)
    ]
    rows = []
    for name, (label, more_is_better) in COMPARED_FIGURES.items():
        first, second = a["figures"].get(name), b["figures"].get(name)
        if first is None and second is None:
            continue
        if name == "images_per_second":
            label = f"{a['figures'].get('unit', 'images')}/s"
        elif name == "best":
            metrics = {run["figures"].get("metric") for run in (a, b)}
            if len(metrics) > 1:
                continue  # a Dice and a loss cannot be compared
            label, more_is_better = f"best {metrics.pop()}", not str(a["figures"].get("metric")).endswith("/loss")
        ratio = second / first if first and second is not None else None
        rows.append(
            {
                "name": name, "label": label, "a": first, "b": second,
                "ratio": None if ratio is None else float(f"{ratio:.4g}"), "more_is_better": more_is_better,
            }
        )  # fmt: skip
    facts_a, facts_b = (run["environment"].get("facts", {}) for run in (a, b))
    machines = [
        {"key": key, "a": facts_a.get(key, "unknown"), "b": facts_b.get(key, "unknown")}
        for key in dict.fromkeys([*facts_a, *facts_b])
        if key not in ("started", "command", "folder") and facts_a.get(key) != facts_b.get(key)
    ]
    return {"config": config, "figures": rows, "machines": machines}


def open_reader(path: Path) -> tuple[Path, RunReader | TuneReader]:
    """The folder of a run or of a search's journal, and what reads it; a folder that is both is a run."""
    journal = find_journal(path)
    if journal is not None and (journal == path or not is_run(path)):
        return journal.parent, TuneReader(journal)
    folder = find_run(path)
    return folder, RunReader(folder)


def read_document(path: Path) -> tuple[Path, Document]:
    """The folder of a run, of a search's journal or of a watched script, and its document."""
    if not has_records(path):
        folder, reader = open_reader(path)
        return folder, reader.document()
    return path, diagnosis_document(diagnosis_of_watched(path), path.resolve().name)
