"""Whatever happens between us and the store, we get the right bytes or a named failure, never wrong bytes."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stoker.io.cache import CachedStore, cache_place
from stoker.io.connection import Patience
from stoker.io.object_store import ObjectStore
from stoker.io.prefetch import open_reader
from stoker.io.stores import ReadFailure, StoreDown
from stoker.tasks.images.layouts.sample_index import SampleIndex, pack_names
from tests.support.proxy import Proxy
from tests.support.s3_server import BUCKET, S3Server, use_environment

SIZE = 60_000
QUICK = Patience(connect_s=30, stall_s=30, request_s=60, retry_s=1, object_s=0, max_retries=3, quick_s=60)
"""Few attempts, each with all the time that a busy machine may need, and no waiting for what does not respond."""
NO_STALLS = replace(QUICK, stall_s=1)


def content(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


@pytest.fixture
def store(s3_server: S3Server, s3_proxy: Proxy, request: pytest.FixtureRequest) -> ObjectStore:
    """Four objects behind the proxy, under their own prefix."""
    prefix = f"faults-{os.getpid()}-{abs(hash(request.node.name))}"
    for number in range(4):
        s3_server.put(f"{prefix}/{number}.jpg", content(number))
    store = ObjectStore(f"s3://{BUCKET}/{prefix}", patience=QUICK)
    store.read("0.jpg")  # opens the first connection
    s3_proxy.reset()
    return store


def overwrite(server: S3Server, store: ObjectStore, name: str, data: bytes) -> Callable[[], None]:
    prefix = store.url.removeprefix(f"s3://{BUCKET}/")
    return lambda: server.put(f"{prefix}/{name}", data)


def failure_of(store: ObjectStore, *arguments: object, **more: object) -> ReadFailure:
    with pytest.raises(ReadFailure) as caught:
        store.read(*arguments, **more)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("kind", ["reset", "short"])
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_a_body_that_breaks_off_anywhere_is_completed(
    store: ObjectStore, s3_proxy: Proxy, kind: str, part: bool
) -> None:
    size = SIZE // 2 if part else SIZE
    places = [0, 1, 2, 511, 4096, size // 3, size // 2, size - 2, size - 1]
    for after in places:
        s3_proxy.reset()
        s3_proxy.fault(r"GET .*1\.jpg", kind, after=after)
        data = store.read("1.jpg", 1000, size) if part else store.read("1.jpg", 0, SIZE, whole=True)
        assert bytes(data) == (content(1)[1000 : 1000 + size] if part else content(1)), f"broken off after {after}"
        assert len([line for line in s3_proxy.requests if "1.jpg" in line]) == 2


@pytest.mark.parametrize("kind", ["reset", "short"])
def test_a_body_that_always_breaks_off_is_a_failure_of_that_sample(
    store: ObjectStore, s3_proxy: Proxy, kind: str
) -> None:
    s3_proxy.fault(r"GET .*1\.jpg", kind, after=0, times=10_000)
    assert failure_of(store, "1.jpg").reason == "unreadable"
    assert bytes(store.read("2.jpg")) == content(2)


def test_a_body_in_small_pieces_arrives_whole_or_fails(store: ObjectStore, s3_proxy: Proxy) -> None:
    for pieces in (2, 3, 7, 50):
        s3_proxy.reset()
        s3_proxy.fault(r"GET .*1\.jpg", "reset", after=SIZE // pieces, times=10_000)
        try:
            data = bytes(store.read("1.jpg"))
        except ReadFailure as failure:
            data = failure.reason.encode()
        assert data in (content(1), b"unreadable")


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_busy_server_is_retried(store: ObjectStore, s3_proxy: Proxy, code: int) -> None:
    s3_proxy.fault(r"GET .*1\.jpg", "status", code=code, times=2)
    assert bytes(store.read("1.jpg")) == content(1)
    assert len(s3_proxy.requests) == 3


def test_one_object_that_is_never_served_is_that_samples_failure(store: ObjectStore, s3_proxy: Proxy) -> None:
    s3_proxy.fault(r"GET .*1\.jpg", "status", times=10_000)
    failure = failure_of(store, "1.jpg")
    assert failure.reason == "unreadable"
    assert "503" in str(failure)
    assert "SlowDown" in str(failure)


def test_a_store_that_never_serves_anything_is_down(store: ObjectStore, s3_proxy: Proxy) -> None:
    s3_proxy.fault("GET", "status", times=10_000)
    with pytest.raises(StoreDown, match="503") as caught:
        store.read("1.jpg")
    assert caught.value.name == "store-unreachable"


def test_a_stalled_body_is_requested_again(store: ObjectStore, s3_proxy: Proxy) -> None:
    s3_proxy.fault(r"GET .*1\.jpg", "stall", after=SIZE // 2, seconds=1000)
    assert bytes(ObjectStore(store.url, patience=NO_STALLS).read("1.jpg")) == content(1)


def test_an_object_that_changed_since_the_index_was_made_is_named(
    store: ObjectStore, s3_server: S3Server, s3_proxy: Proxy
) -> None:
    overwrite(s3_server, store, "1.jpg", b"shorter")()
    assert failure_of(store, "1.jpg", 0, SIZE, whole=True).reason == "changed"
    assert bytes(store.read("1.jpg", 0, 7, whole=True)) == b"shorter"


def test_a_shard_that_is_replaced_between_two_parts_is_named(store: ObjectStore, s3_server: S3Server) -> None:
    assert bytes(store.read("1.jpg", 512, 100)) == content(1)[512:612]
    overwrite(s3_server, store, "1.jpg", content(99))()
    assert failure_of(store, "1.jpg", 1024, 100).reason == "changed"


def test_an_object_that_changes_while_it_is_read_is_never_mixed(
    store: ObjectStore, s3_server: S3Server, s3_proxy: Proxy
) -> None:
    s3_proxy.fault(r"GET .*1\.jpg $", "reset", after=SIZE // 2)
    s3_proxy.fault(r"GET .*1\.jpg bytes=", "call", call=overwrite(s3_server, store, "1.jpg", content(99)))
    assert failure_of(store, "1.jpg", 0, SIZE, whole=True).reason == "changed"


def test_a_deleted_object_is_missing(store: ObjectStore) -> None:
    assert failure_of(store, "deleted.jpg", 0, SIZE, whole=True).reason == "missing"


def test_one_forbidden_object_is_that_samples_failure(store: ObjectStore, s3_proxy: Proxy) -> None:
    s3_proxy.fault(r"GET .*1\.jpg", "status", code=403)
    assert failure_of(store, "1.jpg").reason == "permission"


def test_a_problem_with_the_whole_store_is_reported_within_seconds(
    s3_server: S3Server, s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With production timeouts: a wrong setting must not take two minutes to report."""
    right = s3_server.environment()
    without_keys = {name: value for name, value in right.items() if "KEY" not in name}
    cases = [
        (right | {"AWS_SECRET_ACCESS_KEY": "wrong"}, BUCKET, "credentials-refused"),
        (right | {"AWS_ACCESS_KEY_ID": "wrong"}, BUCKET, "credentials-refused"),
        (right | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, BUCKET, "store-unreachable"),
        (right, "no-such-bucket", "bucket-missing"),
        (without_keys, BUCKET, "no-credentials"),
        (without_keys | {"AWS_SKIP_SIGNATURE": "true"}, BUCKET, "credentials-refused"),
    ]
    for variables, bucket, name in cases:
        use_environment(monkeypatch, variables)
        start = time.monotonic()
        for ask in (
            lambda b=bucket: ObjectStore(f"s3://{b}").read("x"),
            lambda b=bucket: list(ObjectStore(f"s3://{b}").list()),
        ):
            with pytest.raises(StoreDown) as caught:
                ask()
            assert caught.value.name == name
            assert caught.value.hint
            assert "wrong" not in str(caught.value)
        assert time.monotonic() - start < 60


