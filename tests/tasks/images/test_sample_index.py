"""The index as arrays: saved ones are memory-mapped when loaded, and damaged or foreign ones are refused."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stoker.core.files import SEAL, sealed
from stoker.tasks.images.layouts.sample_index import (
    IndexUnreadable,
    Location,
    SampleIndex,
    load_index,
    pack_names,
    save_index,
)

NAMES = [b"cat/1.jpg", b"cat/two words.JPEG", "dog/ü\n.png".encode(), b"dog/\xff\xfe.jpg"]


def folder_index() -> SampleIndex:
    return SampleIndex("/data/train", ("cat", "dog"), np.array([0, 0, 1, 1], np.int32), *pack_names(NAMES))


def packed_index() -> SampleIndex:
    return replace(
        folder_index(),
        shards=("a.tar", "b.tar"),
        shard_of=np.array([0, 1, 1, 0], np.int32),
        offsets=np.array([512, 512, 4096, 9216], np.int64),
        sizes=np.array([10, 20, 30, 40], np.int64),
        facts={"longest": 500},
    )


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save_index(packed_index(), tmp_path)
    loaded = load_index(tmp_path)
    assert [loaded.name(n).encode("utf-8", "surrogateescape") for n in range(4)] == NAMES
    assert loaded.labels.tolist() == [0, 0, 1, 1]
    assert loaded.location(2) == Location("b.tar", 4096, 30)
    assert (loaded.classes, loaded.facts, loaded.root) == (("cat", "dog"), {"longest": 500}, "/data/train")


def test_a_file_of_its_own_is_read_whole(tmp_path: Path) -> None:
    assert save_index(folder_index(), tmp_path).location(1) == Location("cat/two words.JPEG", 0, None)


def test_an_entry_takes_less_than_a_hundred_bytes(tmp_path: Path) -> None:
    names = [b"n%08d/n%08d_%05d.JPEG" % (n // 1300, n // 1300, n) for n in range(20_000)]
    labels = np.arange(20_000, dtype=np.int32) // 1300
    index = SampleIndex("/data", tuple(f"n{n:08d}" for n in range(16)), labels, *pack_names(names))
    save_index(replace(index, sizes=np.zeros(20_000, np.int64)), tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 100 * 20_000


def test_a_worker_receives_the_folder_and_not_the_arrays(tmp_path: Path) -> None:
    names = [b"cat/%06d.jpg" % n for n in range(10_000)]
    index = SampleIndex("/was/here", ("cat",), np.zeros(10_000, np.int32), *pack_names(names))
    moved = replace(save_index(index, tmp_path), root="/is/now/there")
    sent = pickle.dumps(moved)
    assert len(sent) < 1000
    received = pickle.loads(sent)
    assert received.root == "/is/now/there"
    assert received.name(9_999) == "cat/009999.jpg"


def test_an_unsaved_index_is_sent_whole() -> None:
    assert pickle.loads(pickle.dumps(folder_index())).name(1) == "cat/two words.JPEG"


def test_a_worker_refuses_an_index_that_has_been_replaced(tmp_path: Path) -> None:
    sent = pickle.dumps(save_index(folder_index(), tmp_path))
    save_index(replace(folder_index(), labels=np.array([0, 1, 1, 1], np.int32)), tmp_path)
    with pytest.raises(IndexUnreadable, match="replaced"):
        pickle.loads(sent)


def test_the_digest_covers_the_meaning_of_the_indices_and_not_the_location(tmp_path: Path) -> None:
    def digest(index: SampleIndex) -> str:
        return save_index(index, tmp_path).digest

    index = packed_index()
    assert digest(index) == digest(replace(index, root="/elsewhere", facts={}))
    changed = [
        replace(index, labels=np.array([0, 1, 1, 1], np.int32)),
        replace(index, classes=("cat", "cow")),
        replace(index, shards=("a.tar", "c.tar")),
        replace(index, offsets=index.offsets + 512),
        folder_index(),
    ]
    assert len({digest(index), *map(digest, changed)}) == 6


def saved(name: str, array: np.ndarray) -> Callable[[Path], object]:
    return lambda folder: np.save(folder / f"{name}.npy", array, allow_pickle=True)


def meta_with(**changes: object) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        meta = json.loads((folder / "index.json").read_text())
        del meta[SEAL]
        (folder / "index.json").write_text(json.dumps(sealed(meta | changes)))

    return change


DAMAGES: dict[str, Callable[[Path], object]] = {
    "other type": saved("labels", np.zeros(4, np.float64)),
    "label outside": saved("labels", np.array([0, 0, 1, 2], np.int32)),
    "negative shard": saved("shard_of", np.array([0, 0, 1, -1], np.int32)),
    "objects inside": saved("labels", np.array([{}] * 4, object)),
    "no meta": lambda folder: (folder / "index.json").unlink(),
    "half meta": lambda folder: os.truncate(folder / "index.json", 50),
    "foreign meta": lambda folder: (folder / "index.json").write_text("[1, 2]"),
    "next format": meta_with(format=2),
    "shard elsewhere": meta_with(shards=["a.tar", "x/../../../etc/passwd"]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_refused(tmp_path: Path, damage: str) -> None:
    save_index(packed_index(), tmp_path)
    DAMAGES[damage](tmp_path)
    with pytest.raises(IndexUnreadable, match="cannot be used"):
        load_index(tmp_path)
