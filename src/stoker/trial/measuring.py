"""Warm-up, windows and end of a trial: how fast it is, and when that is known."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from stoker.loader.loader import LinkBalance
from stoker.profile.host import HostWatch
from stoker.profile.step_clock import Interval, StepClock

WARM_UP_STEPS = 3
"""The first steps include allocation, the choice of kernels and an empty pipeline."""
PARTS = 6
"""Windows of a trial that runs for its whole time."""
FEWEST_PARTS = 3
MOST_EQUAL = 1000
"""Most windows that one stall counts as: they are in the result of the process."""
AGREED = 0.008
"""Relative standard error of the windows' mean below which more windows would not change the result: well below the
smallest gain that counts."""
ENOUGH_BATCHES = 40
UNSURE = 0.08
"""The same error, above which a trial continues beyond its time: with a huge image now and then, two seconds of the
same settings differed by a third. Short windows of whole batches alone explain half of that."""
FOR_THE_LEAST_S = 15.0
"""However short a trial is meant to be: three seconds of 16 processes gave between 320 and 450 images/s."""
ROUNDS, ROUNDS_AT_MOST_S = 3, 30.0
"""Requests that share a link arrive together, in rounds; the first batch took about one. The bytes of a request in
flight do not count yet, so a trial is wrong by up to one of its rounds: over 6 MB/s (52 images/s), trials that lasted
for one round gave between 2 and 99 images/s."""
LONGEST = 2.5
"""Factor of the wanted seconds, for batches that take long and for rates that vary."""

ReportSeconds = Callable[[float], None]
"""Called with the seconds measured so far."""


class Measurement:
    """Called for each batch and step of a trial; decides when to stop."""

    def __init__(
        self, seconds: float, tell: ReportSeconds, *, warm_up: int = WARM_UP_STEPS, least: int | None = None,
        remote: bool = False, keep: int,
    ) -> None:  # fmt: skip
        """`warm_up` batches do not count. With `least`, it ends sooner if its windows agree, and later if they do
        not or there were fewer batches; without, when its seconds are over. `remote`: the data is behind a link that
        requests share. `keep` single steps and batches are kept."""
        self.clock = StepClock(keep=keep)
        self.host = HostWatch()
        self.start_s: float | None = None
        """From the beginning to the end of the first step."""
        self._seconds, self._tell, self._warm_up, self._least = seconds, tell, warm_up, least
        self._remote, self._rounds_s = remote, 0.0
        self._asked_s = time.perf_counter()
        self._told_s = self._window_from_s = 0.0
        self._link = LinkBalance()
        self._noted: tuple[int, int] = (-1, -1)
        self._batches = self._window_samples = 0
        self._began_s: float | None = None
        self._measured_from_s: float | None = None
        self._windows: list[float] = []
        self._starts: list[float] = []

    @property
    def windows(self) -> list[float]:
        """Samples per second, as far as their bytes arrived while it was measured."""
        share = self._link.share_that_came
        return [share * rate for rate in self._windows]

    def batch(self, batch: Any) -> None:
        """Call it for each batch, before its step; one that is prepared a second time counts once."""
        if (batch.epoch, batch.step) > self._noted:
            self._noted = (batch.epoch, batch.step)
            self._link.take(batch.cost)

    def step(self, batches: int, samples: int) -> bool:
        """Call it after each step; True after the last one. At least one is measured, however long it takes."""
        now_s = time.perf_counter()
        self._batches += batches
        if self._began_s is None:
            self._began_s, self.start_s = now_s, now_s - self._asked_s
            self._rounds_s = min(ROUNDS_AT_MOST_S, ROUNDS * self.start_s) if self._remote else 0.0
            return False
        if self._measured_from_s is None:
            # A step that takes longer than the whole measurement is warm-up enough.
            if self._batches >= self._warm_up or now_s - self._began_s > self._seconds:
                self._begin(now_s)
            return False
        self._window_samples += samples
        elapsed_s, wanted_s = now_s - self._window_from_s, self._seconds / PARTS
        if elapsed_s >= wanted_s:
            # A stall makes one window as long as many. It counts as many: the mean is one over time.
            self._windows += [self._window_samples / elapsed_s] * min(MOST_EQUAL, round(elapsed_s / wanted_s))
            self._window_from_s, self._window_samples = now_s, 0
        measured_s = now_s - self._measured_from_s
        if now_s - self._told_s > 0.2:
            self._told_s = now_s
            self.host.look()
            self._tell(measured_s)
        if self._least is None:
            return measured_s >= self._seconds
        if not self._windows or measured_s < self._rounds_s:
            return False
        return is_enough(self._windows, self._batches, self._least, measured_s, self._seconds)

    def interval(self) -> Interval:
        """The steps after the warm-up, and the waits at the start of every epoch."""
        interval = self.clock.take_interval()
        interval.epoch_starts_s = self._starts + interval.epoch_starts_s
        return interval

    def _begin(self, now_s: float) -> None:
        self._starts = self.clock.take_interval().epoch_starts_s
        self._measured_from_s = self._window_from_s = now_s
        self._batches = 0
        self._link.begin()
        self.host.facts()  # resets its figures: building the model says nothing about steps
        self._tell(0.0)


def is_enough(windows: Sequence[float], batches: int, least: int, elapsed_s: float, wanted_s: float) -> bool:
    """Whether a trial has measured enough: sooner if its windows agree, later if they do not."""
    if elapsed_s >= max(LONGEST * wanted_s, 0.0 if batches >= least else FOR_THE_LEAST_S):
        return True
    if len(windows) < FEWEST_PARTS or batches < least:
        return False
    error = statistics.stdev(windows) / statistics.fmean(windows) / math.sqrt(len(windows))
    if elapsed_s >= wanted_s:
        return error < UNSURE
    return batches >= ENOUGH_BATCHES and error < AGREED
