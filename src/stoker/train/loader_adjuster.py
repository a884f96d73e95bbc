"""Adjusts the training loader while it runs: one change at a time, measured, kept or undone; then it settles.

What is tried and kept is decided in loader_changes.py; here it is measured and done. Samples, order and crops do not
depend on it. Worker processes stay as they are: each has its share of the steps from the start.

When memory runs low, `PrefetchGuard` lets the loader run less far ahead of the model, before the kernel kills a worker.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.core.console import Say
from stoker.core.units import size_text
from stoker.loader.batch import LoaderSetup
from stoker.loader.loader_memory import STATED
from stoker.profile.batch_costs import run_queue_s
from stoker.profile.memory import MemoryState, read_memory
from stoker.profile.step_clock import StepClock
from stoker.train.loader_changes import (
    Knob,
    LoaderChange,
    Look,
    MemoryRoom,
    is_idle,
    is_kept,
    is_steady,
    mean_of,
    possible_changes,
)

if TYPE_CHECKING:
    from stoker.loader.loader import BatchLoader

LOOK_S = 1.0
"""Minimum length of a look: kernels count in ticks, and single steps differ."""
LOOK_STEPS = 8
LOOKS = 5
"""Looks before and after a change; their spread shows what is noise."""
IDLE_LOOKS = 15
"""An idle worker costs little, so there is no hurry to end it."""
READY_EVERY = 8
"""Not at each step: counting what is ready takes a microsecond for each batch in flight."""
STALLED_TIMES = 5
MOST_STALLS = 2
HOLD_S = 60.0
MOST_HOLD_S = 3600.0
"""A change that did not help is tried again after a minute, then after twice as long each time, up to an hour."""

Event = dict[str, Any]


@dataclass
class _Trial:
    """A change that is being tried."""

    change: LoaderChange
    before: list[Look]
    settling: int
    """Steps whose batches were asked for before the change."""


@dataclass(frozen=True)
class _Mark:
    """The clock's sums of an epoch at one moment."""

    steps: int = 0
    seconds: float = 0.0
    samples: int = 0
    wait_s: float = 0.0
    made_s: float = 0.0
    cpu_s: float | None = 0.0
    fetch_s: float = 0.0
    bytes_read: int = 0
    batches: int = 0


