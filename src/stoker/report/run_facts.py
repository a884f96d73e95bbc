"""What a page shows of a run: its numbers, the columns of its charts, and its other files (config, environment,
checkpoints, quarantine, predictions)."""

from __future__ import annotations

import base64
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from stoker.config import Config, config_values
from stoker.config.schema import SECTION_NAMES, key_names
from stoker.config.yaml_file import read_yaml_file
from stoker.core.errors import ConfigError
from stoker.core.files import open_regular, read_json, read_regular
from stoker.core.redact import redact_text
from stoker.core.units import size_text
from stoker.profile.batch_costs import STAGES
from stoker.profile.clock_reading import PARTS, StepTimes
from stoker.profile.observed import StageTime
from stoker.run.json_lines import Record, finite, number
from stoker.run.metrics import read_checkpoint_name
from stoker.tasks.base import metric_of, recorded_task

POINTS = 900
"""More than a screen has pixels for: 900 points of 6 digits in 20 columns are 130 KB."""
DIGITS = 5
"""Significant digits: all that a chart can show, and a third of what a float is written with."""

Column = list[float | None]


def rounded(value: float | None) -> float | None:
    """The number with as many digits as a page shows; None if it is NaN or infinite. Whole numbers stay whole."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 1e15:
        return int(value)
    return float(f"{value:.{DIGITS}g}")


def run_state(
    config: dict[str, Any], epochs: list[Record], events: list[Record], *, held: bool
) -> tuple[str, str | None]:
    """Whether the run is running, finished or stopped, and why it stopped."""
    total = _epochs_total(config)
    endings = ("left", "resumed", "stopped_early")
    last = next((event for event in reversed(events) if event.get("event") in endings), {})
    done = last.get("event") == "stopped_early" or (total is not None and _epochs_done(epochs) >= total)
    state = "running" if held else "finished" if done else "stopped"
    if state == "stopped" and last.get("event") == "left":
        return state, f"{last.get('ending')}: {last.get('why')}"
    return state, None


def figures(
    intervals: Sequence[StepTimes], epochs: list[Record], records: list[Record], config: dict[str, Any], *, held: bool
) -> dict[str, Any]:
    """The single numbers that a reader looks for first."""
    seconds = sum(interval.seconds for interval in intervals)
    images = sum((interval.images_per_second or 0.0) * interval.seconds for interval in intervals)
    counted = sum(interval.steps for interval in intervals)
    wait_s = sum(interval.parts_s.get("wait", 0.0) for interval in intervals)
    metric = metric_of(config)
    scores = [(score, number(r, "epoch")) for r in epochs if (score := number(r, metric.key)) is not None]
    ranked = max(scores, key=lambda pair: metric.rank(pair[0])) if scores else (None, None)
    best: tuple[float | None, float | None] = ranked
    times = [when for r in records if (when := number(r, "time")) is not None]
    steps = (record for record in reversed(records) if record.get("kind") == "step")
    last_loss = next((loss for record in steps if (loss := number(record, "train/loss")) is not None), None)
    return {
        "wait_share": rounded(wait_s / seconds) if seconds else None,
        "images_per_second": rounded(images / seconds) if images and seconds else None,
        "unit": recorded_task(config).unit,
        "step_ms": rounded(1000 * seconds / counted) if counted else None,
        "metric": metric.key,
        "best": rounded(best[0]),
        "best_text": None if best[0] is None else metric.text(best[0]).replace("%", " %"),
        "best_epoch": rounded(best[1]),
        "last_loss": rounded(last_loss),
        "elapsed_s": rounded(times[-1] - times[0]) if len(times) > 1 else None,
        "epoch_s": rounded(number(epochs[-1], "seconds")) if epochs else None,
        "updated": times[-1] if times else None,
        **_how_far(config, epochs, records, held),
    }


def _how_far(config: dict[str, Any], epochs: list[Record], records: list[Record], held: bool) -> dict[str, Any]:
    done, total = _epochs_done(epochs), _epochs_total(config)
    step = next((int(at) for r in reversed(records) if (at := number(r, "step")) is not None), 0)
    ended_at = number(epochs[-1], "step") if epochs else None
    per_epoch = ended_at / done if ended_at and done else None
    recent = [seconds for record in epochs[-5:] if (seconds := number(record, "seconds")) is not None]
    share = min(0.999, max(0.0, step / per_epoch - done)) if per_epoch else None
    left_s = None
    if held and total is not None and recent and share is not None:
        left_s = max(0.0, total - done - share) * sum(recent) / len(recent)
    return {
        "step": step,
        "epochs_done": done,
        "epochs_total": total,
        "epoch_share": rounded(share),
        "left_s": rounded(left_s),
    }


def _epochs_done(epochs: list[Record]) -> int:
    return max((int(number(record, "epoch") or 0) + 1 for record in epochs), default=0)


def _epochs_total(config: dict[str, Any]) -> int | None:
    total = config.get("epochs")
    return total if type(total) is int else None


def sum_of_parts(intervals: Sequence[StepTimes]) -> dict[str, float | None]:
    names = [name for name in PARTS if any(name in interval.parts_s for interval in intervals)]
    return {name: rounded(sum(interval.parts_s.get(name, 0.0) for interval in intervals)) for name in names}


def stage_rows(stages: Mapping[str, StageTime], *, scale: float, samples: float | None = None) -> list[dict[str, Any]]:
    """What workers do for one image: microseconds by stage, split into on-CPU, run-queue and blocked time.

    `scale` turns a stage's seconds into seconds of one image; without `samples`, bytes are left out."""
    rows = []
    for name in sorted(stages, key=lambda name: (*STAGES, name).index(name)):
        stage = stages[name]
        if not stage.wall_s:
            continue
        row: dict[str, Any] = {"name": str(name)[:40]}
        times = {"wall": stage.wall_s, "cpu": stage.cpu_s, "runq": stage.runq_s, "blocked": stage.blocked_s}
        row |= {f"{part}_us": rounded(1e6 * scale * s) for part, s in times.items() if s is not None}
        if samples and stage.read_bytes is not None:
            row["read_bytes"] = rounded(stage.read_bytes / samples)
        rows.append(row)
    return rows


