"""The host's budgets: every part is counted, and the published tables are reproduced."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.loader.loader_memory import STATED
from stoker.plan.host_memory import (
    CUDA_HOST_BYTES,
    HostShape,
    LoaderSettings,
    open_files_budget,
    ram_budget,
    shm_budget,
    torch_loader_bytes,
    torch_loader_verdict,
)

GB = 1_000_000_000
SAMPLE_BYTES = 3 * 224 * 224
PROCESSES = LoaderSettings("process", workers=12, prefetch=3, batch=256, sample_bytes=SAMPLE_BYTES, whole_files=True)
THREADS = replace(PROCESSES, engine="thread")
BATCH_BYTES = 256 * SAMPLE_BYTES


@pytest.mark.parametrize(
    ("workers", "prefetch", "verdict"),
    [(12, 3, "safe"), (16, 4, "risky"), (32, 8, "refused")],
)
def test_the_table_for_62_gb_is_reproduced(workers: int, prefetch: int, verdict: str) -> None:
    assert torch_loader_bytes(1, 1, 256, SAMPLE_BYTES) == pytest.approx(230_000_000)
    assert torch_loader_verdict(workers, prefetch, 256, SAMPLE_BYTES, 62 * GB) == verdict


def test_our_batches_take_a_quarter_of_the_float_ones() -> None:
    budget = ram_budget(HostShape(PROCESSES), limit_bytes=62 * GB)
    assert budget.parts["batches in flight"] == (12 * 3 + 2) * BATCH_BYTES
    assert budget.parts["batches in flight"] < budget.torch_loader_bytes / 4
    assert budget.fits
    assert not budget.measured


def test_what_is_per_accelerator_is_counted_for_each_and_what_is_per_host_once() -> None:
    one = HostShape(
        PROCESSES, on_gpu=True, samples=1_000_000, lookahead_bytes=256_000_000, model_bytes=100, state_bytes=300
    )
    budgets = [ram_budget(replace(one, processes=count)) for count in (1, 8)]
    single, eight = (budget.parts for budget in budgets)
    loader = [eight[name] for name in ("fork server", "workers", "batches in flight", "fetched ahead")]
    assert (budgets[1].total_bytes, budgets[1].loader_bytes) == (sum(eight.values()), sum(loader))
    for name in ("index", "checkpoint copy", "system"):
        assert eight[name] == single[name]
    for name in ("training process", "fork server", "workers", "batches in flight", "fetched ahead", "CUDA"):
        assert eight[name] == 8 * single[name]
    assert single["index"] == 42_000_000
    assert single["CUDA"] == CUDA_HOST_BYTES


def test_without_a_gpu_there_is_no_cuda_but_the_step_and_threads_need_no_fork_server_and_no_shared_memory() -> None:
    shape = HostShape(THREADS, step_bytes=5 * GB, state_bytes=GB)
    parts = ram_budget(shape).parts
    assert {"CUDA", "fork server"}.isdisjoint(parts)
    assert (parts["training step"], parts["checkpoint copy"]) == (5 * GB, GB)
    assert shm_budget(shape, 64_000_000).fits
    assert shm_budget(shape, 64_000_000).needed == 0


def test_a_validation_loader_takes_as_much_again_where_workers_persist() -> None:
    alone = HostShape(PROCESSES)
    beside = replace(alone, validation=PROCESSES)
    first, both = ram_budget(alone).parts, ram_budget(beside).parts
    assert both["workers"] == 2 * first["workers"]
    assert both["batches in flight"] == 2 * first["batches in flight"]
    assert both["fork server"] == first["fork server"]
    assert ram_budget(replace(beside, persistent_workers=False)).parts["workers"] == first["workers"]
    assert shm_budget(beside, None).needed == 2 * shm_budget(alone, None).needed


def test_a_container_with_64_mb_of_shared_memory_and_a_batch_that_no_host_holds_are_refused() -> None:
    budget = shm_budget(HostShape(PROCESSES, processes=2), 64 * 2**20)
    assert budget.needed == 2 * 38 * BATCH_BYTES
    assert budget.fits is False
    assert ram_budget(HostShape(replace(PROCESSES, batch=65_536)), limit_bytes=62 * GB).fits is False


def test_memory_used_by_others_is_measured_or_assumed_and_small_on_a_small_host() -> None:
    assert ram_budget(HostShape(THREADS), os_bytes=7 * GB).parts["system"] == 7 * GB
    assert ram_budget(HostShape(THREADS), limit_bytes=62 * GB).parts["system"] == 3 * GB
    assert ram_budget(HostShape(THREADS), limit_bytes=4 * GB).parts["system"] == 400_000_000


def test_a_loader_without_workers_still_holds_a_batch() -> None:
    parts = ram_budget(HostShape(replace(THREADS, workers=0))).parts
    assert parts["batches in flight"] == 2 * BATCH_BYTES
    assert parts["training process"] == STATED.process + 256 * STATED.image_bytes


@pytest.mark.parametrize(("engine", "in_hand"), [(PROCESSES, 2), (THREADS, 1), (replace(THREADS, workers=0), 2)])
def test_batches_of_an_accumulated_update_are_counted(engine: LoaderSettings, in_hand: int) -> None:
    accumulated = replace(engine, held=4)
    assert engine.batches == engine.workers * engine.prefetch + in_hand
    assert accumulated.batches == engine.batches + 3
    assert accumulated.shared_bytes == (accumulated.batches * BATCH_BYTES if engine is PROCESSES else 0)


def test_open_files_grow_with_workers_and_slots() -> None:
    assert open_files_budget(HostShape(replace(PROCESSES, workers=2))).needed < 1024
    many = open_files_budget(HostShape(replace(PROCESSES, workers=64, prefetch=32)))
    assert many.needed > 1024
    assert many.parts["slots of shared memory"] == 64 * 32 + 2
    assert open_files_budget(HostShape(THREADS)).needed > 0
