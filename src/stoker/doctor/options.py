"""The doctor's options that have a syntax of their own: `--fail-if 'wait_share>0.1'` and `--pace 800 | a100-80`."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.clock.observed import Observed
from stoker.console import say
from stoker.errors import UsageError, did_you_mean

OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
METRICS: dict[str, Callable[[Observed], float | None]] = {
    "wait_share": lambda seen: seen.wait_share,
    "images_per_second": lambda seen: seen.images_per_second if seen.samples else None,
    "ceiling_images_per_second": lambda seen: seen.ceiling_images_per_second,
    "loader_images_per_second": lambda seen: seen.loader_images_per_second,
    "step_s": lambda seen: seen.elapsed_s / seen.steps if seen.steps else None,
    "transfer_share": lambda seen: _share(seen.transfer_s, seen),
    "compute_share": lambda seen: _share(seen.compute_s, seen),
    "epoch_start_s": lambda seen: max(seen.epoch_starts_s[1:], default=None),
}
_FORM = re.compile(r"^\s*([A-Za-z_]\w*)\s*(>=|<=|>|<)\s*(\S+?)\s*$")


@dataclass(frozen=True)
class Gate:
    """One condition under which a run counts as too slow."""

    metric: str
    operator: str
    limit: float


def parse_gates(texts: Sequence[str]) -> tuple[Gate, ...]:
    """The conditions, or a UsageError that lists metrics and operators."""
    return tuple(_parse(text) for text in texts)


def _parse(text: str) -> Gate:
    found = _FORM.match(text)
    metrics = ", ".join(METRICS)
    if found is None:
        raise UsageError(
            "usage", f"--fail-if {text!r} is not METRIC OPERATOR NUMBER",
            why=f"metrics: {metrics}; operators: {' '.join(OPERATORS)}", hint="--fail-if 'wait_share>0.1'",
        )  # fmt: skip
    metric, sign, number = found.groups()
    if metric not in METRICS:
        hint = did_you_mean(metric, METRICS) or "--fail-if 'wait_share>0.1'"
        raise UsageError("usage", f"--fail-if: {metric!r} is not a metric", why=f"metrics: {metrics}", hint=hint)
    try:
        return Gate(metric, sign, float(number))
    except ValueError:
        hint = "--fail-if 'wait_share>0.1'"
        raise UsageError("usage", f"--fail-if {text!r}: {number!r} is not a number", hint=hint) from None


def check_gates(gates: Sequence[Gate], observed: Observed) -> list[str]:
    """What failed, in words. A metric that was not measured fails: a gate must not pass unmeasured."""
    failed = []
    for gate in gates:
        value = METRICS[gate.metric](observed)
        if value is None:
            failed.append(f"{gate.metric} was not measured")
        elif OPERATORS[gate.operator](value, gate.limit):
            failed.append(f"{gate.metric} is {value:.4g}, {gate.operator} {gate.limit:g}")
    return failed


def _share(seconds: float | None, seen: Observed) -> float | None:
    return None if seconds is None or seen.elapsed_s <= 0 else seconds / seen.elapsed_s


def seconds_of_a_step(pace: str, path: Path, overrides: Sequence[str], batch_size: int) -> float:
    """How long the consumer of a config's trials takes for a step; says so where that is computed from a rate."""
    from stoker.doctor.pacing import step_time_s

    seconds = step_time_s(pace)
    if seconds is not None:
        return seconds
    taken = read_pace(pace, path, overrides)
    say(f"note: a consumer of {taken.images_per_second:,.0f} images/s replaces the model ({taken.how})")
    return batch_size / taken.images_per_second


@dataclass(frozen=True)
class Pace:
    """How fast the consumer of the trials takes batches."""

    images_per_second: float
    how: str
    """'as given', or the card whose roofline it is."""


def read_pace(text: str, path: Path, overrides: Sequence[str]) -> Pace:
    """A number of images per second, or the one that `stoker plan` computes for a card.

    Raises UsageError: `pace-invalid`, or the datasheets' error for an unknown card.
    """
    number = _number(text)
    if number is not None:
        if not (math.isfinite(number) and number > 0):
            raise UsageError("pace-invalid", f"--pace {text}: images per second must be above zero", hint="--pace 800")
        return Pace(number, "as given")
    from stoker.machine.datasheets import load_datasheet
    from stoker.plan.planning import Wanted, plan_config

    load_datasheet(text)  # an unknown name is an error before anything is traced
    rates = plan_config(path, overrides, Wanted(gpu=text, alone=True)).plan.time.rates
    if "accelerator" not in rates:
        raise UsageError(
            "pace-unknown",
            f"--pace {text}: the plan has no images/s for this card",
            hint="--pace 800, if 800 images/s were measured on it",
        )
    rate = rates["accelerator"]
    return Pace(rate.images_per_second, rate.source)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
