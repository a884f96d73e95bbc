"""The doctor's answer: verdict, findings, predicted speed-ups, and what is needed against what there is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

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
    """The doctor's whole answer."""

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
        """The document that `--json` prints."""
        observed = self.observed
        document: dict[str, Any] = {
            "verdict": self.verdict,
            "wait_share": observed.wait_share,
            "images_per_second": observed.images_per_second,
            "ceiling_images_per_second": observed.ceiling_images_per_second,
            "stages": {
                name: {
                    "wall_s": stage.wall_s,
                    "cpu_s": stage.cpu_s,
                    "runq_s": stage.runq_s,
                    "blocked_s": stage.blocked_s,
                }
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
