"""The look-ahead: right bytes in the right order, latency hidden, memory bounded, never a deadlock."""

from __future__ import annotations

import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from stoker.io import blocking as blocking_module
from stoker.io.blocking import BLOCKS_ABOVE_S, LOCK_WAITS_BELOW_S, Blocking
from stoker.io.object_store import ObjectStore
from stoker.io.prefetch import Announced, Prefetcher, open_reader
from stoker.io.stores import Buffer, LocalStore, ReadFailure, StoreDown
from stoker.tasks.images.layouts.sample_index import SampleIndex, pack_names
from tests.support.proxy import Proxy, hold_until_in_flight
from tests.support.s3_server import BUCKET, S3Server
from tests.support.waiting import DEADLINE_S, wait_until


def index_of(count: int, size: int | None = None) -> SampleIndex:
    names, ends = pack_names([f"{number}.jpg".encode() for number in range(count)])
    sizes = None if size is None else np.full(count, size, np.int64)
    return SampleIndex("", ("c",), np.zeros(count, np.int32), names, ends, sizes=sizes)


def content(number: int, size: int) -> bytes:
    return random.Random(int(number)).randbytes(size)


class SlowStore:
    """A store that answers after a delay and counts its reads."""

    url, is_remote = "slow", True

    def __init__(self, size: int = 1000, delay: float = 0.002) -> None:
        self.size, self.delay = size, delay
        self.reads: list[int] = []
        self.fetches = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.lock = threading.Lock()

    def read(self, path: str, offset: int = 0, size: int | None = None, *, whole: bool = False) -> Buffer:
        number = int(path.removesuffix(".jpg"))
        with self.lock:
            self.reads.append(number)
            self.fetches += self.is_remote
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        time.sleep(self.delay)
        with self.lock:
            self.in_flight -= 1
        return content(number, self.size)


def test_latency_is_paid_once_and_not_for_each_sample(s3_server: S3Server, s3_proxy: Proxy) -> None:
    for number in range(64):
        s3_server.put(f"latency/{number}.jpg", content(number, 5000))
    reader = open_reader(ObjectStore(f"s3://{BUCKET}/latency"), index_of(64, 5000), lookahead_bytes=10**7)
    reader.take(np.arange(64))
    assert (
        len([line for line in s3_proxy.requests if "list-type" in line]) == 1
    )  # opens the first connection, for all threads
    hold_until_in_flight(s3_proxy, 17, "GET .*jpg")
    reader.expect(np.arange(64))
    order = np.arange(64)
    found = reader.take(order)
    reader.close()
    assert [bytes(data) for data in found if not isinstance(data, ReadFailure)] == [content(n, 5000) for n in order]
    assert s3_proxy.most_in_flight > 16


def test_each_announced_sample_is_read_ahead_exactly_once_and_so_are_repeats() -> None:
    store = SlowStore()
    reader = open_reader(store, index_of(100, 1000), lookahead_bytes=10**6)
    reader.expect(np.arange(50))
    wait_until(lambda: len(store.reads) == 50)
    for first in range(0, 50, 10):
        reader.take(np.arange(first, first + 10))
    assert sorted(store.reads) == list(range(50))
    order = np.repeat(np.arange(80, 100), 3)
    reader.expect(order)
    for first in range(0, 60, 5):
        batch = order[first : first + 5]
        assert reader.take(batch) == [content(number, 1000) for number in batch]
    assert len(store.reads) <= 50 + 30  # a repeat in the next batch may come after the first was handed over
    assert reader.buffered_bytes == 0
    reader.close()


def test_buffered_samples_stay_within_the_budget() -> None:
    store = SlowStore(size=100_000, delay=0.0005)
    reader = open_reader(store, index_of(1000), lookahead_bytes=1_000_000, max_in_flight=8)
    reader.expect(np.arange(1000))
    most = 0
    wait_until(lambda: reader.buffered_bytes > 500_000)
    for first in range(0, 1000, 4):
        for _ in range(3):
            most = max(most, reader.buffered_bytes)
            time.sleep(0.0003)
        reader.take(np.arange(first, first + 4))
    assert most <= 1_000_000 + 8 * 100_000
    assert store.most_in_flight <= 8
    reader.close()


