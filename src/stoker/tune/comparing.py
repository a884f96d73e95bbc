"""What a search maximises, and whether settings are faster than others, given how much repeated runs differ. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.tune.records import Measured, Settings

Goal = Literal["throughput", "epoch-time", "cost"]
GOALS: tuple[Goal, ...] = ("throughput", "epoch-time", "cost")
ALSO = ("precision", "img_size", "batch_size", "mixing")
"""Changes that would alter the training: measured only on request."""
HOUR_S = 3600.0

Score = Callable[[Measured], float | None]
"""The value that is maximised; None if the run does not have it."""

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


@dataclass(frozen=True)
class Objective:
    """A goal, with what is needed to compute it from a trial."""

    goal: Goal = "throughput"
    epochs: int = 1
    validates: bool = False
    """Whether each epoch ends with a validation, whose loader has to start as well."""

    def score(self, measured: Measured) -> float | None:
        """Larger is better; None if the trial failed."""
        if self.goal == "throughput":
            return measured.samples_per_second
        seconds = self.epoch_s(measured) if self.goal == "epoch-time" else self.run_s(measured)
        return 1 / seconds if seconds else None

    def epoch_s(self, measured: Measured) -> float | None:
        """One epoch with its first batch, and the start of validation; None if unknown."""
        rate, samples = steady_rate(measured), measured.epoch_samples
        if not rate or not samples:
            return None
        starts = 2 if self.validates else 1
        return samples / rate + starts * (measured.first_batch_s or 0.0)

    def run_s(self, measured: Measured) -> float | None:
        """The whole run: its start, with compiling, and its epochs."""
        epoch_s = self.epoch_s(measured)
        return None if epoch_s is None else (measured.start_s or 0.0) + self.epochs * epoch_s


def steady_rate(measured: Measured) -> float | None:
    """Samples per second within an epoch, without the wait for its first batch."""
    if measured.result != "measured":
        return None
    if measured.observed is not None and measured.observed.images_per_second:
        return measured.observed.images_per_second
    return measured.samples_per_second


def run_facts(
    objective: Objective, before: Measured | None, after: Measured | None, price_per_hour: float | None
) -> dict[str, float | None]:
    """Hours and money of the whole run, before and after."""
    found: dict[str, float | None] = {}
    for name, measured in (("before", before), ("after", after)):
        seconds = None if measured is None else objective.run_s(measured)
        found[f"hours_{name}"] = None if seconds is None else seconds / HOUR_S
        found[f"cost_{name}"] = None if seconds is None or price_per_hour is None else seconds / HOUR_S * price_per_hour
    return found


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


def compare(mine: Sequence[Measured], against: Sequence[Measured], score: Score, spread: float) -> Comparison | None:
    """None if one of them has no good run."""
    ours, theirs = _logs(mine, score), _logs(against, score)
    if not ours or not theirs:
        return None
    error = math.hypot(*(max(spread, _deviation(logs)) / math.sqrt(len(logs)) for logs in (ours, theirs)))
    return Comparison(statistics.fmean(ours) - statistics.fmean(theirs), SURE * error)


def compare_turns(seen: Comparison, ratios: Sequence[float], turns: Iterable[Sequence[float]]) -> Comparison:
    """The result of `compare`, more exact if both were run in turns: a machine that gets slower and faster does so for
    both runs of a turn, so their ratio varies less than their rates.

    `ratios` are the log-ratios of these turns, `turns` those of all candidates, which say how much turns differ.
    """
    apart = turn_spread(turns)
    if len(ratios) < 2 or apart is None:
        return seen
    error = max(apart[0], _deviation(ratios), LEAST_SPREAD) / math.sqrt(len(ratios))
    sure = STUDENT[min(apart[1], len(STUDENT)) - 1]
    return Comparison(statistics.fmean(ratios), min(seen.noise, sure * error))


def log_ratios(mine: Sequence[Measured], against: Sequence[Measured], score: Score) -> list[float]:
    """The ratio of each turn; empty unless all of them are good."""
    ours, theirs = _logs(mine, score), _logs(against, score)
    if len({len(ours), len(theirs), len(mine), len(against)}) != 1:
        return []
    return [one - other for one, other in zip(ours, theirs, strict=True)]


def spread_of(groups: Iterable[Sequence[Measured]], score: Score) -> float:
    """Standard deviation between runs of the same settings, as a logarithm: from repeats, and from the windows of
    single runs, whichever is larger. Medians, so that one collapse of some settings does not hide all other gains."""
    apart: list[float] = []
    within: list[float] = []
    for runs in groups:
        logs = _logs(runs, score)
        if len(logs) > 1:
            middle, free = statistics.fmean(logs), len(logs) / (len(logs) - 1)
            apart += [math.sqrt(free) * abs(value - middle) for value in logs]
        for windows in (run.windows for run in runs if run.result == "measured" and len(run.windows) > 1):
            mean = statistics.fmean(windows)
            within += [_deviation(windows) / mean / math.sqrt(len(windows))] if mean > 0 else []
    between = NORMAL_MEDIAN * statistics.median(apart) if apart else 0.0
    return max(LEAST_SPREAD, between, statistics.median(within) if within else 0.0)


def turn_spread(turns: Iterable[Sequence[float]]) -> tuple[float, int] | None:
    """Standard deviation of the ratios of turns with the same settings, and the degrees of freedom that it comes from;
    None if there are too few."""
    groups = [group for group in turns if len(group) > 1]
    free = sum(len(group) - 1 for group in groups)
    if free < 2:
        return None
    squares = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    return math.sqrt(squares / free), free


def is_cheaper(settings: Settings, than: Settings) -> bool:
    """Whether settings take less memory than others, no more of any resource, and are otherwise the same."""
    ours, theirs = _taken(settings), _taken(than)
    same = all(value == than.get(name) for name, value in settings.items() if name not in TAKES_MEMORY)
    return same and ours != theirs and all(one <= other for one, other in zip(ours, theirs, strict=True))


def _taken(settings: Settings) -> tuple[float, float, float]:
    """Workers, batches in flight, look-ahead."""
    values = (settings.get(name) for name in TAKES_MEMORY)
    workers, each, ahead = (float(value) if isinstance(value, (int, float)) else 0.0 for value in values)
    # A script may have a fixed number of workers.
    return workers, (workers if "num_workers" in settings else 1.0) * each, ahead


def mean_rate(runs: Sequence[Measured]) -> float | None:
    """Samples per second of the good ones among these runs."""
    rates = [rate for run in runs if (rate := run.samples_per_second) is not None]
    return statistics.fmean(rates) if rates else None


def _deviation(logs: Sequence[float]) -> float:
    return statistics.stdev(logs) if len(logs) > 1 else 0.0


def _logs(runs: Sequence[Measured], score: Score) -> list[float]:
    return [math.log(value) for run in runs if (value := score(run))]
