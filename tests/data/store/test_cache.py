"""The cache returns what the source has, or nothing; several processes share one folder and one budget."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker.data.store.cache import CachedStore, Ledger
from stoker.data.store.stores import LocalStore, ReadFailure
from stoker.errors import UserError

OBJECTS = 200
OBJECT_BYTES = 10_000


def content(number: int) -> bytes:
    return random.Random(number).randbytes(OBJECT_BYTES)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(OBJECTS):
        (folder / f"{number}.jpg").write_bytes(content(number))
    return folder


def kept_files(cache: Path) -> list[Path]:
    return [path for path in cache.glob("??/*") if path.is_file()]


def bytes_on_disk(cache: Path) -> int:
    total = 0
    for path in [*cache.glob("??/*"), *cache.glob("unfinished/*")]:
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
    return total


def test_what_was_read_once_is_available_when_the_source_is_gone(source: Path, tmp_path: Path) -> None:
    store = CachedStore(LocalStore(source), tmp_path / "cache")
    for number in range(10):
        store.read(f"{number}.jpg")
    store.read("0.jpg", 100, 50)
    shutil.rmtree(source)
    again = CachedStore(LocalStore(source), tmp_path / "cache")
    assert [bytes(again.read(f"{number}.jpg")) for number in range(10)] == [content(n) for n in range(10)]
    assert bytes(again.read("0.jpg", 100, 50)) == content(0)[100:150]
    assert again.used_bytes() == bytes_on_disk(tmp_path / "cache")


@pytest.mark.parametrize("damage", ["a flipped bit", "cut off", "empty", "another sample's file"])
def test_a_damaged_file_is_fetched_again_and_never_returned(source: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    store = CachedStore(LocalStore(source), cache)
    store.read("0.jpg")
    [kept] = kept_files(cache)
    whole = kept.read_bytes()
    if damage == "a flipped bit":
        kept.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    elif damage == "cut off":
        kept.write_bytes(whole[:-1])
    elif damage == "empty":
        kept.write_bytes(b"")
    else:
        store.read("1.jpg")
        [other] = [path for path in kept_files(cache) if path != kept]
        kept.write_bytes(other.read_bytes())
    assert bytes(store.read("0.jpg")) == content(0)
    assert kept.read_bytes() == whole


def test_a_full_cache_stays_as_it_is_and_reads_go_to_the_source(source: Path, tmp_path: Path) -> None:
    budget = 20 * OBJECT_BYTES
    store = CachedStore(LocalStore(source), tmp_path / "cache", cache_size=budget)
    for _ in range(2):
        assert all(bytes(store.read(f"{n}.jpg")) == content(n) for n in range(60))
    assert len(kept_files(tmp_path / "cache")) == 19
    assert bytes_on_disk(tmp_path / "cache") <= budget
    assert store.stopped is None
    for number in range(19, 60):
        (source / f"{number}.jpg").unlink()
    assert all(bytes(store.read(f"{n}.jpg")) == content(n) for n in range(19))
    with pytest.raises(ReadFailure):
        store.read("30.jpg")


def test_changed_data_is_not_served_from_old_files(source: Path, tmp_path: Path) -> None:
    store = CachedStore(LocalStore(source), tmp_path / "cache")
    store.read("0.jpg", 0, OBJECT_BYTES, whole=True)
    (source / "0.jpg").write_bytes(b"new and shorter")
    assert bytes(store.read("0.jpg", 0, 15, whole=True)) == b"new and shorter"
    other = tmp_path / "other"
    other.mkdir()
    (other / "0.jpg").write_bytes(b"another store")
    assert bytes(CachedStore(LocalStore(other), tmp_path / "cache").read("0.jpg")) == b"another store"


def test_the_default_budget_is_a_share_of_the_disk_and_includes_what_is_cached(tmp_path: Path) -> None:
    store = CachedStore(LocalStore(tmp_path), tmp_path / "cache")
    assert 0 < store.budget <= 0.91 * shutil.disk_usage(tmp_path).free
    store._ledger.add(10**9)
    later = CachedStore(LocalStore(tmp_path), tmp_path / "cache")
    assert later.budget - store.budget == pytest.approx(0.9e9, abs=0.5e9)


def test_lost_records_are_rebuilt_from_the_folder(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    store = CachedStore(LocalStore(source), cache)
    for number in range(5):
        store.read(f"{number}.jpg")
    used = store.used_bytes()
    (cache / "used").unlink()
    assert CachedStore(LocalStore(source), cache).used_bytes() == used == bytes_on_disk(cache)


def test_what_a_killed_process_left_half_written_is_removed_later(source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    store = CachedStore(LocalStore(source), cache)
    store._ledger.add(1000)
    old, new = cache / "unfinished" / "1-1-ab-1000", cache / "unfinished" / "1-2-ab-500"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    assert Ledger(cache).used() == 0
    assert (old.exists(), new.exists()) == (False, True)


READ_ALL = """
import random, sys
from pathlib import Path
from stoker.data.store.cache import CachedStore
from stoker.data.store.stores import LocalStore
source, cache, budget, seed, objects, size = sys.argv[1:3] + [int(a) for a in sys.argv[3:]]
print("ready", flush=True)
sys.stdin.readline()
store = CachedStore(LocalStore(source), Path(cache), cache_size=budget)
wrong = 0
for lap in range(5):
    order = list(range(objects))
    random.Random(seed * 10 + lap).shuffle(order)
    for place, number in enumerate(order):
        wrong += bytes(store.read(f"{number}.jpg")) != random.Random(number).randbytes(size)
        if lap == 0 and place == 20:
            print("under way", flush=True)
