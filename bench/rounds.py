"""Interleaved rounds: every contender runs once per round, so that a noisy neighbour affects all of them equally."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.core.files import write_text
from stoker.run.environment import describe_environment

RESULTS = Path(__file__).parents[1] / "results"
# Packages whose version could affect a figure; results record only these.
TELLING_PACKAGES = (
    "torch", "torchvision", "timm", "numpy", "pillow", "simplejpeg", "opencv-python-headless",
    "nvidia-nvimgcodec-cu13", "obstore", "webdataset", "litdata", "ffcv", "nvidia-dali-cuda130", "typer", "pydantic",
    "awscrt", "zarr", "tensorstore", "tifffile", "scipy",
)  # fmt: skip


@dataclass(frozen=True)
class Spread:
    """The values of one measurement over several rounds."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def as_dict(self) -> dict[str, float | list[float]]:
        return {
            "median": round(self.median, 5),
            "min": round(min(self.values), 5),
            "max": round(max(self.values), 5),
            "rounds": [round(value, 5) for value in self.values],
        }


def interleave(contenders: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Spread]:
    """Runs every contender once per round; its return value is its figure for that round."""
    values: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for name, measure in contenders.items():
            values[name].append(measure())
            sys.stderr.write(f"round {number + 1}/{rounds}  {name}: {values[name][-1]:.4g}\n")
    return {name: Spread(tuple(found)) for name, found in values.items()}


def ratio(numerator: Spread, denominator: Spread) -> Spread:
    """The ratio round by round, so that a disturbance that lasted a whole round cancels out."""
    return Spread(tuple(a / b for a, b in zip(numerator.values, denominator.values, strict=True)))


def keep(name: str, document: dict[str, Any]) -> Path:
    """Writes the figures under results/, with a description of the machine and software; returns the file's path."""
    environment = describe_environment()
    kept = {
        "python": environment["python"],
        "git": environment["git"],
        "cpu": environment["host"]["cpu"],
        "cpus": environment["host"]["cpus"],
        "packages": {k: v for k, v in environment["packages"].items() if k.lower() in TELLING_PACKAGES},
    }
    path = RESULTS / name / "result.json"
    write_text(path, json.dumps({"measured": document, "environment": kept}, indent=2) + "\n")
    return path