def index_of(count: int, size: int | None = SIZE) -> SampleIndex:
    names, ends = pack_names([f"{number}.jpg".encode() for number in range(count)])
    sizes = None if size is None else np.full(count, size, np.int64)
    return SampleIndex("", ("c",), np.zeros(count, np.int32), names, ends, sizes=sizes)


def test_a_batch_through_every_fault_at_once_has_right_samples_and_named_failures(
    store: ObjectStore, s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path
) -> None:
    for number in range(4, 40):
        overwrite(s3_server, store, f"{number}.jpg", content(number))()
    overwrite(s3_server, store, "7.jpg", content(7)[:-1])()
    for number, (kind, details) in enumerate(
        [
            ("reset", {"after": 100}),
            ("short", {"after": SIZE // 2}),
            ("status", {"times": 2}),
            ("stall", {"seconds": 1000}),
        ]
    ):
        for sample in range(10 + number, 40, 4):
            s3_proxy.fault(rf"GET .*/{sample}\.jpg", kind, **details)
    s3_proxy.fault(r"GET .*/5\.jpg", "status", code=404, times=100)
    s3_proxy.fault(r"GET .*/6\.jpg", "reset", times=100)
    place = cache_place(str(tmp_path / "cache"))
    assert place is not None
    cached = CachedStore(ObjectStore(store.url, patience=NO_STALLS), place)
    for _ in range(2):
        reader = open_reader(cached, index_of(40), lookahead_bytes=10 * SIZE)
        reader.expect(np.arange(40))
        found = [*reader.take(np.arange(20)), *reader.take(np.arange(20, 40))]
        reader.close()
        failures = {n: result.reason for n, result in enumerate(found) if isinstance(result, ReadFailure)}
        assert failures == {5: "missing", 6: "unreadable", 7: "changed"}
        for number, result in enumerate(found):
            if not isinstance(result, ReadFailure):
                assert bytes(result) == content(number), f"sample {number}"


def test_a_store_that_dies_midway_stops_every_consumer(store: ObjectStore, s3_proxy: Proxy) -> None:
    reader = open_reader(store, index_of(4, None), lookahead_bytes=SIZE)
    assert bytes(reader.take(np.array([0]))[0]) == content(0)  # type: ignore[arg-type]
    reader.expect(np.array([1, 2, 3, 1, 2, 3]))
    s3_proxy.stop()
    for _ in range(2):
        with pytest.raises(StoreDown) as caught:
            reader.take(np.array([1, 2, 3]))
        assert caught.value.name == "store-unreachable"
    reader.close()