print(wrong, store.stopped)
"""


def test_four_processes_share_it_and_survive_the_death_of_one(source: Path, tmp_path: Path) -> None:
    cache, budget = tmp_path / "cache", int(OBJECTS * OBJECT_BYTES * 0.6)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READ_ALL, source, cache, *map(str, (budget, seed, OBJECTS, OBJECT_BYTES))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for seed in range(4)
    ]  # fmt: skip
    for reader in readers:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("go\n")
        reader.stdin.flush()
    victim, *others = readers
    assert victim.stdout is not None
    assert victim.stdout.readline() == "under way\n"
    victim.send_signal(signal.SIGKILL)
    most = 0
    while any(reader.poll() is None for reader in others):
        most = max(most, bytes_on_disk(cache))
        time.sleep(0.01)
    assert [reader.communicate()[0].splitlines()[-1] for reader in others] == ["0 None"] * 3
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    assert max(most, bytes_on_disk(cache)) <= budget
    store = CachedStore(LocalStore(source), cache, cache_size=budget)
    # The killed process had claimed a few objects without writing them, and a few were written by two at once.
    assert store.used_bytes() - bytes_on_disk(cache) <= 8 * (OBJECT_BYTES + 24)
    assert bytes_on_disk(cache) > 0.8 * budget
    assert all(bytes(store.read(f"{number}.jpg")) == content(number) for number in range(OBJECTS))


def test_threads_share_one_store(source: Path, tmp_path: Path) -> None:
    store = CachedStore(LocalStore(source), tmp_path / "cache", cache_size=100 * OBJECT_BYTES)
    with ThreadPoolExecutor(16) as pool:
        for _ in range(3):
            numbers = random.sample(range(OBJECTS), OBJECTS)
            found = pool.map(lambda number: bytes(store.read(f"{number}.jpg")), numbers)
            assert list(found) == [content(number) for number in numbers]
    assert bytes_on_disk(tmp_path / "cache") <= 100 * OBJECT_BYTES


FILL_DISK = """
import resource, subprocess, sys
from pathlib import Path
from stoker.data.store.cache import CachedStore
from stoker.data.store.stores import LocalStore
source, cache, how = sys.argv[1:]
Path(cache).mkdir()
if how == "full":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", cache], check=True)
store = CachedStore(LocalStore(source), Path(cache), cache_size=10**9)
if how == "limited":
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
right = sum(bytes(store.read(f"{n}.jpg")) == (Path(source) / f"{n}.jpg").read_bytes() for n in list(range(60)) * 2)
print(right, store.stopped)
"""


@pytest.mark.parametrize("how", ["full", "limited"])
def test_a_full_disk_stops_caching_but_not_reading(source: Path, tmp_path: Path, how: str) -> None:
    prefix: list[str] = []
    if how == "full":
        # A 200 kB disk that only this process sees.
        prefix = ["unshare", "--mount", *(() if os.getuid() == 0 else ("--user", "--map-root-user"))]
        if subprocess.run([*prefix, "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True).returncode:
            pytest.skip("mounting a small disk is not permitted here")
    done = subprocess.run(
        [*prefix, sys.executable, "-c", FILL_DISK, source, tmp_path / "cache", how], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    right, _, note = done.stdout.partition(" ")
    assert right == "120"
    assert ("the disk is full" if how == "full" else "cannot be written to") in note


def test_a_folder_that_cannot_be_created_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used as a cache"):
        CachedStore(LocalStore(source), tmp_path / "file" / "cache")