def columns(
    rows: Sequence[Mapping[str, float | None]], names: Sequence[str], worst: Sequence[str] = ()
) -> dict[str, Column]:
    """The rows as columns of at most POINTS values each; columns without any value are left out.

    Neighbours are averaged. A column in `worst` keeps the largest instead, so that a stall is not averaged away.
    """
    edges = list(range(len(rows) + 1))
    if len(rows) > POINTS:
        edges = [round(point * len(rows) / POINTS) for point in range(POINTS + 1)]
    found: dict[str, Column] = {}
    for name in names:
        merge = max if name in worst else statistics.fmean
        column: Column = []
        for a, b in pairwise(edges):
            known = [value for row in rows[a:b] if (value := row.get(name)) is not None and math.isfinite(value)]
            column.append(rounded(merge(known)) if known else None)
        if any(value is not None for value in column):
            found[name] = column
    return found


def timeline_columns(intervals: Sequence[StepTimes]) -> dict[str, Any]:
    """Milliseconds of a step by part, the longest step, and the throughput."""
    rows: list[dict[str, float | None]] = [
        {
            "step": interval.step,
            "epoch": interval.epoch,
            **{f"{part}_ms": 1000 * seconds / interval.steps for part, seconds in interval.parts_s.items()},
            "longest_ms": None if interval.longest_s is None else 1000 * interval.longest_s,
            "images_per_second": interval.images_per_second,
        }
        for interval in intervals
    ]
    names = ("step", "epoch", *(f"{part}_ms" for part in (*PARTS, "rest")), "longest_ms", "images_per_second")
    return columns(rows, names, worst=("step", "epoch", "longest_ms"))


def memory_columns(intervals: Sequence[StepTimes]) -> dict[str, Any]:
    """Peaks of memory; empty if it was never measured."""
    # It is measured every few seconds, not on every line.
    rows: list[dict[str, float | None]] = [{"step": i.step, **i.memory_bytes} for i in intervals if i.memory_bytes]
    names = ("step", *sorted({name for row in rows for name in row if name != "step"}))
    return columns(rows, names, worst=names)


