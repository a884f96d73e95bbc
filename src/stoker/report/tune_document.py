"""Everything that a page shows of a search of `stoker tune`, from its journal; also while the search is under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.core.errors import UserError
from stoker.core.units import count
from stoker.report.run_facts import clip, mapping, rounded
from stoker.run.json_lines import JsonLines, KeptRecords, Record, finite, number, read_records
from stoker.run.lease import is_locked

JOURNAL = "tune.jsonl"
ABLATION = "ablate.jsonl"
SHOWN_STEPS = 200
SHOWN_KEYS = 60
SHOWN_WINDOWS = 100
LONGEST_DETAIL = 2000
KEPT = ("kept", "confirmed")

Document = dict[str, Any]


def is_tune(document: Document) -> bool:
    """Whether this is the document of a search, rather than of a run."""
    return document.get("kind") == "tune"


def find_journal(path: Path) -> Path | None:
    """The journal that is meant by its own path or its folder's; None if there is none.

    Raises UserError for a file that is not a journal."""
    if path.suffix == ".jsonl" and path.is_file():
        with suppress(OSError):
            if next(read_records(path), {}).get("kind") == "begin":
                return path
        raise UserError(
            "not-a-journal", f"{path} is not a journal of `stoker tune`", why="its first line does not begin a search",
            hint=f"stoker report {path.parent}",
        )  # fmt: skip
    named = sorted(path.glob(f"*.{JOURNAL}")) if path.is_dir() else []
    return next((file for file in (path / JOURNAL, *named, path / ABLATION) if file.is_file()), None)


class TuneReader:
    """A journal to read again and again; each time costs only what is new in it."""

    def __init__(self, journal: Path) -> None:
        self.journal = journal
        self._lines = JsonLines(journal, KeptRecords)
        self._document: Document | None = None
        self._running: bool | None = None

    def document(self) -> Document:
        """What is known about the search now; the same object as before if nothing has changed."""
        changed = self._lines.refresh()
        running = is_locked(self.journal)
        if self._document is None or changed or running != self._running:
            self._running = running
            self._document = self._build(running=running)
        return self._document

    def _build(self, *, running: bool) -> Document:
        records = self._lines.records
        begin = _last(records, "begin")
        end = _last(records, "end")
        others = _records(end.get("other_training"))[:SHOWN_STEPS]
        apart = {number(record, "number") for record in others}
        steps = [_step_row(record) for record in _of_kind(records, "step") if number(record, "number") not in apart]
        # Every round says again what a source contributes.
        sources = {row["label"]: row for row in map(_source_row, _of_kind(records, "source"))}
        original = mapping(end.get("original")) or mapping(begin.get("original"))
        kept = [record for record in _of_kind(records, "step") if record.get("decision") in KEPT]
        best = mapping(end.get("best")) or (mapping(kept[-1].get("settings")) if kept else original)
        state = "finished" if end else "running" if running else "stopped"
        facts, command = mapping(end.get("facts")), _last(records, "command")
        return {
            "kind": "tune",
            "what": "ablation" if begin.get("what") == "ablation" else "search",
            "name": clip(begin.get("config") or begin.get("command") or self.journal.resolve().parent.name),
            "folder": clip(self.journal.parent),
            "state": state,
            "ending": clip(end["stopped"]) if end.get("stopped") else None,
            "figures": _figures(records, steps),
            "changes": _changes(original, best, steps),
            "steps": steps[:SHOWN_STEPS],
            "sources": list(sources.values())[:SHOWN_STEPS],
            "other": [_step_row(record, ("measured", "different-training")) for record in others],
            "setup": _setup(begin),
            "command": clip(command["line"], LONGEST_DETAIL) if command.get("line") else None,
            "notes": [clip(note) for note in [*_texts(facts.get("notes")), *_texts(command.get("notes"))]],
            "missing": self._missing(begin),
        }

    def _missing(self, begin: Record) -> list[str]:
        found, lines = [], self._lines
        if not lines.exists:
            found.append(f"{self.journal.name} does not exist any more.")
        elif not begin:
            found.append(f"{self.journal.name} has no beginning: it is not the journal of a search.")
        if lines.broken:
            found.append(f"{self.journal.name}: {count(lines.broken, 'line')} not in JSON and skipped.")
        if lines.problem is not None:
            found.append(f"{self.journal.name} was not read: {lines.problem}.")
        if lines.records.left_out:
            found.append(f"{self.journal.name}: {count(lines.records.left_out, 'line')} too many, and left out.")
        return [clip(text) for text in found]


def _figures(records: Sequence[Record], steps: Sequence[Record]) -> dict[str, Any]:
    begin, end = _last(records, "begin"), _last(records, "end")
    facts = mapping(end.get("facts"))
    rates = [step["rate"] for step in steps if step["decision"] == "baseline" and step["rate"] is not None]
    before = number(end, "before") or (rates[0] if rates else None)
    kept = [step["rate"] for step in steps if step["decision"] in KEPT and step["rate"] is not None]
    after = number(end, "after") or (kept[-1] if kept else None)
    return {
        "unit": clip(facts.get("unit") or begin.get("unit") or "samples"),
        "objective": clip(facts.get("objective") or begin.get("goal") or "throughput"),
        "before": rounded(before),
        "after": rounded(after),
        "speedup": rounded(after / before) if before and after else None,
        "ceiling": rounded(number(end, "ceiling") or number(_last(records, "ceiling"), "samples_per_second")),
        "trials": rounded(number(end, "trials")) or sum(1 for _ in _of_kind(records, "trial")),
        "took_s": rounded(number(end, "took_s")),
        "hours_before": rounded(number(facts, "hours_before")),
        "hours_after": rounded(number(facts, "hours_after")),
        "cost_before": rounded(number(facts, "cost_before")),
        "cost_after": rounded(number(facts, "cost_after")),
        "updated": rounded(number(end, "time") or number(begin, "time")),
    }


def _step_row(record: Record, counting: tuple[str, ...] = ("measured",)) -> dict[str, Any]:
    """One line of the journal as the page shows it; `counting` are the results whose speed counts."""
    measured, against = _records(record.get("measured")), _records(record.get("against"))
    rates = [rate for one in measured if (rate := _rate_of(one, counting)) is not None]
    failures = [one for one in measured if one.get("result") not in counting]
    predicted = mapping(record.get("predicted"))
    windows = [value for one in measured for value in _windows(one)][:SHOWN_WINDOWS]
    before = [rate for one in against if (rate := _rate_of(one, counting)) is not None]
    waits = [share for one in measured if (share := number(one, "wait_share")) is not None]
    return {
        "number": rounded(number(record, "number")),
        "change": _pairs(record.get("change")),
        "why": clip(record.get("why") or ""),
        "predicted": {name: rounded(finite(predicted.get(name))) for name in ("low", "expected", "high")}
        if predicted
        else None,
        "rate": rounded(sum(rates) / len(rates)) if rates else None,
        "rates": [rounded(rate) for rate in rates],
        "low": rounded(min(windows)) if windows else None,
        "high": rounded(max(windows)) if windows else None,
        "against": rounded(sum(before) / len(before)) if before else None,
        "speedup": rounded(number(record, "speedup")),
        "decision": clip(record.get("decision") or "", 40),
        "reason": clip(record.get("reason") or ""),
        "failed": len(failures),
        "result": clip(failures[0].get("result"), 40) if failures else None,
        "detail": clip(failures[0].get("detail") or "", LONGEST_DETAIL) if failures else "",
        "wait_share": rounded(waits[0]) if waits else None,
        "peak_bytes": rounded(max((size for one in measured if (size := number(one, "peak_bytes"))), default=None)),
    }


def _source_row(record: Record) -> dict[str, Any]:
    return {
        "label": clip(record.get("label") or ""),
        "change": _pairs(record.get("change")),
        "factor": rounded(number(record, "factor")),
        "spread": rounded(number(record, "spread")),
        "verdict": clip(record.get("verdict") or "", 60),
        "note": clip(record.get("note") or ""),
    }


def _changes(original: Record, best: Record, steps: Sequence[Record]) -> list[dict[str, Any]]:
    """The settings in which the best differs from the original, with what was decided when each was kept."""
    reasons = {pair["key"]: step["reason"] for step in steps if step["decision"] == "kept" for pair in step["change"]}
    changed = [key for key in list(best)[:SHOWN_KEYS] if key not in original or original[key] != best[key]]
    return [
        {
            "key": clip(key), "from": _shown(original.get(key)), "to": _shown(best[key]),
            "reason": reasons.get(clip(key), ""),
        }
        for key in changed
    ]  # fmt: skip


def _setup(begin: Record) -> dict[str, str]:
    """What the search was told and where it ran: all single values of the first line, nested ones by their own name."""
    facts: dict[str, str] = {}
    for name, value in begin.items():
        if name in ("kind", "format", "time", "original", "what"):
            continue
        inner = value.items() if isinstance(value, dict) else [(name, value)]
        facts |= {clip(key, 60): _shown(one) for key, one in inner if one is not None and not isinstance(one, dict)}
    return dict(list(facts.items())[:SHOWN_KEYS])


def _pairs(change: Any) -> list[dict[str, str]]:
    return [{"key": clip(key), "value": _shown(value)} for key, value in list(mapping(change).items())[:SHOWN_KEYS]]


def _shown(value: Any) -> str:
    """A setting as a config has it."""
    if value is None or isinstance(value, bool):
        return {None: "none", True: "true", False: "false"}[value]
    return clip(", ".join(map(str, value)) if isinstance(value, list) else value)


def _rate_of(measured: Record, counting: tuple[str, ...]) -> float | None:
    windows = _windows(measured)
    return sum(windows) / len(windows) if measured.get("result") in counting and windows else None


def _windows(measured: Record) -> list[float]:
    windows = measured.get("windows")
    found = (finite(value) for value in windows[:SHOWN_WINDOWS]) if isinstance(windows, list) else ()
    return [value for value in found if value is not None]


def _of_kind(records: Sequence[Record], kind: str) -> Iterator[Record]:
    return (record for record in records if record.get("kind") == kind)


def _last(records: Sequence[Record], kind: str) -> Record:
    return next((record for record in reversed(records) if record.get("kind") == kind), {})


def _records(value: Any) -> list[Record]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []
