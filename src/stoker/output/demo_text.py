"""How the demo ends: what it learned, where the time went, what to try next."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.output.time_spent import TimeSpent

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