def step_columns(steps: list[Record]) -> dict[str, Any]:
    names = ("step", "train/loss", "train/lr")
    return columns([{name: number(record, name) for name in names} for record in steps], names, worst=("step",))


def epoch_columns(epochs: list[Record]) -> dict[str, Any]:
    names = [
        "epoch", "images_per_second", "wait_share", "seconds", "train/loss", "val/loss", "train/acc1", "val/acc1",
        "train/acc5", "val/acc5", "val/dice", "val/iou", "val/surface_dice", "train/lr",
    ]  # fmt: skip
    return columns([{name: number(record, name) for name in names} for record in epochs], names, worst=("epoch",))


# Other files.

LONGEST_TEXT = 400
"""Characters of a name or a message: a path may have 4,096, and a page full of those is unreadable."""
SHOWN_SAMPLES = 200
SHOWN_PREDICTIONS = 100
SHOWN_CHECKPOINTS = 100
SHOWN_VOLUMES = 12
LARGEST_ENVIRONMENT_BYTES = 4 << 20
LARGEST_PREVIEW_BYTES = 1 << 20
JPEG = b"\xff\xd8\xff"


def clip(value: Any, longest: int = LONGEST_TEXT) -> str:
    """Text as a page may hold it: shortened, without secrets and lone surrogates."""
    text = redact_text(str(value)[: 4 * longest]).encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a run's config.yaml with their values, including unknown keys; empty if it cannot be read."""
    try:
        open_regular(path).close()  # a pipe may be a config that somebody names, but never a run's
        found = read_yaml_file(path, frozenset(key_names()), SECTION_NAMES)
    except (ConfigError, OSError, ValueError):
        return {}
    return {entry.key: _plain(entry.value) for entry in found.entries}


def changed_from_defaults(values: dict[str, Any]) -> list[dict[str, Any]]:
    """The keys whose value differs from the default, and those that this version does not know."""
    defaults = {key: _plain(value) for key, value in config_values(Config()).items()}
    return [
        {"key": clip(key), "value": value, "default": defaults.get(key), "known": key in defaults}
        for key, value in values.items()
        if key not in defaults or defaults[key] != value
    ]


def read_environment(path: Path) -> dict[str, Any]:
    """The facts about machine and versions that a reader wants first, and all packages; empty if unreadable."""
    try:
        record = read_json(path, LARGEST_ENVIRONMENT_BYTES)
    except (OSError, ValueError):
        return {}
    if not isinstance(record, dict):
        return {}
    host, git = mapping(record.get("host")), mapping(record.get("git"))
    packages = {clip(name, 80): clip(version, 80) for name, version in mapping(record.get("packages")).items()}
    command, ram = record.get("command"), finite(host.get("ram_bytes"))
    facts = {
        "started": record.get("time"),
        "host": host.get("name"),
        "system": host.get("system"),
        "processor": host.get("cpu"),
        "cores": host.get("cpus"),
        "memory": None if ram is None else size_text(ram),
        "python": record.get("python"),
        "torch": packages.get("torch"),
        "stoker": record.get("stoker"),
        "revision": git.get("revision"),
        "command": " ".join(map(str, command)) if isinstance(command, list) else command,
        "folder": record.get("folder"),
    }
    if git.get("changed"):
        facts["revision"] = f"{facts['revision']}, with uncommitted changes"
    return {
        "facts": {name: clip(value) for name, value in facts.items() if value is not None},
        "variables": {clip(k, 80): clip(v) for k, v in mapping(record.get("variables")).items()},
        "packages": dict(list(packages.items())[:1000]),
    }


def preview_of(path: Path) -> dict[str, Any] | None:
    """Where the run's picture of its samples is, and its size; None without one that a page can hold."""
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            is_jpeg = stream.read(len(JPEG)) == JPEG
        file = str(path).encode().decode()  # JSON is UTF-8; a folder's name need not be
    except (OSError, ValueError):
        return None
    return {"file": file, "bytes": size} if is_jpeg and size <= LARGEST_PREVIEW_BYTES else None


