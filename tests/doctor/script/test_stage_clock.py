"""The clock of a batch: where a sample's sleep and its waiting for a core are counted, and batches that are not split
into stages."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stoker.attach import fetching, ring, stage_clock
from stoker.attach.fetching import FetchTotals
from stoker.attach.sampling import sampler
from stoker.attach.stage_clock import COLLATE, DECODE, FETCH, OTHER, STAGE_COUNT, StageClock, here

MS = 1_000_000


class MadeUpThread:
    """What the kernel says of a thread that does only what a test tells it."""

    def __init__(self) -> None:
        self.wall_ns = self.cpu_ns = self.queued_ns = 0

    def runs(self, ms: float) -> None:
        self.wall_ns += int(ms * MS)
        self.cpu_ns += int(ms * MS)

    def sleeps(self, ms: float) -> None:
        self.wall_ns += int(ms * MS)

    def waits_for_a_core(self, ms: float) -> None:
        self.wall_ns += int(ms * MS)
        self.queued_ns += int(ms * MS)


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> MadeUpThread:
    made_up = MadeUpThread()
    monkeypatch.setattr(stage_clock, "_wall_ns", lambda: made_up.wall_ns)
    monkeypatch.setattr(stage_clock, "_cpu_ns", lambda: made_up.cpu_ns)
    monkeypatch.setattr(stage_clock, "read_schedule", lambda: (made_up.cpu_ns, made_up.queued_ns))
    return made_up


@pytest.mark.parametrize("closer", [0, 8])
def test_sleep_counts_for_the_reading_and_not_for_the_decoding(thread: MadeUpThread, closer: int) -> None:
    clock = StageClock()
    clock._closer = closer
    clock.begin()
    clock.enter(DECODE)
    thread.runs(20)
    clock.enter(FETCH)
    thread.sleeps(30)
    clock.leave()
    thread.runs(20)
    thread.waits_for_a_core(10)
    clock.leave()
    clock.settle()
    clock.end()
    assert here.clock is None
    assert (clock.off_core[FETCH], clock.run_queue[FETCH]) == (30 * MS, 0)
    assert (clock.off_core[DECODE], clock.run_queue[DECODE]) == (10 * MS, 10 * MS)
    assert (clock.wall[FETCH], clock.wall[DECODE]) == (30 * MS, 50 * MS)
    assert (clock.took_ns, clock.ran_ns, clock.queue_ns) == (80 * MS, 40 * MS, 10 * MS)


@pytest.mark.real_time
def test_the_kernel_says_the_same_of_a_real_thread() -> None:
    """By the least of many: where others take the machine's time, a thread is off its core and nobody says why."""
    decoding_slept = []
    for _ in range(10):
        clock = StageClock()
        clock.begin()
        clock.enter(DECODE)
        until = time.thread_time() + 0.01
        while time.thread_time() < until:
            pass
        clock.leave()
        clock.enter(FETCH)
        time.sleep(0.01)
        clock.leave()
        clock.end()
        assert clock.off_core[FETCH] >= 9 * MS
        assert clock.took_ns - clock.ran_ns == pytest.approx(sum(clock.off_core), abs=1)
        assert all(off <= wall for off, wall in zip(clock.off_core, clock.wall, strict=True))
        decoding_slept.append(clock.off_core[DECODE] - clock.run_queue[DECODE])
    assert min(decoding_slept) < 3 * MS


def test_after_a_sample_that_slept_the_kernel_is_asked_at_every_boundary_for_a_while(thread: MadeUpThread) -> None:
    clock = StageClock()
    clock._closer = 0
    clock.begin()
    looked_closer = []
    for ran_ms, slept_ms in [(1, 0), (1.98, 0.02), (0, 5), *[(1, 0)] * stage_clock.CLOSER_LOOKS]:
        thread.runs(ran_ms)
        thread.sleeps(slept_ms)
        clock.settle()
        looked_closer.append(clock._closer > 0)
    clock.end()
    # One per cent off the core is what any thread loses.
    assert looked_closer == [False, False, True, *[True] * (stage_clock.CLOSER_LOOKS - 1), False]
    assert clock.off_core[OTHER] == 5 * MS


def test_a_batch_that_is_not_split_has_its_time_as_a_whole(thread: MadeUpThread) -> None:
    clock = StageClock()
    clock.begin_whole()
    states = [here.preparing]
    thread.runs(10)
    thread.sleeps(20)
    thread.waits_for_a_core(5)
    clock.end_whole()
    states.append(here.preparing)
    assert states == [True, False]
    assert (clock.took_ns, clock.ran_ns, clock.queue_ns) == (35 * MS, 10 * MS, 5 * MS)
    assert sum(clock.wall) == 0


def made(totals: FetchTotals, number: int, thread: MadeUpThread) -> bool:
    """Prepares a batch that collates for half a millisecond; every fourth one reads for 2 ms first."""
    in_stages = totals.choose()
    totals.batch_begins()
    if number % 4 == 0:
        totals.clock.enter(FETCH) if in_stages else None
        thread.sleeps(2)
        totals.clock.leave() if in_stages else None
    totals.clock.enter(COLLATE) if in_stages else None
    thread.runs(0.5)
    totals.clock.leave() if in_stages else None
    totals.batch_ends()
    totals.batch_made(1, 2, [], None)
    return in_stages


def test_after_the_first_batches_a_quarter_stands_for_all(
    thread: MadeUpThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "begin", lambda *_: None)
    totals = FetchTotals(str(tmp_path / "fetch.ring"), 0, 1)
    chosen = [made(totals, number, thread) for number in range(600)]
    totals._write_totals()
    assert all(chosen[: fetching.STAGES_BELOW])
    later = chosen[fetching.STAGES_BELOW :]
    assert sum(later) == pytest.approx(len(later) / 4, rel=0.1)
    # The batches that read are among them as often as the others.
    reading = [was for number, was in enumerate(chosen) if number % 4 == 0 and number >= fetching.STAGES_BELOW]
    assert sum(reading) == pytest.approx(len(reading) / 4, rel=0.15)
    batches, samples, *_ = written = ring.TOTALS.unpack_from(totals._ring.memory, ring.TOTALS_AT)
    assert (batches, samples) == (600, 1200)
    wall, calls = written[7 : 7 + STAGE_COUNT], written[7 + 3 * STAGE_COUNT :]
    assert calls[COLLATE] == pytest.approx(600, rel=0.01)
    assert wall[COLLATE] == pytest.approx(600 * 0.5 * MS, rel=0.01)
    assert wall[FETCH] == pytest.approx(150 * 2 * MS, rel=0.1)


def test_long_batches_are_always_split(thread: MadeUpThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "ALWAYS_FROM_NS", 100_000)
    monkeypatch.setattr(sampler, "begin", lambda *_: None)
    totals = FetchTotals(str(tmp_path / "fetch.ring"), 0, 1)
    assert all(made(totals, number, thread) for number in range(100))
