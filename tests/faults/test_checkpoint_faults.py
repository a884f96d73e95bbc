"""Kills, full disks, flipped bits and hostile files: a checkpoint is either whole or refused."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from stoker.train.checkpoint.folder import Checkpoints
from stoker.train.checkpoint.format import (
    HEADER_HASH,
    NO_HASH,
    OPENING,
    TENSORS_HASH,
    CheckpointCorrupt,
    CheckpointForeign,
    read_checkpoint,
    write_checkpoint,
)
from stoker.train.checkpoint.saver import BackgroundWriter
from tests.conftest import PROJECT
from tests.support.training_state import same, training_state
from tests.support.waiting import DEADLINE_S

POINTS = {
    "last": ["before temp", "half of temp", "after temp", "during rotation", "before rename", "after rename",
             "after rotation"],
    "best": ["before temp", "half of temp", "after temp", "before rename", "after rename", "before prune",
             "during prune"],
}  # fmt: skip

# One process imports torch and forks for every kill, which keeps this fast; the child is really killed by SIGKILL.
KILLED = """# warm
import os, random, signal, sys, time
from contextlib import closing
from pathlib import Path
from stoker.train.checkpoint.saver import BackgroundWriter
from stoker.train.checkpoint.folder import Checkpoints
from tests.support.training_state import training_state
from tests.support.waiting import wait_until

root, kind, points = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
old, new = training_state(1), training_state(2)

def save(folder, state, epoch):
    if kind == "last":
        return folder.save_last(state)
    return folder.save_best(state, epoch, 0.5)

def in_child(work):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    return child

for number, point in enumerate(points):
    place = root / str(number)
    save(Checkpoints(place, keep_best=1), old, 1)
    def stop(reached):
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)
    child = in_child(lambda: save(Checkpoints(place, keep_best=1, stop=stop), new, 2))
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL, point

def inode(path):
    try:
        return path.stat().st_ino
    except FileNotFoundError:  # between two renames
        return None

def forever():
    with closing(BackgroundWriter(Checkpoints(root / "any"))) as saver:
        for step in range(10**9):
            saver.save((old, new)[step % 2], best=(step, 0.1))

rounds = 5 if kind == "last" else 0
Checkpoints(root / "any").save_last(old)
for _ in range(rounds):
    before = inode(root / "any" / "last.ckpt")
    child = in_child(forever)
    wait_until(lambda: inode(root / "any" / "last.ckpt") not in (before, None))
    time.sleep(random.uniform(0, 0.2))  # any moment of the saves that follow
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = Checkpoints(root / "any").latest()
    assert found.path.name == "last.ckpt" and not found.notes, found.notes