class LoaderAdjuster:
    """Call `after_step` once per step, from the training thread; most calls only compare a few numbers."""

    def __init__(
        self,
        cores: float,
        *,
        fixed: frozenset[Knob] = frozenset(),
        read: Callable[[], MemoryState | None] = read_memory,
        look_s: float = LOOK_S,
        look_steps: int = LOOK_STEPS,
        hold_s: float = HOLD_S,
    ) -> None:
        self._cores = cores
        self._fixed = fixed
        self._read = read
        self._look_s = look_s
        self._look_steps = look_steps
        self._hold_s = hold_s
        self._loader: BatchLoader[Any] | None = None
        self._setup: LoaderSetup | None = None
        """What has been kept so far; another loader of the run gets it, too."""
        self._first_requests = 0
        self._trial: _Trial | None = None
        self._held: dict[tuple[Knob, bool], tuple[float, int]] = {}
        """By setting and direction: the time before which it is not tried again, and how often it was put off."""
        self._looks: list[Look] = []
        self._idle_looks = 0
        self._stalls = 0
        self._read_bytes = 0
        """Bytes read for a batch."""
        self._steps = 0
        """Steps of the epoch, at the last call."""
        self.is_settled = False
        """Nothing is being tried, and whatever might help was tried not long ago."""
        self._begin(_Mark())

    def after_step(self, loader: BatchLoader[Any], clock: StepClock) -> Event | None:
        """What was decided after this step, if anything: a record for the run's files."""
        setup = loader.setup
        if setup is None or setup.workers == 0:
            return None
        if loader is not self._loader:
            self._adopt(loader, setup)
        if clock.steps <= self._steps:  # another epoch: the rest of the last one is not looked at
            self._begin(_Mark())
        self._steps = clock.steps
        if (clock.steps - self._mark.steps - 1) % READY_EVERY == 0:
            self._ready += loader.ready() / max(1, loader.in_flight)
            self._asked += 1
        trial = self._trial
        if trial is not None:
            if loader.in_flight < loader.most_in_flight and trial.change.is_more:
                return self._undo(loader, "memory ran low")
            if trial.settling > 0:
                trial.settling -= 1
                self._begin(_mark(clock))
                return None
        steps = clock.steps - self._mark.steps
        # The sums of an epoch include the wait for its first batch, which no set-up of the loader can hide.
        if steps < self._look_steps or clock.total_s - self._mark.seconds < self._look_s:
            return None
        look = self._look(loader, setup, clock)
        if self._is_stall(look):
            return None
        self._looks.append(look)
        return self._decide(loader, setup) if trial is None else self._judge(loader, trial)

    def _adopt(self, loader: BatchLoader[Any], setup: LoaderSetup) -> None:
        """Takes over the loader of another image size: with the same set-up, and everything may be tried again."""
        self._loader = loader
        self._first_requests = self._first_requests or setup.requests
        if self._setup is not None:
            loader.adjust(self._setup)
        self._setup = loader.setup
        self._trial = None
        self._held.clear()
        self._looks.clear()
        self._idle_looks = 0
        self._begin(_Mark())

    def _begin(self, mark: _Mark) -> None:
        self._mark = mark
        self._queued_s, self._ran_s = run_queue_s(), time.thread_time()
        self._ready, self._asked = 0.0, 0

    def _look(self, loader: BatchLoader[Any], setup: LoaderSetup, clock: StepClock) -> Look:
        before, now = self._mark, _mark(clock)
        first_s = (clock.first_wait_s or 0.0) if before.steps == 0 else 0.0
        seconds = max(1e-9, now.seconds - before.seconds - first_s)
        made_s = max(1e-9, now.made_s - before.made_s)
        queued_s = run_queue_s()
        crowded_s = None if queued_s is None or self._queued_s is None else queued_s - self._queued_s
        cpu_s = None if now.cpu_s is None or before.cpu_s is None else now.cpu_s - before.cpu_s
        look = Look(
            seconds=seconds,
            samples=now.samples - before.samples,
            wait_share=max(0.0, now.wait_s - before.wait_s - first_s) / seconds,
            ready_share=self._ready / max(1, self._asked),
            busy_share=min(1.0, made_s / (seconds * setup.workers)),
            cpu_share=None if cpu_s is None else min(1.0, cpu_s / made_s),
            fetch_share=(now.fetch_s - before.fetch_s) / made_s,
            crowded_share=None if crowded_s is None else crowded_s / seconds,
            loop_share=min(1.0, (time.thread_time() - self._ran_s) / seconds),
            held_back_by=loader.held_back_by(),
        )
        self._read_bytes = (now.bytes_read - before.bytes_read) // max(1, now.batches - before.batches)
        self._begin(now)
        return look

    def _is_stall(self, look: Look) -> bool:
        """Whether something else delayed the run, such as a store that did not respond: that says nothing about the
        loader. Several such looks in a row are the new normal."""
        known = self._looks or ([] if self._trial is None else self._trial.before)
        stalled = bool(known) and look.seconds > STALLED_TIMES * statistics.median(one.seconds for one in known)
        self._stalls = self._stalls + 1 if stalled else 0
        return 0 < self._stalls <= MOST_STALLS

    def _decide(self, loader: BatchLoader[Any], setup: LoaderSetup) -> Event | None:
        del self._looks[:-LOOKS]
        self._idle_looks = self._idle_looks + 1 if is_idle(self._looks[-1]) else 0
        if len(self._looks) < LOOKS or not is_steady(self._looks):
            return None
        seen, now_s = mean_of(self._looks), time.monotonic()
        room, idle_for_long = self._room(loader), self._idle_looks >= IDLE_LOOKS
        for change in possible_changes(seen, setup, room, idle_for_long=idle_for_long):
            until_s, _ = self._held.get((change.knob, change.is_more), (0.0, 0))
            if now_s >= until_s:
                self._trial = _Trial(change, list(self._looks), settling=loader.most_in_flight)
                self._looks.clear()
                self.is_settled = False
                loader.adjust(change.made(setup))
                return _event("tried", change, rate_before=seen.rate)
        self.is_settled = True
        return None

    def _judge(self, loader: BatchLoader[Any], trial: _Trial) -> Event | None:
        """Keeps or undoes the change that was tried, once there is enough to compare."""
        if len(self._looks) < LOOKS:
            return None
        if not is_kept(trial.change, trial.before, self._looks):
            return self._undo(loader, trial.change.why)
        change = trial.change
        self._setup, self._trial = loader.setup, None
        if change.is_more:
            # Otherwise a varying load would make it switch back and forth.
            self._hold(change.knob, is_more=False)
        self._idle_looks = 0
        return _event("kept", change, rate_before=mean_of(trial.before).rate, rate_after=mean_of(self._looks).rate)

    def _undo(self, loader: BatchLoader[Any], why: str) -> Event:
        trial = self._trial
        assert trial is not None
        assert self._setup is not None
        loader.adjust(self._setup)
        self._hold(trial.change.knob, is_more=trial.change.is_more)
        after = mean_of(self._looks).rate if self._looks else None
        self._trial = None
        self._looks.clear()
        self._idle_looks = 0
        return _event("undone", trial.change, rate_before=mean_of(trial.before).rate, rate_after=after, why=why)

    def _hold(self, knob: Knob, *, is_more: bool) -> None:
        _, times = self._held.get((knob, is_more), (0.0, 0))
        self._held[knob, is_more] = time.monotonic() + min(MOST_HOLD_S, self._hold_s * 2**times), times + 1

    def _room(self, loader: BatchLoader[Any]) -> MemoryRoom:
        state = self._read()
        spare = None
        if state is not None:
            # Twice the mark below which the prefetch is reduced, as for raising that again.
            spare = max(0, state.available_bytes - 2 * int(min(LOW_SHARE * state.limit_bytes, LOW_AT_MOST_BYTES)))
        return MemoryRoom(
            cores=self._cores,
            spare_bytes=spare,
            batch_bytes=loader.batch_bytes,
            worker_bytes=STATED.thread + self._read_bytes,
            first_requests=self._first_requests,
            is_limited=loader.in_flight < loader.most_in_flight,
            fixed=self._fixed,
        )


