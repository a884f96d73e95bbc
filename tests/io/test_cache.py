"""The cache returns what the source has, or nothing; several processes share one folder and one limit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stoker.core.errors import UserError
from stoker.io.cache import CACHE_FOLDER, CachedStore, OpenCopy, cache_place
from stoker.io.stores import LocalStore, ReadFailure

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


def cached(source: Path, folder: Path, limit: int | None = None) -> CachedStore:
    return CachedStore(LocalStore(source), cache_place(str(folder), limit))


def settle(cache: Path) -> OpenCopy:
    """Waits until everything that was read is kept."""
    place = cache_place(str(cache))
    place.open().flush()
    return place.open()


def kept_files(cache: Path) -> list[Path]:
    found = (cache / CACHE_FOLDER).rglob("*")
    return [path for path in found if path.is_file() and not path.name.startswith(".stage")]


def bytes_on_disk(cache: Path) -> int:
    return sum(path.stat().st_size for path in kept_files(cache))


def test_what_was_read_once_is_available_when_the_source_is_gone(source: Path, tmp_path: Path) -> None:
    store = cached(source, tmp_path / "cache")
    for number in range(10):
        store.read(f"{number}.jpg")
    store.read("0.jpg", 100, 50)
    settle(tmp_path / "cache").close()
    shutil.rmtree(source)
    again = cached(source, tmp_path / "cache")
    assert [bytes(again.read(f"{number}.jpg")) for number in range(10)] == [content(n) for n in range(10)]
    assert bytes(again.read("0.jpg", 100, 50)) == content(0)[100:150]
    assert settle(tmp_path / "cache").totals() == (11, bytes_on_disk(tmp_path / "cache"))


@pytest.mark.parametrize("damage", ["a flipped bit", "cut off", "gone"])
def test_a_damaged_file_is_fetched_again_and_never_returned(source: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    store = cached(source, cache)
    store.read("0.jpg")
    settle(cache)
    [kept] = kept_files(cache)
    whole = kept.read_bytes()
    if damage == "a flipped bit":
        kept.write_bytes(whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:])
    elif damage == "cut off":
        kept.write_bytes(whole[:-1])
    else:
        shutil.rmtree(cache / CACHE_FOLDER)
    assert bytes(store.read("0.jpg")) == content(0)
    if damage != "gone":
        settle(cache)
        assert kept.read_bytes() == whole


def test_a_full_cache_that_threads_share_stays_as_it_is_and_reads_go_to_the_source(
    source: Path, tmp_path: Path
) -> None:
    store = cached(source, tmp_path / "cache", 20 * OBJECT_BYTES)
    assert [bytes(store.read(f"{n}.jpg")) for n in range(20)] == [content(n) for n in range(20)]
    with ThreadPoolExecutor(16) as pool:
        for _ in range(2):
            assert settle(tmp_path / "cache").stopped is None
            numbers = random.sample(range(60), 60)
            found = pool.map(lambda number: bytes(store.read(f"{number}.jpg")), numbers)
            assert list(found) == [content(number) for number in numbers]
    assert len(kept_files(tmp_path / "cache")) == 20
    for number in range(60):
        (source / f"{number}.jpg").unlink()
    assert all(bytes(store.read(f"{n}.jpg")) == content(n) for n in range(20))
    with pytest.raises(ReadFailure):
        store.read("30.jpg")


def test_changed_data_is_not_served_from_old_files(source: Path, tmp_path: Path) -> None:
    store = cached(source, tmp_path / "cache")
    store.read("0.jpg", 0, OBJECT_BYTES, whole=True)
    settle(tmp_path / "cache")
    (source / "0.jpg").write_bytes(b"new and shorter")
    assert bytes(store.read("0.jpg", 0, 15, whole=True)) == b"new and shorter"
    # The old file is replaced, and no longer counts.
    assert settle(tmp_path / "cache").totals() == (1, 15)
    other = tmp_path / "other"
    other.mkdir()
    (other / "0.jpg").write_bytes(b"another store")
    assert bytes(cached(other, tmp_path / "cache").read("0.jpg")) == b"another store"


def test_the_default_limit_is_a_share_of_the_disk_and_includes_what_is_cached(source: Path, tmp_path: Path) -> None:
    store = cached(source, tmp_path / "cache")
    for number in range(OBJECTS):
        store.read(f"{number}.jpg")
    before = settle(tmp_path / "cache")
    before.close()
    after = settle(tmp_path / "cache")
    assert 0 < before.limit_bytes <= 0.91 * shutil.disk_usage(tmp_path).free
    free = shutil.disk_usage(tmp_path).free
    assert after.limit_bytes == pytest.approx(0.9 * (free + OBJECTS * OBJECT_BYTES), abs=1e9)


READ_ALL = """
import random, sys
from stoker.io.cache import CachedStore, cache_place
from stoker.io.stores import LocalStore
source, cache, limit, seed, objects, size = sys.argv[1:3] + [int(a) for a in sys.argv[3:]]
print("ready", flush=True)
sys.stdin.readline()
place = cache_place(cache, limit)
store = CachedStore(LocalStore(source), place)
wrong = 0
for lap in range(5):
    order = list(range(objects))
    random.Random(seed * 10 + lap).shuffle(order)
    for number in order:
        wrong += bytes(store.read(f"{number}.jpg")) != random.Random(number).randbytes(size)
    place.open().flush()
    if lap == 0:
        print("under way", flush=True)
print(wrong, place.open().stopped)
"""


def test_four_processes_share_it_and_survive_the_death_of_one(source: Path, tmp_path: Path) -> None:
    cache, limit = tmp_path / "cache", int(OBJECTS * OBJECT_BYTES * 0.6)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READ_ALL, source, cache, *map(str, (limit, seed, OBJECTS, OBJECT_BYTES))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for seed in range(4)
    ]  # fmt: skip
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:
        reader.stdin.write("go\n")
        reader.stdin.flush()
    victim, *others = readers
    assert victim.stdout.readline() == "under way\n"
    victim.send_signal(signal.SIGKILL)
    assert [reader.communicate()[0].splitlines()[-1] for reader in others] == ["0 None"] * 3
    victim.communicate()
    assert victim.returncode == -signal.SIGKILL
    store = cached(source, cache, limit)
    files, listed = settle(cache).totals()
    assert 0.8 * limit < listed <= limit
    assert all(bytes(store.read(f"{number}.jpg")) == content(number) for number in range(OBJECTS))
    # The killed process may have left a few files that are not listed.
    assert len(kept_files(cache)) >= files


FILL_DISK = """
import resource, subprocess, sys
from pathlib import Path
from stoker.io.cache import CachedStore, cache_place
from stoker.io.stores import LocalStore
source, cache, how = sys.argv[1:]
Path(cache).mkdir()
if how == "full":
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", cache], check=True)
place = cache_place(cache, 10**9)
store = CachedStore(LocalStore(source), place)
if how == "limited":
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
right = sum(bytes(store.read(f"{n}.jpg")) == (Path(source) / f"{n}.jpg").read_bytes() for n in list(range(60)) * 2)
place.open().flush()
print(right, place.open().stopped)
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
    assert ("are free on its disk" if how == "full" else "cannot be written to") in note


def test_a_folder_that_cannot_be_created_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used as a cache"):
        cached(source, tmp_path / "file" / "cache")
