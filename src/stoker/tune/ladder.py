"""The search: one change at a time, each measured against the best so far, kept or rolled back.

Knows nothing of configs or scripts: `trier` runs settings, `propose` says what is worth a run, `fits` what must not be
run. Whatever a run ends with is a result. The same measurements lead to the same decisions, so a search that was killed
resumes by taking its recorded runs instead of running them again (`Journal`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from stoker.tune.comparing import FLOOR, Comparison, compare, is_cheaper, mean_rate, percent, smallest_gain, spread_of
from stoker.tune.journal import Journal
from stoker.tune.objective import Objective, run_facts
from stoker.tune.records import (
    Candidate,
    Decision,
    Key,
    Listener,
    Measured,
    Nobody,
    Outcome,
    Settings,
    State,
    Step,
    Trier,
    key_of,
)

AT_CEILING = 0.95
"""Share of the ceiling from which a search ends: the rest would not pay for the trials."""
MOST_TRIALS = 25
"""Runs of a process, those of the original and of the confirmation included."""
CLEAR = math.log(1.2)
"""A gain from which one run is enough, if it is also twice the noise: the confirmation at the end would reveal a
mistake."""
CANNOT_HELP = 1.06
"""With no gain expected: the upper end of a prediction below which a run is not worth its time. The model's own error
alone reaches up to 1.04 where nothing changes (doctor/what_if.py)."""
EXPECTED = 1.01
MOST_ROUNDS = 4
"""Runs of a candidate that looks faster, on a machine whose noise hides it."""
FOR_CONFIRMATION = 4
"""Runs that are set aside for the end; two of them are usually enough."""
WANTED_SPREAD = 0.015
"""Standard deviation of repeated runs: two runs then differ from two others by 3 % at most, by chance."""
MOST_LONGER, WORTH_LONGER = 6.0, 1.5
"""Times the wanted length of a trial: noise that this does not average out is slower than trials are."""
MOST_REPEATED = 8
"""Proposals in a row that were tried before: then there is nothing new."""

Propose = Callable[[State], Candidate | None]
Fits = Callable[[Settings], str | None]
"""Why the plan refuses these settings; None if they fit."""


def search(
    trier: Trier,
    start: Settings,
    propose: Propose,
    *,
    budget_s: float,
    trial_s: float,
    fits: Fits = lambda _settings: None,
    journal: Journal | None = None,
    tell: Listener | None = None,
    objective: Objective | None = None,
    ceiling: float | None = None,
    most_trials: int = MOST_TRIALS,
    other_training: Sequence[Candidate] = (),
    price_per_hour: float | None = None,
    facts: Mapping[str, Any] = MappingProxyType({}),
) -> Outcome:
    """The best settings that were run, confirmed against the original from fresh starts; or the original itself.

    `ceiling` is samples per second with batches that are always ready, if known. `other_training` is measured at the
    end, and never part of the best. `facts` become part of the outcome's. Ctrl-C ends the search with the best so far.
    """
    ladder = _Ladder(
        trier, dict(start), propose, budget_s, trial_s, fits, journal or Journal(), tell or Nobody(),
        objective or Objective(), ceiling, most_trials, price_per_hour, facts,
    )  # fmt: skip
    try:
        stopped = ladder.climb()
        ladder.confirm()
        ladder.measure_others(other_training)
    except KeyboardInterrupt:
        return ladder.outcome("interrupted")
    outcome = ladder.outcome(stopped)
    ladder.journal.end(outcome)
    return outcome


@dataclass
class _Ladder:
    trier: Trier
    original: Settings
    propose: Propose
    budget_s: float
    trial_s: float
    fits: Fits
    journal: Journal
    tell: Listener
    objective: Objective
    ceiling: float | None
    most_trials: int
    price_per_hour: float | None
    facts: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.best = dict(self.original)
        self.runs: dict[Key, list[Measured]] = {}
        self.steps: list[Step] = []
        self.others: list[Step] = []
        self.trials = 0
        self._began_s = time.monotonic()
        self._took_s = 0.0
        self._longest_s = 0.0
        self._starting_s = 0.0
        self._longest_trial_s = MOST_LONGER * self.trial_s
        self._alike: dict[Key, list[Measured]] = {}
        """Runs that took as long as trials take now: shorter ones differ more."""
        self._ledger: str | None = None
        self._earlier: list[Settings] = []
        """Settings that were the best once, newest last."""
        self._confirmed: tuple[list[Measured], list[Measured]] | None = None

    # The rungs.

    def climb(self) -> str:
        """Tries candidates until there is nothing left, no time, or nothing to gain; returns which."""
        self._baseline()
        runs = self.runs.get(key_of(self.original), ())
        if any(run.result == "refused" for run in runs) and not any(run.result == "measured" for run in runs):
            return "the original is refused"
        repeated = 0
        while True:
            if not self._may_run(1):
                return "budget"
            candidate = self.propose(self._state())
            if candidate is None or repeated >= MOST_REPEATED:
                share = self._state().share_of_ceiling
                return "compute-bound" if share is not None and share >= AT_CEILING else "nothing left to try"
            settings = self.best | candidate.change
            if self._state().is_done(settings):
                repeated += 1
                continue
            repeated = 0
            reason = self._why_skip(candidate, settings)
            if reason is not None:
                self._decide(candidate, settings, "skipped", reason)
            else:
                self._try(candidate, settings)

    def _baseline(self) -> None:
        """The original, twice: how fast it is, and how much two runs differ."""
        refused = self.fits(self.original)
        if refused is not None:
            self._add(_baseline_step(self.original, f"not run: the plan says it would not fit: {refused}"))
            return
        runs = [self._run(self.original, {}, "baseline")]
        if runs[0].result != "refused":
            runs.append(self._run(self.original, {}, "baseline"))
        good = [run for run in runs if run.result == "measured"]
        if len(good) == 1:
            runs.append(self._run(self.original, {}, "baseline"))
        failed = next((run for run in runs if run.result != "measured"), None)
        reason = "the original"
        if failed is not None:
            reason += f"; {failed.failure}" if good else f" does not run: {failed.failure}"
        self._add(_baseline_step(self.original, reason, tuple(runs)))

    def _why_skip(self, candidate: Candidate, settings: Settings) -> str | None:
        refused = self.fits(settings)
        if refused is not None:
            return f"the plan says it would not fit: {refused}"
        predicted = candidate.predicted
        if predicted is not None and predicted.expected < EXPECTED and predicted.high < CANNOT_HELP:
            return f"predicted to gain nothing ({percent(predicted.expected)}, at most {percent(predicted.high)})"
        return None

    def _try(self, candidate: Candidate, settings: Settings) -> None:
        first = self._run(settings, candidate.change, "candidate")
        mine, against = [first], self._of(self.best)[-2:]
        if first.result != "measured":
            self._decide(candidate, settings, "not kept", first.failure, mine)
            return
        seen = self._compare(mine, against)
        if seen is None:
            self._keep(candidate, settings, "the best so far does not run, this does", mine, [], None)
            return
        cheaper = is_cheaper(settings, self.best)
        sure = seen.gain > max(CLEAR, 2 * seen.noise)
        hopeless = not seen.may_be_gain and not (cheaper and seen.gain > -seen.noise)
        undecided = not (sure or hopeless)
        if undecided and self._may_run(4) and self._lengthen():
            mine, against = [], []
        while undecided and len(mine) < MOST_ROUNDS and self._may_run(2):
            # Alternating, so that neither side profits when the machine gets faster or slower.
            between = self._run(self.best, {}, "best")
            mine.append(self._run(settings, candidate.change, "candidate"))
            against = [*against[1 - len(mine) :], between]
            failed = next((run for run in mine if run.result != "measured"), None)
            if failed is not None:
                self._decide(candidate, settings, "not kept", f"run again, {failed.failure}", mine, against)
                return
            seen = self._compare(mine, against) or seen
            # What looks like a gain gets more rounds; no other question is worth them.
            undecided = not seen.is_gain and seen.gain > math.log1p(FLOOR)
        words = f"{seen.words()}"
        if seen.is_gain:
            self._keep(candidate, settings, words, mine, against, seen)
        elif cheaper and seen.gain >= 0 and len(mine) > 1:
            self._keep(candidate, settings, f"{words}: not slower, and cheaper", mine, against, seen)
        else:
            inside = "" if seen.gain < -seen.noise else ", inside the noise"
            self._decide(candidate, settings, "not kept", words + inside, mine, against, seen)

    def _lengthen(self) -> bool:
        """Makes the trials longer where repeated runs differ, as far as the budget allows; False if they stay."""
        spread = spread_of(self._alike.values(), self.objective.score)
        room_s = (self.budget_s - self._spent_s()) / max(1, self.most_trials - self.trials) - self._starting_s
        longer_s = min(self.trial_s * (spread / WANTED_SPREAD) ** 2, self._longest_trial_s, room_s)
        if longer_s < WORTH_LONGER * self.trial_s:
            return False
        self.trial_s = longer_s
        self._alike.clear()
        self.tell.lengthened(longer_s, spread)
        return True

    def confirm(self) -> None:
        """Compares the best with the original from fresh starts, in turns; if the gain does not hold, falls back to
        what was the best before."""
        while key_of(self.best) != key_of(self.original):
            if not self._room_for(2):
                self._give_up()
                return
            seen, mine, against = self._confirmation(self.best)
            holds = seen is None if not self._scores(against) else seen is not None and _holds(seen, self)
            holds = holds and bool(self._scores(mine))
            failed = next((run.failure for run in (*mine, *against) if run.result != "measured"), "not measured")
            self._add(
                Step(
                    number=len(self.steps), settings=dict(self.best), change=_difference(self.original, self.best),
                    why="from fresh starts, in turns with the original",
                    decision="confirmed" if holds else "not confirmed",
                    reason=seen.words() if seen is not None else failed,
                    measured=tuple(mine), against=tuple(against), speedup=None if seen is None else seen.ratio,
                )
            )  # fmt: skip
            if holds:
                self._confirmed = (mine, against)
                return
            self.best = self._earlier.pop() if self._earlier else dict(self.original)

    def _confirmation(self, settings: Settings) -> tuple[Comparison | None, list[Measured], list[Measured]]:
        mine: list[Measured] = []
        against: list[Measured] = []
        seen = None
        original_runs = bool(self._of(self.original))
        for round_number in range(2):
            if round_number and not self._room_for(2):
                break
            if original_runs:
                against.append(self._run(self.original, {}, "confirmation"))
            mine.append(self._run(settings, _difference(self.original, settings), "confirmation"))
            seen = self._compare(mine, against)
            if (seen is not None and seen.is_gain) or (not original_runs and self._scores(mine)):
                break
        return seen, mine, against

    def _give_up(self) -> None:
        """No run is left to confirm anything with: only the original is certain."""
        self._add(
            Step(
                number=len(self.steps), settings=dict(self.best), change=_difference(self.original, self.best),
                why="from fresh starts, in turns with the original", decision="not confirmed",
                reason="no trials were left for it",
            )
        )  # fmt: skip
        self.best = dict(self.original)

    def measure_others(self, candidates: Sequence[Candidate]) -> None:
        """What would be faster, but a different training."""
        for candidate in candidates:
            settings = self.best | candidate.change
            refused = self.fits(settings)
            runs, ratio = [], None
            if refused is None:
                runs = [self._run(settings, candidate.change, "candidate")]
                ours, theirs = runs[0].raw_samples_per_second, self._rate(self.best)
                failed = runs[0].result not in ("measured", "different-training")
                ratio = ours / theirs if ours and theirs and not failed else None
            reason = refused or (runs[0].failure if ratio is None else f"{percent(ratio)}, but a different training")
            step = Step(
                number=len(self.steps) + len(self.others), settings=settings, change=candidate.change,
                why=candidate.why, decision="skipped" if refused else "not kept", reason=reason,
                predicted=candidate.predicted, measured=tuple(runs), speedup=ratio,
            )  # fmt: skip
            self.others.append(step)
            self.journal.step(step)
            self.tell.step(step)

    def outcome(self, stopped: str) -> Outcome:
        mine, against = self._confirmed or (self._of(self.best), self._of(self.original))
        before, after = (next((r for r in runs[::-1] if r.result == "measured"), None) for runs in (against, mine))
        whole_run = run_facts(self.objective, before, after, self.price_per_hour)
        spread = spread_of(self._alike.values(), self.objective.score)
        return Outcome(
            original=self.original, best=self.best, before=mean_rate(against), after=mean_rate(mine),
            stopped=stopped, ceiling=self.ceiling, trials=self.trials, took_s=self._spent_s(),
            steps=tuple(self.steps), other_training=tuple(self.others),
            facts={
                "objective": self.objective.goal, "confirmed": self._confirmed is not None,
                "smallest_gain": smallest_gain(spread), "trial_s": self.trial_s,
                "could_be_longer": self.trial_s * WORTH_LONGER < self._longest_trial_s, **whole_run, **self.facts,
            },
        )  # fmt: skip

    # One run, one decision.

    def _run(self, settings: Settings, change: Settings, role: str) -> Measured:
        self.trials += 1
        measured = self.journal.recorded(settings)
        if measured is None:
            self.tell.trial_begins(self.trials, settings, change, role)
            measured = self._checked(self.trier.run(settings, self.trial_s))
            self.journal.trial(settings, measured)
            self.tell.trial_ends(self.trials, measured)
        if self._ledger is None and measured.result == "measured":
            self._ledger = measured.ledger
        self._took_s += measured.took_s
        self._longest_s = max(self._longest_s, measured.took_s)
        self._starting_s = max(self._starting_s, measured.took_s - self.trial_s)
        for runs in (self.runs, self._alike):
            runs.setdefault(key_of(settings), []).append(measured)
        return measured

    def _checked(self, measured: Measured) -> Measured:
        """The same, unless it was fed something else than the original."""
        if measured.result != "measured" or self._ledger in (None, measured.ledger) or measured.ledger is None:
            return measured
        why = "the samples, crops, labels or the total batch were not those of the original"
        return replace(measured, result="different-training", detail=why)

    def _keep(
        self,
        candidate: Candidate,
        settings: Settings,
        reason: str,
        mine: list[Measured],
        against: list[Measured],
        seen: Comparison | None,
    ) -> None:
        if key_of(self.best) != key_of(self.original):
            self._earlier.append(self.best)
        self.best = settings
        self._decide(candidate, settings, "kept", reason, mine, against, seen)

    def _decide(
        self,
        candidate: Candidate,
        settings: Settings,
        decision: Decision,
        reason: str,
        mine: Sequence[Measured] = (),
        against: Sequence[Measured] = (),
        seen: Comparison | None = None,
    ) -> None:
        self._add(
            Step(
                number=len(self.steps), settings=settings, change=candidate.change, why=candidate.why,
                decision=decision, reason=reason, predicted=candidate.predicted, measured=tuple(mine),
                against=tuple(against), speedup=None if seen is None else seen.ratio,
            )
        )  # fmt: skip

    def _add(self, step: Step) -> None:
        self.steps.append(step)
        self.journal.step(step)
        self.tell.step(step)

    # What is known.

    def _state(self) -> State:
        left_s = self.budget_s - self._spent_s()
        return State(self.original, self.best, self.runs, tuple(self.steps), self._known_ceiling(), left_s)

    def _known_ceiling(self) -> float | None:
        """The ceiling is the original model's: a faster step has a higher one, which nobody measured."""
        same = all(self.best.get(key) == self.original.get(key) for key in CHANGES_THE_STEP)
        return self.ceiling if same else None

    def _spent_s(self) -> float:
        # Recorded runs took their time, too, though not now.
        return max(time.monotonic() - self._began_s, self._took_s)

    def _may_run(self, runs: int) -> bool:
        """Whether there is time for so many runs, and for the confirmation."""
        if not self._room_for(runs + FOR_CONFIRMATION):
            return False
        return self._spent_s() + (runs + FOR_CONFIRMATION / 2) * self._longest_s <= self.budget_s

    def _room_for(self, runs: int) -> bool:
        return self.trials + runs <= self.most_trials

    def _of(self, settings: Settings) -> list[Measured]:
        """Good runs of these settings."""
        return [run for run in self.runs.get(key_of(settings), []) if run.result == "measured"]

    def _scores(self, runs: Sequence[Measured]) -> list[float]:
        return [value for run in runs if (value := self.objective.score(run))]

    def _compare(self, mine: Sequence[Measured], against: Sequence[Measured]) -> Comparison | None:
        return compare(mine, against, self.objective.score, spread_of(self._alike.values(), self.objective.score))

    def _rate(self, settings: Settings) -> float | None:
        return mean_rate(self._of(settings))


CHANGES_THE_STEP = ("compile_model", "compile_mode", "channels_last", "batch_size", "gradient_accumulation")


def _baseline_step(original: Settings, reason: str, runs: tuple[Measured, ...] = ()) -> Step:
    why = "what everything is compared with"
    return Step(
        number=0, settings=original, change={}, why=why, decision="baseline", reason=reason, measured=runs
    )  # fmt: skip


def _holds(seen: Comparison, ladder: _Ladder) -> bool:
    """Whether the confirmation shows what was promised: a gain, or for a cheaper setting no loss."""
    return seen.is_gain or (is_cheaper(ladder.best, ladder.original) and seen.gain >= 0)


def _difference(before: Settings, after: Settings) -> Settings:
    return {name: value for name, value in after.items() if before.get(name) != value}
