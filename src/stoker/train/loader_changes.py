"""Which change of the loader to try next, and whether to keep it: pure functions of what was measured.

A change is tried, never just made: it stays only if the samples per second justify it (`is_kept`), because blocked time
does not tell whether more workers would help.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from stoker.core.units import count, number_text, rate_text, size_text
from stoker.io.prefetch import HeldBack
from stoker.loader.batch import LoaderSetup

Knob = Literal["workers", "prefetch", "lookahead_bytes", "requests"]

# Between the two nothing is changed: a loop that waits 3 % of its time is not worth a trial in either direction.
WAITS_FROM = 0.05
WAITS_NEVER = 0.01
# Workers that make batches for less of the time are idle because as many batches as allowed are in flight.
BUSY_FROM = 0.85
# A worker that is blocked for longer than it computes leaves its core to others.
BLOCKED_FROM = 0.5
# The training thread is runnable but has no core for this share of its time: the workers have them.
CROWDED_FROM = 0.05
# The work of fewer workers must fit into this share of their time: batches differ in what they cost.
FULL_LOAD = 0.8
# The last worker on all cores gets at least this much of one, beside the training thread.
LEAST_OF_A_CORE = 0.5
MOST_WORKERS = 32
MOST_PREFETCH = 8
MOST_TIMES_REQUESTS = 4
# A gain below this is not worth the memory, a loss below this is not worth a worker. Judgement, not measurement.
LEAST_GAIN = 0.03
MOST_LOSS = 0.02
# Rates of single looks that differ by more belong to a load that is just changing.
STEADY = 0.25


@dataclass(frozen=True)
class Look:
    """Measurements over some steps. Shares are between 0 and 1; None means that it was not measured."""

    seconds: float
    samples: int
    wait_share: float
    """Share of the seconds in which the loop waited for data."""
    ready_share: float
    """Share of the batches in flight that were made before the loop asked for them."""
    busy_share: float
    """Share of the workers' time in which they made batches."""
    cpu_share: float | None
    """Share of the time of making a batch that a worker ran, or waited for a core."""
    fetch_share: float
    """Share of the time of making a batch that a worker waited for its bytes, or read them."""
    crowded_share: float | None
    """Share of the seconds in which the training thread could have run, but had no core."""
    loop_share: float
    """Share of the seconds in which the training thread ran."""
    held_back_by: HeldBack | None = None
    """What kept the reader from asking for more, at the end."""

    @property
    def rate(self) -> float:
        return self.samples / self.seconds


@dataclass(frozen=True)
class MemoryRoom:
    """What a change may use."""

    cores: float
    """The cores of this rank."""
    spare_bytes: int | None
    """Memory that may be taken; None if unknown: then no change is made that needs more."""
    batch_bytes: int
    worker_bytes: int
    """What a worker takes besides the batches in flight: its scratch space and the files of its batch."""
    first_requests: int
    """The reader's initial setting."""
    is_limited: bool = False
    """Memory ran low, and the batches in flight are limited for that reason."""
    fixed: frozenset[Knob] = frozenset()
    """What the user has chosen."""


@dataclass(frozen=True)
class LoaderChange:
    """One change of one number."""

    knob: Knob
    before: int
    after: int
    why: str

    @property
    def is_more(self) -> bool:
        return self.after > self.before

    def made(self, setup: LoaderSetup) -> LoaderSetup:
        values: dict[str, int] = {self.knob: self.after}
        return replace(setup, **values)


def mean_of(looks: Sequence[Look]) -> Look:
    """Several looks as one, each weighted by its seconds."""
    seconds = sum(look.seconds for look in looks)

    def mean(name: str) -> Any:
        values = [(getattr(look, name), look.seconds) for look in looks]
        return None if any(value is None for value, _ in values) else sum(v * s for v, s in values) / seconds

    names = ("wait_share", "ready_share", "busy_share", "cpu_share", "fetch_share", "crowded_share", "loop_share")
    held = [look.held_back_by for look in looks]
    # True most of the time, not by chance in one of them.
    common = max(set(held), key=held.count)
    return Look(
        seconds=seconds, samples=sum(look.samples for look in looks), **{name: mean(name) for name in names},
        held_back_by=common,
    )  # fmt: skip


def possible_changes(
    seen: Look, setup: LoaderSetup, room: MemoryRoom, *, idle_for_long: bool
) -> Iterator[LoaderChange]:
    """Changes that may help, the most likely first; none that needs more memory than there is."""
    if seen.wait_share >= WAITS_FROM:
        for change in _more(seen, setup, room) if not room.is_limited else ():
            needed = needed_bytes(change, setup, room)
            fits = needed <= 0 or (room.spare_bytes is not None and needed <= room.spare_bytes)
            if fits and change.knob not in room.fixed:
                yield change
    elif setup.workers > 1 and "workers" not in room.fixed:
        fewer = setup.workers - 1
        if seen.crowded_share is not None and seen.crowded_share >= CROWDED_FROM:
            why = f"the training thread waited for a core for {seen.crowded_share:.0%} of the time"
            yield LoaderChange("workers", setup.workers, fewer, why)
        elif idle_for_long and seen.busy_share * setup.workers <= FULL_LOAD * fewer:
            why = f"the loop never waited, and the workers were busy for {seen.busy_share:.0%} of the time"
            yield LoaderChange("workers", setup.workers, fewer, why)


