"""Accuracy of the what-if predictions: from one observed run, every other setting is predicted and then measured.

Workers {0, 1, 2, 4, 8} x prefetch {2, 4} x readers that sleep, compute, or do both, through torch's DataLoader and our
thread engine, with a consumer that takes time without using a core, as a GPU would. The CPU time that other programs
used during a measurement is measured too and passed to the prediction: we are testing the loader model, not how well
it guesses the load of the machine.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from bench.quiet import wait_for_quiet
from bench.rounds import keep
from bench.what_if_loaders import KINDS, observe
from stoker.doctor.what_if import model_of, speed_up, with_loader
from stoker.profile.observed import Observed

WORKERS, PREFETCH = (0, 1, 2, 4, 8), (2, 4)
CALIBRATED = (2, 2)
"""Workers and prefetch of the observed run."""
MEDIAN_LIMIT, P95_LIMIT, COVERAGE = 0.10, 0.25, (0.70, 0.90)


@dataclass(frozen=True)
class Trial:
    """One setting, predicted and measured."""

    engine: str
    kind: str
    workers: int
    prefetch: int
    predicted: float
    low: float
    high: float
    measured: float
    others_cores: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def covered(self) -> bool:
        return self.low <= self.measured <= self.high

    def as_dict(self) -> dict[str, Any]:
        values = {name: round(value, 2) if isinstance(value, float) else value for name, value in vars(self).items()}
        return values | {"error": round(self.error, 4), "covered": self.covered}


def others_cores(observed: Observed) -> float:
    """Cores that other programs used during the observation."""
    assert observed.host is not None
    assert observed.host.cpu_busy_share is not None
    ours = sum(batch.cpu_s or 0.0 for batch in observed.batches) + (observed.times.consumer_cpu_s or 0.0)
    return max(0.0, observed.host.cpu_busy_share * observed.host.cpus - ours / observed.times.elapsed_s)


def try_one(calibration: Observed, engine: Literal["process", "thread"], kind: str, workers: int, prefetch: int,
            seconds: float, patience: float) -> Trial:  # fmt: skip
    """Predicts a setting from the calibration and measures it."""
    wait_for_quiet(patience)
    there = observe(engine, kind, workers, prefetch, seconds)
    taken = others_cores(there)
    model = model_of(calibration)
    assert model is not None
    cpus = float(os.cpu_count() or 1)
    change = with_loader(workers, prefetch)
    gain = speed_up(
        model, lambda one: replace(change(one), setup=replace(change(one).setup, cores=max(0.5, cpus - taken)))
    )
    now = calibration.steps / calibration.times.elapsed_s
    return Trial(
        engine, kind, workers, prefetch,
        predicted=gain.expected * now, low=gain.low * now, high=gain.high * now,
        measured=there.steps / there.times.elapsed_s, others_cores=taken,
    )  # fmt: skip


def summary(trials: list[Trial]) -> dict[str, Any]:
    """Error, coverage and bias over all trials."""
    errors = sorted(abs(trial.error) for trial in trials)
    logs = [math.log(trial.predicted / trial.measured) for trial in trials]
    return {
        "trials": len(trials),
        "median_error": round(statistics.median(errors), 4),
        "p95_error": round(errors[min(len(errors) - 1, math.ceil(0.95 * len(errors)) - 1)], 4),
        "coverage_of_80": round(statistics.fmean(trial.covered for trial in trials), 3),
        "bias": round(statistics.fmean(logs), 4),
        "stdev_of_log": round(statistics.stdev(logs), 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--engine", choices=["process", "thread"], action="append")
    parser.add_argument("--kind", choices=list(KINDS), action="append")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to wait for idle cores before each run")
    parser.add_argument("--dry", action="store_true", help="do not write to results/")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trials: list[Trial] = []
    for number in range(arguments.rounds):
        for engine in arguments.engine or ("process", "thread"):
            for kind in arguments.kind or KINDS:
                # Calibrated every time: an hour-old observation says little about a shared machine.
                wait_for_quiet(arguments.patience)
                calibration = observe(engine, kind, *CALIBRATED, arguments.seconds)
                for workers in WORKERS:
                    for prefetch in PREFETCH if workers else PREFETCH[:1]:
                        if (workers, prefetch) == CALIBRATED:
                            continue
                        trial = try_one(
                            calibration, engine, kind, workers, prefetch, arguments.seconds, arguments.patience
                        )
                        trials.append(trial)
                        sys.stderr.write(
                            f"round {number + 1}  {engine:7} {kind:5} workers {workers} prefetch {prefetch}: "
                            f"{trial.predicted:6.1f} ({trial.low:.1f}-{trial.high:.1f}) predicted, "
                            f"{trial.measured:6.1f} measured, {trial.error:+.1%} "
                            f"{'' if trial.covered else 'outside '}[others {trial.others_cores:.2f}]\n"
                        )
    found = summary(trials)
    print(found)
    if not arguments.dry:
        groups = {
            f"{engine} {kind}": summary([t for t in trials if (t.engine, t.kind) == (engine, kind)])
            for engine, kind in sorted({(trial.engine, trial.kind) for trial in trials})
        }
        document = {"seconds": arguments.seconds, "rounds": arguments.rounds, "calibrated_with": CALIBRATED}
        rows = [trial.as_dict() for trial in trials]
        print(f"wrote {keep('what_if', document | {'all': found, 'groups': groups, 'trials': rows})}")
    right = found["median_error"] <= MEDIAN_LIMIT and found["p95_error"] <= P95_LIMIT
    return 0 if right and COVERAGE[0] <= found["coverage_of_80"] <= COVERAGE[1] else 1


if __name__ == "__main__":
    sys.exit(main())
