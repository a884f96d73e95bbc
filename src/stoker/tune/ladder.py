"""The search: one change at a time, each measured against the best so far, kept or rolled back.

Knows nothing of configs or scripts: `trier` runs settings, `propose` says what is worth a run, `fits` what must not be
run. Whatever a run ends with is a result. The same measurements lead to the same decisions, so a search that was killed
resumes by taking its recorded runs instead of running them again (`Journal`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from stoker.tune.comparing import FLOOR, Comparison, is_cheaper, mean_rate, percent, smallest_gain
from stoker.tune.journal import Journal
from stoker.tune.objective import Objective, run_facts
from stoker.tune.records import Candidate, Listener, Measured, Nobody, Outcome, Settings, Step, Trier, key_of
from stoker.tune.rungs import FOR_CONFIRMATION, WORTH_LONGER, Fits, Propose, Ready, Rungs

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
WORTH_ANOTHER_LOOK = 0.03
"""A gain that may be hidden, from which on time that is left at the end is spent on it. The loader's model expected at
most +4 % where a run showed +6 % (results/tune, a few huge images)."""
MOST_REPEATED = 8
"""Proposals in a row that were tried before: then there is nothing new."""


def search(
    trier: Trier,
    start: Settings,
    propose: Propose,
    *,
    budget_s: float,
    trial_s: float,
    fits: Fits = lambda _settings: None,
    ready: Ready = lambda _settings: None,
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
        trier, dict(start), propose, budget_s, trial_s, fits, ready, journal or Journal(), tell or Nobody(),
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


class _Ladder(Rungs):
    """The rungs, in their order."""

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
                if self._look_again():
                    repeated = 0
                    continue
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
        predicted = candidate.predicted
        if predicted is not None and predicted.expected < EXPECTED and predicted.high < CANNOT_HELP:
            return f"predicted to gain nothing ({percent(predicted.expected)}, at most {percent(predicted.high)})"
        return self._why_not(settings)

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
        if sure or hopeless:
            self._judge(candidate, settings, mine, against, seen)
            return
        if self._may_run(4) and self._lengthen(self.most_trials - self.trials):
            mine, against = [], []
        # What looks like a gain gets more rounds; no other question is worth them before all have been asked.
        self._in_turns(candidate, settings, mine, against, seen, lambda now: now.gain > math.log1p(FLOOR))

    def _in_turns(
        self,
        candidate: Candidate,
        settings: Settings,
        mine: list[Measured],
        against: list[Measured],
        seen: Comparison,
        is_open: Callable[[Comparison], bool],
        before: int = 0,
    ) -> None:
        """Runs it in turns with the best so far, until there is a gain, or the question is closed; and decides.

        `before`: runs of it that do not count against the most."""
        most, undecided = before + MOST_ROUNDS, True
        while undecided and len(mine) < most and self._may_run(2):
            # Alternating, so that neither side profits when the machine gets faster or slower.
            between = self._run(self.best, {}, "best")
            mine.append(self._run(settings, candidate.change, "candidate"))
            against = [*against[1 - len(mine) :], between]
            failed = next((run for run in mine if run.result != "measured"), None)
            if failed is not None:
                self._decide(candidate, settings, "not kept", f"run again, {failed.failure}", mine, against)
                return
            seen = self._compare_turns(settings, mine, against) or seen
            undecided = not seen.is_gain and is_open(seen)
        self._judge(candidate, settings, mine, against, seen)

    def _judge(
        self, candidate: Candidate, settings: Settings, mine: list[Measured], against: list[Measured], seen: Comparison
    ) -> None:
        self._seen[key_of(settings)] = seen
        if seen.is_gain:
            self._keep(candidate, settings, seen.words(), mine, against, seen)
        elif is_cheaper(settings, self.best) and seen.gain >= 0 and len(mine) > 1:
            self._keep(candidate, settings, f"{seen.words()}: not slower, and cheaper", mine, against, seen)
        else:
            inside = "" if seen.gain < -seen.noise else ", inside the noise"
            self._decide(candidate, settings, "not kept", seen.words() + inside, mine, against, seen)

    def _look_again(self) -> bool:
        """Comes back to what the noise hid, or to what was only predicted to gain nothing, in longer trials; True if
        one of them was kept."""
        share = self._state().share_of_ceiling
        if share is not None and share >= AT_CEILING:
            return False
        questions = self._open_questions()
        for place, step in enumerate(questions):
            if not self._may_run(2) or self._why_not(step.settings) is not None:
                continue
            self._looked.add(key_of(step.settings))
            before = key_of(self.best)
            self._try_again(step, rest=len(questions) - place)
            if key_of(self.best) != before:
                return True
        return False

    def _open_questions(self) -> list[Step]:
        """Steps against the best so far that may hide a gain, the largest first; those that were not run come last."""
        last = max((place for place, step in enumerate(self.steps) if step.decision == "kept"), default=0)
        found: list[tuple[bool, float, Step]] = []
        for step in self.steps[last + 1 :]:
            if key_of(step.settings) in self._looked or key_of(step.settings) == key_of(self.best):
                continue
            if step.decision == "skipped" and step.predicted is not None:
                most, was_run = math.log(max(1e-9, step.predicted.high)), False
            elif step.decision == "not kept" and (seen := self._seen.get(key_of(step.settings))) is not None:
                most, was_run = seen.gain + seen.noise, True
            else:
                continue
            if most > math.log1p(WORTH_ANOTHER_LOOK):
                found.append((was_run, most, step))
        return [step for _, _, step in sorted(found, key=lambda one: one[:2], reverse=True)]

    def _try_again(self, step: Step, rest: int) -> None:
        candidate = Candidate(step.change, f"{step.why}; again, as there is time", step.predicted)
        if not step.measured:
            self._try(candidate, step.settings)
            return
        mine, against = list(step.measured), list(step.against or self._of(self.best)[-2:])
        seen = self._seen[key_of(step.settings)]
        if self._lengthen(min(self.most_trials - self.trials, 2 * MOST_ROUNDS * rest + FOR_CONFIRMATION)):
            mine, against = [], []
        self._in_turns(candidate, step.settings, mine, against, seen, lambda now: now.may_be_gain, len(mine))

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
        for round_number in range(MOST_ROUNDS):
            if round_number and not self._room_for(2):
                break
            if round_number >= 2 and not (seen is not None and seen.may_be_gain and self._has_time_for(2)):
                break
            if original_runs:
                against.append(self._run(self.original, {}, "confirmation"))
            mine.append(self._run(settings, _difference(self.original, settings), "confirmation"))
            seen = self._compare_turns(settings, mine, against)
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
        spread = self._spread()
        return Outcome(
            original=self.original, best=self.best, before=mean_rate(against), after=mean_rate(mine),
            stopped=stopped, ceiling=self.ceiling, trials=self.trials, took_s=self._spent_s(),
            steps=tuple(self.steps), other_training=tuple(self.others),
            facts={
                "objective": self.objective.goal, "confirmed": self._confirmed is not None,
                "smallest_gain": smallest_gain(spread), "trial_s": self.trial_s,
                "could_be_longer": self.trial_s * WORTH_LONGER < self._longest_trial_s,
                "budget_used": self._spent_s() / self.budget_s if self.budget_s > 0 else 1.0, **whole_run, **self.facts,
            },
        )  # fmt: skip


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
