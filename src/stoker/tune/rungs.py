"""One run and one decision of a search, and what is known from them: speeds, noise, time that is left.

`tune/ladder.py` decides which run comes next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stoker.tune.comparing import (
    Comparison,
    compare,
    compare_turns,
    log_ratios,
    mean_rate,
    spread_of,
    turn_spread,
)
from stoker.tune.journal import Journal
from stoker.tune.objective import Objective
from stoker.tune.records import (
    Candidate,
    Decision,
    Key,
    Listener,
    Measured,
    Settings,
    State,
    Step,
    Trier,
    key_of,
)

FOR_CONFIRMATION = 4
"""Runs that are set aside for the end; two of them are usually enough."""
WANTED_SPREAD = 0.015
"""Standard deviation of repeated runs: two runs then differ from two others by 3 % at most, by chance."""
MOST_LONGER, WORTH_LONGER = 6.0, 1.5
"""Times the wanted length of a trial: noise that this does not average out is slower than trials are."""
CHANGES_THE_STEP = ("compile_model", "compile_mode", "channels_last", "batch_size", "gradient_accumulation")

Propose = Callable[[State], Candidate | None]
Fits = Callable[[Settings], str | None]
"""Why the plan refuses these settings; None if they fit."""
Ready = Callable[[Settings], str | None]
"""Makes what settings need before they can be run, such as a pack; None, or why that cannot be. Its time is not part of
the budget."""


@dataclass
class Rungs:
    """A search so far. `Journal` and `Listener` are told of each run and each decision."""

    trier: Trier
    original: Settings
    propose: Propose
    budget_s: float
    trial_s: float
    fits: Fits
    ready: Ready
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
        self._apart_s = 0.0
        self._longest_s = 0.0
        self._starting_s = 0.0
        self._longest_trial_s = MOST_LONGER * self.trial_s
        self._alike: dict[Key, list[Measured]] = {}
        """Runs that took as long as trials take now: shorter ones differ more."""
        self._turns: dict[Key, list[float]] = {}
        """The log-ratios of such runs that alternated, by the settings that were compared with the best so far."""
        self._expected_spread = 0.0
        self._ledger: str | None = None
        self._seen: dict[Key, Comparison] = {}
        """What each candidate was judged by."""
        self._looked: set[Key] = set()
        """What was looked at again."""
        self._earlier: list[Settings] = []
        """Settings that were the best once, newest last."""
        self._confirmed: tuple[list[Measured], list[Measured]] | None = None

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
        return max(time.monotonic() - self._began_s - self._apart_s, self._took_s)

    def _may_run(self, runs: int) -> bool:
        """Whether there is time for so many runs, and for the confirmation."""
        return self._room_for(runs + FOR_CONFIRMATION) and self._has_time_for(runs + FOR_CONFIRMATION / 2)

    def _has_time_for(self, runs: float) -> bool:
        return self._spent_s() + runs * self._longest_s <= self.budget_s

    def _room_for(self, runs: int) -> bool:
        return self.trials + runs <= self.most_trials

    def _of(self, settings: Settings) -> list[Measured]:
        """Good runs of these settings."""
        return [run for run in self.runs.get(key_of(settings), []) if run.result == "measured"]

    def _scores(self, runs: Sequence[Measured]) -> list[float]:
        return [value for run in runs if (value := self.objective.score(run))]

    def _compare(self, mine: Sequence[Measured], against: Sequence[Measured]) -> Comparison | None:
        return compare(mine, against, self.objective.score, self._spread())

    def _compare_turns(
        self, settings: Settings, mine: Sequence[Measured], against: Sequence[Measured]
    ) -> Comparison | None:
        """For runs that alternated."""
        self._turns[key_of(settings)] = log_ratios(mine, against, self.objective.score)
        return compare_turns(mine, against, self.objective.score, self._spread(), self._turns.values())

    def _spread(self) -> float:
        """Standard deviation of repeated runs; after trials were lengthened, what it should be until there are some."""
        seen = spread_of(self._alike.values(), self.objective.score)
        repeated = any(len(self._scores(runs)) > 1 for runs in self._alike.values())
        return seen if repeated else max(seen, self._expected_spread)

    def _rate(self, settings: Settings) -> float | None:
        return mean_rate(self._of(settings))

    # What comes before a run.

    def _why_not(self, settings: Settings) -> str | None:
        """Why these settings cannot be run."""
        began_s = time.monotonic()
        unready = self.ready(settings)
        self._apart_s += time.monotonic() - began_s
        if unready is not None:
            return unready
        refused = self.fits(settings)
        return None if refused is None else f"the plan says it would not fit: {refused}"

    def _lengthen(self, runs: int) -> bool:
        """Makes the trials longer where repeated runs differ, as far as the budget allows if so many are to come; False
        if they stay."""
        spread, turns = self._spread(), turn_spread(self._turns.values())
        if turns is not None:
            spread = min(spread, turns[0] / math.sqrt(2))  # of one run, without what both runs of a turn share
        room_s = (self.budget_s - self._spent_s()) / max(1, runs) - self._starting_s
        longer_s = min(self.trial_s * (spread / WANTED_SPREAD) ** 2, self._longest_trial_s, room_s)
        if longer_s < WORTH_LONGER * self.trial_s:
            return False
        self._expected_spread = spread * math.sqrt(self.trial_s / longer_s)
        self.trial_s = longer_s
        self._alike.clear()
        self._turns.clear()
        self.tell.lengthened(longer_s, spread)
        return True
