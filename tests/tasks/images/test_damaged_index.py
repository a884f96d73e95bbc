"""A damaged index is noticed when it is opened: a kept one is made anew and a pack is refused, before a wrong label
is trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import obstore
import pytest

from stoker.core.errors import UserError
from stoker.tasks.images.layouts.opening import open_index
from stoker.tasks.images.layouts.sample_index import SampleIndex
from tests.support.s3_server import S3Server
from tests.tasks.images.test_index import Opening, age
from tests.tasks.images.test_packing import make_images, pack

Damage = Callable[[Path], object]


def changed_array(name: str, change: Callable[[np.ndarray], object]) -> Damage:
    """Changes an array of an index in place, as a bad block or somebody's script would."""

    def damage(folder: Path) -> None:
        array = np.load(folder / f"{name}.npy", mmap_mode="r+")
        change(array)
        array.flush()

    return damage


def swap(array: np.ndarray) -> None:
    array[[0, 1]] = array[[1, 0]]


def flip(array: np.ndarray) -> None:
    array[:] = array.max() - array


def truncate(folder: Path) -> None:
    file = folder / "labels.npy"
    file.write_bytes(file.read_bytes()[:-4])


def reorder_classes(folder: Path) -> None:
    meta = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(meta | {"classes": meta["classes"][::-1]}))


DAMAGES: dict[str, Damage] = {
    "labels": changed_array("labels", flip),
    "names": changed_array("name_bytes", swap),
    "ends of names": changed_array("name_ends", lambda ends: ends.__setitem__(0, ends[0] + 1)),
    "truncated": truncate,
    "removed": lambda folder: (folder / "labels.npy").unlink(),
    "classes": reorder_classes,
}
OF_A_PACK: dict[str, Damage] = DAMAGES | {
    "offsets": changed_array("offsets", swap),
    "sizes": changed_array("sizes", swap),
    "shards": changed_array("shard_of", flip),
}


def as_before_checksums(folder: Path) -> None:
    """An index as earlier versions saved it: with a digest over everything, and no other checksum."""
    meta = json.loads((folder / "index.json").read_text())
    del meta["xxh3"], meta["seal"]
    (folder / "index.json").write_text(json.dumps(meta))


def content(index: SampleIndex) -> tuple[list[int], list[str]]:
    """Labels and names, copied: the arrays are mapped, and change with their files."""
    return index.labels.tolist(), [index.name(number) for number in range(len(index))]


@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_a_damaged_kept_index_is_made_anew_and_that_is_said_once(tmp_path: Path, old: bool) -> None:
    make_images(tmp_path / "data" / "train")
    age(tmp_path / "data")
    opening = Opening(tmp_path / "data")
    good = content(opening.index)
    for name, damage in DAMAGES.items():
        kept = Opening(tmp_path / "data").index
        assert kept.folder is not None
        if old:
            as_before_checksums(kept.folder)
        damage(kept.folder)
        again = Opening(tmp_path / "data")
        assert content(again.index) == good, name
        assert "is damaged" in " ".join(again.said), name
        assert again.listed == 3, name
        assert Opening(tmp_path / "data").said == opening.said, name


def test_a_changed_listing_is_not_believed(tmp_path: Path) -> None:
    make_images(tmp_path / "data" / "train")
    age(tmp_path / "data")
    first = Opening(tmp_path / "data").index
    good = content(first)
    assert first.folder is not None
    listing = first.folder.parent / "listing.json"
    before = json.loads(listing.read_text())
    # The index of other samples under the name of this one, as a careless restore would leave it.
    make_images(tmp_path / "other" / "train", per_class=2)
    other = Opening(tmp_path / "other").index
    assert other.folder is not None
    for file in other.folder.iterdir():
        (first.folder / file.name).write_bytes(file.read_bytes())
    again = Opening(tmp_path / "data")
    assert content(again.index) == good
    assert "the index of other samples" in " ".join(again.said)
    listing.write_text(json.dumps(before | {"made_ns": 1}))
    again = Opening(tmp_path / "data")
    assert "listing.json changed" in " ".join(again.said)
    assert again.listed == 3


