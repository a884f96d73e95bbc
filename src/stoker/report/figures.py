"""What a run's lines add up to: how far it is, how fast, where its time went; and columns for its charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stoker.clock.costs import STAGES
from stoker.report.clock_intervals import PARTS, StepInterval, columns, rounded
from stoker.report.surroundings import clip
from stoker.run.metrics import Record, number


def images_per_step(config: dict[str, Any]) -> float | None:
    """Of all ranks together, where the config alone says how many there are."""
    factors = [config.get(key, 1) for key in ("batch_size", "gradient_accumulation", "devices", "num_nodes")]
    if "batch_size" not in config or not all(type(factor) is int for factor in factors):
        return None
    return float(factors[0] * factors[1] * factors[2] * factors[3])


def progress(config: dict[str, Any], epochs: list[Record], events: list[Record], *, held: bool) -> dict[str, Any]:
    """Whether the run goes on, and how it ended where it did not go to its end."""
    total = _epochs_total(config)
    state = "running" if held else "finished" if total is not None and _epochs_done(epochs) >= total else "stopped"
    last = next((event for event in reversed(events) if event.get("event") in ("left", "resumed")), {})
    ending = None
    if state == "stopped" and last.get("event") == "left":
        ending = clip(f"{last.get('ending')}: {last.get('why')}")
    return {"state": state, "ending": ending}


def sum_of_parts(intervals: Sequence[StepInterval]) -> dict[str, float | None]:
    """Seconds of all steps by part."""
    names = [name for name in (*PARTS, "rest") if any(name in interval.parts_s for interval in intervals)]
    return {name: rounded(sum(interval.parts_s.get(name, 0.0) for interval in intervals)) for name in names}


def figures(
    intervals: Sequence[StepInterval],
    epochs: list[Record],
    records: list[Record],
    config: dict[str, Any],
    *,
    held: bool,
) -> dict[str, Any]:
    """The single numbers that a reader looks for first."""
    seconds = sum(interval.seconds for interval in intervals)
    images = sum((interval.images_per_second or 0.0) * interval.seconds for interval in intervals)
    counted = sum(interval.steps for interval in intervals)
    wait_s = sum(interval.parts_s.get("wait", 0.0) for interval in intervals)
    scores = [(score, number(r, "epoch")) for r in epochs if (score := number(r, "val/acc1")) is not None]
    best: tuple[float | None, float | None] = max(scores, key=lambda pair: pair[0]) if scores else (None, None)
    times = [when for r in records if (when := number(r, "time")) is not None]
    lines = (record for record in reversed(records) if record.get("kind") == "step")
    newest = next((loss for record in lines if (loss := number(record, "train/loss")) is not None), None)
    return {
        "wait_share": rounded(wait_s / seconds) if seconds else None,
        "images_per_second": rounded(images / seconds) if images and seconds else None,
        "step_ms": rounded(1000 * seconds / counted) if counted else None,
        "best_val_acc1": rounded(best[0]),
        "best_epoch": rounded(best[1]),
        "last_loss": rounded(newest),
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


def validation_beside(epochs: list[Record], intervals: Sequence[StepInterval]) -> dict[str, float | None]:
    """What the epochs took beside their steps, where every epoch and step of the run is known."""
    seconds = [number(record, "seconds") for record in epochs]
    last = number(epochs[-1], "step") if epochs else None
    inside = [interval for interval in intervals if last is not None and interval.step <= last]
    if not seconds or None in seconds or last is None or sum(interval.steps for interval in inside) < last:
        return {}
    return {"validation": rounded(max(0.0, sum(s for s in seconds if s) - sum(i.seconds for i in inside)))}


def timeline_columns(intervals: Sequence[StepInterval]) -> dict[str, Any]:
    names = ("step", "epoch", *(f"{part}_ms" for part in (*PARTS, "rest")), "longest_ms", "images_per_second")
    return columns([interval.row() for interval in intervals], names, worst=("step", "epoch", "longest_ms"))


def memory_columns(intervals: Sequence[StepInterval]) -> dict[str, Any]:
    names = sorted({name for interval in intervals for name in interval.extra if name.endswith("_bytes")})
    # The host is looked at every few seconds, not at every line.
    rows = [interval.row() for interval in intervals if interval.extra]
    return columns(rows, ("step", *names), worst=("step", *names)) if rows else {}


def step_columns(steps: list[Record]) -> dict[str, Any]:
    """Loss and learning rate."""
    names = ("step", "train/loss", "train/lr")
    return columns([{name: number(record, name) for name in names} for record in steps], names, worst=("step",))


def epoch_columns(epochs: list[Record]) -> dict[str, Any]:
    names = [
        "epoch", "images_per_second", "wait_share", "seconds", "train/loss", "val/loss", "train/acc1", "val/acc1",
        "train/acc5", "val/acc5", "train/lr",
    ]  # fmt: skip
    return columns([{name: number(record, name) for name in names} for record in epochs], names, worst=("epoch",))


def stages_of_metrics(steps: list[Record]) -> list[dict[str, Any]]:
    """Of one image, as the last line says: the mean over most of an epoch."""
    last = next((record for record in reversed(steps) if number(record, "batch/wall_s")), {})
    stages = [(name, number(last, f"batch/{name}_s")) for name in STAGES]
    return [{"name": name, "wall_us": rounded(1e6 * seconds)} for name, seconds in stages if seconds]
