"""Loaders with a known amount of work, whose batches carry the time it took to make them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from bench.quiet import busy_seconds
from stoker.attach.stage_clock import read_schedule
from stoker.loader.loader import LoaderOptions
from stoker.loader.threads import ThreadEngine
from stoker.profile.observed import BatchTime, HostFacts, LoaderShape, LoopTimes, Observed
from stoker.tasks.images.image_loader import ImageBatch

KINDS = {"io": (0.0, 24e-3), "cpu": (14e-3, 0.0), "mixed": (8e-3, 16e-3)}
"""Seconds per batch spent computing and sleeping."""
SAMPLES = 8
STEP_S = 4e-3
WARM_UP_S = 0.7
"""Until the workers run and the buffers have reached a steady state."""
ENDLESS = 1_000_000
BLOCK = bytes(100_000)


def _hash_seconds() -> float:
    """CPU seconds to hash one block on this machine, so that the work takes about the requested time."""
    began = time.thread_time()
    for _ in range(50):
        hashlib.sha256(BLOCK).digest()
    return (time.thread_time() - began) / 50


BLOCK_S = _hash_seconds()


def make_batch(kind: str, number: int) -> BatchTime:
    """Does a fixed amount of work per sample, which takes longer on busy cores, as real work would."""
    cpu_s, sleep_s = KINDS[kind]
    began, before = time.perf_counter(), read_schedule()
    slept = 0.0
    # Varies by up to 50 %, identically in every run for the same batch number.
    factors = np.random.default_rng(number).uniform(0.5, 1.5, SAMPLES)
    for factor in factors:
        if sleep_s:
            asleep = time.perf_counter()
            time.sleep(sleep_s * factor / SAMPLES)
            slept += time.perf_counter() - asleep
        # Hashing releases the GIL, as decoders do.
        for _ in range(round(cpu_s * factor / SAMPLES / BLOCK_S)):
            hashlib.sha256(BLOCK).digest()
    wall, now = time.perf_counter() - began, read_schedule()
    assert before is not None, "this benchmark needs a kernel with schedstat"
    assert now is not None
    cpu, runq = (now[0] - before[0]) / 1e9, (now[1] - before[1]) / 1e9
    return BatchTime(wall, cpu, runq, max(0.0, wall - cpu - runq), SAMPLES, fetch_s=slept)


class _Work(Dataset[BatchTime]):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int) -> BatchTime:
        return make_batch(self.kind, number)


class _Maker:
    """The parts of a batch maker that the thread engine uses."""

    class plan:  # noqa: N801
        class steps:  # noqa: N801
            @staticmethod
            def count(_start: int) -> int:
                return ENDLESS

    class reader:  # noqa: N801
        mean_bytes = 1e6
        requests = 1

        @staticmethod
        def forget() -> None: ...

        @staticmethod
        def close() -> None: ...

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.plan.steps.batch_size = SAMPLES  # type: ignore[attr-defined]

    def announce(self, *_: Any) -> None: ...

    def make(self, epoch: int, step: int, _start: int, _buffer: Any) -> ImageBatch:
        nothing = np.zeros(SAMPLES, dtype=np.int64)
        cost = make_batch(self.kind, step)
        images = np.zeros((SAMPLES, 1, 1, 3), dtype=np.uint8)
        return ImageBatch(
            nothing, nothing, nothing > 0, images=images, keys=nothing.astype(np.uint64),
            epoch=epoch, step=step, next_position=step, cost=cast(Any, cost),
        )  # fmt: skip


def batches_of(engine: str, kind: str, workers: int, prefetch: int) -> Iterator[BatchTime]:
    """The costs of an endless stream of batches, made by torch's workers or our threads."""
    if engine == "thread":
        options = LoaderOptions("thread", workers, prefetch, lookahead=1_000_000)
        threads = ThreadEngine(cast(Any, _Maker(kind)), options)
        with closing(threads):
            for batch in threads.batches(0, 0):
                yield cast(BatchTime, batch.cost)
        return
    loader = DataLoader(
        _Work(kind), batch_size=None, num_workers=workers, prefetch_factor=prefetch if workers else None,
        collate_fn=lambda cost: cost, worker_init_fn=lambda _: torch.set_num_threads(1),
        multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    yield from loader


def observe(engine: Literal["process", "thread"], kind: str, workers: int, prefetch: int, seconds: float) -> Observed:
    """Runs a loader with a paced consumer and returns what the doctor would have observed."""
    costs: list[BatchTime] = []
    waits: list[float] = []
    steps: list[float] = []
    pace = np.random.default_rng(1)
    batches = batches_of(engine, kind, workers, prefetch)
    began = time.perf_counter()
    started = busy = cpu = 0.0
    while True:
        asked = time.perf_counter()
        if not started and asked - began > WARM_UP_S:
            costs, waits, steps = [], [], []
            started, busy, cpu = asked, busy_seconds(), time.process_time()
        if started and asked - started >= seconds:
            break
        cost = next(batches)
        got = time.perf_counter()
        time.sleep(STEP_S * pace.uniform(0.7, 1.3))
        costs.append(cost)
        waits.append(got - asked)
        steps.append(time.perf_counter() - got)
    elapsed = asked - started
    cpus = os.cpu_count() or 1
    busy_share = min(1.0, (busy_seconds() - busy) / elapsed / cpus)
    own = time.process_time() - cpu
    cast(Any, batches).close()
    in_this_process = engine == "thread" or workers == 0
    own -= sum(cost.cpu_s or 0.0 for cost in costs) if in_this_process else 0.0
    return Observed(
        source="trial", steps=len(steps), samples=SAMPLES * len(steps),
        times=LoopTimes(
            elapsed_s=elapsed, wait_s=sum(waits), compute_s=sum(steps), consumer_cpu_s=max(0.0, own),
            waits_s=tuple(waits), steps_s=tuple(steps),
        ),
        loader=LoaderShape(workers, prefetch, engine), batches=tuple(costs),
        host=HostFacts(cpus=cpus, cpu_busy_share=busy_share),
    )  # fmt: skip
