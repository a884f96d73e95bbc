"""Conditions under which a script or a run counts as too slow: `--fail-if 'wait_share>0.1'`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.core.errors import UsageError, did_you_mean
from stoker.profile.observed import Observed

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


def parse_gate(text: str) -> Gate:
    """The condition, or a UsageError that lists metrics and operators."""
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
