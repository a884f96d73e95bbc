"""The demo: 1,797 handwritten digits as JPEGs in class folders, and what the training of them came to."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from stoker.clock.costs import STAGES
from stoker.errors import UserError
from stoker.run.json_lines import Record
from stoker.run.metrics import read_metrics

# The demo's data: 1,797 handwritten digits, as JPEGs in class folders like any other data set.

SIDE = 32
QUALITY = 95
# Every fifth digit is for validation; the collection is in the order in which people wrote.
VALIDATION_EVERY = 5


def write_digits(root: Path) -> Path:
    """Writes the digits below `root`, once; the folder that a config's data_root names."""
    done = root / ".complete"
    if done.exists():
        return root
    import cv2
    import simplejpeg

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError(
            "digits-missing",
            "scikit-learn is not installed",
            why="the demo's handwritten digits come with it",
            hint="pip install 'stoker[demo]'",
        ) from None
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        split = "val" if number % VALIDATION_EVERY == 0 else "train"
        folder = root / split / f"digit{label}"
        folder.mkdir(parents=True, exist_ok=True)
        grey = (pixels * (255 / 16)).astype(np.uint8)
        large = cv2.resize(grey, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
        colour = np.ascontiguousarray(np.repeat(large[:, :, None], 3, axis=2))
        (folder / f"{number:04d}.jpg").write_bytes(simplejpeg.encode_jpeg(colour, quality=QUALITY))
    done.touch()
    return root


# Where the time of a run went, from what its clock wrote into metrics.jsonl.


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


# How the demo ends: what it learned, where the time went, what to try next.

THRESHOLD = 97.0
"""Percent of the validation digits that a run must read; the config reaches 99 (tests/commands/test_demo.py)."""
BAR = 40


@dataclass(frozen=True)
class DemoResult:
    """What a demo came to."""

    config: Path
    run_folder: Path
    best_val_acc1: float | None
    epochs: int
    seconds: float
    """From the command to its end; a run that was finished before takes few."""
    spent: TimeSpent

    @property
    def learned(self) -> bool:
        return self.best_val_acc1 is not None and self.best_val_acc1 >= THRESHOLD

    def as_dict(self) -> dict[str, Any]:
        spent = self.spent
        return {
            "best_val_acc1": self.best_val_acc1,
            "threshold": THRESHOLD,
            "learned": self.learned,
            "epochs": self.epochs,
            "seconds": self.seconds,
            "images_per_second": spent.images_per_second,
            "computing_s": spent.computing_s,
            "waiting_s": spent.waiting_s,
            "validation_s": spent.validation_s,
            "stages": spent.stages_s,
            "config": str(self.config),
            "run_folder": str(self.run_folder),
        }


def demo_text(result: DemoResult) -> str:
    """A verdict, bars, commands to type."""
    best = "no validation" if result.best_val_acc1 is None else f"val/acc1 {result.best_val_acc1:.1f} %"
    verdict = "it reads" if result.learned else f"below the {THRESHOLD:g} % that we expect"
    lines = [f"\n{best} after {result.epochs} epochs ({verdict}), {result.seconds:.0f} s in all", *_bars(result.spent)]
    config, run = shlex.quote(str(result.config)), shlex.quote(str(result.run_folder))
    digit = shlex.quote(str(result.config.parent / "digits" / "val" / "digit7"))
    lines += [
        "",
        "try next:",
        f"  stoker predict {run} {digit}   # what it takes some sevens for",
        f"  stoker eval {run}   # which digits it confuses",
        f"  stoker lr-find {config}   # which learning rate suits it",
        f"  stoker train {config} lr=0.4 run_name=faster   # another run; Ctrl-C, and again, goes on",
        "  stoker train configs/rsb_a3.yaml data_root=/your/imagenet   # the same code, the real thing",
    ]
    return "\n".join(lines)


def _bars(spent: TimeSpent) -> list[str]:
    parts = {
        "computing": spent.computing_s,
        "waiting for data": spent.waiting_s,
        "validation": spent.validation_s,
    }
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    whole = sum(known.values())
    if not whole:
        return []
    rate = "" if spent.images_per_second is None else f" ({spent.images_per_second:,.0f} images/s in training)"
    lines = ["", f"where the time of the epochs went{rate}:"]
    for name, seconds in known.items():
        lines.append(_bar(name, f"{seconds:7.1f} s ", seconds / whole))
    making = sum(spent.stages_s.values())
    if making:
        lines += ["", "what a loader's worker does for an image, meanwhile:"]
        lines += [_bar(name, f"{value * 1e6:7.0f} us", value / making) for name, value in spent.stages_s.items()]
    return lines


def _bar(name: str, amount: str, share: float) -> str:
    return f"  {name:<17}{amount}  {share:4.0%}  {'#' * round(BAR * share)}".rstrip()
