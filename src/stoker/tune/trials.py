"""The trials of one search or ablation, run or taken from the journal; and whether settings are faster than others,
given how much repeated runs differ."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from stoker.tune.journal import Journal
from stoker.tune.objective import Score
from stoker.tune.records import Key, Listener, Measured, Settings, Trier, key_of

MOST_TRIALS = 25
"""Runs of a process, including those of the original and of the confirmation."""
FOR_CONFIRMATION = 4
"""Runs that are set aside for the end; two of them are usually enough."""
WANTED_SPREAD = 0.015
"""Standard deviation of repeated runs: two runs then differ from two others by 3 % at most, by chance."""
MOST_LONGER, WORTH_LONGER = 6.0, 1.5
"""Factors of a trial's length. Noise that is still there at six times the length changes too slowly to average out."""
FLOOR = 0.02
"""A gain below this does not count, however quiet the machine: nobody would notice it."""
LEAST_SPREAD = 0.005
"""Smallest spread assumed for repeated runs: two that happen to agree do not prove that there is no noise."""
NORMAL_MEDIAN = 1.4826
"""Standard deviations in a median absolute deviation of a normal distribution."""
SURE = 2.0
"""Standard errors that a gain has to exceed: 95 % of a normal distribution are within two."""
STUDENT = (6.31, 2.92, 2.35, 2.13, 2.02, SURE)
"""The same where the standard error is itself an estimate from few turns: Student's t for 95 % on one side, by degrees
of freedom."""


TAKES_MEMORY = ("num_workers", "prefetch_factor", "lookahead")


class Trials:
    def __init__(
        self, trier: Trier, score: Score, journal: Journal | None = None, tell: Listener | None = None, *,
        budget_s: float, trial_s: float, most: int = MOST_TRIALS, same_training: bool = True,
    ) -> None:  # fmt: skip
        """`same_training`: a run with other samples than the first does not count."""
        self.journal, self.tell = journal or Journal(), tell or Listener()
        self.trial_s, self.budget_s = trial_s, budget_s
        self.runs: dict[Key, list[Measured]] = {}
        self.count = 0
        self.noise = Noise(score)
        self._trier, self._most, self._same_training = trier, most, same_training
        self._longest_trial_s = MOST_LONGER * trial_s
        self.off_budget_s = 0.0
        """Seconds spent on work that does not count, such as packing."""
        self._began_s = time.monotonic()
        self._took_s = self._longest_s = self._starting_s = 0.0
        self._ledger: str | None = None

    def run(self, settings: Settings, change: Settings, role: str) -> Measured:
        """One run, or the one that the journal has from before an interruption."""
        self.count += 1
        measured = self.journal.recorded(settings)
        if measured is None:
            self.tell.trial_begins(self.count, change, role)
            measured = self._trier.run(settings, self.trial_s)
            changed = self._ledger is not None and measured.ledger not in (None, self._ledger)
            if changed and measured.result == "measured":
                why = "the samples, crops, labels or the total batch were not those of the original"
                measured = replace(measured, result="different-training", detail=why)
            self.journal.trial(settings, measured)
            self.tell.trial_ends()
        if self._ledger is None and measured.result == "measured" and self._same_training:
            self._ledger = measured.ledger
        self._took_s += measured.took_s
        self._longest_s = max(self._longest_s, measured.took_s)
        self._starting_s = max(self._starting_s, measured.took_s - self.trial_s)
        for runs in (self.runs, self.noise.alike):
            runs.setdefault(key_of(settings), []).append(measured)
        return measured

    def good(self, settings: Settings) -> list[Measured]:
        return [run for run in self.runs.get(key_of(settings), []) if run.result == "measured"]

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

    @property
    def could_be_longer(self) -> bool:
        return self.trial_s * WORTH_LONGER < self._longest_trial_s

    def lengthen(self, runs: int | None = None) -> bool:
        """Makes trials longer if repeated runs differ, as far as the budget allows for this many runs to come (default:
        all that are left); False if their length stays."""
        left = self._most - self.count
        spread, turns = self.noise.spread(), self.noise.turn_spread()
        if turns is not None:
            spread = min(spread, turns[0] / math.sqrt(2))  # of one run, without what both runs of a turn share
        room_s = (self.budget_s - self.spent_s) / max(1, left if runs is None else min(left, runs)) - self._starting_s
        longer_s = min(self.trial_s * (spread / WANTED_SPREAD) ** 2, self._longest_trial_s, room_s)
        if longer_s < WORTH_LONGER * self.trial_s:
            return False
        self.noise.lengthened(spread * math.sqrt(self.trial_s / longer_s))
        self.trial_s = longer_s
        self.tell.lengthened(longer_s, spread)
        return True


