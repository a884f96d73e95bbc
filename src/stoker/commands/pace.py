"""`--pace`: an accelerator that is not here, as the images that it would take in a second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.commands.planning import Wanted, plan_config
from stoker.errors import UsageError
from stoker.probe.datasheets import load_datasheet


@dataclass(frozen=True)
class Pace:
    """How fast the consumer of the trials is."""

    images_per_second: float
    how: str
    """'as given', or whose roofline it is."""


def read_pace(text: str, path: Path, overrides: Sequence[str]) -> Pace:
    """A number of images a second, or the card's name for which `stoker plan` computes one.

    Raises UsageError: `pace-invalid`, or what the datasheets say of a name that they do not know.
    """
    number = _number(text)
    if number is not None:
        if not (math.isfinite(number) and number > 0):
            raise UsageError("pace-invalid", f"--pace {text}: images a second are above zero", hint="--pace 800")
        return Pace(number, "as given")
    load_datasheet(text)  # a name that nobody knows is said before anything is traced
    rates = plan_config(path, overrides, Wanted(gpu=text, gpus=1, nodes=1)).plan.time.rates
    if "accelerator" not in rates:
        raise UsageError(
            "pace-unknown",
            f"--pace {text}: the plan could not compute what it takes in a second",
            hint="--pace 800, where 800 images/s are what was measured on it",
        )
    rate = rates["accelerator"]
    return Pace(rate.images_per_second, rate.source)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
