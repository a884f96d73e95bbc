"""A loader of threads whose workers, prefetch and look-ahead change while it runs: the same batches, other threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.loader.batch import LoaderSetup
from stoker.loader.threads import WorkerPool
from stoker.tasks.images.image_loader import ImageLoader
from tests.loader.test_loader import SAMPLES, entries, ledger, loader_for, make_images
from tests.support.proxy import Proxy, hold_until_in_flight
from tests.support.s3_server import S3Server
from tests.support.waiting import wait_until


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    make_images(root, "train", SAMPLES)
    return root


@pytest.fixture
def loader(data: Path) -> Iterator[ImageLoader]:
    loader = loader_for(data, "batch_size=2", "loader=thread", workers=2)
    yield loader
    loader.close()


def setup_of(loader: ImageLoader) -> LoaderSetup:
    assert loader.setup is not None
    return loader.setup


def test_the_stream_is_the_same_whatever_changes(data: Path, loader: ImageLoader) -> None:
    expected = ledger(loader_for(data, "batch_size=2", "loader=thread"), epoch=1)
    first, found = setup_of(loader), []
    changes = [
        replace(first, workers=5), replace(first, workers=1), replace(first, prefetch=8), replace(first, requests=1),
        replace(first, lookahead_bytes=1000, requests=100), first,
    ]  # fmt: skip
    for number, batch in enumerate(loader.epoch(1)):
        found.append(entries(batch))
        loader.adjust(changes[number % len(changes)])
    assert found == expected


def test_as_many_batches_are_in_flight_as_the_workers_ask_for_unless_memory_is_short(loader: ImageLoader) -> None:
    first = setup_of(loader)
    assert (loader.workers, loader.in_flight) == (2, 4)
    loader.adjust(replace(first, workers=3, prefetch=3))
    assert (loader.workers, loader.most_in_flight, loader.in_flight) == (3, 9, 9)
    loader.limit_prefetch(3)
    loader.adjust(replace(first, workers=5))
    assert (loader.most_in_flight, loader.in_flight) == (10, 3)
    loader.limit_prefetch(loader.most_in_flight)
    loader.adjust(replace(first, workers=6))
    assert loader.in_flight == 12, "what was lifted is no limit any more"
    epoch = loader.epoch(0)
    next(epoch)
    wait_until(lambda: loader.ready() == 11)
    loader.adjust(replace(first, workers=1, prefetch=1))
    for _ in range(12):
        next(epoch)
    assert loader.ready() <= 1
    assert len(loader._engine._buffers) <= 1 + 2  # type: ignore[union-attr]


def test_worker_processes_cannot_be_adjusted(data: Path) -> None:
    loader = loader_for(data, "batch_size=8", "loader=process", workers=1)
    try:
        assert (loader.setup, loader.workers, loader.held_back_by()) == (None, 1, None)
    finally:
        loader.close()


def test_a_worker_pool_grows_and_shrinks_at_once() -> None:
    pool: WorkerPool[int] = WorkerPool(1)
    lock, gate, at_work = threading.Lock(), threading.Semaphore(0), 0

    def work(number: int) -> int:
        nonlocal at_work
        with lock:
            at_work += 1
        gate.acquire()
        with lock:
            at_work -= 1
        if number == 7:
            raise ValueError("seven")
        return number

    futures = [pool.submit(lambda number=number: work(number)) for number in range(20)]  # type: ignore[misc]
    wait_until(lambda: at_work == 1)
    pool.resize(4)
    wait_until(lambda: at_work == 4)
    pool.resize(2)
    gate.release(3)
    wait_until(lambda: sum(future.done() for future in futures) == 3)
    wait_until(lambda: at_work == 2)
    assert futures[0].result() == 0
    assert futures[12].cancel()
    gate.release(100)
    wait_until(lambda: all(future.done() for future in futures))
    assert isinstance(futures[7].exception(), ValueError)
    assert [future.result() for number, future in enumerate(futures) if number not in (7, 12)] == [
        number for number in range(20) if number not in (7, 12)
    ]
    pool.close()


def test_more_requests_and_bytes_are_under_way_once_they_are_allowed(
    data: Path, tmp_path: Path, s3_server: S3Server, s3_proxy: Proxy
) -> None:
    url = s3_server.put_folder(data, "adjusting")
    loader = loader_for(url, "batch_size=1", "loader=thread", f"index_dir={tmp_path}", workers=1)  # type: ignore[arg-type]
    first = setup_of(loader)
    assert (first.requests, first.lookahead_bytes) == (64, 256_000_000)
    try:
        expected = [entries(batch) for batch in loader.epoch(0)]
        for setup, held_back, most in [
            (replace(first, requests=3), "requests", 3),
            (replace(first, lookahead_bytes=1), "lookahead_bytes", 4),
        ]:
            loader.adjust(setup)
            s3_proxy.reset()
            # What is asked for beyond the first batches is not answered until more is allowed.
            hold_until_in_flight(s3_proxy, 9, "GET .*jpg", answered=8)
            epoch = loader.epoch(0)
            found = [entries(next(epoch)) for _ in range(2)]
            wait_until(lambda: loader.held_back_by() == held_back)  # noqa: B023 - called at once
            assert s3_proxy.most_in_flight <= most
            loader.adjust(first)
            found += [entries(batch) for batch in epoch]
            assert s3_proxy.most_in_flight > 8
            assert found == expected
    finally:
        loader.close()
