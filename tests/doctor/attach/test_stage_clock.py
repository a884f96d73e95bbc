"""The clock of a batch: where a sample's sleep and its waiting for a core are counted, and batches that are not split
into stages."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from stoker.doctor.attach.inside import fetching, ring, stage_clock
from stoker.doctor.attach.inside.fetching import FetchTotals
from stoker.doctor.attach.inside.sampling import sampler
from stoker.doctor.attach.inside.stage_clock import COLLATE, DECODE, FETCH, OTHER, STAGE_COUNT, StageClock, here

MS = 1_000_000


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@pytest.mark.parametrize("closer", [0, 8])
def test_sleep_counts_for_the_reading_and_not_for_the_decoding(closer: int) -> None:
    clock = StageClock()
    clock._closer = closer
    clock.begin()
    clock.enter(DECODE)
    spin(0.02)
    clock.enter(FETCH)
    time.sleep(0.03)
    clock.leave()
    spin(0.02)
    clock.leave()
    clock.settle()
    clock.end()
    assert here.clock is None
    assert clock.off_core[FETCH] - clock.run_queue[FETCH] == pytest.approx(30 * MS, rel=0.2)
    # On busy cores it may have waited for one, but it has not slept.
    assert clock.off_core[DECODE] - clock.run_queue[DECODE] < 4 * MS
    assert clock.took_ns - clock.ran_ns == pytest.approx(sum(clock.off_core), abs=1)
    assert all(off <= wall for off, wall in zip(clock.off_core, clock.wall, strict=True))


def test_after_a_sample_that_slept_the_kernel_is_asked_at_every_boundary_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = {"wall": 0, "cpu": 0}
    monkeypatch.setattr(stage_clock, "_wall_ns", lambda: now["wall"])
    monkeypatch.setattr(stage_clock, "_cpu_ns", lambda: now["cpu"])
    clock = StageClock()
    clock._closer = 0
    clock.begin()
    looked_closer = []
    for wall_ms, cpu_ms in [(1, 1), (2, 1.98), (5, 0), *[(1, 1)] * stage_clock.CLOSER_LOOKS]:
        now["wall"] += int(wall_ms * MS)
        now["cpu"] += int(cpu_ms * MS)
        clock.settle()
        looked_closer.append(clock._closer > 0)
    clock.end()
    # One per cent off the core is what any thread loses.
    assert looked_closer == [False, False, True, *[True] * (stage_clock.CLOSER_LOOKS - 1), False]
    assert clock.off_core[OTHER] == 5 * MS


def test_a_batch_that_is_not_split_has_its_time_as_a_whole() -> None:
    clock = StageClock()
    clock.begin_whole()
    states = [here.preparing]
    spin(0.01)
    time.sleep(0.02)
    clock.end_whole()
    states.append(here.preparing)
    assert states == [True, False]
    assert clock.ran_ns == pytest.approx(10 * MS, rel=0.2)
    assert clock.took_ns - clock.ran_ns - clock.queue_ns == pytest.approx(20 * MS, rel=0.2)
    assert sum(clock.wall) == 0


def made(totals: FetchTotals, number: int) -> bool:
    """Prepares a batch that collates for half a millisecond; every fourth one reads for 2 ms first."""
    in_stages = totals.choose()
    totals.batch_begins()
    if number % 4 == 0:
        totals.clock.enter(FETCH) if in_stages else None
        time.sleep(0.002)
        totals.clock.leave() if in_stages else None
    totals.clock.enter(COLLATE) if in_stages else None
    spin(0.0005)
    totals.clock.leave() if in_stages else None
    totals.batch_ends()
    totals.batch_made(1, 2, [], None)
    return in_stages


def test_after_the_first_batches_a_quarter_stands_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "begin", lambda *_: None)
    totals = FetchTotals(str(tmp_path / "fetch.ring"), 0, 1)
    slept = 0
    chosen = []
    for number in range(600):
        chosen.append(made(totals, number))
        slept += 2 * MS if number % 4 == 0 else 0
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
    assert wall[FETCH] == pytest.approx(slept, rel=0.3)


def test_long_batches_are_always_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "ALWAYS_FROM_NS", 100_000)
    monkeypatch.setattr(sampler, "begin", lambda *_: None)
    totals = FetchTotals(str(tmp_path / "fetch.ring"), 0, 1)
    assert all(made(totals, number) for number in range(100))


def test_another_thread_is_not_timed() -> None:
    clock = StageClock()
    clock.begin()
    seen = []
    thread = threading.Thread(target=lambda: seen.append((here.clock, here.preparing)))
    thread.start()
    thread.join()
    clock.end()
    assert seen == [(None, False)]