def test_a_sample_or_batch_larger_than_the_budget_does_not_wait_for_room() -> None:
    store = SlowStore(size=5000)
    reader = open_reader(store, index_of(10, 5000), lookahead_bytes=1000)
    reader.expect(np.arange(10))
    wait_until(lambda: len(store.reads) == 1)
    time.sleep(0.02)
    assert store.reads == [0]
    assert reader.take(np.arange(10)) == [content(number, 5000) for number in range(10)]
    reader.close()
    reader = open_reader(SlowStore(), index_of(300, 1000), lookahead_bytes=5000, max_in_flight=4)
    reader.expect(np.arange(300))
    # The second batch first: the samples before it fill the budget and have not been taken yet.
    assert reader.take(np.arange(100, 200)) == [content(number, 1000) for number in range(100, 200)]
    assert reader.take(np.arange(100)) == [content(number, 1000) for number in range(100)]
    assert reader.take(np.arange(200, 300)) == [content(number, 1000) for number in range(200, 300)]
    assert reader.buffered_bytes == 0
    reader.close()


def test_threads_taking_different_batches_get_the_right_samples() -> None:
    reader = open_reader(SlowStore(delay=0.0002), index_of(2000, 1000), lookahead_bytes=100_000, max_in_flight=16)
    order = np.random.default_rng(2).integers(0, 2000, 4000)
    batches = [order[first : first + 16] for first in range(0, 4000, 16)]
    reader.expect(order)

    def take(batch: np.ndarray) -> bool:  # type: ignore[type-arg]
        unexpected = int(batch[0] + 1) % 2000
        replaced = reader.take(np.array([unexpected])) == [content(unexpected, 1000)]
        return replaced and reader.take(batch) == [content(number, 1000) for number in batch]

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(take, batches))
    reader.forget()
    wait_until(lambda: reader.buffered_bytes == 0)
    reader.close()


def test_forgotten_samples_free_their_space() -> None:
    store = SlowStore()
    reader = open_reader(store, index_of(1000, 1000), lookahead_bytes=10_000)
    reader.expect(np.arange(1000))
    wait_until(lambda: reader.ready_bytes == 10_000)
    assert len(store.reads) == 10
    reader.forget()
    assert reader.ready_bytes == 0
    wait_until(lambda: reader.buffered_bytes == 0)
    reader.expect(np.arange(500, 520))
    assert reader.take(np.arange(500, 520)) == [content(number, 1000) for number in range(500, 520)]
    assert len(store.reads) == 30
    assert reader.ready_bytes == 0
    reader.close()


