"""The numbers of a page: how far a run is, how fast, where its time goes; and the columns of its charts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from stoker.profile.batch_costs import STAGES
from stoker.profile.clock_reading import PARTS, StepTimes
from stoker.profile.observed import StageTime
from stoker.run.json_lines import Record, number
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
    """Seconds of all steps by part."""
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
    """Loss and learning rate."""
    names = ("step", "train/loss", "train/lr")
    return columns([{name: number(record, name) for name in names} for record in steps], names, worst=("step",))


def epoch_columns(epochs: list[Record]) -> dict[str, Any]:
    """Throughput, loss and scores by epoch."""
    names = [
        "epoch", "images_per_second", "wait_share", "seconds", "train/loss", "val/loss", "train/acc1", "val/acc1",
        "train/acc5", "val/acc5", "val/dice", "val/iou", "val/surface_dice", "train/lr",
    ]  # fmt: skip
    return columns([{name: number(record, name) for name in names} for record in epochs], names, worst=("epoch",))
