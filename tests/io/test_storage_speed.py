"""Storage speed: cold reads are really cold or not reported, and a bad file stops nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stoker.config import load_config
from stoker.io import storage_speed
from stoker.io.storage_speed import drop_from_cache, measure_local_disk
from stoker.io.stores import open_store
from stoker.profile.observed import StorageFacts
from stoker.tasks.images.data import describe_storage, measure_storage_of
from stoker.tasks.images.layouts.opening import open_index
from stoker.tasks.images.layouts.sample_index import SampleSet, all_samples
from stoker.trial.process import storage_trial
from tests.support.proxy import Proxy
from tests.support.s3_server import BUCKET, S3Server
from tests.support.waiting import wait_until


def write_files(root: Path, count: int, size: int) -> SampleSet:
    """Files that have reached the disk and are not only in the write cache."""
    for number in range(count):
        path = root / "train" / f"class{number % 2}" / f"{number:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as stream:
            stream.write(os.urandom(size))
            stream.flush()
            os.fsync(stream.fileno())
    return all_samples(open_index(str(root), "train", index_dir=root / "index"))


@pytest.fixture
def cold_reads(tmp_path: Path) -> None:
    """Skips the test where the kernel keeps even a file that nobody uses, as one short of memory does for a while."""
    path = tmp_path / "control"
    with path.open("wb") as stream:
        stream.write(os.urandom(200_000))
        stream.flush()
        os.fsync(stream.fileno())
    end = time.monotonic() + 10
    with path.open("rb") as stream:
        while pages_in_cache(stream.fileno(), 200_000):
            if time.monotonic() > end:
                pytest.skip("this kernel drops nothing from its page cache")
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            time.sleep(0.05)
    path.unlink()


def pages_in_cache(descriptor: int, size: int) -> int:
    """Counted by mincore, and so by other means than the code under test."""
    with mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        start = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        found = ctypes.CDLL(None, use_errno=True).mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), pages)
        assert found == 0, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in pages)


def measured_cold(samples: SampleSet, seconds: float) -> tuple[StorageFacts, list[str]]:
    """Facts and what is missing, measured again while the kernel keeps the files in its page cache."""
    found: list[tuple[StorageFacts, list[str]]] = []

    def is_cold() -> bool:
        missing: list[str] = []
        facts = measure_storage_of(samples, open_store(samples.index.root), seconds, missing.append)
        found[:] = [(facts, missing)]
        return facts.cold_bytes_per_second is not None and facts.parallel_bytes_per_second is not None

    wait_until(is_cold, lambda: str(found), deadline_s=60)
    return found[0]


@pytest.mark.usefixtures("cold_reads")
def test_a_folder_is_read_cold_and_warm_by_one_and_by_many_whatever_single_files_do(tmp_path: Path) -> None:
    samples = write_files(tmp_path, 40, 50_000)
    (tmp_path / "train" / "class0" / "000.jpg").unlink()
    facts, missing = measured_cold(samples, 0.6)
    assert missing == []
    assert facts.kind is not None
    assert facts.packed is False
    for rate in (facts.cold_bytes_per_second, facts.warm_bytes_per_second, facts.parallel_bytes_per_second):
        assert rate > 50_000
    assert facts.latency_s > 0
    assert facts.bytes_per_sample == 50_000
    assert facts.dataset_bytes == 40 * 50_000


@pytest.mark.usefixtures("cold_reads")
def test_a_file_leaves_the_page_cache_without_root_and_so_does_a_part_of_it(tmp_path: Path) -> None:
    write_files(tmp_path, 1, 400_000)
    path = tmp_path / "train" / "class0" / "000.jpg"
    path.read_bytes()
    wait_until(lambda: drop_from_cache(str(path), 8 * mmap.PAGESIZE, 8 * mmap.PAGESIZE))
    wait_until(lambda: drop_from_cache(str(path)))


def test_what_stays_in_memory_is_not_called_cold() -> None:
    """Files on tmpfs are memory and cannot be evicted."""
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no /dev/shm")
    root = shm / f"stoker-test-{os.getpid()}"
    try:
        samples = write_files(root, 12, 10_000)
        missing: list[str] = []
        facts = measure_storage_of(samples, open_store(samples.index.root), 1.0, missing.append)
    finally:
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        root.rmdir()
    assert facts.kind == "tmpfs"
    assert facts.remote is False
    assert facts.cold_bytes_per_second is None
    assert facts.warm_bytes_per_second is not None
    assert len(missing) == 1
    assert "page cache" in missing[0]


def test_a_subset_is_described_by_its_own_bytes(tmp_path: Path) -> None:
    """For an index with sizes, such as that of an object store or of shards."""
    index = replace(write_files(tmp_path, 4, 1000).index, sizes=np.array([1000, 2000, 3000, 4000]), folder=None)
    some = SampleSet(index, index.classes, np.array([1, 2]), np.array([0, 1], np.int32))
    assert describe_storage(some).dataset_bytes == 5000
    assert describe_storage(some).bytes_per_sample == 2500


def test_an_object_store_is_remote_and_its_latency_is_that_of_a_request(
    s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path
) -> None:
    for number in range(16):
        s3_server.put(f"doctor/train/class{number % 2}/{number:02d}.jpg", os.urandom(2000))
    samples = all_samples(open_index(f"s3://{BUCKET}/doctor", "train", index_dir=tmp_path))
    s3_proxy.latency = 0.2  # far above what a busy machine adds
    facts = measure_storage_of(samples, open_store(samples.index.root), 3)
    assert facts.remote is True
    assert facts.kind == "s3"
    assert 0.2 <= facts.latency_s < 2
    assert facts.warm_bytes_per_second is None
    assert facts.bytes_per_sample == 2000
    # Many concurrent requests wait in parallel.
    assert facts.parallel_bytes_per_second > 2 * facts.cold_bytes_per_second


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    rate = measure_local_disk(tmp_path, 50_000, seconds=0.3)
    assert 1e4 < rate < 1e11
    assert (measure_local_disk(tmp_path, 1e10, seconds=0.2) or 0) > 0, "with a single file"
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder that does not exist: temporary files go to the usual place.
    assert measure_local_disk(tmp_path / "nowhere", 1000, seconds=0.1) is not None
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o500)
        assert measure_local_disk(tmp_path, 1000) is None
        tmp_path.chmod(0o700)
    monkeypatch.setattr(storage_speed, "LEAST_FREE", 1 << 62)
    assert measure_local_disk(tmp_path, 1000) is None


def test_a_trial_measures_it_where_the_data_is_elsewhere_and_only_there(
    s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path
) -> None:
    s3_proxy.latency = 0.0
    for number in range(8):
        s3_server.put(f"disk/train/class{number % 2}/{number:02d}.jpg", os.urandom(2000))
        here = tmp_path / "train" / f"class{number % 2}" / f"{number:02d}.jpg"
        here.parent.mkdir(parents=True, exist_ok=True)
        here.write_bytes(os.urandom(2000))
    rates = []
    for root in (f"s3://{BUCKET}/disk", str(tmp_path)):
        config = load_config(None, ["task=classify", f"data_root={root}", f"index_dir={tmp_path / 'index'}"]).config
        rates.append(storage_trial(config, {"seconds": 1.0}, lambda _s: None)["storage"]["local_bytes_per_second"])
    assert rates[0] > 0
    assert rates[1] is None
