"""The adjuster in worlds whose rates are known: it finds what helps, undoes what does not, and then leaves it alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from stoker.io.prefetch import HeldBack
from stoker.loader.batch import LoaderSetup
from stoker.profile.batch_costs import BatchCost, StageCost
from stoker.profile.memory import MemoryState
from stoker.profile.step_clock import StepClock
from stoker.train import loader_adjuster
from stoker.train.loader_adjuster import IDLE_LOOKS, LOOK_STEPS, LOOKS, LoaderAdjuster

GB = 1_000_000_000
BATCH = 64
SETUP = LoaderSetup(workers=2, prefetch=2, lookahead_bytes=256_000_000, requests=64)
CYCLE = 2 * LOOKS * LOOK_STEPS + 40
"""Steps that are enough to see something, try it and judge it."""


@pytest.fixture(autouse=True)
def _nobody_waits_for_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of these worlds pass in microseconds: what this machine's scheduler says does not belong to them."""
    monkeypatch.setattr(loader_adjuster, "run_queue_s", lambda: None)


@dataclass
class World:
    """A loader whose throughput is a function of its set-up, a consumer of a fixed pace, and their clock."""

    makes: Callable[[LoaderSetup], float]
    """Samples per second."""
    takes: float = 1000.0
    cpu_share: float = 1.0
    fetch_share: float = 0.0
    held_back: HeldBack | None = None
    available: float = 40.0
    setup: LoaderSetup = SETUP
    batch_bytes: int = 10_000_000
    limit: int | None = None
    clock: StepClock = field(default_factory=StepClock)
    events: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.adjuster = LoaderAdjuster(cores=4, look_s=0.0, read=self.memory)

    @property
    def most_in_flight(self) -> int:
        return self.setup.workers * self.setup.prefetch

    @property
    def in_flight(self) -> int:
        return min(self.limit or self.most_in_flight, self.most_in_flight)

    def memory(self) -> MemoryState:
        return MemoryState(int(self.available * GB), 62 * GB)

    def ready(self) -> int:
        return self.in_flight if self.makes(self.setup) > self.takes else 0

    def held_back_by(self) -> HeldBack | None:
        return self.held_back

    def adjust(self, setup: LoaderSetup) -> None:
        self.setup = setup

    def train(self, steps: int, *, epoch: bool = False) -> World:
        """So many steps, as the clock would have counted them."""
        if epoch:
            self.clock.epoch_begins()
        for _ in range(steps):
            made = self.makes(self.setup)
            step_s = BATCH / min(made, self.takes)
            made_s = step_s * self.setup.workers * min(1.0, self.takes / made)
            clock = self.clock
            clock.first_wait_s = clock.first_wait_s or 0.0
            clock.steps, clock.samples, clock.total_s = clock.steps + 1, clock.samples + BATCH, clock.total_s + step_s
            clock.wait_s += max(0.0, step_s - BATCH / self.takes)
            stages = {
                "fetch": StageCost(made_s * self.fetch_share, 0.0, 0.0, 1),
                "decode": StageCost(made_s * (1 - self.fetch_share), made_s * self.cpu_share, 0.0, 1),
            }
            clock.cost.add(BatchCost(stages, wall_s=made_s, samples=BATCH, bytes_read=BATCH * 100_000))
            event = self.adjuster.after_step(self, clock)
            if event is not None:
                self.events.append(event)
        return self

    def decisions(self) -> list[tuple[str, str, int, int]]:
        return [(one["decision"], one["knob"], one["from"], one["to"]) for one in self.events]


def test_workers_are_added_until_the_loop_no_longer_waits() -> None:
    world = World(lambda setup: 300.0 * setup.workers).train(6 * CYCLE)
    assert world.decisions() == [
        ("tried", "workers", 2, 3), ("kept", "workers", 2, 3), ("tried", "workers", 3, 4), ("kept", "workers", 3, 4),
    ]  # fmt: skip
    assert world.adjuster.is_settled
    assert world.events[1]["rate_before"] == pytest.approx(600, abs=0.01)
    assert world.events[1]["rate_after"] == pytest.approx(900, abs=0.01)


