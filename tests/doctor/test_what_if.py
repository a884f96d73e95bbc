"""Predictions from observations: when they are made, when not, how certain they are; and the simulation behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.doctor.diagnosis import Prediction
from stoker.doctor.simulation import Setup, ThreadWork, simulate
from stoker.doctor.what_if import model_of, speed_up, what_if, with_loader
from stoker.profile.observed import (
    BatchTime,
    HostFacts,
    LoaderShape,
    LoopRates,
    LoopTimes,
    Observed,
    StageTime,
    StorageFacts,
)
from tests.doctor.checks.observations import changed


def observed(*, cpu: float, blocked: float, step: float = 0.004, workers: int = 2, cpus: int = 8) -> Observed:
    """A loop fed by workers, with the given times per batch of 8."""
    count = 200
    every = max(step, (cpu + blocked) / workers)
    return Observed(
        source="script",
        steps=count,
        samples=8 * count,
        times=LoopTimes(
            elapsed_s=every * count,
            wait_s=(every - step) * count,
            consumer_cpu_s=0.0,
            waits_s=(every - step,) * count,
            steps_s=(step,) * count,
        ),
        loader=LoaderShape(workers=workers, prefetch=2, engine="process"),
        batches=(BatchTime(cpu + blocked, cpu, 0.0, blocked, 8, fetch_s=blocked),) * count,
        host=HostFacts(cpus=cpus),
    )


def named(seen: Observed, name: str) -> Prediction:
    return next(prediction for prediction in what_if(seen) if prediction.id == name)


def test_more_workers_help_if_workers_wait() -> None:
    prediction = named(observed(cpu=0.0, blocked=0.04), "workers")
    assert prediction.label.startswith("num_workers 2 -> ")
    assert prediction.speedup.expected == pytest.approx(5.0, rel=0.1)  # from 20 ms per batch to the 4 ms of the step
    assert prediction.speedup.low < prediction.speedup.expected < prediction.speedup.high
    assert prediction.images_per_second.expected == pytest.approx(400 * prediction.speedup.expected, rel=0.01)


def test_more_workers_do_not_help_if_the_cores_are_full() -> None:
    assert "workers" not in {p.id for p in what_if(observed(cpu=0.04, blocked=0.0, cpus=2))}


def test_fewer_workers_help_if_there_are_too_many() -> None:
    seen = observed(cpu=0.04, blocked=0.0, workers=2, cpus=1)
    seen = replace(seen, loader=LoaderShape(workers=8, prefetch=2, engine="process"))
    prediction = named(seen, "workers")
    assert dict(prediction.settings)["num_workers"] == 1
    assert prediction.speedup.expected == pytest.approx(1.0, abs=0.05)


def test_a_faster_accelerator_helps_only_a_loop_that_does_not_wait() -> None:
    assert named(observed(cpu=0.0, blocked=0.1), "accelerator").speedup.expected == pytest.approx(1.0, abs=0.03)
    assert named(observed(cpu=0.0, blocked=0.02, step=0.05), "accelerator").speedup.expected > 1.8


def test_the_cpu_time_of_a_store_client_is_not_the_loops_and_is_gone_after_staging() -> None:
    # Two workers wait 200 ms for a batch; threads in the same process use 60 ms of CPU time to fetch it.
    storage = StorageFacts(remote=True, bytes_per_sample=100_000, local_bytes_per_second=1e9)
    shape = LoaderShape(workers=2, prefetch=2, engine="thread")
    seen = changed(observed(cpu=0.04, blocked=0.2, cpus=2), storage=storage, consumer_cpu_s=200 * 0.068, loader=shape)
    model = model_of(seen)
    assert model.setup.consumer_threads == pytest.approx(2.0)
    assert (model.batches[0].cpu_s, model.batches[0].blocked_s) == pytest.approx((0.1, 0.14))
    assert (model.fetching[0].cpu_s, model.fetching[0].blocked_s) == pytest.approx((0.06, 0.14))
    # Worker processes fetch for themselves, so the training process's CPU time is its own.
    processes = model_of(replace(seen, loader=replace(shape, engine="process")))
    assert processes.batches[0].cpu_s == pytest.approx(0.04)
    # The 120 ms between two batches shrink to 24: a worker's 40 ms of computing and the loop's 8, on two cores.
    assert named(seen, "staging").speedup.expected == pytest.approx(0.120 / 0.024, rel=0.15)


def test_a_paced_consumer_uses_no_cpu() -> None:
    shape = LoaderShape(workers=2, prefetch=2, engine="thread")
    paced = replace(observed(cpu=0.04, blocked=0.2), rates=LoopRates(pace=2000.0))
    seen = changed(paced, consumer_cpu_s=200 * 0.003, loader=shape)
    model = model_of(seen)
    assert model.steps[0].cpu_s == 0.0
    assert model.steps[0].blocked_s == pytest.approx(0.004)


def test_the_gain_from_staging_follows_the_local_read_rate() -> None:
    storage = StorageFacts(remote=True, bytes_per_sample=100_000, warm_bytes_per_second=100e6)
    seen = replace(observed(cpu=0.002, blocked=0.2), storage=storage)
    # 8 samples of 100 kB take 8 ms instead of 200; with 2 ms of computing, two workers make a batch every 5 ms.
    assert named(seen, "staging").speedup.expected == pytest.approx(0.202 / 0.010, rel=0.1)
    assert "staging" not in {p.id for p in what_if(replace(seen, storage=replace(storage, remote=False)))}
    unknown = replace(storage, warm_bytes_per_second=None)
    assert "staging" not in {p.id for p in what_if(replace(seen, storage=unknown))}
    # An object store has no local page cache, so this host's own disk was measured instead.
    nearby = replace(unknown, local_bytes_per_second=storage.warm_bytes_per_second)
    assert named(replace(seen, storage=nearby), "staging") == named(seen, "staging")


def test_packing_is_predicted_for_our_own_decoding_only() -> None:
    stages = {"decode": StageTime(wall_s=8.0, cpu_s=8.0), "fetch": StageTime(wall_s=0.0)}
    seen = replace(
        observed(cpu=0.04, blocked=0.0, cpus=2), source="run", stages=stages, storage=StorageFacts(packed=False)
    )
    assert named(seen, "packing").speedup.expected == pytest.approx(1.5, rel=0.05)
    for other in (replace(seen, source="script"), replace(seen, storage=StorageFacts(packed=True))):
        assert "packing" not in {p.id for p in what_if(other)}


def test_saturated_remote_storage_limits_the_gain_from_workers() -> None:
    storage = StorageFacts(remote=True, bytes_per_sample=100_000, parallel_bytes_per_second=400 * 100_000 * 1.5)
    seen = replace(observed(cpu=0.0, blocked=0.04), storage=storage)
    assert named(seen, "workers").speedup.expected == pytest.approx(1.5, rel=0.05)


def test_workers_that_take_turns_are_predicted_no_gain() -> None:
    seen = observed(cpu=0.01, blocked=0.03)
    assert {p.id for p in what_if(seen, takes_turns=True)}.isdisjoint({"workers", "prefetch"})


def test_without_measurements_nothing_is_predicted() -> None:
    seen = observed(cpu=0.01, blocked=0.01)
    bare = tuple(replace(batch, cpu_s=None, runq_s=None, blocked_s=None) for batch in seen.batches)
    for lost in ({"batches": ()}, {"steps_s": ()}, {"loader": None}, {"batches": bare}):
        assert what_if(changed(seen, **lost)) == ()


def test_the_interval_is_wider_where_batches_vary() -> None:
    even = model_of(observed(cpu=0.0, blocked=0.04))
    seen = observed(cpu=0.0, blocked=0.04)
    varied = tuple(
        replace(batch, blocked_s=0.4 if number % 40 == 7 else 0.02) for number, batch in enumerate(seen.batches)
    )
    uneven = model_of(replace(seen, batches=varied))
    narrow, wide = (speed_up(model, with_loader(4)) for model in (even, uneven))
    assert wide.high / wide.low > narrow.high / narrow.low


# The simulated loader, compared with results worked out by hand.

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
