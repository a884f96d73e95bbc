"""The demo: 1,797 handwritten digits as JPEGs in class folders, and the result of training on them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stoker.clock.costs import STAGES
from stoker.clock.reading import read_observed
from stoker.errors import UserError
from stoker.run.folder import RunFolder
from stoker.run.metrics import read_metrics

SIDE = 32
QUALITY = 95
# Every fifth digit is for validation; the collection is in the order in which people wrote.
VALIDATION_EVERY = 5
THRESHOLD = 97.0
"""Percent of the validation digits that a run must read; the config reaches 99 (tests/commands/test_demo.py)."""
BAR = 40


def write_digits(root: Path) -> Path:
    """Writes the digits below `root`, once; returns the folder for a config's data_root."""
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


@dataclass(frozen=True)
class TimeSpent:
    """Where the time of a run went; None and empty if the run did not record it."""

    computing_s: float | None = None
    """Steps without waiting: augmentation on the device, forward, backward, update."""
    waiting_s: float | None = None
    """The model was idle because no batch was ready."""
    validation_s: float | None = None
    images_per_second: float | None = None
    """Over all training steps."""
    stages_s: dict[str, float] = field(default_factory=dict)
    """Seconds a worker took for one image, by stage."""


def time_spent(folder: RunFolder) -> TimeSpent:
    """What the clock of a run recorded."""
    try:
        seen = read_observed(folder.root)
    except UserError:  # a run of another version
        return TimeSpent()
    # Observed leaves out the first step of each epoch, except for its wait.
    firsts = len(seen.epoch_starts_s)
    costs = [record for record in read_metrics(folder.metrics_file, "step") if "batch/wall_s" in record]
    last = costs[-1] if costs else {}  # the mean over most of the last epoch
    return TimeSpent(
        computing_s=(seen.elapsed_s - seen.wait_s) * (1 + firsts / max(1, seen.steps)),
        waiting_s=seen.wait_s + sum(seen.epoch_starts_s),
        validation_s=seen.validation_s,
        images_per_second=seen.images_per_second,
        stages_s={name: last[f"batch/{name}_s"] for name in STAGES if last.get(f"batch/{name}_s")},
    )


@dataclass(frozen=True)
class DemoResult:
    """The result of a demo."""

    config: Path
    run_folder: Path
    best_val_acc1: float | None
    epochs: int
    seconds: float
    """Of the whole command; few if the run was already finished."""
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
    """The accuracy, where the time went as bars, and commands to type next."""
    best = "no validation" if result.best_val_acc1 is None else f"val/acc1 {result.best_val_acc1:.1f} %"
    outcome = "it learned to read" if result.learned else f"below the expected {THRESHOLD:g} %"
    lines = [f"\n{best} after {result.epochs} epochs ({outcome}), {result.seconds:.0f} s in total"]
    lines += _bars(result.spent)
    config, run = shlex.quote(str(result.config)), shlex.quote(str(result.run_folder))
    digit = shlex.quote(str(result.config.parent / "digits" / "val" / "digit7"))
    lines += [
        "",
        "try next:",
        f"  stoker predict {run} {digit}   # classify some sevens",
        f"  stoker eval {run}   # see which digits it confuses",
        f"  stoker lr-find {config}   # find a learning rate",
        f"  stoker train {config} lr=0.4 run_name=faster   # another run; stop it with Ctrl-C, run it again to resume",
        "  stoker train configs/rsb_a3.yaml data_root=/your/imagenet   # the same code on ImageNet",
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
        lines += ["", "what a worker of the loader does for each image, meanwhile:"]
        lines += [_bar(name, f"{value * 1e6:7.0f} us", value / making) for name, value in spent.stages_s.items()]
    return lines


def _bar(name: str, amount: str, share: float) -> str:
    return f"  {name:<17}{amount}  {share:4.0%}  {'#' * round(BAR * share)}".rstrip()