def _mark(clock: StepClock) -> _Mark:
    cost = clock.cost
    ran_s, queued_s = cost.on_cpu_s, cost.run_queue_s
    fetch = cost.stages.get("fetch")
    return _Mark(
        steps=clock.steps,
        seconds=clock.total_s,
        samples=clock.samples,
        wait_s=clock.wait_s,
        made_s=cost.wall_s,
        cpu_s=None if ran_s is None or queued_s is None else ran_s + queued_s,
        fetch_s=cost.fetch_s,
        bytes_read=cost.bytes_read,
        batches=0 if fetch is None else fetch.calls,
    )


def _event(decision: str, change: LoaderChange, *, why: str | None = None, **rates: float | None) -> Event:
    rounded = {name: rate if rate is None else round(rate, 2) for name, rate in rates.items()}
    about = {"decision": decision, "knob": change.knob, "from": change.before, "to": change.after}
    return about | {"why": why or change.why} | rounded


CHECK_EVERY_S = 1.0
# Acts before earlyoom, which kills processes when 10 % of the memory is left; but 8 GB are enough on any host.
LOW_SHARE = 0.12
LOW_AT_MOST_BYTES = 8_000_000_000
# With half of that left there is no time to reduce step by step.
CRITICAL_PART = 0.5
# If all processes wait for memory for a tenth of the time, the host is thrashing. Re-reading a large data set through
# the page cache stalls as well, with plenty of memory; so stalls only count below twice the low mark.
STALLED = 0.1
STALLED_WITHIN = 2.0
# Batches in flight have to be consumed before their memory is free.
SETTLE_S = 5.0
# A peak such as validation or another job on the host is over by then. A run that shrinks a second time has a leak or
# is too large, and stays small.
GROW_AFTER_S = 600.0