def test_a_closed_reader_releases_all_waiting_threads() -> None:
    store = SlowStore(delay=0.2)
    reader = open_reader(store, index_of(200), lookahead_bytes=10**6, max_in_flight=2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(reader.take, np.arange(200))
        wait_until(lambda: store.in_flight)
        reader.close()
        with pytest.raises(RuntimeError, match="closed"):
            waiting.result()


class DeadStore(SlowStore):
    def read(self, path: str, offset: int = 0, size: int | None = None, *, whole: bool = False) -> Buffer:
        super().read(path)
        raise StoreDown("gone", "the store is gone")


def test_a_dead_store_is_reported_to_every_thread_at_once_and_the_next_read_tries_again() -> None:
    store = DeadStore()
    reader = open_reader(store, index_of(1000), lookahead_bytes=10**6, max_in_flight=2)
    with ThreadPoolExecutor(4) as pool:
        takes = [pool.submit(reader.take, np.arange(first, first + 250)) for first in range(0, 1000, 250)]
        for take in takes:
            with pytest.raises(StoreDown):
                take.result()
    store.read = SlowStore().read  # type: ignore[method-assign]
    assert reader.take([3]) == [content(3, 1000)]
    wait_until(lambda: reader.buffered_bytes == 0)
    reader.close()


def test_reads_begin_few_at_a_time_and_each_that_is_done_adds_one() -> None:
    permits, read_so_far = threading.Semaphore(0), list[int]()

    def read(keys: Sequence[int]) -> Iterator[bytes]:
        read_so_far.extend(keys)
        permits.acquire()
        return iter([bytes(keys)])

    ahead = Prefetcher(read, lambda _key: 1, lookahead_bytes=100, requests=5, first_requests=2)
    ahead.expect(range(20))
    for begun in (2, 4, 6, 8, 9, 10):  # with one done each time, two to five are under way
        wait_until(lambda begun=begun: len(read_so_far) == begun)
        permits.release()
    permits.release(20)
    assert ahead.take(range(20)) == [bytes([key]) for key in range(20)]
    ahead.close()


def test_what_nobody_takes_is_read_in_order_and_leaves_nothing_behind() -> None:
    done: list[str] = []

    def read(keys: Sequence[str]) -> Iterator[None]:
        done.extend(keys)
        yield None

    files = Prefetcher(read, lambda _key: 10, lookahead_bytes=100, requests=1, are_taken=False)
    files.expect("abc")
    files.expect("a")
    assert files.drained(DEADLINE_S, done=True)
    assert (done, files.buffered_bytes, files._ahead) == (["a", "b", "c", "a"], 0, {})
    files.close()


def test_a_key_that_is_dropped_gives_its_bytes_back() -> None:
    ahead = Prefetcher(lambda keys: iter([b"x" * 10]), lambda _key: 10, lookahead_bytes=20, requests=2)
    ahead.expect(range(4))
    wait_until(lambda: ahead.ready_bytes == 20)
    ahead.drop([0, 3])
    wait_until(lambda: ahead.ready_bytes == 20)  # of 1 and 2: 3 is no longer announced
    ahead.drop([1, 2])
    assert ahead.buffered_bytes == 0
    ahead.close()


def test_warm_files_are_read_by_the_caller_and_failures_stay_in_their_place(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number}.jpg").write_bytes(content(number, 1000))
    (tmp_path / "3.jpg").unlink()
    reader = open_reader(LocalStore(tmp_path), index_of(100), lookahead_bytes=10**6)
    reader._blocking.note = lambda blocked_s: None  # type: ignore[method-assign]
    before = threading.active_count()
    for announced in (True, False, True):
        order = np.random.default_rng(3).permutation(100)
        if announced:
            reader.expect(order)
        for first in range(0, 100, 10):
            for number, found in zip(order[first : first + 10], reader.take(order[first : first + 10]), strict=True):
                if number == 3:
                    assert isinstance(found, ReadFailure)
                    assert (found.path, found.reason) == ("3.jpg", "missing")
                else:
                    assert found == content(number, 1000)
    assert threading.active_count() == before
    assert reader._announced.first() is None
    reader.close()


class SlowFolder(SlowStore):
    is_remote = False


def test_a_folder_that_blocks_is_read_ahead_by_threads_until_it_flows_again() -> None:
    store = SlowFolder(delay=0.02)
    reader = open_reader(store, index_of(2000), lookahead_bytes=10**6)
    reader.expect(np.arange(2000))
    for first in range(0, 500, 50):
        assert reader.take(np.arange(first, first + 50)) == [content(n, 1000) for n in range(first, first + 50)]
    assert store.most_in_flight > 4
    store.delay = 0.0
    for first in range(500, 2000, 50):
        assert reader.take(np.arange(first, first + 50)) == [content(n, 1000) for n in range(first, first + 50)]
    wait_until(lambda: store.in_flight == 0)
    reader.close()


def test_a_folder_that_begins_to_block_in_the_middle_of_a_batch_loses_no_sample() -> None:
    """The first sample is under way in a thread; it arrives while the second is read here, so slowly that the other
    two are handed to threads."""
    store = SlowFolder(delay=0.3)
    reader = open_reader(store, index_of(4), lookahead_bytes=1)
    reader._blocking.blocks = True
    reader.expect(np.arange(4))
    wait_until(lambda: store.reads)
    reader._blocking.blocks = False
    reader._blocking.mean_s = 0.25e-3  # one slow read is enough from here
    assert reader.take(np.arange(4)) == [content(number, 1000) for number in range(4)]
    assert sorted(store.reads) == [0, 1, 2, 3]
    reader.close()


def test_a_reader_that_is_closed_while_its_folder_begins_to_block_releases_its_caller() -> None:
    store = SlowFolder(delay=0.3)
    reader = open_reader(store, index_of(4), lookahead_bytes=1)
    reader._blocking.mean_s = 0.25e-3  # one slow read is enough from here
    with ThreadPoolExecutor(1) as pool:
        taken = pool.submit(reader.take, np.arange(4))
        wait_until(lambda: store.reads)
        reader.close()
        with pytest.raises(RuntimeError, match="closed"):
            taken.result(DEADLINE_S)


def test_an_epoch_that_the_collector_ends_in_a_thread_that_holds_the_lock_does_not_hang() -> None:
    reader = open_reader(SlowStore(), index_of(1000, 1000), lookahead_bytes=10_000)
    reader.expect(np.arange(1000))
    with reader._lock:  # as in the middle of any of its methods
        reader.forget()
    reader.expect(np.arange(20, 21))
    wait_until(lambda: reader.buffered_bytes == 1000)
    reader.close()


def test_one_slow_read_does_not_start_threads_but_two_do() -> None:
    blocking = Blocking(remote=False)
    blocking.note(5.0)
    assert not blocking.blocks
    blocking.note(5.0)
    assert blocking.blocks
    assert blocking.timed(lambda: 7, lambda: False) == 7
    for _ in range(30):
        blocking.note(0.0)
    assert not blocking.blocks
    assert Blocking(remote=True).blocks


@pytest.mark.real_time
def test_time_spent_waiting_counts_as_blocked_and_computing_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of many: on a machine whose time is taken by others, a single one may look blocked, or not."""
    blocking, noted = Blocking(remote=True), list[float]()
    monkeypatch.setattr(blocking, "note", noted.append)
    for _ in range(20):
        blocking.timed(lambda: time.sleep(0.002), lambda: True)
        blocking.timed(lambda: sum(range(30_000)), lambda: True)
    assert statistics.median(noted[1::2]) < BLOCKS_ABOVE_S < statistics.median(noted[0::2])


def test_the_queue_skips_samples_that_were_taken_early() -> None:
    queue = Announced()
    queue.add(np.array([1, 2, 2, 3], np.int64))
    for sample in (3, 2, 77):
        queue.take_out(sample)
    seen = []
    while (first := queue.first()) is not None:
        seen.append(first)
        queue.drop_first()
    assert seen == [1, 2]
    queue.add(np.arange(70, 5000))
    assert queue.first() == 70


def test_a_program_may_end_while_reads_are_under_way(s3: S3Server) -> None:
    proxy = Proxy(s3.port, latency=0.3).start()
    s3.put("ending/0.jpg", b"x")
    program = f"""
import sys
import numpy as np
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.io.test_prefetch import index_of
from stoker.io.object_store import ObjectStore
from stoker.io.prefetch import open_reader
reader = open_reader(ObjectStore("s3://{BUCKET}/ending"), index_of(100), lookahead_bytes=10**8)
reader.take(np.array([0]))
reader.expect(np.arange(100))
print("ends")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE_S,
        env=os.environ | {"AWS_ENDPOINT_URL": proxy.endpoint},
    )  # fmt: skip
    proxy.stop()
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")


def test_a_short_wait_without_io_is_not_mistaken_for_slow_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a wait for the GIL; read-ahead threads would make it worse, and they would not be stopped again.

    By a clock that only the reads move: no sleep is short on a busy machine.
    """
    now_s, stored = 0.0, 0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(blocking_module, "_used_s", lambda: 0.0)
    monkeypatch.setattr(blocking_module, "_bytes_from_storage", lambda: stored)

    def wait(seconds: float, read_bytes: int = 0) -> None:
        nonlocal now_s, stored
        now_s, stored = now_s + seconds, stored + read_bytes

    blocking = Blocking(remote=False)
    for _ in range(20):
        blocking.timed(lambda: wait(0.9 * LOCK_WAITS_BELOW_S), lambda: False)
    assert blocking.mean_s == 0
    assert not blocking.blocks
    for seconds, read_bytes in ((0.9 * LOCK_WAITS_BELOW_S, 4096), (1.1 * LOCK_WAITS_BELOW_S, 0)):
        blocking = Blocking(remote=False)
        for _ in range(20):
            blocking.timed(lambda: wait(seconds, read_bytes), lambda: False)  # noqa: B023 - called at once
        assert blocking.blocks