@dataclass(frozen=True)
class Comparison:
    """Settings against others, both as logarithms of a ratio."""

    gain: float
    noise: float
    """Two standard errors."""

    @property
    def ratio(self) -> float:
        return math.exp(self.gain)

    @property
    def is_gain(self) -> bool:
        return self.gain > max(math.log1p(FLOOR), self.noise)

    @property
    def may_be_gain(self) -> bool:
        """Whether more runs could still show a gain."""
        return self.gain + self.noise > math.log1p(FLOOR)

    def words(self) -> str:
        """+38 % ± 4 %"""
        return f"{math.expm1(self.gain):+.0%} ± {math.expm1(self.noise):.0%}".replace("%", " %")


class Noise:
    """How much repeated runs differ, and whether some settings are faster than others in spite of it."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self.alike: dict[Key, list[Measured]] = {}
        """Runs that took as long as trials take now: shorter ones differ more."""
        self.turns: dict[Key, list[float]] = {}
        """The log-ratios of such runs that alternated, by the settings that were compared."""
        self.expected_spread = 0.0

    def scores(self, runs: Sequence[Measured]) -> list[float]:
        return [score for run in runs if (score := self._score(run))]

    def lengthened(self, expected_spread: float) -> None:
        self.expected_spread = expected_spread
        self.alike.clear()
        self.turns.clear()

    def spread(self) -> float:
        """Standard deviation between runs of the same settings, as a logarithm: from repeats, and from the windows of
        single runs, whichever is larger. After trials were lengthened, the target until there are new runs.

        Medians, so that one collapse of some settings does not hide all other gains.
        """
        apart: list[float] = []
        within: list[float] = []
        for runs in self.alike.values():
            logs = self._logs(runs)
            if len(logs) > 1:
                middle, free = statistics.fmean(logs), len(logs) / (len(logs) - 1)
                apart += [math.sqrt(free) * abs(value - middle) for value in logs]
            for windows in (run.windows for run in runs if run.result == "measured" and len(run.windows) > 1):
                mean = statistics.fmean(windows)
                within += [_deviation(windows) / mean / math.sqrt(len(windows))] if mean > 0 else []
        between = NORMAL_MEDIAN * statistics.median(apart) if apart else self.expected_spread
        return max(LEAST_SPREAD, between, statistics.median(within) if within else 0.0)

    def compare(self, mine: Sequence[Measured], against: Sequence[Measured]) -> Comparison | None:
        """None if one of them has no good run."""
        ours, theirs, spread = self._logs(mine), self._logs(against), self.spread()
        if not ours or not theirs:
            return None
        error = math.hypot(*(max(spread, _deviation(logs)) / math.sqrt(len(logs)) for logs in (ours, theirs)))
        return Comparison(statistics.fmean(ours) - statistics.fmean(theirs), SURE * error)

    def compare_turns(self, of: Settings, mine: Sequence[Measured], against: Sequence[Measured]) -> Comparison | None:
        """The same, more exact for runs that alternated: a machine that gets slower and faster does so for both runs of
        a turn, so their ratio varies less than their rates. How much ratios vary is known from the turns of all
        candidates."""
        seen, ours, theirs = self.compare(mine, against), self._logs(mine), self._logs(against)
        if seen is None or len({len(ours), len(theirs), len(mine), len(against)}) != 1:
            return seen
        ratios = self.turns[key_of(of)] = [one - other for one, other in zip(ours, theirs, strict=True)]
        apart = self.turn_spread()
        if len(ratios) < 2 or apart is None:
            return seen
        error = max(apart[0], _deviation(ratios), LEAST_SPREAD) / math.sqrt(len(ratios))
        sure = STUDENT[min(apart[1], len(STUDENT)) - 1]
        return Comparison(statistics.fmean(ratios), min(seen.noise, sure * error))

    def turn_spread(self) -> tuple[float, int] | None:
        """Standard deviation of the ratios of turns with the same settings, and the degrees of freedom that it comes
        from; None if there are too few."""
        groups = [group for group in self.turns.values() if len(group) > 1]
        free = sum(len(group) - 1 for group in groups)
        if free < 2:
            return None
        squares = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
        return math.sqrt(squares / free), free

    def _logs(self, runs: Sequence[Measured]) -> list[float]:
        return [math.log(score) for score in self.scores(runs)]


def is_cheaper(settings: Settings, than: Settings) -> bool:
    """Whether settings take less memory than others, no more of any resource, and are otherwise the same."""

    def taken(of: Settings) -> tuple[float, float, float]:
        """Workers, batches in flight, look-ahead."""
        values = (of.get(name) for name in TAKES_MEMORY)
        workers, each, ahead = (float(value) if isinstance(value, (int, float)) else 0.0 for value in values)
        # A script may have a fixed number of workers.
        return workers, (workers if "num_workers" in of else 1.0) * each, ahead

    ours, theirs = taken(settings), taken(than)
    same = all(value == than.get(name) for name, value in settings.items() if name not in TAKES_MEMORY)
    return same and ours != theirs and all(one <= other for one, other in zip(ours, theirs, strict=True))


def _deviation(logs: Sequence[float]) -> float:
    return statistics.stdev(logs) if len(logs) > 1 else 0.0
