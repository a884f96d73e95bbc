"""The simulated loader compared with results worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.doctor.simulation import Setup, ThreadWork, simulate

LIGHT = (ThreadWork(0.0, 0.001),)
ROOMY = Setup(workers=1, prefetch=2, cores=8)


def rate(setup: Setup, batch: ThreadWork, step: ThreadWork = LIGHT[0], count: int = 240) -> float:
    return simulate(setup, [batch] * count, [step])


@pytest.mark.parametrize("round_robin", [True, False])
def test_one_worker_makes_a_batch_at_a_time_and_a_slow_consumer_sets_the_pace(round_robin: bool) -> None:
    setup = replace(ROOMY, round_robin=round_robin)
    assert rate(setup, ThreadWork(0.01, 0.03)) == pytest.approx(1 / 0.04, rel=0.01)
    found = simulate(setup, [ThreadWork(0.0, 0.02)] * 240, [ThreadWork(0.0, 0.05)])
    assert found == pytest.approx(20, rel=0.01)


@pytest.mark.parametrize("workers", [2, 8])
@pytest.mark.parametrize("round_robin", [True, False])
def test_workers_that_wait_scale_beyond_the_cores(workers: int, round_robin: bool) -> None:
    setup = Setup(workers=workers, round_robin=round_robin, cores=1)
    assert rate(setup, ThreadWork(0.0, 0.04)) == pytest.approx(workers / 0.04, rel=0.02)


@pytest.mark.parametrize(("workers", "cores"), [(1, 2), (4, 2), (6, 1.5)])
def test_workers_that_compute_scale_up_to_the_cores(workers: int, cores: float) -> None:
    setup = Setup(workers=workers, cores=cores)
    assert rate(setup, ThreadWork(0.04, 0.0)) == pytest.approx(min(workers, cores) / 0.04, rel=0.03)


def test_a_consumer_that_computes_takes_cores_from_the_workers() -> None:
    # Two cores: a batch needs 20 ms of CPU time and so does a step, so at most 50 of each per second.
    assert rate(Setup(workers=4, cores=2), ThreadWork(0.02, 0.0), ThreadWork(0.02, 0.0)) == pytest.approx(50, rel=0.05)
    assert rate(Setup(workers=4, cores=1), ThreadWork(0.02, 0.0), ThreadWork(0.02, 0.0)) == pytest.approx(25, rel=0.05)


def test_without_workers_loading_and_computing_alternate() -> None:
    found = simulate(Setup(workers=0), [ThreadWork(0.01, 0.02)] * 50, [ThreadWork(0.0, 0.01)])
    assert found == pytest.approx(25)


def test_one_slow_batch_holds_up_the_workers_behind_it_and_prefetching_hides_it() -> None:
    usual, slow = ThreadWork(0.0, 0.010), ThreadWork(0.0, 0.200)
    batches = [slow if number % 20 == 19 else usual for number in range(400)]
    short, long = (
        simulate(Setup(workers=2, prefetch=prefetch, cores=4), batches, [ThreadWork(0.0, 0.008)])
        for prefetch in (1, 16)
    )
    assert short < 0.9 * long


def test_the_next_free_thread_takes_the_next_batch_but_a_workers_batches_wait_for_it() -> None:
    # Round-robin gives worker 0 every slow batch; threads share them.
    batches = [ThreadWork(0.0, 0.03 if number % 2 == 0 else 0.01) for number in range(400)]
    turns = simulate(Setup(workers=2, prefetch=8, cores=4), batches, LIGHT)
    shared = simulate(Setup(workers=2, prefetch=8, cores=4, round_robin=False), batches, LIGHT)
    assert turns == pytest.approx(2 / 0.03, rel=0.03)
    assert shared == pytest.approx(2 / 0.02, rel=0.03)
