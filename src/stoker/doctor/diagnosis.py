"""The doctor's answer: verdict, findings, predicted speed-ups, what is needed against what there is; and the conditions
under which a script or a run counts as too slow (`--fail-if 'wait_share>0.1'`)."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stoker.core.errors import UsageError, did_you_mean
from stoker.core.finding import Estimate, Finding, as_json
from stoker.profile.observed import Observed


@dataclass(frozen=True)
class Prediction:
    """The speed-up of one change, before it is tried."""

    id: str
    """A stable name: workers, prefetch, staging, packing, accelerator."""
    label: str
    """'num_workers 2 -> 6'."""
    speedup: Estimate
    images_per_second: Estimate
    settings: tuple[tuple[str, int | bool | str], ...] = ()
    """Config keys that make the change, so that it can be tried; empty if there are none."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"settings": dict(self.settings)}


@dataclass(frozen=True)
class Confirmation:
    """A prediction beside what a trial of it measured."""

    prediction: Prediction
    measured_images_per_second: float
    measured_speedup: float

    @property
    def error(self) -> float:
        """Error of the predicted rate, as a share of the measured one; above zero if the prediction was too high."""
        return self.prediction.images_per_second.expected / self.measured_images_per_second - 1

    def as_dict(self) -> dict[str, Any]:
        return self.prediction.as_dict() | {
            "measured_images_per_second": self.measured_images_per_second,
            "measured_speedup": self.measured_speedup,
            "error": self.error,
        }


@dataclass(frozen=True)
class Need:
    """What the accelerator needs of one resource, and what is available."""

    what: str
    unit: str
    """images/s, patches/s, samples/s or bytes/s."""
    wants: float
    has: float
    how: str
    """Where `has` comes from: '2 cores, 1.9 ms of CPU per image'."""

    @property
    def covered(self) -> float:
        return self.has / self.wants if self.wants > 0 else float("inf")


@dataclass(frozen=True)
class Diagnosis:
    verdict: str
    """The id of the bottleneck: `storage-bound`, `compute-bound`, or `unknown`."""
    line: str
    """The verdict in a sentence."""
    findings: tuple[Finding, ...]
    """The verdict first, then by speed-up."""
    observed: Observed
    predictions: tuple[Prediction, ...] = ()
    needs: tuple[Need, ...] = ()
    confirmation: Confirmation | None = None

    def as_dict(self) -> dict[str, Any]:
        observed = self.observed
        document: dict[str, Any] = {
            "verdict": self.verdict,
            "wait_share": observed.wait_share,
            "images_per_second": observed.images_per_second,
            "ceiling_images_per_second": observed.ceiling_images_per_second,
            "stages": {
                name: {part: getattr(stage, part) for part in ("wall_s", "cpu_s", "runq_s", "blocked_s")}
                for name, stage in observed.stages.items()
            },
            "findings": [as_json(finding, "id", "message", "fix", "speedup") for finding in self.findings],
        }
        if observed.preparation is not None:
            document["lines"] = [asdict(spot) for spot in observed.preparation.spots]
        document["what_if"] = [prediction.as_dict() for prediction in self.predictions]
        document["needs"] = [asdict(need) for need in self.needs]
        document["not_seen"] = list(observed.missing)
        if self.confirmation is not None:
            document["confirmed"] = self.confirmation.as_dict()
        return document


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
