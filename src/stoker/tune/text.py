"""Words for what a search does and found, and the lines that are printed while it is under way. Decides nothing."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from stoker.config.reference import write_scalar
from stoker.core.console import Advance, format_table, progress_bar, say
from stoker.core.units import clock, count, rate_text, size_text
from stoker.tune.records import Listener, Outcome, Settings, Step

SIZES = ("lookahead", "volume_cache")
WORTH_SAYING = 0.05
"""A gain that people would want: if trials cannot show it, we say so."""
MUCH_LEFT = 0.3
"""If a search used less than this share of the budget, trials of three times the length would have fitted into it."""
STOPPED = {
    "compute-bound": "the loop is compute-bound: it runs at the speed of its model",
    "budget": "the budget of time or trials is used up",
    "nothing left to try": "there is nothing left to try",
    "interrupted": "interrupted; the same command resumes",
    "the original is refused": "the original does not run",
}


def settings_text(change: Settings) -> str:
    """num_workers 4, loader process"""
    return ", ".join(f"{name} {_value(name, value)}" for name, value in change.items()) or "as it is"


def step_text(step: Step, unit: str) -> str:
    rates = [rate for run in step.measured if (rate := run.raw_samples_per_second) is not None]
    rate = sum(rates) / len(rates) if rates else None
    speed = "" if rate is None else f"{rate_text(rate, unit)}, "
    what = "the original" if step.decision == "baseline" else settings_text(step.change)
    if step.decision in ("confirmed", "not confirmed"):
        return f"{step.number:>3}  {step.decision}: {what}: {speed}{step.reason} over the original"
    reason = "" if step.decision == "baseline" and step.reason == "the original" else step.reason
    verdict = "" if step.decision == "baseline" else f" ({step.decision})"
    return f"{step.number:>3}  {what}: {speed}{reason}".rstrip(", ") + verdict


def outcome_text(outcome: Outcome, target: Path | None) -> str:
    unit, facts = str(outcome.facts.get("unit", "samples")), outcome.facts
    lines = [_headline(outcome, unit)]
    changed = []
    for name, value in outcome.best.items():
        if outcome.original.get(name) != value:
            step = outcome.step_that_set(name, value)
            gain = "" if step is None else step.reason
            changed.append((name, _value(name, outcome.original.get(name)), _value(name, value), gain))
    if changed:
        lines += ["", format_table(changed, ("key", "before", "after", "gain when changed"))]
    stopped = STOPPED.get(outcome.stopped, outcome.stopped)
    lines += ["", f"{count(outcome.trials, 'trial')} in {clock(outcome.took_s)}; {stopped}"]
    if outcome.ceiling and outcome.after:
        share = f"{outcome.after / outcome.ceiling:.0%}".replace("%", " %")
        lines.append(f"{share} of the ceiling, {rate_text(outcome.ceiling, unit)}")
    lines += _unseen(outcome)
    lines += _whole_run(facts)
    failures = [step for step in outcome.steps if any(run.result != "measured" for run in step.measured)]
    if failures:
        lines += ["", "failed trials:"]
        lines += [f"  {settings_text(step.change)}: {step.reason}" for step in failures]
    if outcome.other_training:
        lines += ["", "faster, but a different training:"]
        lines += [f"  {settings_text(step.change)}: {step.reason}" for step in outcome.other_training]
    lines += ["", *(str(note) for note in facts.get("notes", ()))] if facts.get("notes") else []
    if target is not None:
        lines += ["", f"written: {target}"]
    return "\n".join(lines)


def _headline(outcome: Outcome, unit: str) -> str:
    if outcome.after is None:
        return "no settings ran to the end"
    after = rate_text(outcome.after, unit)
    if outcome.best == outcome.original:
        subject = outcome.facts.get("subject", "the config")
        if outcome.stopped == "compute-bound":
            return f"{subject} is as fast as it gets here: {after}"
        return f"nothing faster was found; {subject} as it is: {after}"
    if outcome.before is None:
        return f"the original does not run here; with these changes it does: {after}"
    ratio = outcome.after / outcome.before
    confirmed = "" if outcome.facts.get("confirmed") else " (not confirmed)"
    return f"{rate_text(outcome.before, unit)} -> {after}: {ratio:.2f} times as fast{confirmed}"


def _unseen(outcome: Outcome) -> list[str]:
    """The gains that the noise of this machine hides."""
    hidden = outcome.facts.get("smallest_gain")
    if hidden is None or hidden < WORTH_SAYING or outcome.stopped in ("compute-bound", "interrupted"):
        return []
    below = f"{hidden:.0%}".replace("%", " %")
    line = f"gains below {below} cannot be seen here in trials of {outcome.facts['trial_s']:.0f} s"
    if not outcome.facts.get("could_be_longer"):
        return [line]
    if outcome.facts.get("budget_used", 1.0) < MUCH_LEFT:
        return [f"{line}; --trial-seconds {3 * outcome.facts['trial_s']:.0f} would show smaller ones"]
    return [f"{line}; a larger --budget makes them longer"]


def _whole_run(facts: dict[str, Any]) -> list[str]:
    before, after = facts.get("hours_before"), facts.get("hours_after")
    if before is None or after is None:
        return []
    line = f"the whole run: {_hours(before)} -> {_hours(after)}"
    if facts.get("cost_before") is not None:
        line += f", {facts['cost_before']:,.2f} -> {facts['cost_after']:,.2f} at the given price"
    return [line]


def _hours(hours: float) -> str:
    return f"{hours:,.1f} h" if hours >= 1 else f"{60 * hours:.1f} min"


def _value(name: str, value: Any) -> str:
    if name in SIZES and isinstance(value, int):
        return size_text(value)
    return write_scalar(value)


class Live(Listener):
    """Shows each trial on stderr while it runs, and a line for each decision."""

    def __init__(self, unit: str, trial_s: float) -> None:
        self.unit, self.trial_s = unit, trial_s
        self._stack = ExitStack()
        self._advance: Advance | None = None

    def report(self, seconds: float) -> None:
        if self._advance is not None:
            self._advance(min(round(seconds), round(self.trial_s)), round(self.trial_s))

    def begin(self, what: str) -> None:
        """A bar on a terminal; elsewhere the line of the decision is enough."""
        self.close()
        if sys.stderr.isatty():
            self._advance = self._stack.enter_context(progress_bar(what, max(1, round(self.trial_s)), unit=""))

    def close(self) -> None:
        self._advance = None
        self._stack.close()

    def trial_begins(self, number: int, change: Settings, role: str) -> None:
        names = {"baseline": "the original", "best": "the best so far again", "whole": "the config as given"}
        confirming = "confirming " if role == "confirmation" else ""
        self.begin(f"trial {number}: {confirming}{names.get(role) or settings_text(change)}")

    def trial_ends(self) -> None:
        self.close()

    def lengthened(self, seconds: float, spread: float) -> None:
        self.trial_s = seconds
        say(f"note: repeated runs differ by {100 * spread:.0f} %, so trials take {seconds:.0f} s from now on")

    def step(self, step: Step) -> None:
        self.close()
        say(step_text(step, self.unit))
