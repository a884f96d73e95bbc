"""Loading from a pack made with --restart-rows: the batches of the same pack read whole, from fewer bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import obstore
import pytest
import webdataset

from stoker.data.images.pack.folder import PackFolder, check_options, remove_pack
from stoker.data.images.pack.packing import PackOptions
from stoker.data.images.row_index import open_row_index
from stoker.data.images.sample_index import META, checksum, load_index
from stoker.errors import UserError
from stoker.files import SEAL, sealed
from tests.data.images.test_packing import pack
from tests.data.test_loader import Entry, entries, loader_for
from tests.support.images import encode, noise
from tests.support.s3_server import S3Server

SAMPLES = 23
TRAIN = ("crop_scale=[0.08,0.4]",)
"""Small crops, so that most rows are not needed."""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of several shards, whose images have 6 to 20 rows of units."""
    root, random = tmp_path_factory.mktemp("rows"), np.random.default_rng(5)
    for number in range(SAMPLES):
        place = root / "source" / f"class{number % 3}" / f"{number:02d}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        width, height = random.integers(90, 330, 2).tolist()
        place.write_bytes(encode(noise(width, height, seed=number), "PNG"))
    (root / "packed").mkdir()
    pack(root / "source", root / "packed" / "train", PackOptions(30_000, quality=90, restart_rows=True))
    assert len(load_index(root / "packed" / "train").shards) > 2
    return root / "packed"


@pytest.fixture(scope="module")
def without_rows(packed: Path) -> Path:
    """The same shards, with the index that an older version would have written."""
    copy = packed.parent / "without-rows"
    shutil.copytree(packed, copy)
    meta = json.loads((copy / "train" / META).read_text())
    meta["arrays"] = [name for name in meta["arrays"] if not name.startswith("layout")]
    del meta["facts"]["restart_rows"]
    del meta[SEAL]
    (copy / "train" / META).write_text(json.dumps(sealed(meta)))
    return copy


def epochs(
    data: Path | str, *overrides: str, batch: int = 5, workers: int = 0, count: int = 2
) -> tuple[list[Entry], int]:
    """The samples of some epochs, and the bytes that were read for them."""
    loader = loader_for(data, *TRAIN, f"batch_size={batch}", *overrides, workers=workers)  # type: ignore[arg-type]
    found, read = [], 0
    try:
        for epoch in range(count):
            for made in loader.epoch(epoch):
                found += entries(made)
                read += made.cost.bytes_read
    finally:
        loader.close()
    return found, read


