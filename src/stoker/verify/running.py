"""Runs checks one after the other: which ones, how long each took, and what they found together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.errors import Interrupted, Preempted, StokerError, UsageError, did_you_mean
from stoker.verify.checks import TOPICS, Check, Outcome, Status, Subject, unknown

if TYPE_CHECKING:
    from stoker.machine.host import HostConfig, Machine
    from stoker.tasks.classify import TrainingData
    from stoker.tasks.volumes.data import VolumeData

MODULES = (
    "stoker.verify.config",
    "stoker.verify.data",
    "stoker.verify.volumes",
    "stoker.verify.labels",
    "stoker.verify.model",
    "stoker.verify.machine",
    "stoker.verify.gpus",
    "stoker.verify.nodes",
)
"""Each has its checks in `CHECKS`; a module is imported when checks are run."""

OnStart = Callable[[Check, int, int], None]
"""Called before each check: (check, its number from 1, how many there are)."""


@dataclass(frozen=True)
class Result:
    """What one check found, and how long it took."""

    check: Check
    outcome: Outcome
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        check, outcome = self.check, self.outcome
        return {
            "name": check.name,
            "topic": check.topic,
            "title": check.title,
            "status": outcome.status,
            "seen": outcome.seen,
            "fix": outcome.fix,
            "details": list(outcome.details),
            "facts": _plain(outcome.facts),
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Report:
    """Everything that was found."""

    results: tuple[Result, ...]
    not_applicable: tuple[str, ...]
    """Names of checks that do not apply here, such as those of a GPU on a host without one."""
    seconds: float

    def count(self, status: Status) -> int:
        return sum(result.outcome.status == status for result in self.results)

    def as_dict(self) -> dict[str, Any]:
        return {
            "pass_count": self.count("passed"),
            "fail_count": self.count("failed"),
            "unknown_count": self.count("unknown"),
            "checks": [result.as_dict() for result in self.results],
            "not_applicable": list(self.not_applicable),
            "seconds": round(self.seconds, 3),
        }


def all_checks() -> tuple[Check, ...]:
    """Every check, by topic."""
    found = [check for module in MODULES for check in import_module(module).CHECKS]
    assert len({check.name for check in found}) == len(found), "two checks have the same name"
    return tuple(sorted(found, key=lambda check: TOPICS.index(check.topic)))


def choose_checks(checks: Sequence[Check], skip: Iterable[str] = (), *, deep: bool = False) -> tuple[Check, ...]:
    """The checks to run; raises UsageError if `skip` names one that does not exist."""
    names = [check.name for check in checks]
    skipped = set(skip)
    for name in sorted(skipped.difference(names)):
        meant = did_you_mean(name, names)
        raise UsageError(
            "unknown-check",
            f"--skip {name} is not a check" + (f"; {meant}" if meant else ""),
            hint="stoker verify --list",
        )
    return tuple(check for check in checks if check.name not in skipped and (deep or not check.deep))


def run_checks(checks: Sequence[Check], subject: Subject, on_start: OnStart = lambda *_: None) -> Report:
    """Runs every check; one that fails to run is 'unknown', and the rest continue."""
    began = time.perf_counter()
    results: list[Result] = []
    not_applicable: list[str] = []
    for number, check in enumerate(checks, start=1):
        on_start(check, number, len(checks))
        started = time.perf_counter()
        outcome = None if check.task not in (None, subject.config.task) else _run(check, subject)
        if outcome is None:
            not_applicable.append(check.name)
        else:
            results.append(Result(check, outcome, time.perf_counter() - started))
    return Report(tuple(results), tuple(not_applicable), time.perf_counter() - began)


def warnings_before_training(
    config: HostConfig,
    path: Path,
    overrides: Sequence[str],
    machine: Machine,
    data: TrainingData | VolumeData,
    checks: Sequence[Check] | None = None,
) -> list[str]:
    """What the checks that take no time find wrong, one line each; the run starts anyway."""
    cheap = [check for check in (all_checks() if checks is None else checks) if check.cheap]
    report = run_checks(cheap, Subject(config, path, overrides, machine).with_data(data))
    return [
        f"{result.check.name}: {result.outcome.seen}; fix: {result.outcome.fix}"
        for result in report.results
        if result.outcome.status == "failed"
    ]


def _run(check: Check, subject: Subject) -> Outcome | None:
    try:
        return check.run(subject)
    except (Interrupted, Preempted):
        raise
    except StokerError as error:
        return unknown(error.seen, error.hint, reason=error.name)
    except Exception as error:
        from stoker.run.environment import write_crash_log

        log = write_crash_log(error)
        first = next(iter(str(error).splitlines()), "")
        where = None if log is None else f"please report it; the details are in {log}"
        return unknown(f"the check itself failed: {type(error).__name__}: {first}", where, reason="crash")


def _plain(value: Any) -> Any:
    """The value for JSON, which has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | bool | None) else str(value)
