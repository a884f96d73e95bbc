"""What the checks found, in words: pure functions from records to text."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby

from stoker.console import format_table
from stoker.plan.text import duration
from stoker.verify.checks import Check, Status, size_text
from stoker.verify.expected import Expected
from stoker.verify.running import Report, Result

MARKS: dict[Status, str] = {"passed": "✓", "failed": "✗", "unknown": "?"}
WIDTH = 110
# Checks that take less are not worth a figure.
SHOWN_SECONDS = 1.0


def verify_text(report: Report, expected: Expected | None, name: str) -> str:
    """The checks by topic, what to expect of the run, and the count."""
    lines = [name]
    width = max((len(result.check.name) for result in report.results), default=0)
    for topic, results in groupby(report.results, key=lambda result: result.check.topic):
        lines += ["", topic]
        for result in results:
            lines += _result_lines(result, width)
    if expected is not None:
        lines += ["", "expected", *(f"  {line}" for line in expected_lines(expected))]
    return "\n".join([*lines, "", _count_line(report)])


def list_text(checks: Sequence[Check]) -> str:
    """Every check with its topic and what it checks."""
    rows = [[check.name, check.topic, check.title, _when(check)] for check in checks]
    return format_table(rows, ["check", "topic", "what is checked", "when"])


def expected_lines(expected: Expected) -> list[str]:
    """How long the run takes, what it needs and costs, and the accuracy that its recipe publishes."""
    lines = []
    if expected.hours is not None:
        pace = "" if expected.images_per_second is None else f" at {expected.images_per_second:,.0f} images/s"
        bound = "" if expected.bound_by is None else f", bound by the {expected.bound_by}"
        lines.append(f"time    {duration(3600 * expected.hours)}{pace}{bound} (a plan, not a measurement)")
    sizes = (("VRAM", expected.vram_bytes), ("RAM", expected.ram_bytes), ("disk", expected.disk_bytes))
    memory = [f"{size_text(size)} of {name}" for name, size in sizes if size is not None]
    if memory:
        lines.append(f"memory  {', '.join(memory)}")
    if expected.cost is not None:
        lines.append(f"cost    {expected.cost:,.2f}")
    if expected.milestones:
        points = ", ".join(f"{value:g} % after epoch {epoch}" for epoch, value in expected.milestones)
        lines.append(f"val     {points} ({expected.milestones_source})")
    return lines or ["nothing is known: the plan could not be made"]


def _result_lines(result: Result, width: int) -> list[str]:
    outcome = result.outcome
    took = f" ({result.seconds:.1f} s)" if result.seconds >= SHOWN_SECONDS else ""
    lines = _wrapped(f"{outcome.seen}{took}", f"  {MARKS[outcome.status]} {result.check.name:<{width}}  ", width + 6)
    if outcome.fix is not None:
        word = "fix: " if outcome.status == "failed" else "to check it: "
        lines += _wrapped(outcome.fix, " " * (width + 6) + word, width + 6 + len(word))
    return lines + [f"{' ' * (width + 6)}{line}" for line in outcome.details]


def _wrapped(text: str, first: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    ) or [first.rstrip()]


def _count_line(report: Report) -> str:
    parts = [f"{report.count('passed')} passed", f"{report.count('failed')} failed"]
    if report.count("unknown"):
        parts.append(f"{report.count('unknown')} could not be checked")
    if report.not_applicable:
        parts.append(f"{len(report.not_applicable)} do not apply here")
    return f"{', '.join(parts)}; {report.seconds:.0f} s"


def _when(check: Check) -> str:
    return "--deep" if check.deep else "train too" if check.cheap else ""