def test_what_does_not_help_is_undone_and_not_tried_again_soon() -> None:
    world = World(lambda _setup: 500.0).train(10 * CYCLE)
    assert world.decisions() == [("tried", "workers", 2, 3), ("undone", "workers", 2, 3)]
    assert world.setup.workers == 2
    assert world.adjuster.is_settled
    worse = World(lambda setup: 500.0 if setup.workers == 2 else 300.0).train(10 * CYCLE)
    assert worse.setup.workers == 2


def test_what_did_not_help_is_tried_again_later_and_then_ever_later() -> None:
    world = World(lambda _setup: 500.0)
    world.adjuster = LoaderAdjuster(cores=4, look_s=0.0, read=world.memory, hold_s=0.0)
    world.train(4 * CYCLE)
    assert world.decisions().count(("undone", "workers", 2, 3)) > 1
    slower = World(lambda _setup: 500.0)
    slower.adjuster = LoaderAdjuster(cores=4, look_s=0.0, read=slower.memory, hold_s=1e-9)
    slower.train(4 * CYCLE)
    assert slower.adjuster._held["workers", True][1] > 1


def test_a_reader_that_is_held_back_gets_more_requests_while_they_help() -> None:
    world = World(lambda setup: 4.0 * min(setup.requests, 200), cpu_share=0.1, fetch_share=0.9, held_back="requests")
    world.train(14 * CYCLE)
    assert world.setup.requests == 256
    kept = [one for one in world.decisions() if one[0] == "kept"]
    assert kept == [("kept", "requests", 64, 128), ("kept", "requests", 128, 256)]


def test_a_consumer_that_never_waits_keeps_as_few_workers_as_it_needs() -> None:
    world = World(lambda setup: 500.0 * setup.workers, takes=450.0, setup=replace(SETUP, workers=4))
    world.train((IDLE_LOOKS - 1) * LOOK_STEPS)
    assert world.events == [], "no hurry"
    world.train(10 * CYCLE)
    assert world.setup.workers == 2
    assert {one[0] for one in world.decisions()} == {"tried", "kept"}


def test_workers_that_are_needed_again_come_back_and_then_stay_for_a_while() -> None:
    world = World(lambda setup: 300.0 * setup.workers, takes=100.0).train(4 * CYCLE)
    assert world.setup.workers == 1
    world.takes = 400.0
    world.train(4 * CYCLE)
    assert world.setup.workers == 2
    world.takes = 100.0
    world.train(10 * CYCLE)
    assert world.setup.workers == 2, "a load that changes does not make it go back and forth"
    assert [one[0] for one in world.decisions() if one[1] == "workers"] == ["tried", "kept"] * 2


def test_memory_that_runs_low_ends_a_trial_and_prevents_the_next() -> None:
    world = World(lambda setup: 300.0 * setup.workers)
    while not world.events:
        world.train(1)
    world.limit = 2
    world.train(1)
    assert world.decisions()[-1] == ("undone", "workers", 2, 3)
    assert world.events[-1]["why"] == "memory ran low"
    world.train(3 * CYCLE)
    assert (len(world.events), world.setup.workers) == (2, 2)
    short = World(lambda setup: 300.0 * setup.workers, available=15.0, batch_bytes=GB).train(3 * CYCLE)
    assert short.events == []


def test_an_epoch_that_ends_and_a_store_that_is_away_do_not_count() -> None:
    world = World(lambda setup: 300.0 * setup.workers)
    for _ in range(40):
        world.train(LOOK_STEPS + 3, epoch=True)
    assert world.setup.workers == 4
    away = World(lambda _setup: 990.0).train(LOOKS * LOOK_STEPS)
    away.clock.total_s += 300.0
    away.clock.wait_s += 300.0
    away.train(2 * CYCLE)
    assert away.events == []


def test_another_loader_of_the_run_gets_what_was_kept() -> None:
    world = World(lambda setup: 300.0 * setup.workers).train(6 * CYCLE)
    other = World(lambda setup: 300.0 * setup.workers)
    other.adjuster = world.adjuster
    other.train(1)
    assert other.setup.workers == 4
