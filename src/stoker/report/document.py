"""Everything that a page shows of a run, as one plain document; `--json` prints it. Two runs beside each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stoker.doctor.records import Diagnosis, Need
from stoker.errors import StokerError
from stoker.plan.records import Finding
from stoker.report.clock_intervals import ClockSums, intervals_of_metrics, rounded
from stoker.report.figures import (
    epoch_columns,
    figures,
    images_per_step,
    memory_columns,
    progress,
    stages_of_metrics,
    step_columns,
    sum_of_parts,
    timeline_columns,
    validation_beside,
)
from stoker.report.surroundings import (
    changed_from_defaults,
    clip,
    describe_predictions,
    describe_quarantine,
    list_checkpoints,
    read_config,
    read_environment,
)
from stoker.run.folder import RunFolder, find_run
from stoker.run.lease import is_held
from stoker.run.metrics import ABOUT, JsonLines, Record, number

# Everything that a page shows of a run, as one plain document; `--json` prints it.

Document = dict[str, Any]

JUDGE_EVERY_S = 5.0
JUDGING_SHARE = 0.05
"""Of the time of one core, at most."""
SHOWN_FINDINGS = 40
SHOWN_EVENTS = 60


Judge = Callable[[Path], Diagnosis | str]
"""What the checks say about the run in a folder, or in words why they say nothing."""


class RunReader:
    """A run folder, read again and again at the price of what is new in it."""

    def __init__(self, root: Path, judge: Judge) -> None:
        self.folder = RunFolder(root)
        self._judge = judge
        self._diagnosis: Diagnosis | None = None
        self._why_not: str | None = None
        self._judge_due_s = 0.0
        self._unjudged = True
        self._metrics = JsonLines(self.folder.metrics_file, _MetricsLines)
        self._clock = JsonLines(self.folder.clock_file, ClockSums)
        self._predictions: JsonLines[list[Record]] = JsonLines(RunFolder(root).predictions_file, list)
        self._quarantine: JsonLines[list[Record]] = JsonLines(self.folder.quarantine_file, list)
        self._document: Document | None = None
        self._seen: tuple[object, ...] = ()

    def document(self) -> Document:
        """What is known of the run now; the same object as before where nothing has changed."""
        changed = [file.refresh() for file in (self._metrics, self._predictions, self._quarantine)]
        self._unjudged |= self._clock.refresh()
        if self._unjudged and time.monotonic() >= self._judge_due_s:
            self._think()
            changed.append(True)
        seen = (is_held(self.folder.lease_file), _changed_ns(self.folder.config_file))
        if self._document is None or any(changed) or seen != self._seen:
            self._seen = seen
            self._document = self._made(held=seen[0])
        return self._document

    def _think(self) -> None:
        began_s = time.monotonic()
        judged, self._unjudged = self._judge(self.folder.root), False
        self._diagnosis = None if isinstance(judged, str) else judged
        self._why_not = judged if isinstance(judged, str) else None
        # The checks read the whole clock: of a long run that takes seconds, which the training beside us would miss.
        took_s = time.monotonic() - began_s
        self._judge_due_s = time.monotonic() + max(JUDGE_EVERY_S, took_s / JUDGING_SHARE)

    def _made(self, *, held: bool) -> Document:
        folder, records, clock, diagnosis = self.folder, self._metrics.records, self._clock.records, self._diagnosis
        config = read_config(folder.config_file)
        steps, epochs, events = (
            [record for record in records if record.get("kind") == kind] for kind in ("step", "epoch", "event")
        )
        split = bool(clock.intervals)
        intervals = clock.intervals or intervals_of_metrics(records, images_per_step(config))
        parts = sum_of_parts(intervals)
        besides = {name: rounded(seconds) for name, seconds in clock.besides_s.items()}
        tried = [] if diagnosis is None else [prediction.as_dict() for prediction in diagnosis.predictions]
        return {
            "name": clip(folder.root.resolve().name),
            "folder": clip(folder.root),
            **progress(config, epochs, events, held=held),
            "verdict": None if diagnosis is None else {"id": clip(diagnosis.verdict), "line": clip(diagnosis.line)},
            "figures": figures(intervals, epochs, records, config, held=held),
            "parts": parts,
            "split": split,
            "besides": besides if split else validation_beside(epochs, intervals),
            "timeline": timeline_columns(intervals),
            "epochs": epoch_columns(epochs),
            "steps": step_columns(steps),
            "memory": memory_columns(intervals),
            "stages": clock.stages() or stages_of_metrics(steps),
            "slowest": [sample | {"name": clip(sample["name"])} for sample in clock.slowest],
            "findings": [] if diagnosis is None else [finding_row(f) for f in diagnosis.findings[:SHOWN_FINDINGS]],
            "needs": [] if diagnosis is None else [need_row(need) for need in diagnosis.needs[:SHOWN_FINDINGS]],
            "predictions": describe_predictions([*tried, *self._predictions.records]),
            "quarantine": describe_quarantine(self._quarantine.records),
            "config": {"changed": changed_from_defaults(config), "all": config},
            "environment": read_environment(folder.environment_file),
            "checkpoints": list_checkpoints(folder.checkpoints),
            "events": _telling(events),
            "missing": self._missing(split, steps),
        }

    def _missing(self, split: bool, steps: Sequence[Record]) -> list[str]:
        found = []
        if not self._metrics.exists:
            found.append("metrics.jsonl is not there: this run has written no step yet.")
        elif not steps:
            found.append("metrics.jsonl has no line of a step yet.")
        if not split:
            found.append(
                "clock.jsonl has no line: transfer, computing and the rest of a step are not told apart, and stages "
                "are not split by CPU, queue and blocking. Runs of an older version have none."
            )
        for file in (self._metrics, self._clock, self._predictions, self._quarantine):
            if file.broken:
                found.append(f"{file.path.name}: {file.broken:,} lines are no JSON and were passed over.")
        observed = [self._why_not] if self._why_not is not None and split else []
        if self._diagnosis is not None:
            observed += self._diagnosis.observed.missing
        return [*found, *(clip(text) for text in observed)]


class _MetricsLines(list[Record]):
    """Lines of metrics.jsonl; of what a batch cost only the newest line's word is kept."""

    _newest_step: Record | None = None

    def append(self, record: Record) -> None:
        if record.get("kind") == "step":
            before, self._newest_step = self._newest_step or {}, record
            for name in [name for name in before if name.startswith("batch/")]:
                del before[name]
        super().append(record)