assert not rounds or Checkpoints(root / "any").best(), "no save was ever reached"
"""


@pytest.mark.parametrize("kind", ["last", pytest.param("best", marks=pytest.mark.release)])
def test_a_kill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path, kind: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), kind, *POINTS[kind]],
        cwd=PROJECT, capture_output=True, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    old, new = training_state(1), training_state(2)
    for number, point in enumerate(POINTS[kind]):
        folder = Checkpoints(tmp_path / str(number), keep_best=1)
        found = folder.latest()
        assert found is not None, point
        # Until the rename the old checkpoint counts; after it, the new one.
        expected = new if POINTS[kind].index("after rename") <= number else old
        assert same(plain(found.state), plain(expected)), point
        # The next save works as if nothing had happened and removes the leftovers.
        assert folder.save_last(new).failure is None
        assert list(folder.folder.glob(".*")) == [], point


@pytest.mark.parametrize("kind", ["last", "best"])
def test_the_kills_cover_every_point_of_a_save(tmp_path: Path, kind: str) -> None:
    passed: list[str] = []
    folder = Checkpoints(tmp_path, keep_best=1, stop=passed.append)
    for epoch in range(2):
        passed.clear()
        if kind == "last":
            folder.save_last(training_state(1))
        else:
            folder.save_best(training_state(1), epoch, 0.5)
    assert passed == POINTS[kind]


def test_a_full_disk_keeps_the_old_checkpoint_and_the_next_save_retries(disk_of: Callable[[str], Path]) -> None:
    small_disk = disk_of("4m")
    folder = Checkpoints(small_disk, keep_best=2)
    mega = {"step": 1, "weight": torch.ones(250_000)}
    assert folder.save_last(mega).failure is None
    (small_disk / "somebody").write_bytes(bytes(2_500_000))
    for failed in (folder.save_last(mega | {"step": 2}), folder.save_best(mega, 1, 0.5)):
        assert failed is not None
        assert "No space left on device" in (failed.failure or "")
    with closing(BackgroundWriter(folder)) as saver:
        saver.save(mega | {"step": 3})
        assert [outcome.failure is None for outcome in saver.wait()] == [False]
        assert sorted(path.name for path in small_disk.iterdir()) == ["last.ckpt", "somebody"]
        assert read_checkpoint(folder.last)["step"] == 1
        (small_disk / "somebody").unlink()
        saver.save(mega | {"step": 4})
        assert [outcome.failure is None for outcome in saver.wait()] == [True]
    assert [read_checkpoint(path)["step"] for path in (folder.last, folder.previous)] == [4, 1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "last.ckpt"
    state = {"config": {"lr": 0.1}, "f": torch.randn(9), "b": torch.ones(5, dtype=torch.bool), "n": torch.tensor(3)}
    write_checkpoint(path, state)
    return path.read_bytes()


def test_a_flipped_bit_anywhere_in_the_file_is_detected(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "last.ckpt"
    for position in range(len(whole)):
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(CheckpointCorrupt, match=r"last\.ckpt"):
            read_checkpoint(path)


def test_a_file_truncated_or_extended_anywhere_is_detected(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "last.ckpt"
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointCorrupt, match=r"last\.ckpt"):
            read_checkpoint(path)
    for more in (b"\0", whole):
        path.write_bytes(whole + more)
        with pytest.raises(CheckpointCorrupt, match="must have"):
            read_checkpoint(path)
    # What a machine crash can leave: the right size, with zeros where blocks never reached the disk.
    path.write_bytes(whole[:-20] + bytes(20))
    with pytest.raises(CheckpointCorrupt, match="hash mismatch"):
        read_checkpoint(path)


class Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_a_pickle_or_a_zip_under_our_name_is_refused_and_not_run(tmp_path: Path) -> None:
    path, proof = tmp_path / "last.ckpt", tmp_path / "executed"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps({"model": Payload(proof)}, protocol))
        with pytest.raises(CheckpointForeign, match="is a pickle" if protocol > 1 else "is not a checkpoint"):
            read_checkpoint(path)
    torch.save({"model": Payload(proof)}, path)
    with pytest.raises(CheckpointCorrupt, match="is a zip file"):
        Checkpoints(tmp_path).latest()
    assert not proof.exists()


@pytest.mark.parametrize("length", [2**63 - 1, 2**64 - 1, 2**40, 99_000_000, 0, 7])
def test_a_huge_or_tiny_header_length_is_refused_without_allocating(tmp_path: Path, length: int) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(length.to_bytes(8, "little") + OPENING + bytes(100))
    tracemalloc.start()
    with pytest.raises(CheckpointCorrupt):
        read_checkpoint(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def forged(state: str, table: dict[str, Any], data: bytes) -> bytes:
    """A malicious file with correct hashes."""
    metadata = {
        "format": "stoker checkpoint 1",
        "header_xxh3_128": NO_HASH,
        "tensors_xxh3_128": NO_HASH,
        "state": state,
    }
    text = json.dumps({"__metadata__": metadata, **table}, separators=(",", ":")).encode()
    header = bytearray(len(text).to_bytes(8, "little") + text)
    header[TENSORS_HASH] = xxhash.xxh3_128(data).hexdigest().encode()
    header[HEADER_HASH] = xxhash.xxh3_128(header).hexdigest().encode()
    return bytes(header) + data


def entry(shape: Any, start: Any, end: Any, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


PLAIN = '{"x":{"$tensor":"x"}}'
FORGERIES = {
    "overlapping": (PLAIN, {"x": entry([8], 0, 8), "y": entry([8], 4, 12)}, bytes(12)),
    "gap": (PLAIN, {"x": entry([4], 4, 8)}, bytes(8)),
    "beyond the end": (PLAIN, {"x": entry([2**40], 0, 2**40)}, bytes(8)),
    "negative": (PLAIN, {"x": entry([-2, -4], 0, 8)}, bytes(8)),
    "shape too large": (PLAIN, {"x": entry([16], 0, 8)}, bytes(8)),
    "overflowing shape": (PLAIN, {"x": entry([2**70, 0], 0, 0)}, b""),
    "many dimensions": (PLAIN, {"x": entry([1] * 100_000, 0, 1)}, b"\0"),
    "type that is none": (PLAIN, {"x": entry([8], 0, 8, "PICKLE")}, bytes(8)),
    "shape that is none": (PLAIN, {"x": entry("8", 0, 8)}, bytes(8)),
    "no table": (PLAIN, {"x": 3}, b""),
    "tensor that is not there": ('{"y":{"$tensor":"y"}}', {"x": entry([8], 0, 8)}, bytes(8)),
    "impossible strides": ('{"x":{"$tensor":"x","strides":[1000000000000]}}', {"x": entry([8], 0, 8)}, bytes(8)),
    "unknown mark": ('{"x":{"$object":"os.system"}}', {}, b""),
    "nested too deep": ('{"x":' + "[" * 100_000 + "]" * 100_000 + "}", {}, b""),
    "no dict": ("[]", {}, b""),
    "no JSON": ("{", {}, b""),
    "unhashable key": ('{"x":{"$dict":[[[],1]]}}', {}, b""),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_file_with_correct_hashes_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "last.ckpt"
    path.write_bytes(forged(PLAIN, {"x": entry([8], 0, 8)}, bytes(8)))
    assert torch.equal(read_checkpoint(path)["x"], torch.zeros(8, dtype=torch.uint8))
    path.write_bytes(forged(*FORGERIES[name]))
    with pytest.raises(CheckpointCorrupt, match=r"makes no sense|must have"):
        read_checkpoint(path)


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """The state as it is read back, with a plain dict in place of the model's OrderedDict."""
    return dict(state, model=dict(state["model"]))