@pytest.mark.parametrize("mode", ["fast", "faithful", "draft"])
def test_the_batches_are_those_of_the_pack_read_whole(packed: Path, without_rows: Path, mode: str) -> None:
    wanted, all_bytes = epochs(without_rows, f"decode_mode={mode}")
    found, some_bytes = epochs(packed, f"decode_mode={mode}", workers=2)
    assert found == wanted
    assert len(wanted) == 2 * (SAMPLES // 5) * 5
    assert some_bytes < 0.75 * all_bytes


def test_worker_processes_read_the_same(packed: Path, without_rows: Path) -> None:
    assert epochs(packed, "loader=process", workers=2, count=1)[0] == epochs(without_rows, count=1)[0]


def test_repeats_of_a_sample_share_one_read(packed: Path, without_rows: Path) -> None:
    wanted, all_bytes = epochs(without_rows, "repeated_augmentation=3", batch=21)
    found, some_bytes = epochs(packed, "repeated_augmentation=3", batch=21, workers=1)
    assert found == wanted
    assert some_bytes < all_bytes
    sizes = load_index(packed / "train").sizes
    assert sizes is not None
    assert all_bytes <= 2 * sizes.sum()  # each sample once an epoch, not three times


def test_validation_and_a_subset_read_the_same(packed: Path, without_rows: Path) -> None:
    for options in (("val_fraction=0.4",), ("subset_classes=2", "subset_train_per_class=5")):
        for split in ("val", "train") if options[0].startswith("val") else ("train",):
            streams = []
            for data in (packed, without_rows):
                loader = loader_for(data, *TRAIN, "batch_size=5", *options, split=split)
                streams.append([entry for batch in loader.epoch(0) for entry in entries(batch)])
                loader.close()
            assert streams[0] == streams[1]
            assert streams[0]


def test_an_object_store_is_asked_for_the_rows_and_a_cache_keeps_whole_samples(
    packed: Path, without_rows: Path, tmp_path: Path, s3: S3Server
) -> None:
    url = s3.put_folder(packed, "restart-rows")
    wanted, all_bytes = epochs(without_rows)
    found, some_bytes = epochs(url, f"index_dir={tmp_path}", workers=2)
    assert found == wanted
    assert some_bytes < 0.75 * all_bytes
    cached = (f"index_dir={tmp_path}", f"cache_dir={tmp_path / 'cache'}")
    assert len(epochs(url, *cached, batch=1, workers=2, count=1)[0]) == SAMPLES
    for shard in load_index(packed / "train").shards:
        nothing = bytes((packed / "train" / shard).stat().st_size)  # a missing shard would be noticed at once
        obstore.put(s3.client(), f"restart-rows/train/{shard}", nothing)
    # Also other crops of the same samples.
    assert epochs(url, *cached, batch=1)[0] == epochs(without_rows, batch=1)[0]


def test_webdataset_reads_the_shards(packed: Path) -> None:
    index = load_index(packed / "train")
    urls = [str(packed / "train" / shard) for shard in index.shards]
    read = [sample["jpg"] for sample in webdataset.WebDataset(urls, shardshuffle=False).decode("rgb8")]
    rows = open_row_index(index)
    assert rows is not None
    sizes = {(layout.height, layout.width, 3) for layout in map(rows.layout, range(SAMPLES)) if layout is not None}
    assert len(read) == SAMPLES
    assert {picture.shape for picture in read} == sizes


def test_a_pack_with_rows_is_not_continued_without_and_removed_whole(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed / "train", tmp_path / "train")
    folder = PackFolder(tmp_path / "train", "")
    with pytest.raises(UserError) as refused:
        check_options(folder, PackOptions(30_000, quality=90).as_dict())
    assert "was packed with --shard-size 30000B --quality 90 --restart-rows; this" in refused.value.seen
    check_options(folder, PackOptions(30_000, quality=90, restart_rows=True).as_dict())
    remove_pack(folder)
    assert {path.name for path in (tmp_path / "train").iterdir()} == {".pack"}


def test_damaged_shards_are_quarantined_and_the_run_goes_on(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "packed")
    index, random = load_index(packed / "train"), np.random.default_rng(1)
    for sample in range(0, SAMPLES, 2):
        path, offset, size = index.location(sample)
        shard = bytearray((tmp_path / "packed" / "train" / path).read_bytes())
        assert size is not None
        if sample % 4:
            for at in random.integers(offset, offset + size, 200):
                shard[at] = 0xFF if at % 2 else 0xD3
        else:
            shard[offset : offset + size] = bytes(size)
        (tmp_path / "packed" / "train" / path).write_bytes(bytes(shard))
    file = tmp_path / "quarantine.jsonl"
    loader = loader_for(tmp_path / "packed", "batch_size=1", "max_bad_fraction=1", workers=2, quarantine=file)
    assert len([entry for batch in loader.epoch(0) for entry in entries(batch)]) == SAMPLES
    loader.close()
    bad = [json.loads(line) for line in file.read_text().splitlines()]
    damaged, emptied = ({index.name(sample) for sample in range(0, SAMPLES, step)} for step in (2, 4))
    assert emptied <= {line["name"] for line in bad} <= damaged
    assert any("restart marker" in line["reason"] for line in bad)


def test_rows_that_do_not_fit_their_sample_are_not_used(packed: Path, without_rows: Path, tmp_path: Path) -> None:
    """A damaged record makes its sample be read whole; one that only fits by its sum makes a bad sample."""
    shutil.copytree(packed, tmp_path / "packed")
    file = tmp_path / "packed" / "train" / "layout_bytes.npy"
    records = np.load(file)
    records[:] = np.random.default_rng(2).integers(0, 256, len(records))
    np.save(file, records)
    with pytest.raises(UserError, match="is not what stoker pack wrote"):
        epochs(tmp_path / "packed")
    # As a faulty program would have written it: with checksums that agree.
    place = tmp_path / "packed" / "train" / META
    meta = json.loads(place.read_text())
    del meta[SEAL]
    meta["xxh3"]["layout_bytes"] = checksum(records)
    place.write_text(json.dumps(sealed(meta)))
    assert epochs(tmp_path / "packed") == epochs(without_rows)


def test_an_index_with_a_part_of_the_records_is_refused(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "packed")
    file = tmp_path / "packed" / "train" / "layout_bytes.npy"
    np.save(file, np.load(file)[:-5])
    with pytest.raises(UserError, match="layout_bytes is truncated"):
        loader_for(tmp_path / "packed", *TRAIN)