def read_evaluation(file: Path, picture: Path) -> dict[str, Any] | None:
    """The scores of a run's validation volumes, the worst first, with their picture; None if none were made."""
    try:
        record = read_json(file)
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("volumes"), list):
        return None
    volumes = [one for one in record["volumes"] if isinstance(one, dict)]
    return {
        "checkpoint": clip(Path(str(record.get("checkpoint"))).name),
        "count": len(volumes),
        "mean": _scores_of(mapping(record.get("mean"))),
        "volumes": [{"id": clip(one.get("id")), **_scores_of(one)} for one in volumes[:SHOWN_VOLUMES]],
        "picture": preview_of(picture),
    }


def _scores_of(record: dict[str, Any]) -> dict[str, float | None]:
    competition = mapping(record.get("competition"))
    scores = {name: rounded(number(record, name)) for name in ("dice", "iou", "surface_dice")}
    score = number(competition or record, "score")
    return scores if score is None else scores | {"score": rounded(score)}


def picture_url(preview: dict[str, Any] | None) -> str | None:
    """The picture itself, as text that a page can hold; None if it is gone."""
    try:
        data = b"" if preview is None else read_regular(Path(preview["file"]), LARGEST_PREVIEW_BYTES)
    except OSError:
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}" if data.startswith(JPEG) else None


def list_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Names, sizes and scores, the best first."""
    found: list[tuple[float, dict[str, Any]]] = []
    try:
        files = sorted(file for file in folder.iterdir() if file.suffix == ".ckpt")
    except OSError:
        return []
    for file in files:
        said = read_checkpoint_name(file.name)
        try:
            size = file.stat().st_size
        except OSError:
            continue  # a running run deletes old ones
        row: dict[str, Any] = {"name": clip(file.name), "bytes": size, "epoch": None, "score": None}
        if said is not None:
            text = f"{said.metric.key} {said.metric.text(said.value)}"
            row |= {"epoch": said.epoch, "score": said.value, "score_text": text}
        found.append((-math.inf if said is None else said.metric.rank(said.value), row))
    return [row for _, row in sorted(found, key=lambda pair: pair[0], reverse=True)[:SHOWN_CHECKPOINTS]]


def describe_quarantine(records: Sequence[Record]) -> dict[str, Any]:
    """How many samples could not be read, and the first few."""
    bad = {str(record.get("name", record.get("sample", "?"))): record.get("reason") for record in records}
    shown = list(bad.items())[:SHOWN_SAMPLES]
    return {
        "count": len(bad),
        "samples": [
            {"name": clip(name), "reason": clip("no reason recorded" if reason is None else reason)}
            for name, reason in shown
        ],
    }


def describe_predictions(records: Sequence[Record]) -> list[dict[str, Any]]:
    """What was predicted, what a trial measured, and how far off the prediction was; the newest last.

    A record is `Confirmation.as_dict()`, or `Prediction.as_dict()` of one that was not tried; a prediction that was
    repeated or tried later is shown once.
    """
    untried: dict[Any, int] = {}
    last: dict[int, Record] = {}
    for at, record in enumerate(records):
        last.pop(untried.pop(str(record.get("label")), -1), None)
        last[at] = record
        if "measured_speedup" not in record:
            untried[str(record.get("label"))] = at
    found = []
    for record in list(last.values())[-SHOWN_PREDICTIONS:]:
        speedup = mapping(record.get("speedup"))
        found.append(
            {
                "label": clip(record.get("label") or record.get("id") or "?"),
                **{name: rounded(number(speedup, name)) for name in ("low", "expected", "high")},
                "measured": rounded(number(record, "measured_speedup")),
                "measured_images_per_second": rounded(number(record, "measured_images_per_second")),
                "error": rounded(number(record, "error")),
            }
        )
    return found


def _plain(value: Any) -> Any:
    """A config value as JSON, short enough for a table."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value[:20]]
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    return clip(value)


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, or an empty one: nothing in a file is trusted."""
    return value if isinstance(value, dict) else {}
