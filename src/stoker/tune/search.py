"""The search: one change at a time, each measured against the best so far, kept or dropped.

    baseline -> propose -> ask the model and the plan -> run in turns with the best -> keep or drop -> confirm

Knows nothing about configs or scripts: `Trials` runs settings, `Choices` says what is worth a run and what not to run.
Whatever a run ends with is a result. The same measurements lead to the same decisions, so a search that was killed
resumes by taking its recorded runs instead of running them again (`Journal`).

Where noise hides the answer, trials get longer, not more numerous, and open questions are asked again when nothing
else is left: a search that ends early with '-5 % ± 23 %' has not found out anything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.trial.ledger import STEP_KEYS
from stoker.tune.objective import Objective
from stoker.tune.records import (
    EXPECTED,
    Candidate,
    Decision,
    Fits,
    Measured,
    Outcome,
    Propose,
    Ready,
    Settings,
    State,
    Step,
    key_of,
    mean_rate,
)
from stoker.tune.trials import FLOOR, FOR_CONFIRMATION, SURE, Comparison, Trials, is_cheaper

CLEAR = math.log(1.2)
"""A gain from which one run is enough, if it is also twice the noise: the confirmation at the end would reveal a
mistake."""
CANNOT_HELP = 1.06
"""If the upper end of a prediction is below this, and no gain is expected, a run is not worth its time. The model's own
error alone reaches up to 1.04 where nothing changes (doctor/what_if.py)."""
MOST_ROUNDS = 4
"""Runs of a candidate that looks faster, on a machine whose noise hides it."""
WORTH_ANOTHER_LOOK = 0.03
"""Time left at the end is spent on candidates whose hidden gain may exceed this. The loader's model expected at most
+4 % where a run showed +6 % (results/tune, a few huge images)."""


@dataclass(frozen=True)
class Choices:
    """What a search starts from, and what it can choose from."""

    start: Settings
    propose: Propose
    fits: Fits = lambda _settings: None
    ready: Ready = lambda _settings: None
    ceiling: float | None = None
    """Samples per second with batches that are always ready, if known."""
    other_training: Sequence[Candidate] = ()
    """Measured at the end, and never part of the best."""


def search(trials: Trials, choices: Choices, objective: Objective, facts: Mapping[str, Any] | None = None) -> Outcome:
    """The best settings that were run, confirmed against the original from fresh starts; or the original itself.

    `trials` score by the objective. `facts` become part of the outcome's. Ctrl-C ends the search with the best so far.
    """
    found = _Search(trials, choices)
    try:
        stopped = found.improve() if found.begin() else "the original is refused"
        found.confirm()
        found.measure_others()
    except KeyboardInterrupt:
        return found.outcome("interrupted", objective, facts)
    outcome = found.outcome(stopped, objective, facts)
    trials.journal.end(outcome)
    return outcome


@dataclass
class _Duel:
    """A candidate's settings against others, run in turns."""

    candidate: Candidate
    settings: Settings
    other: Settings | None
    """None if the others do not run."""
    mine: list[Measured] = field(default_factory=list)
    against: list[Measured] = field(default_factory=list)
    seen: Comparison | None = None