def is_idle(seen: Look) -> bool:
    return seen.wait_share <= WAITS_NEVER and seen.ready_share >= 0.5


def is_steady(looks: Sequence[Look]) -> bool:
    """Whether these looks saw the same load, so that a change can be compared with them."""
    rates = [look.rate for look in looks]
    return statistics.stdev(rates) <= STEADY * statistics.mean(rates)


def is_kept(change: LoaderChange, before: Sequence[Look], after: Sequence[Look]) -> bool:
    """Whether the rate justifies a change: more of something has to be faster, less must not be slower."""
    was, now = mean_of(before).rate, mean_of(after).rate
    noise = 2 * math.hypot(_error(before), _error(after))
    if change.is_more:
        return now / was - 1 > max(LEAST_GAIN, noise)
    return now / was - 1 >= -MOST_LOSS and mean_of(after).wait_share < WAITS_FROM


def needed_bytes(change: LoaderChange, setup: LoaderSetup, room: MemoryRoom) -> int:
    more = change.after - change.before
    if change.knob == "workers":
        return more * (setup.prefetch * room.batch_bytes + room.worker_bytes)
    if change.knob == "prefetch":
        return more * setup.workers * room.batch_bytes
    return more if change.knob == "lookahead_bytes" else 0


def outcome_text(details: dict[str, Any], unit: str) -> str | None:
    """The line about the end of a trial; None for its beginning, which only the files record."""
    if details["decision"] == "tried":
        return None
    knob, before, after = details["knob"], details["from"], details["to"]
    if details.get("rate_after") is None:
        return f"loader: back from {_shown(knob, after)} to {_amount(knob, before)}: {details['why']}"
    rates = f"{number_text(details['rate_before'])} -> {rate_text(details['rate_after'], unit)}"
    if details["decision"] == "kept":
        return f"loader: {_amount(knob, after)} instead of {_shown(knob, before)}, {rates}: {details['why']}"
    noise = ", which is within the noise" if details["rate_after"] > details["rate_before"] else ""
    return f"loader: back from {_shown(knob, after)} to {_amount(knob, before)}, {rates}{noise}"


def _more(seen: Look, setup: LoaderSetup, room: MemoryRoom) -> Iterator[LoaderChange]:
    waited = f"the loop waited {seen.wait_share:.0%} of the time"
    blocked_share = None if seen.cpu_share is None else 1 - seen.cpu_share
    blocks = blocked_share is not None and blocked_share >= BLOCKED_FROM
    if blocks and seen.fetch_share >= BLOCKED_FROM and seen.held_back_by is not None:
        knob = seen.held_back_by
        before = getattr(setup, knob)
        after = 2 * before
        if knob == "requests":
            after = min(after, MOST_TIMES_REQUESTS * room.first_requests)
        if after > before:
            yield LoaderChange(knob, before, after, f"{waited}, and the workers for the storage")
    if seen.busy_share < BUSY_FROM and setup.prefetch < MOST_PREFETCH:
        why = f"{waited}, although the workers were idle for {1 - seen.busy_share:.0%} of it"
        yield LoaderChange("prefetch", setup.prefetch, min(MOST_PREFETCH, 2 * setup.prefetch), why)
    if seen.busy_share < BUSY_FROM:
        return
    after = min(MOST_WORKERS, 2 * setup.workers if blocks else setup.workers + 1)
    # Where the kernel does not say, a worker is taken to compute all the time.
    cpu_share = 1.0 if seen.cpu_share is None else seen.cpu_share
    cores = room.cores - seen.loop_share + LEAST_OF_A_CORE
    while after > setup.workers and after * cpu_share * seen.busy_share > cores:
        after -= 1
    if after > setup.workers:
        kind = "blocked" if blocks else "busy"
        yield LoaderChange("workers", setup.workers, after, f"{waited}, and the workers were {kind}")


def _error(looks: Sequence[Look]) -> float:
    if len(looks) < 2:
        return 0.0
    rates = [look.rate for look in looks]
    return statistics.stdev(rates) / math.sqrt(len(rates)) / max(1e-9, statistics.mean(rates))


def _shown(knob: Knob, value: int) -> str:
    return size_text(value) if knob == "lookahead_bytes" else str(value)


def _amount(knob: Knob, value: int) -> str:
    if knob == "lookahead_bytes":
        return f"{size_text(value)} of look-ahead"
    if knob == "prefetch":
        return f"{count(value, 'batch', 'batches')} in flight per worker"
    return count(value, "worker") if knob == "workers" else f"{count(value, 'request')} at once"
