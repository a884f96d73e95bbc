"""Where the time of a run went, from what its clock wrote into metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from stoker.clock.costs import STAGES
from stoker.output.metrics_file import Record, read_metrics


@dataclass(frozen=True)
class TimeSpent:
    """Seconds of the run's epochs by part; None where the file does not say."""

    epochs_s: float | None
    """All of them, validation included, checkpoints in between not."""
    steps_s: float | None
    """Training steps, waiting included."""
    waiting_s: float | None
    """The model stood still because no batch was ready."""
    stages_s: dict[str, float]
    """What a worker did for one image: seconds by stage, those that took any."""
    images_per_second: float | None
    """Over all training steps."""

    @property
    def computing_s(self) -> float | None:
        """Steps without waiting: augmentation on the device, forward, backward, update."""
        return None if self.steps_s is None or self.waiting_s is None else self.steps_s - self.waiting_s

    @property
    def validation_s(self) -> float | None:
        """What an epoch took beside its steps."""
        return None if self.epochs_s is None or self.steps_s is None else max(0.0, self.epochs_s - self.steps_s)


def time_spent(metrics_file: Path, images_per_step: int) -> TimeSpent:
    """Adds up the epochs of a run; a part that one epoch lacks is not known of the run."""
    epochs, steps = list(read_metrics(metrics_file, "epoch")), list(read_metrics(metrics_file, "step"))
    ends = [0, *(epoch["step"] for epoch in epochs)]
    images = [images_per_step * (end - begin) for begin, end in pairwise(ends)]
    times = [
        count / epoch["images_per_second"] if epoch.get("images_per_second") else None
        for count, epoch in zip(images, epochs, strict=True)
    ]
    waits = [
        None if seconds is None or "wait_share" not in epoch else seconds * epoch["wait_share"]
        for seconds, epoch in zip(times, epochs, strict=True)
    ]
    steps_s = _sum(times)
    # The last line of an epoch is the mean over most of it.
    last: Record = next((record for record in reversed(steps) if "batch/wall_s" in record), {})
    return TimeSpent(
        epochs_s=_sum([epoch.get("seconds") for epoch in epochs]),
        steps_s=steps_s,
        waiting_s=_sum(waits),
        stages_s={name: last[f"batch/{name}_s"] for name in STAGES if last.get(f"batch/{name}_s")},
        images_per_second=sum(images) / steps_s if steps_s else None,
    )


def _sum(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if known and len(known) == len(parts) else None