class PrefetchGuard:
    """Call `check` once per step with the loader of the step's batch: it reads a clock, and once a second a few small
    files."""

    def __init__(
        self,
        say: Say,
        *,
        read: Callable[[], MemoryState | None] = read_memory,
        clock: Callable[[], float] = time.monotonic,
        every_s: float = CHECK_EVERY_S,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._say = say
        self._read = read
        self._clock = clock
        self._every_s = every_s
        self._settle_s = settle_s
        self._loader: BatchLoader[Any] | None = None
        self._levels: list[int] = []
        self._level = 0
        """Position in `_levels`; kept when the loader changes."""
        self._next_check = -1.0
        self._settled_at = -1.0
        self._calm_since: float | None = None
        self._times_shrunk = 0

    def check(self, loader: BatchLoader[Any]) -> None:
        """Looks at memory, at most once a second, and reduces the loader's batches in flight if it runs low."""
        if loader is not self._loader or loader.most_in_flight != self._levels[0]:
            self._adopt(loader)
        now = self._clock()
        if now < self._next_check:
            return
        self._next_check = now + self._every_s
        state = self._read()
        if state is None:
            return
        low = min(LOW_SHARE * state.limit_bytes, LOW_AT_MOST_BYTES)
        if is_short(state, low):
            self._calm_since = None
            if now >= self._settled_at:
                self._shrink(state, now, at_once=state.available_bytes < CRITICAL_PART * low)
        elif self._level:
            self._maybe_grow(state, now, low)

    def _adopt(self, loader: BatchLoader[Any]) -> None:
        """Applies the current limit to another loader (another image size, or validation), or to one with other
        workers."""
        self._loader = loader
        self._levels = in_flight_levels(loader.workers, loader.most_in_flight)
        if self._level:
            loader.limit_prefetch(self._target())

    def _target(self) -> int:
        return self._levels[min(self._level, len(self._levels) - 1)]

    def _shrink(self, state: MemoryState, now: float, *, at_once: bool) -> None:
        if self._level >= len(self._levels) - 1:
            return
        before = self._target()
        self._level = len(self._levels) - 1 if at_once else self._level + 1
        self._times_shrunk += 1
        self._settled_at = now + self._settle_s
        self._apply(f"memory is down to {size_text(state.available_bytes)} of {size_text(state.limit_bytes)}", before)

    def _maybe_grow(self, state: MemoryState, now: float, low: float) -> None:
        assert self._loader is not None
        before = self._target()
        larger = self._levels[min(self._level, len(self._levels) - 1) - 1]
        needed = (larger - before) * self._loader.batch_bytes
        if self._times_shrunk > 1 or state.available_bytes < 2 * low + needed:
            self._calm_since = None
            return
        if self._calm_since is None:
            self._calm_since = now
        if now - self._calm_since >= GROW_AFTER_S:
            self._calm_since = None
            self._level = min(self._level, len(self._levels) - 1) - 1
            self._apply(f"{size_text(state.available_bytes)} of memory are free again", before)

    def _apply(self, reason: str, before: int) -> None:
        assert self._loader is not None
        after, workers = self._target(), max(1, self._loader.workers)
        self._loader.limit_prefetch(after)
        change = f"{before} -> {after} batches in flight"
        if before % workers == after % workers == 0:
            change = f"prefetch_factor {before // workers} -> {after // workers} ({change})"
        self._say(f"{reason}: {change}")


def is_short(state: MemoryState, low: float) -> bool:
    """Whether so little memory is left, or processes wait for it so long, that fewer batches should be in flight."""
    if state.available_bytes < low:
        return True
    return state.stalled is not None and state.stalled >= STALLED and state.available_bytes < STALLED_WITHIN * low


def in_flight_levels(workers: int, most: int) -> list[int]:
    """Batches in flight, level by level: halves the prefetch factor down to one, then the batches down to one."""
    workers = max(1, workers)
    levels, factor = [most], most // workers
    while factor > 1:
        factor //= 2
        levels.append(factor * workers)
    while levels[-1] > 1:
        levels.append(levels[-1] // 2)
    return levels
