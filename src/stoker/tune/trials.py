"""The trials of one search or ablation: run or taken from the journal, how much repeated ones differ, the time left."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from stoker.tune.comparing import Comparison, Score, compare, compare_turns, log_ratios, spread_of, turn_spread
from stoker.tune.journal import Journal
from stoker.tune.records import Key, Listener, Measured, Settings, Trier, key_of

MOST_TRIALS = 25
"""Runs of a process, including those of the original and of the confirmation."""
FOR_CONFIRMATION = 4
"""Runs that are set aside for the end; two of them are usually enough."""
WANTED_SPREAD = 0.015
"""Standard deviation of repeated runs: two runs then differ from two others by 3 % at most, by chance."""
MOST_LONGER, WORTH_LONGER = 6.0, 1.5
"""Factors of a trial's length. Noise that even six times the length does not average out changes too slowly."""


class Trials:
    """Runs settings, and remembers every run."""

    def __init__(
        self, trier: Trier, journal: Journal, tell: Listener, score: Score, *, budget_s: float, trial_s: float,
        most: int = MOST_TRIALS, same_training: bool = True,
    ) -> None:  # fmt: skip
        """`same_training`: a run with other samples than the first does not count."""
        self.journal, self.tell = journal, tell
        self.trial_s, self.budget_s = trial_s, budget_s
        self.runs: dict[Key, list[Measured]] = {}
        self.count = 0
        self._trier, self._score, self._most = trier, score, most
        self._same_training = same_training
        self._longest_trial_s = MOST_LONGER * trial_s
        self.off_budget_s = 0.0
        """Seconds spent on work that does not count, such as packing."""
        self._began_s = time.monotonic()
        self._took_s = self._longest_s = self._starting_s = 0.0
        self._alike: dict[Key, list[Measured]] = {}
        """Runs that took as long as trials take now: shorter ones differ more."""
        self._turns: dict[Key, list[float]] = {}
        """The log-ratios of such runs that alternated, by the settings that were compared."""
        self._expected_spread = 0.0
        self._ledger: str | None = None

    def run(self, settings: Settings, change: Settings, role: str) -> Measured:
        """One run, or the one that the journal has from before an interruption."""
        self.count += 1
        measured = self.journal.recorded(settings)
        if measured is None:
            self.tell.trial_begins(self.count, settings, change, role)
            measured = self._trier.run(settings, self.trial_s)
            if (
                measured.result == "measured"
                and self._ledger is not None
                and measured.ledger not in (None, self._ledger)
            ):
                why = "the samples, crops, labels or the total batch were not those of the original"
                measured = replace(measured, result="different-training", detail=why)
            self.journal.trial(settings, measured)
            self.tell.trial_ends(self.count, measured)
        if self._ledger is None and measured.result == "measured" and self._same_training:
            self._ledger = measured.ledger
        self._took_s += measured.took_s
        self._longest_s = max(self._longest_s, measured.took_s)
        self._starting_s = max(self._starting_s, measured.took_s - self.trial_s)
        for runs in (self.runs, self._alike):
            runs.setdefault(key_of(settings), []).append(measured)
        return measured

    def good(self, settings: Settings) -> list[Measured]:
        """The runs of these settings that were measured."""
        return [run for run in self.runs.get(key_of(settings), []) if run.result == "measured"]

    def scores(self, runs: Sequence[Measured]) -> list[float]:
        return [score for run in runs if (score := self._score(run))]

    # Time and number.

    @property
    def spent_s(self) -> float:
        # Recorded runs took their time, too, though not now.
        return max(time.monotonic() - self._began_s - self.off_budget_s, self._took_s)

    def has_room(self, runs: int) -> bool:
        return self.count + runs <= self._most

    def has_time(self, runs: float) -> bool:
        return self.spent_s + runs * self._longest_s <= self.budget_s

    def may_run(self, runs: int) -> bool:
        """Whether there is time for this many runs, and for the confirmation."""
        return self.has_room(runs + FOR_CONFIRMATION) and self.has_time(runs + FOR_CONFIRMATION / 2)

    # Noise.

    def spread(self) -> float:
        """Standard deviation of repeated runs; after trials were lengthened, the target until there are new runs."""
        seen = spread_of(self._alike.values(), self._score)
        repeated = any(len(self.scores(runs)) > 1 for runs in self._alike.values())
        return seen if repeated else max(seen, self._expected_spread)

    def compare(self, mine: Sequence[Measured], against: Sequence[Measured]) -> Comparison | None:
        return compare(mine, against, self._score, self.spread())

    def compare_turns(self, of: Settings, mine: Sequence[Measured], against: Sequence[Measured]) -> Comparison | None:
        """The same for runs that alternated."""
        ratios, seen = log_ratios(mine, against, self._score), self.compare(mine, against)
        if ratios:
            self._turns[key_of(of)] = ratios
        return None if seen is None else compare_turns(seen, ratios, self._turns.values())

    @property
    def could_be_longer(self) -> bool:
        return self.trial_s * WORTH_LONGER < self._longest_trial_s

    def lengthen(self, runs: int | None = None) -> bool:
        """Makes trials longer if repeated runs differ, as far as the budget allows for this many runs to come (default:
        all that are left); False if their length stays."""
        left = self._most - self.count
        spread, turns = self.spread(), turn_spread(self._turns.values())
        if turns is not None:
            spread = min(spread, turns[0] / math.sqrt(2))  # of one run, without what both runs of a turn share
        room_s = (self.budget_s - self.spent_s) / max(1, left if runs is None else min(left, runs)) - self._starting_s
        longer_s = min(self.trial_s * (spread / WANTED_SPREAD) ** 2, self._longest_trial_s, room_s)
        if longer_s < WORTH_LONGER * self.trial_s:
            return False
        self._expected_spread = spread * math.sqrt(self.trial_s / longer_s)
        self.trial_s = longer_s
        self._alike.clear()
        self._turns.clear()
        self.tell.lengthened(longer_s, spread)
        return True
