"""Packing a split: the plan, the bytes, the index, bad files, and resuming after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import webdataset
from PIL import Image

from stoker.core.errors import UserError
from stoker.core.files import SEAL, sealed
from stoker.io.stores import open_store
from stoker.tasks.images.decode.crops import Decoding
from stoker.tasks.images.decode.headers import BadImage, Box
from stoker.tasks.images.layouts.opening import open_index
from stoker.tasks.images.layouts.sample_index import META, SampleIndex, checksum
from stoker.tasks.images.pack.make_shard import PackOptions
from stoker.tasks.images.pack.pack_folder import PackFolder, claim_packs, remove_pack
from stoker.tasks.images.pack.split_packing import ImagePackResult, pack_split, plan_shards
from stoker.tasks.packing import claim_destination
from tests.support.s3_server import S3Server

SMALL = PackOptions(shard_bytes=40_000)
PER_CLASS = 12


def make_images(root: Path, per_class: int = PER_CLASS) -> dict[str, bytes]:
    """Class folders with dots in their names and no two identical files."""
    random = np.random.default_rng(0)
    files = {}
    for class_name in ("a.b", "cat", "dog"):
        (root / class_name).mkdir(parents=True)
        for number in range(per_class):
            side = int(random.integers(20, 60))
            pixels = random.integers(0, 255, (side, side + number, 3), np.uint8)
            name = f"{class_name}/image.{number}.v2.JPEG"
            files[name] = simplejpeg.encode_jpeg(pixels, quality=80)
            (root / name).write_bytes(files[name])
    return files


def pack(
    source: Path | str,
    destination: Path,
    options: PackOptions = SMALL,
    *,
    workers: int = 1,
    max_bad_fraction: float = 0.5,
    progress: Callable[[int, int | None], None] = lambda _done, _total: None,
) -> ImagePackResult:
    with claim_packs(destination, [""], options.as_dict(), fresh=False) as (folder,):
        index = open_index(str(source), "", index_dir=destination.parent / "listings")
        return pack_split(index, folder, options, workers=workers, max_bad_fraction=max_bad_fraction, progress=progress)


def opened(folder: Path) -> SampleIndex:
    return open_index(str(folder), "", index_dir=folder.parent / "listings")


def content(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_images(tmp_path / "source")
    return tmp_path / "source"


def test_the_plan_assigns_every_sample_once_within_the_size() -> None:
    sizes = np.random.default_rng(1).integers(0, 5000, 1000)
    tasks = plan_shards(sizes, 100_000)
    dealt = np.concatenate([task.samples for task in tasks])
    assert sorted(dealt.tolist()) == list(range(1000))
    assert [task.first_key for task in tasks] == [0, *np.cumsum([len(task.samples) for task in tasks])[:-1].tolist()]
    assert all(task.planned_bytes <= 100_000 for task in tasks)
    assert all(task.planned_bytes > 90_000 for task in tasks[:-1])
    # One that is larger than a shard gets its own.
    tasks = plan_shards(np.array([10, 500_000, 10], np.int64), 100_000)
    assert [1] in [task.samples.tolist() for task in tasks]


def test_the_index_leads_to_the_original_bytes_in_the_order_of_the_source(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []
    result = pack(source, tmp_path / "packed", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (3 * PER_CLASS, 3 * PER_CLASS)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    before, index = opened(source), opened(tmp_path / "packed")
    assert result.samples == len(index) == len(before) == 3 * PER_CLASS
    assert index.classes == before.classes
    assert index.labels.tolist() == before.labels.tolist()
    store = open_store(index.root)
    for sample in range(len(index)):
        assert index.name(sample) == before.name(sample)
        assert bytes(store.read(*index.location(sample))) == (source / before.name(sample)).read_bytes()
    facts = index.facts["shards"]
    assert sum(fact["bytes"] for fact in facts) == result.bytes
    assert [fact["name"] for fact in facts] == list(index.shards)
    assert len(index.shards) >= 3
    assert len(set(index.labels[index.shard_of == 0].tolist())) == 3, "a shard contains mixed classes"


def test_webdataset_reads_every_sample(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed")
    index = opened(tmp_path / "packed")
    urls = [str(tmp_path / "packed" / shard) for shard in index.shards]
    read = [(sample["jpg"], int(sample["cls"])) for sample in webdataset.WebDataset(urls, shardshuffle=False)]
    expected = {((source / index.name(sample)).read_bytes(), int(index.labels[sample])) for sample in range(len(index))}
    assert len(read) == len(index)
    assert set(read) == expected


def test_packs_are_bit_identical_for_any_number_of_workers(source: Path, tmp_path: Path) -> None:
    options = PackOptions(SMALL.shard_bytes, longest=30)
    for workers in (1, 3):
        pack(source, tmp_path / f"packed-{workers}", options, workers=workers)
    assert content(tmp_path / "packed-1") == content(tmp_path / "packed-3")


def test_shrunk_images_have_the_requested_size_and_the_rest_keep_their_bytes(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed", PackOptions(40_000, longest=40))
    index = opened(tmp_path / "packed")
    store, kept = open_store(index.root), 0
    for sample in range(len(index)):
        data, original = bytes(store.read(*index.location(sample))), (source / index.name(sample)).read_bytes()
        sides = simplejpeg.decode_jpeg_header(original)[:2]
        assert max(simplejpeg.decode_jpeg_header(data)[:2]) == min(40, max(sides))
        kept += data == original
        assert (data == original) == (max(sides) <= 40)
    assert 0 < kept < len(index)


def test_a_pack_of_a_pack_contains_the_same_samples(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "once")
    pack(tmp_path / "once", tmp_path / "twice", PackOptions(shard_bytes=1_000_000))
    once, twice = opened(tmp_path / "once"), opened(tmp_path / "twice")
    assert len(twice.shards) == 1
    assert twice.name_bytes.tobytes() == once.name_bytes.tobytes()
    store = open_store(twice.root)
    assert all(
        bytes(store.read(*twice.location(n))) == (source / twice.name(n)).read_bytes() for n in range(len(twice))
    )


def test_objects_of_a_store_are_packed_into_the_same_bytes_as_files(s3: S3Server, source: Path, tmp_path: Path) -> None:
    spoil(source)
    (source / "a.b" / "dangling.png").unlink()
    for path in source.rglob("*"):
        if path.is_file():
            s3.put(f"packing/{path.relative_to(source)}", path.read_bytes())
    (source / "dog" / "folder.jpg").rmdir()  # a store has no folders
    pack(source, tmp_path / "from-files")
    pack("s3://bucket/packing", tmp_path / "from-store", workers=2)
    assert len(skipped_in(tmp_path / "from-store")) == 3
    assert content(tmp_path / "from-files") == content(tmp_path / "from-store")


def _flip(path: Path) -> None:
    changed = bytearray(path.read_bytes())
    changed[1000] ^= 255
    path.write_bytes(changed)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: _flip(folder / "shard-000001.tar"),
        lambda folder: (folder / "shard-000001.tar").unlink(),
        lambda folder: (folder / ".pack" / "shard-000001.json").unlink(),
        lambda folder: (folder / ".pack" / "shard-000001.json").write_text("{"),
        lambda folder: (folder / ".shard-000001.tar.tmp").write_bytes(b"half"),
        lambda folder: (folder / "index.json").unlink(),
    ],
    ids=["flipped", "missing", "no-record", "torn-record", "left-over", "no-index"],
)
def test_only_what_is_damaged_is_written_again(source: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    whole = pack(source, tmp_path / "packed")
    before = content(tmp_path / "packed")
    damage(tmp_path / "packed")
    assert content(tmp_path / "packed") != before
    again = pack(source, tmp_path / "packed")
    assert again.kept_shards >= whole.shards - 1
    assert content(tmp_path / "packed") == before


def spoil(source: Path) -> set[str]:
    """Five files that are not images, each for a different reason."""
    (source / "cat" / "empty.jpg").write_bytes(b"")
    (source / "cat" / "page.jpg").write_bytes(b"<html>" * 20)
    (source / "dog" / "cut.jpg").write_bytes((source / "dog" / "image.0.v2.JPEG").read_bytes()[:50])
    (source / "dog" / "folder.jpg").mkdir()
    (source / "a.b" / "dangling.png").symlink_to("nowhere")
    return {"cat/empty.jpg", "cat/page.jpg", "dog/cut.jpg", "dog/folder.jpg", "a.b/dangling.png"}


def skipped_in(folder: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]
    return {line["name"]: line["reason"] for line in lines}


def test_bad_files_are_left_out_and_named_with_the_reason(source: Path, tmp_path: Path) -> None:
    bad = spoil(source)
    result = pack(source, tmp_path / "packed", workers=2)
    assert (result.samples, result.skipped) == (3 * PER_CLASS, 5)
    named = skipped_in(tmp_path / "packed")
    assert set(named) == bad
    assert named["cat/empty.jpg"] == "empty file"
    assert named["dog/folder.jpg"] == "is a directory"
    assert named["a.b/dangling.png"].startswith("missing")
    index = opened(tmp_path / "packed")
    assert not bad & {index.name(sample) for sample in range(len(index))}
    pack(source, tmp_path / "again")
    assert content(tmp_path / "packed") == content(tmp_path / "again")


def is_read_in_training(data: bytes) -> bool:
    decoding, out = Decoding("simplejpeg"), np.empty((16, 16, 3), np.uint8)
    try:
        header = decoding.read_header(data)
        decoding.crop_into(data, header, Box(0, 0, header.height, header.width), out)
    except BadImage:
        return False
    return True


@pytest.mark.parametrize("kind", ["jpeg", "png", "gif", "bmp", "tiff", "webp"])
def test_a_truncated_file_is_left_out_as_in_training(source: Path, tmp_path: Path, kind: str) -> None:
    pixels = np.random.default_rng(2).integers(0, 255, (60, 80, 3), np.uint8)
    file = source / "cat" / f"cut.{kind}"
    Image.fromarray(pixels).save(file, kind)
    whole, kept = file.read_bytes(), []
    for size in (len(whole), len(whole) - 3, len(whole) // 2):
        file.write_bytes(whole[:size])
        kept.append(pack(source, tmp_path / f"packed{size}").skipped == 0)
        assert kept[-1] == is_read_in_training(whole[:size])
    assert (kept[0], kept[-1]) == (True, False)


def test_too_many_bad_files_stop_before_the_index_and_a_higher_limit_resumes(source: Path, tmp_path: Path) -> None:
    bad = spoil(source)
    one_shard = PackOptions(shard_bytes=10_000_000)
    with pytest.raises(UserError) as stopped:
        pack(source, tmp_path / "packed", one_shard, max_bad_fraction=0.1)
    assert stopped.value.name == "too-many-bad-images"
    assert all(name in stopped.value.seen for name in bad)
    assert set(skipped_in(tmp_path / "packed")) == bad
    assert not (tmp_path / "packed" / "index.json").exists()
    assert pack(source, tmp_path / "packed", one_shard, max_bad_fraction=0.2).kept_shards == 1


def test_a_repaired_file_is_included(source: Path, tmp_path: Path) -> None:
    repaired = source / "cat" / "image.3.v2.JPEG"
    whole = repaired.read_bytes()
    repaired.write_bytes(b"?" * len(whole))
    assert pack(source, tmp_path / "packed").skipped == 1
    repaired.write_bytes(whole)
    again = pack(source, tmp_path / "packed")
    assert (again.skipped, again.kept_shards) == (0, again.shards - 1)
    assert skipped_in(tmp_path / "packed") == {}
    pack(source, tmp_path / "at-once")
    assert content(tmp_path / "packed") == content(tmp_path / "at-once")


def refusal(call: Callable[[], Any]) -> UserError:
    with pytest.raises(UserError) as refused:
        call()
    return refused.value


def test_a_different_source_is_refused(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed")
    before = content(tmp_path / "packed")
    (source / "cat" / "one-more.jpg").write_bytes((source / "cat" / "image.0.v2.JPEG").read_bytes())
    assert refusal(lambda: pack(source, tmp_path / "packed")).name == "pack-source-differs"
    assert content(tmp_path / "packed") == before


def test_a_pack_of_an_earlier_version_that_indexed_the_rows_of_images_still_works(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed")
    before, packed = opened(tmp_path / "packed"), tmp_path / "packed"
    rows = {"layout_bytes": np.zeros(90, np.uint8), "layout_ends": np.arange(len(before), dtype=np.int64)}
    meta = json.loads((packed / META).read_text())
    del meta[SEAL]
    meta["arrays"] += list(rows)
    meta["facts"]["restart_rows"] = "ffd8 ffdd"
    for name, array in rows.items():
        np.save(packed / f"{name}.npy", array)
        meta["xxh3"][name] = checksum(array)
    (packed / META).write_text(json.dumps(sealed(meta)))
    for record in (packed / ".pack").glob("shard-*.json"):
        record.write_text(json.dumps(json.loads(record.read_text()) | {"layouts": [], "template": None}))

    assert [opened(packed).location(n) for n in range(len(before))] == [before.location(n) for n in range(len(before))]
    again = pack(source, packed)
    assert again.kept_shards == again.shards
    remove_pack(PackFolder(packed, ""))
    assert set(content(packed)) == {".pack/lock"}


def test_removing_a_pack_leaves_what_others_put_there(source: Path, tmp_path: Path) -> None:
    pack(source, tmp_path / "packed")
    for name in ("notes.txt", "shard-list.txt", "weights.npy"):
        (tmp_path / "packed" / name).write_text("mine")
    remove_pack(PackFolder(tmp_path / "packed", ""))
    assert set(content(tmp_path / "packed")) == {"notes.txt", "shard-list.txt", "weights.npy", ".pack/lock"}


def test_foreign_shards_are_not_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed" / "shard-000000.tar").write_bytes(b"theirs")
    remove_pack(PackFolder(tmp_path / "packed", ""))
    assert refusal(lambda: pack(source, tmp_path / "packed")).name == "destination-not-empty"
    assert (tmp_path / "packed" / "shard-000000.tar").read_bytes() == b"theirs"


def test_a_disk_that_is_too_small_is_refused_before_the_first_shard(source: Path, tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    with (source / "cat" / "huge.jpg").open("wb") as stream:
        # A sparse file takes up no space; far more than is free, because other programs may free some meanwhile.
        stream.truncate(2 * status.f_frsize * status.f_blocks)
    assert refusal(lambda: pack(source, tmp_path / "packed")).name == "disk-too-small"
    assert not list((tmp_path / "packed").glob("*.tar"))


def test_two_packs_at_the_same_time_are_refused(source: Path, tmp_path: Path) -> None:
    with claim_destination(tmp_path / "packed"):
        assert refusal(lambda: pack(source, tmp_path / "packed")).name == "pack-busy"
