"""Runs checks one after the other, and shows what they found, by topic."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.config.keys import task_names
from stoker.core.console import finding_lines, format_table, progress_bar, say
from stoker.core.errors import Interrupted, Preempted, StokerError, UsageError, did_you_mean
from stoker.core.finding import Finding, Status, as_json
from stoker.tasks.base import task_named
from stoker.tasks.checks import TOPICS, Check, Subject, unknown
from stoker.verify.machine import Forecast, forecast_lines

if TYPE_CHECKING:
    from stoker.profile.host import HostConfig, Machine

MODULES = (
    "stoker.verify.schedule_checks",
    "stoker.verify.model",
    "stoker.verify.machine",
    "stoker.verify.nodes",
)
"""The checks for all tasks: each module has its own in `CHECKS`, and is imported when checks are run."""

MARKS = {"passed": "✓", "failed": "✗", "unknown": "?"}
WIDTH = 110
SHOWN_SECONDS = 1.0
"""A check that takes less time is shown without it."""

OnStart = Callable[[Check, int, int], None]
"""Called before each check: (check, its number from 1, how many there are)."""


@dataclass(frozen=True)
class CheckResult:
    check: Check
    finding: Finding
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.check.name,
            "topic": self.check.topic,
            "title": self.check.title,
            **as_json(self.finding, "status", "seen", "fix", "details", "facts"),
            "seconds": round(self.seconds, 3),
        }


@dataclass(frozen=True)
class Report:
    results: tuple[CheckResult, ...]
    not_applicable: tuple[str, ...]
    """Names of checks that do not apply here, such as those of a GPU on a host without one."""
    seconds: float

    def count(self, status: Status) -> int:
        return sum(result.finding.status == status for result in self.results)

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
    """Every check of every task, by topic."""
    own = [replace(check, task=name) for name in task_names() for check in task_named(name).checks()]
    found = [check for check in own if check.after is None]
    for general in (check for module in MODULES for check in import_module(module).CHECKS):
        found += [general, *(check for check in own if check.after == general.name)]
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
    results: list[CheckResult] = []
    not_applicable: list[str] = []
    for number, check in enumerate(checks, start=1):
        on_start(check, number, len(checks))
        started = time.perf_counter()
        finding = _run(check, subject) if check.applies_to(subject) else None
        if finding is None:
            not_applicable.append(check.name)
        else:
            results.append(CheckResult(check, finding, time.perf_counter() - started))
    return Report(tuple(results), tuple(not_applicable), time.perf_counter() - began)


def run_and_show(checks: Sequence[Check], subject: Subject) -> Report:
    """The same, with a line that shows which check is under way."""
    topics: set[str] = set()
    with ExitStack() as shown:

        def show(check: Check, number: int, total: int) -> None:
            shown.close()  # the line of the check before
            if sys.stderr.isatty():
                shown.enter_context(progress_bar(f"checking {number} of {total}: {check.title}"))
            elif check.topic not in topics:
                topics.add(check.topic)
                say(f"checking: {check.topic}")

        return run_checks(checks, subject, show)


def warnings_before_training(
    config: HostConfig,
    path: Path,
    overrides: Sequence[str],
    machine: Machine,
    data: Any,
    checks: Sequence[Check] | None = None,
) -> list[str]:
    """Problems found by the quick checks, one line each; the run starts anyway."""
    cheap = [check for check in (all_checks() if checks is None else checks) if check.cheap]
    report = run_checks(cheap, Subject(config, path, overrides, machine).with_made("data", data))
    return [
        f"{result.check.name}: {result.finding.seen}; fix: {result.finding.fix}"
        for result in report.results
        if result.finding.status == "failed"
    ]


def _run(check: Check, subject: Subject) -> Finding | None:
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


def verify_text(report: Report, expected: Forecast | None, name: str) -> str:
    """The checks by topic, what to expect of the run, and the count."""
    lines = [name]
    width = max((len(result.check.name) for result in report.results), default=0)
    for topic, results in groupby(report.results, key=lambda result: result.check.topic):
        lines += ["", topic]
        for result in results:
            took = f" ({result.seconds:.1f} s)" if result.seconds >= SHOWN_SECONDS else ""
            finding = replace(result.finding, seen=f"{result.finding.seen}{took}")
            lines += finding_lines(finding, f"  {MARKS[finding.status]} {result.check.name:<{width}}  ", WIDTH)
    if expected is not None:
        lines += ["", "expected", *(f"  {line}" for line in forecast_lines(expected))]
    parts = [f"{report.count('passed')} passed", f"{report.count('failed')} failed"]
    if report.count("unknown"):
        parts.append(f"{report.count('unknown')} could not be checked")
    if report.not_applicable:
        parts.append(f"{len(report.not_applicable)} do not apply here")
    lines += ["", f"{', '.join(parts)}; {report.seconds:.0f} s"]
    if report.count("failed"):
        lines.append("a check that does not fit your data: --skip NAME leaves it out")
    return "\n".join(lines)


def list_json(checks: Sequence[Check]) -> dict[str, Any]:
    keys = ("name", "topic", "title", "task", "deep", "cheap")
    return {"checks": [{key: getattr(check, key) for key in keys} for check in checks]}


def list_text(checks: Sequence[Check]) -> str:
    rows = [
        [check.name, check.topic, check.title, "--deep" if check.deep else "train too" if check.cheap else ""]
        for check in checks
    ]
    return format_table(rows, ["check", "topic", "what is checked", "when"])