class _Search:
    """How far a search has come."""

    def __init__(self, trials: Trials, choices: Choices) -> None:
        self.trials, self.choices = trials, choices
        self.original = dict(choices.start)
        self.best = dict(choices.start)
        self.steps: list[Step] = []
        self.others: list[Step] = []
        self.confirmed: _Duel | None = None
        self._open: list[tuple[float, _Duel]] = []
        """Candidates that may hide a gain over the best so far, run or not, and how large a gain."""
        self._earlier: list[Settings] = []
        """Earlier best settings, newest last."""

    def begin(self) -> bool:
        """Runs the original twice: how fast it is, and how much two runs differ. False if it is refused."""
        refused, reason = self.choices.fits(self.original), "the original"
        runs: list[Measured] = []
        if refused is None:
            runs.append(self.trials.run(self.original, {}, "baseline"))
            if runs[0].result != "refused":
                runs.append(self.trials.run(self.original, {}, "baseline"))
            if len(self.trials.good(self.original)) == 1:
                runs.append(self.trials.run(self.original, {}, "baseline"))
        good, failed = self.trials.good(self.original), _failure_of(runs)
        if refused is not None:
            reason = f"not run: the plan says it would not fit: {refused}"
        elif failed is not None:
            reason += f"; {failed}" if good else f" does not run: {failed}"
        baseline = Candidate({}, "what everything is compared with")
        self._record(_Duel(baseline, self.original, None, runs), "baseline", reason)
        return bool(good) or not any(run.result == "refused" for run in runs)

    def improve(self) -> str:
        """Tries candidates until there is nothing left, no time, or nothing to gain; returns which."""
        while self.trials.may_run(1):
            state = self._state()
            candidate = self.choices.propose(state)
            if candidate is None or state.is_done(self.best | candidate.change):
                if self._look_again():
                    continue
                return "compute-bound" if state.is_at_ceiling else "nothing left to try"
            duel = _Duel(candidate, self.best | candidate.change, self.best)
            reason = _why_hopeless(candidate) or self._why_not(duel.settings)
            if reason is None:
                self._try(duel)
                continue
            self._record(duel, "skipped", reason)
            if candidate.predicted is not None:
                self._open.append((math.log(max(1e-9, candidate.predicted.high)), duel))
        return "budget"

    def _try(self, duel: _Duel) -> None:
        duel.mine = [self.trials.run(duel.settings, duel.candidate.change, "candidate")]
        duel.against = self.trials.good(self.best)[-2:]
        seen = duel.seen = self.trials.noise.compare(duel.mine, duel.against)
        if seen is not None:
            cheaper = is_cheaper(duel.settings, self.best)
            sure = seen.gain > max(CLEAR, 2 * seen.noise)
            hopeless = not seen.may_be_gain and not (cheaper and seen.gain > -seen.noise)
            if not sure and not hopeless:
                if self.trials.may_run(4) and self.trials.lengthen():
                    duel.mine, duel.against = [], []
                # Candidates that look faster get more rounds; any other gets them only after all have been tried.
                self._run_in_turns(duel, lambda now: now.gain > math.log1p(FLOOR), MOST_ROUNDS)
        self._judge(duel)

    def _run_in_turns(self, duel: _Duel, is_open: Callable[[Comparison], bool], most: int) -> None:
        """Runs both at least once more, until there is a gain or none is possible."""
        undecided = True
        while undecided and len(duel.mine) < most and self.trials.may_run(2):
            self._turn(duel, "best", "candidate")
            seen = duel.seen
            undecided = _failure_of(duel.mine) is None and seen is not None and not seen.is_gain and is_open(seen)

    def _turn(self, duel: _Duel, other_role: str, role: str) -> None:
        # Alternating, so that neither side profits when the machine gets faster or slower.
        between = [] if duel.other is None else [self.trials.run(duel.other, {}, other_role)]
        duel.mine.append(self.trials.run(duel.settings, duel.candidate.change, role))
        duel.against = [*duel.against[1 - len(duel.mine) :], *between]
        duel.seen = self.trials.noise.compare_turns(duel.settings, duel.mine, duel.against) or duel.seen

    def _judge(self, duel: _Duel) -> None:
        seen, failed = duel.seen, _failure_of(duel.mine)
        decision: Decision = "kept"
        if failed is not None:
            decision, reason = "not kept", failed if seen is None else f"run again, {failed}"
            seen = duel.seen = None
        elif seen is None:
            reason = "the best so far does not run, this does"
        elif seen.is_gain:
            reason = seen.words()
        elif is_cheaper(duel.settings, self.best) and seen.gain >= 0 and len(duel.mine) > 1:
            reason = f"{seen.words()}: not slower, and cheaper"
        else:
            decision, reason = "not kept", seen.words() + ("" if seen.gain < -seen.noise else ", inside the noise")
        if decision == "kept":
            self._open.clear()
            if key_of(self.best) != key_of(self.original):
                self._earlier.append(self.best)
            self.best = duel.settings
        elif seen is not None:
            self._open.append((seen.gain + seen.noise, duel))
        self._record(duel, decision, reason)

    def _look_again(self) -> bool:
        """Returns to candidates that the noise hid, or that were only predicted to gain nothing, in longer trials;
        True if one of them was kept."""
        hidden = [] if self._state().is_at_ceiling else self._open
        questions = [(gain, duel) for gain, duel in hidden if gain > math.log1p(WORTH_ANOTHER_LOOK)]
        questions.sort(key=lambda one: (bool(one[1].mine), one[0]), reverse=True)
        self._open, before = [], key_of(self.best)
        for place, (_, duel) in enumerate(questions):
            if not self.trials.may_run(2) or self._why_not(duel.settings) is not None:
                continue
            duel.candidate = replace(duel.candidate, why=f"{duel.candidate.why}; again, as there is time")
            if not duel.mine:
                self._try(duel)
            else:
                if self.trials.lengthen(2 * MOST_ROUNDS * (len(questions) - place) + FOR_CONFIRMATION):
                    duel.mine, duel.against = [], []
                self._run_in_turns(duel, lambda now: now.may_be_gain, len(duel.mine) + MOST_ROUNDS)
                self._judge(duel)
            if key_of(self.best) != before:
                return True
        return False

    def confirm(self) -> None:
        """Compares the best with the original from fresh starts, in turns; if the gain does not hold, falls back to the
        previous best."""
        while key_of(self.best) != key_of(self.original):
            change = {name: value for name, value in self.best.items() if self.original.get(name) != value}
            candidate = Candidate(change, "from fresh starts, in turns with the original")
            duel = _Duel(candidate, self.best, self.original if self.trials.good(self.original) else None)
            while self._needs_confirmation(duel):
                self._turn(duel, "confirmation", "confirmation")
            seen, cheaper = duel.seen, is_cheaper(self.best, self.original)
            holds = seen is None or seen.is_gain or (cheaper and seen.gain >= 0)
            holds = holds and bool(self.trials.noise.scores(duel.mine))
            failed = _failure_of([*duel.mine, *duel.against]) or "not measured"
            reason = "no trials were left for it" if not duel.mine else failed if seen is None else seen.words()
            self._record(duel, "confirmed" if holds else "not confirmed", reason)
            if holds:
                self.confirmed = duel
                return
            # With no trials left only the original is certain.
            self.best = self._earlier.pop() if self._earlier and duel.mine else dict(self.original)

    def _needs_confirmation(self, duel: _Duel) -> bool:
        seen, rounds = duel.seen, len(duel.mine)
        if not self.trials.has_room(2) or rounds == MOST_ROUNDS:
            return False
        if (seen is not None and seen.is_gain) or (duel.other is None and self.trials.noise.scores(duel.mine)):
            return False
        return rounds < 2 or (seen is not None and seen.may_be_gain and self.trials.has_time(2))

    def measure_others(self) -> None:
        """Measures settings that would be faster, but are a different training."""
        for candidate in self.choices.other_training:
            duel = _Duel(candidate, self.best | candidate.change, None)
            refused = self.choices.fits(duel.settings)
            if refused is not None:
                self._record(duel, "skipped", refused, self.others)
                continue
            run = self.trials.run(duel.settings, candidate.change, "candidate")
            duel.mine.append(run)
            ours, theirs = run.raw_samples_per_second, mean_rate(self.trials.good(self.best))
            ratio = ours / theirs if ours and theirs else None
            reason = run.failure if ratio is None else f"{_percent(ratio)}, but a different training"
            self._record(duel, "not kept", reason, self.others, ratio)

    def _record(
        self, duel: _Duel, decision: Decision, reason: str, steps: list[Step] | None = None, ratio: float | None = None
    ) -> None:
        candidate = duel.candidate
        step = Step(
            len(self.steps) + len(self.others), dict(duel.settings), candidate.change, candidate.why, decision, reason,
            candidate.predicted, tuple(duel.mine), tuple(duel.against), duel.seen.ratio if duel.seen else ratio,
        )  # fmt: skip
        (self.steps if steps is None else steps).append(step)
        self.trials.journal.step(step)
        self.trials.tell.step(step)

    def _state(self) -> State:
        # The ceiling is the original model's: a faster step has a higher one, which nobody measured.
        same_step = all(self.best.get(key) == self.original.get(key) for key in STEP_KEYS)
        ceiling, left_s = self.choices.ceiling if same_step else None, self.trials.budget_s - self.trials.spent_s
        return State(self.original, self.best, self.trials.runs, tuple(self.steps), ceiling, left_s)

    def _why_not(self, settings: Settings) -> str | None:
        began_s = time.monotonic()
        unready = self.choices.ready(settings)
        self.trials.off_budget_s += time.monotonic() - began_s
        if unready is not None:
            return unready
        refused = self.choices.fits(settings)
        return None if refused is None else f"the plan says it would not fit: {refused}"

    def outcome(self, stopped: str, objective: Objective, facts: Mapping[str, Any] | None) -> Outcome:
        trials = self.trials
        duel = self.confirmed or _Duel(
            Candidate({}, ""), self.best, None, trials.good(self.best), trials.good(self.original)
        )
        sides = ([run for run in runs if run.result == "measured"] for runs in (duel.against, duel.mine))
        before, after = (good[-1] if good else None for good in sides)
        return Outcome(
            original=self.original, best=self.best, before=mean_rate(duel.against), after=mean_rate(duel.mine),
            stopped=stopped, ceiling=self.choices.ceiling, trials=trials.count, took_s=trials.spent_s,
            steps=tuple(self.steps), other_training=tuple(self.others),
            facts={
                "objective": objective.goal, "confirmed": self.confirmed is not None,
                # The gain that two runs against two others would show.
                "smallest_gain": max(FLOOR, math.expm1(SURE * trials.noise.spread())), "trial_s": trials.trial_s,
                "could_be_longer": trials.could_be_longer,
                "budget_used": trials.spent_s / trials.budget_s if trials.budget_s > 0 else 1.0,
                **objective.run_facts(before, after), **(facts or {}),
            },
        )  # fmt: skip


def _why_hopeless(candidate: Candidate) -> str | None:
    predicted = candidate.predicted
    if predicted is None or predicted.expected >= EXPECTED or predicted.high >= CANNOT_HELP:
        return None
    return f"predicted to gain nothing ({_percent(predicted.expected)}, at most {_percent(predicted.high)})"


def _failure_of(runs: Sequence[Measured]) -> str | None:
    """How the first failed run failed; None if all were measured."""
    return next((run.failure for run in runs if run.result != "measured"), None)


def _percent(ratio: float) -> str:
    return f"{ratio - 1:+.0%}".replace("%", " %")