@pytest.fixture(scope="module")
def a_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source` and its pack, `packed`; packing takes seconds."""
    folder = tmp_path_factory.mktemp("pack")
    make_images(folder / "source")
    pack(folder / "source", folder / "packed")
    return folder


def copy_of(a_pack: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(a_pack, tmp_path / "copy"))


def test_a_damaged_pack_is_refused(a_pack: Path, tmp_path: Path) -> None:
    packed = copy_of(a_pack, tmp_path) / "packed"
    good = {file: file.read_bytes() for file in packed.iterdir() if file.suffix in (".json", ".npy")}
    for old in (False, True):
        for name, damage in OF_A_PACK.items():
            if old:
                as_before_checksums(packed)
            damage(packed)
            with pytest.raises(UserError) as caught:
                open_index(str(packed), "", index_dir=tmp_path / "kept")
            assert caught.value.name == "pack-damaged", name
            for file, whole in good.items():
                file.unlink(missing_ok=True)  # the arrays are mapped
                file.write_bytes(whole)
    as_before_checksums(packed)
    assert len(open_index(str(packed), "", index_dir=tmp_path / "kept")) == 36


def test_packing_again_repairs_the_index_and_believes_no_changed_record(a_pack: Path, tmp_path: Path) -> None:
    folder = copy_of(a_pack, tmp_path)
    packed = folder / "packed"
    good = {name: (packed / f"{name}.npy").read_bytes() for name in ("labels", "offsets", "sizes")}
    OF_A_PACK["offsets"](packed)
    for number, column in enumerate(("samples", "offsets", "labels")):
        file = packed / ".pack" / f"shard-{number:06d}.json"
        record = json.loads(file.read_text())
        values = record[column]
        other = next(place for place, value in enumerate(values) if value != values[0])
        values[0], values[other] = values[other], values[0]
        file.write_text(json.dumps(record))
    result = pack(folder / "source", packed)
    assert result.kept_shards == result.shards - 3
    assert {name: (packed / f"{name}.npy").read_bytes() for name in good} == good
    assert len(open_index(str(packed), "", index_dir=tmp_path / "kept")) == 36


def test_shards_that_were_cut_exchanged_or_removed_are_refused(tmp_path: Path, s3: S3Server) -> None:
    folder = tmp_path / "packed"
    # Files of equal size make shards of equal size: only their content tells them apart.
    for number in range(40):
        file = tmp_path / "source" / "ab"[number % 2] / f"{number}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"BM" + (54 + 12).to_bytes(4, "little") + bytes(4) + (54).to_bytes(4, "little")
                         + (40).to_bytes(4, "little") + (2).to_bytes(4, "little") * 2 + b"\1\0\x18\0"
                         + bytes(24) + bytes([number] * 16))  # fmt: skip
    pack(tmp_path / "source", folder)
    first, second = folder / "shard-000000.tar", folder / "shard-000001.tar"
    assert first.stat().st_size == second.stat().st_size
    whole = [first.read_bytes(), second.read_bytes()]
    url = s3.put_folder(folder, "damaged-pack")
    assert len(open_index(url, "", index_dir=tmp_path / "kept")) > 0
    for content, said in ((whole[1][:-512], "shard-000001.tar has"), (None, "shard-000001.tar is missing")):
        obstore.delete(s3.client(), "damaged-pack/shard-000001.tar")
        if content is not None:
            s3.put("damaged-pack/shard-000001.tar", content)
        with pytest.raises(UserError, match=said) as caught:
            open_index(url, "", index_dir=tmp_path / "kept")
        assert caught.value.name == "pack-damaged"
    for contents, said in (
        ([whole[1], whole[0]], "belongs before"),
        ([whole[0], whole[0]], "belongs before"),
        ([whole[0], whole[1][:-512]], "its index says"),
    ):
        first.write_bytes(contents[0])
        second.write_bytes(contents[1])
        with pytest.raises(UserError, match=said) as caught:
            open_index(str(folder), "", index_dir=tmp_path / "kept")
        assert caught.value.name == "pack-damaged"
    second.unlink()
    with pytest.raises(UserError, match="shard-000001"):
        open_index(str(folder), "", index_dir=tmp_path / "kept")