def finding_row(finding: Finding) -> dict[str, Any]:
    """A finding as the page shows it."""
    speedup = finding.speedup
    return {
        "id": clip(finding.id),
        "message": clip(finding.message, 1000),
        "fix": None if finding.fix is None else clip(finding.fix, 1000),
        "speedup": None if speedup is None else {n: rounded(v) for n, v in speedup.as_dict().items()},
        "refuses": finding.refuses,
    }


def need_row(need: Need) -> dict[str, Any]:
    """A need as the page shows it."""
    return {
        "what": clip(need.what), "unit": clip(need.unit), "wants": rounded(need.wants), "has": rounded(need.has),
        "how": clip(need.how),
    }  # fmt: skip


def _telling(events: Sequence[Record]) -> list[dict[str, Any]]:
    """What happened to the run besides its checkpoints, the newest last."""
    told = [event for event in events if event.get("event") != "checkpoint"][-SHOWN_EVENTS:]
    return [
        {
            "event": clip(event.get("event")),
            "step": rounded(number(event, "step")),
            "details": clip(", ".join(f"{name}: {value}" for name, value in event.items() if name not in ABOUT)),
        }
        for event in told
    ]


def _changed_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


# Two runs beside each other: the keys in which they differ, and the figures.

_ABSENT = object()
FIGURES = {
    "images_per_second": ("images a second", True),
    "wait_share": ("share of step time spent waiting", False),
    "step_ms": ("milliseconds of a step", False),
    "epoch_s": ("seconds of the last epoch", False),
    "best_val_acc1": ("best val/acc1", True),
    "last_loss": ("last train/loss", False),
    "epochs_done": ("epochs", None),
    "step": ("steps", None),
}
"""Figure: what it is called, and whether more is better; None where neither is."""


def compare(a: Document, b: Document) -> dict[str, Any]:
    """What differs between two runs' documents."""
    # What the doctor saw of a script has no config.
    ours, theirs = ((run["config"] or {}).get("all", {}) for run in (a, b))
    keys = [*ours, *(key for key in theirs if key not in ours)]
    config = [
        {"key": key, "a": ours.get(key), "b": theirs.get(key), "in_a": key in ours, "in_b": key in theirs}
        for key in keys
        if ours.get(key, _ABSENT) != theirs.get(key, _ABSENT)
    ]
    figures = []
    for name, (label, more_is_better) in FIGURES.items():
        first, second = a["figures"].get(name), b["figures"].get(name)
        if first is None and second is None:
            continue
        ratio = second / first if first and second is not None else None
        figures.append(
            {
                "name": name, "label": label, "a": first, "b": second,
                "ratio": None if ratio is None else float(f"{ratio:.4g}"), "more_is_better": more_is_better,
            }
        )  # fmt: skip
    facts_a, facts_b = (run["environment"].get("facts", {}) for run in (a, b))
    machines = [
        {"key": key, "a": facts_a.get(key, "not known"), "b": facts_b.get(key, "not known")}
        for key in dict.fromkeys([*facts_a, *facts_b])
        if key not in ("started", "command", "folder") and facts_a.get(key) != facts_b.get(key)
    ]
    return {"config": config, "figures": figures, "machines": machines}


# Finds a run folder and reads it, with the checks' opinion of it: what `report` and `watch` begin with.


def read_document(path: Path) -> tuple[Path, Document]:
    """The folder, and what a page shows of the run or of the watched script in it."""
    from stoker.doctor.attach.records import has_records

    if not has_records(path):
        folder = find_run(path)
        return folder, read_run(folder).document()

    from stoker.doctor.diagnosing import diagnosis_of_watched
    from stoker.report.diagnosis_document import diagnosis_document

    return path, diagnosis_document(diagnosis_of_watched(path), path.resolve().name)


def read_run(folder: Path) -> RunReader:
    """The run, to be asked for its document as often as one likes."""
    return RunReader(folder, judge_run)


def judge_run(folder: Path) -> Diagnosis | str:
    """What the checks say of the run so far, or in words why they cannot say anything."""
    from stoker.clock.file import read_observed
    from stoker.doctor.diagnosing import diagnosis_of

    try:
        observed = read_observed(folder)
    except StokerError as error:
        return f"a verdict: {error.seen}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        # A page from a broken file is worth more than none.
        return f"a verdict: clock.jsonl cannot be read ({type(error).__name__}: {error})"
    return diagnosis_of(observed) if observed.steps else "a verdict: the clock has seen no whole step yet"
