"""Whether settings are faster than others, given how much repeated runs differ. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from stoker.tune.records import Measured, Settings

Score = Callable[[Measured], float | None]
"""What is maximised; None if the run does not say."""

FLOOR = 0.02
"""A gain below this is not one, however still the machine is: nobody would notice it."""
LEAST_SPREAD = 0.005
"""Of repeated runs: two that happen to agree do not prove that there is no noise."""
NORMAL_MEDIAN = 1.4826
"""Standard deviations in a median absolute deviation of a normal distribution."""
SURE = 2.0
"""Standard errors that a gain has to exceed: 95 % of a normal distribution are within two."""
STUDENT = (6.31, 2.92, 2.35, 2.13, 2.02, SURE)
"""The same where the standard error is itself an estimate from few turns: Student's t for 95 % on one side, by degrees
of freedom."""


@dataclass(frozen=True)
class Comparison:
    """Candidate against the best so far, both as logarithms of a ratio."""

    gain: float
    noise: float
    """± so much, two standard errors."""

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


def spread_of(groups: Iterable[Sequence[Measured]], score: Score) -> float:
    """Standard deviation between runs of the same settings, as a logarithm: from repeats, and from the windows of
    single runs, whichever is larger. Medians, so that settings which fell apart once do not hide all other gains."""
    apart: list[float] = []
    within: list[float] = []
    for runs in groups:
        logs = _logs(runs, score)
        if len(logs) > 1:
            middle, free = statistics.fmean(logs), len(logs) / (len(logs) - 1)
            apart += [math.sqrt(free) * abs(value - middle) for value in logs]
        within += [error for run in runs if (error := _window_error(run)) is not None]
    between = NORMAL_MEDIAN * statistics.median(apart) if apart else 0.0
    return max(LEAST_SPREAD, between, statistics.median(within) if within else 0.0)


def compare(candidate: Sequence[Measured], best: Sequence[Measured], score: Score, spread: float) -> Comparison | None:
    """None if one of them has no good run."""
    ours, theirs = _logs(candidate, score), _logs(best, score)
    if not ours or not theirs:
        return None
    error = math.hypot(*(max(spread, _deviation(logs)) / math.sqrt(len(logs)) for logs in (ours, theirs)))
    return Comparison(statistics.fmean(ours) - statistics.fmean(theirs), SURE * error)


def compare_turns(
    candidate: Sequence[Measured],
    best: Sequence[Measured],
    score: Score,
    spread: float,
    turns: Iterable[Sequence[float]],
) -> Comparison | None:
    """The same for runs that alternated, each of `best` before the one of `candidate`. A machine that gets slower and
    faster does so for both runs of a turn, so their ratio varies less than their rates.

    `turns` are the log-ratios of all candidates so far, this one included: together they say how much turns differ.
    """
    seen, ratios = compare(candidate, best, score, spread), log_ratios(candidate, best, score)
    apart = turn_spread(turns)
    if seen is None or len(ratios) < 2 or apart is None:
        return seen
    error = max(apart[0], _deviation(ratios), LEAST_SPREAD) / math.sqrt(len(ratios))
    sure = STUDENT[min(apart[1], len(STUDENT)) - 1]
    return Comparison(statistics.fmean(ratios), min(seen.noise, sure * error))


def turn_spread(turns: Iterable[Sequence[float]]) -> tuple[float, int] | None:
    """Standard deviation of the ratios of turns with the same settings, and the degrees of freedom that it comes from;
    None if there are too few."""
    groups = [group for group in turns if len(group) > 1]
    free = sum(len(group) - 1 for group in groups)
    if free < 2:
        return None
    squares = sum((value - statistics.fmean(group)) ** 2 for group in groups for value in group)
    return math.sqrt(squares / free), free


def log_ratios(candidate: Sequence[Measured], best: Sequence[Measured], score: Score) -> list[float]:
    """Of each turn; empty unless all of them are good."""
    ours, theirs = _logs(candidate, score), _logs(best, score)
    if len({len(ours), len(theirs), len(candidate), len(best)}) != 1:
        return []
    return [mine - other for mine, other in zip(ours, theirs, strict=True)]


def smallest_gain(spread: float) -> float:
    """The smallest gain that two runs against two others would show, as a share: 0.06."""
    return max(FLOOR, math.expm1(SURE * spread))


def is_cheaper(settings: Settings, than: Settings) -> bool:
    """Whether settings take less memory than others, and no more of anything."""
    pairs = list(zip(_taken(settings), _taken(than), strict=True))
    others = [name for name in settings if name not in ("num_workers", "prefetch_factor", "lookahead")]
    if any(settings[name] != than.get(name) for name in others):
        return False
    return all(ours <= theirs for ours, theirs in pairs) and any(ours < theirs for ours, theirs in pairs)


def _taken(settings: Settings) -> tuple[float, float, float]:
    """Workers, batches in flight, look-ahead."""
    workers = _number(settings, "num_workers")
    # A script may have a number of workers of its own, which is always the same.
    in_flight = (workers if "num_workers" in settings else 1.0) * _number(settings, "prefetch_factor")
    return workers, in_flight, _number(settings, "lookahead")


def mean_rate(runs: Sequence[Measured]) -> float | None:
    """Samples per second of the good ones among these runs."""
    rates = [rate for run in runs if (rate := run.samples_per_second) is not None]
    return sum(rates) / len(rates) if rates else None


def percent(ratio: float) -> str:
    """+12 %"""
    return f"{ratio - 1:+.0%}".replace("%", " %")


def _number(settings: Settings, name: str) -> float:
    value = settings.get(name)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _deviation(logs: Sequence[float]) -> float:
    return statistics.stdev(logs) if len(logs) > 1 else 0.0


def _logs(runs: Sequence[Measured], score: Score) -> list[float]:
    return [math.log(value) for run in runs if (value := score(run))]


def _window_error(run: Measured) -> float | None:
    if run.result != "measured" or len(run.windows) < 2:
        return None
    mean = statistics.fmean(run.windows)
    return statistics.stdev(run.windows) / mean / math.sqrt(len(run.windows)) if mean > 0 else None
