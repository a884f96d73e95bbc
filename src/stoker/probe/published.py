"""Published speeds of accelerators: figures that somebody measured, with their source."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources

import yaml

from stoker.errors import UsageError, did_you_mean


@dataclass(frozen=True)
class PublishedRate:
    """What one accelerator takes in ResNet-50 training at 224 px."""

    name: str
    images_per_second: float
    source: str


def published_rate(name: str) -> PublishedRate:
    """The published figure for an accelerator; raises UsageError where nobody published one that we know."""
    text = resources.files("stoker.probe").joinpath("published_rates.yaml").read_text()
    rates = yaml.safe_load(text)
    known = name.lower().replace("_", "-")
    if known not in rates:
        meant = did_you_mean(known, rates)
        raise UsageError(
            "unknown-gpu",
            f"no published figure for {name!r}" + (f"; {meant}" if meant else ""),
            why="how much of it this host can feed is only worth saying against a measured figure",
            hint="known: " + ", ".join(sorted(rates)),
        )
    return PublishedRate(known, float(rates[known]["images_per_second"]), rates[known]["source"])
