"""The guard reduces the prefetch step by step as memory runs low, reports it, and is slow to raise it again."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from stoker.profile.memory import MemoryState
from stoker.train.loader_adjuster import GROW_AFTER_S, SETTLE_S, PrefetchGuard, in_flight_levels

GB = 1_000_000_000


@dataclass
class LimitedLoader:
    """A loader that only remembers its limit."""

    workers: int = 3
    most_in_flight: int = 12
    batch_bytes: int = 3072
    in_flight: int = 12

    def limit_prefetch(self, batches: int) -> None:
        self.in_flight = min(batches, self.most_in_flight)


@pytest.fixture
def loader() -> LimitedLoader:
    return LimitedLoader()


class Host:
    """A 62 GB host whose free memory and clock are set by the test."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.available = 40.0
        self.stalled: float | None = None
        self.reads = 0
        self.said: list[str] = []
        self.guard = PrefetchGuard(self.said.append, read=self.read, clock=lambda: self.now_s)

    def read(self) -> MemoryState:
        self.reads += 1
        return MemoryState(int(self.available * GB), 62 * GB, self.stalled)

    def pass_time(self, seconds: float, loader: LimitedLoader) -> None:
        for _ in range(int(seconds)):
            self.now_s += 1
            self.guard.check(loader)


def test_the_prefetch_shrinks_step_by_step_with_a_message(loader: LimitedLoader) -> None:
    host = Host()
    PrefetchGuard(host.said.append, read=lambda: MemoryState(20 * GB, 2000 * GB)).check(loader)
    assert host.said == [], "a large host with gigabytes left is not short"
    for _ in range(1000):
        host.now_s += 0.001
        host.guard.check(loader)
    assert host.reads in (1, 2), "once a second, not at every step"
    host.now_s = 1.0
    host.available = 5.0
    host.pass_time(1, loader)
    assert loader.in_flight == 6
    assert host.said == ["memory is down to 5 GB of 62 GB: prefetch_factor 4 -> 2 (12 -> 6 batches in flight)"]
    host.pass_time(SETTLE_S - 1, loader)
    assert loader.in_flight == 6, "what was in flight has not been taken yet"
    host.pass_time(1, loader)
    assert loader.in_flight == 3
    host.pass_time(60, loader)
    assert loader.in_flight == 1
    assert host.said[-1] == "memory is down to 5 GB of 62 GB: 3 -> 1 batches in flight"
    assert len(host.said) == 3


def test_with_almost_no_memory_left_it_drops_to_one_at_once(loader: LimitedLoader) -> None:
    host = Host()
    host.available = 1.0
    host.pass_time(1, loader)
    assert loader.in_flight == 1
    assert len(host.said) == 1


@pytest.mark.parametrize(("available", "in_flight"), [(10.0, 6), (40.0, 12)])
def test_pressure_counts_only_when_little_is_left(loader: LimitedLoader, available: float, in_flight: int) -> None:
    host = Host()
    host.available, host.stalled = available, 0.3
    host.pass_time(1, loader)
    assert loader.in_flight == in_flight


def test_it_grows_again_after_a_long_quiet_period_but_only_once(loader: LimitedLoader) -> None:
    host = Host()
    host.available = 5.0
    host.pass_time(1, loader)
    host.available = 40.0
    host.pass_time(GROW_AFTER_S, loader)
    assert loader.in_flight == 6
    host.pass_time(1, loader)
    assert loader.in_flight == 12
    assert host.said[-1] == "40 GB of memory are free again: prefetch_factor 2 -> 4 (6 -> 12 batches in flight)"
    host.available = 5.0
    host.pass_time(1, loader)
    host.available = 40.0
    host.pass_time(3 * GROW_AFTER_S, loader)
    assert loader.in_flight == 6
    assert len(host.said) == 3


def test_another_loader_gets_the_same_limit(loader: LimitedLoader) -> None:
    host = Host()
    host.available = 5.0
    host.pass_time(1, loader)
    other = LimitedLoader(workers=2, most_in_flight=4, in_flight=4)
    host.guard.check(other)
    assert other.in_flight == 2
    assert len(host.said) == 1


@pytest.mark.parametrize(
    ("workers", "prefetch", "levels"),
    [(12, 3, [36, 12, 6, 3, 1]), (2, 8, [16, 8, 4, 2, 1]), (1, 2, [2, 1]), (0, 2, [1])],
)
def test_steps_halve_the_prefetch_factor_first(workers: int, prefetch: int, levels: list[int]) -> None:
    assert in_flight_levels(workers, max(1, workers * prefetch)) == levels
