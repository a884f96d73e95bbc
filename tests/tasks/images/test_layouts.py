"""Data as people have it: every layout gives the images and labels of plain class folders, and bad input is named."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from stoker.config import load_config
from stoker.core.errors import UserError
from stoker.io.stores import StoreDown
from stoker.loader.sampler import permute
from stoker.tasks.images.data import measure_storage_of, open_data, open_samples
from stoker.tasks.images.layouts import imagenet
from stoker.tasks.images.layouts.imagenet import real_labels, synsets
from stoker.tasks.images.layouts.opening import open_index
from stoker.tasks.images.layouts.parquet_files import list_parquet, open_sample_store
from stoker.tasks.images.layouts.sample_index import SampleSet
from stoker.tasks.images.layouts.splits import FoundSplit, find_split
from tests.support.layouts import (
    WNIDS,
    as_wordnet,
    flat_val,
    images_of,
    write_list,
    write_parquet,
    write_solution,
    write_tars,
)
from tests.support.tiny_training import write_images

CLASSES = list(WNIDS)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders named by WordNet ids, and validation images named as ImageNet's."""
    made = write_images(tmp_path_factory.mktemp("images"), train=8, val=4)
    return as_wordnet(made, tmp_path_factory.mktemp("folders"))


def content(samples: SampleSet) -> list[tuple[str, bytes]]:
    """The class and bytes of every sample, in their order."""
    index, members = samples.index, np.arange(len(samples))
    store = open_sample_store(pickle.loads(pickle.dumps(index)))  # as a worker has it
    found = []
    for sample, label in zip(samples.indices(members), samples.labels(members), strict=True):
        path, offset, size = index.location(int(sample))
        data = bytes(store.read(path, offset, size, whole=index.shard_of is None))
        found.append((samples.classes[label], data))
    return found


def opened(root: Path, split: str, *overrides: str) -> SampleSet:
    return open_samples(load_config(None, [f"data_root={root}", *overrides]).config, split)  # type: ignore[arg-type]


def refusal(root: Path, split: str, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        opened(root, split, *overrides)
    assert caught.value.hint
    return caught.value


# Each layout is made from the class folders, and returns the overrides that it needs.


def kaggle(folders: Path, root: Path) -> list[str]:
    write_solution(root / "LOC_val_solution.csv", flat_val(folders, root, "ILSVRC/Data/CLS-LOC"))
    return []


def solution_beside_val(folders: Path, root: Path) -> list[str]:
    write_solution(root / "LOC_val_solution.csv", flat_val(folders, root))
    return []


def devkit(folders: Path, root: Path, table: str = "meta.mat") -> list[str]:
    classes = flat_val(folders, root)
    # ILSVRC's numbers are not in the order of the ids.
    numbers = dict(zip(WNIDS, (449, 7, 1000), strict=True))
    data = root / "ILSVRC2012_devkit_t12" / "data"
    data.mkdir(parents=True)
    lines = [str(numbers[classes[name]]) for name in sorted(classes)]
    (data / "ILSVRC2012_validation_ground_truth.txt").write_text("\n".join(lines) + "\n")
    if table == "meta.mat":
        kinds = [("ILSVRC2012_ID", "O"), ("WNID", "O"), ("words", "O"), ("gloss", "O"), ("num_children", "O")]
        rows = [(number, wnid, "words", "gloss", 0) for wnid, number in numbers.items()]
        rows.append((1001, "n00001740", "entity", "inner node", 3))
        scipy.io.savemat(data / "meta.mat", {"synsets": np.array(rows, kinds).reshape(-1, 1)})
    elif table == "map_clsloc.txt":
        text = "".join(f"{wnid} {number} words\n" for wnid, number in numbers.items())
        (data / table).write_text(text)
    return []


def later_devkit(folders: Path, root: Path) -> list[str]:
    return devkit(folders, root, "map_clsloc.txt")


def renamed_val(name: str) -> Callable[[Path, Path], list[str]]:
    def make(folders: Path, root: Path) -> list[str]:
        shutil.copytree(folders / "train", root / "train")
        shutil.copytree(folders / "val", root / name)
        return []

    make.__name__ = name
    return make


def list_with_splits(folders: Path, root: Path) -> list[str]:
    shutil.copytree(folders, root / "all")
    rows = [
        (str(path.relative_to(folders.parent)).replace(folders.name, "all", 1), name, split)
        for split in ("train", "val")
        for path, name in images_of(folders, split)
    ]
    shuffled = [rows[at] for at in permute(np.arange(len(rows)), len(rows), 3)]
    write_list(root / "list.csv", shuffled, ("image", "label", "split"))
    return ["samples_csv=list.csv"]


def list_per_split(folders: Path, root: Path) -> list[str]:
    shutil.copytree(folders, root / "all")
    for split in ("train", "val"):
        rows = [(f"{root}/all/{split}/{name}/{path.name}", name) for path, name in images_of(folders, split)]
        write_list(root / f"{split}.csv", rows[::-1], ("filename", "class"))
    return ["train_csv=train.csv", f"val_csv={root}/val.csv"]


def metadata_csv(folders: Path, root: Path) -> list[str]:
    for split in ("train", "val"):
        target = root / split / "images"
        target.mkdir(parents=True)
        rows = []
        for path, name in images_of(folders, split):
            shutil.copyfile(path, target / path.name)
            rows.append((f"images/{path.name}", name))
        if split == "train":
            write_list(root / split / "metadata.csv", rows, ("file_name", "label"))
        else:
            lines = [json.dumps({"file_name": file, "label": name}) for file, name in rows]
            (root / split / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return []


def tars_in_folders(folders: Path, root: Path) -> list[str]:
    for split in ("train", "val"):
        write_tars(root / split, images_of(folders, split), CLASSES, how="json" if split == "val" else "cls")
    (root / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return []


def tars_side_by_side(folders: Path, root: Path) -> list[str]:
    for split, name in (("train", "train"), ("val", "validation")):
        write_tars(root, images_of(folders, split), CLASSES, how="names", prefix=f"imagenet-{name}-")
    return []


def parquet(folders: Path, root: Path) -> list[str]:
    train = images_of(folders, "train")
    write_parquet(root / "data" / "train-00000-of-00002.parquet", train[1::2], CLASSES)
    write_parquet(root / "data" / "train-00001-of-00002.parquet", train[::2], CLASSES)
    write_parquet(root / "data" / "validation-00000-of-00001.parquet", images_of(folders, "val"), CLASSES)
    return []


LAYOUTS = [
    kaggle, devkit, later_devkit, renamed_val("valid"), renamed_val("test"), list_with_splits, list_per_split,
    metadata_csv, tars_in_folders, tars_side_by_side, parquet,
]  # fmt: skip


@pytest.mark.parametrize("make", LAYOUTS, ids=lambda make: make.__name__)
def test_a_layout_gives_the_images_and_labels_of_class_folders(folders: Path, tmp_path: Path, make) -> None:
    if make is parquet:
        pytest.importorskip("pyarrow")
    root = tmp_path / "data"
    root.mkdir()
    overrides = make(folders, root)
    before = listing(root)
    config = load_config(None, [f"data_root={root}", "decoder=simplejpeg", *overrides]).config
    data = open_data(config, lambda _text: None)
    assert data.val is not None
    for split, samples in (("train", data.train), ("val", data.val)):
        assert samples.classes == tuple(CLASSES)
        assert sorted(content(samples)) == sorted(content(opened(folders, split)))
        names = [samples.index.name(number) for number in range(len(samples.index))]
        assert len(set(names)) == len(names)
        # The saved index gives the same samples in the same order.
        assert content(opened(root, split, *overrides)) == content(samples)
    assert listing(root) == before


def listing(root: Path) -> dict[str, tuple[int, int]]:
    """Names, sizes and times of everything below a folder."""
    found = [root, *root.rglob("*")]
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in found}


def test_val_is_preferred_to_its_other_names_and_the_choice_is_said(folders: Path, tmp_path: Path) -> None:
    for name in ("test", "validation"):
        renamed_val(name)(folders, tmp_path / name)
    shutil.copytree(folders / "val", tmp_path / "test" / "val")
    said: list[str] = []
    assert open_index(str(tmp_path / "test"), "val", index_dir=None, say=said.append).root.endswith("/val")
    assert said == ["test/ is not used"]
    said.clear()
    open_index(str(tmp_path / "validation"), "val", index_dir=None, say=said.append)
    assert said == ["there is no val/: using validation for validation"]


def test_a_store_that_may_be_read_but_not_listed_has_the_split_at_its_usual_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: object) -> None:
        raise StoreDown("credentials-refused", "no permission to list")

    monkeypatch.setattr("stoker.io.object_store.ObjectStore.entries", refuse)
    assert find_split("s3://bucket/packed", "val") == FoundSplit("val")


# Labels of ImageNet's validation images


def ground_truth(folder: Path, order: list[str], table: list[str]) -> Path:
    """A file of numbers for the images that have a ReaL label, true in `order`, beside a table that says `table`."""
    number_of = {wnid: number for number, wnid in enumerate(order, 1)}
    lines = [number_of[synsets()[labels[0]]] if labels else 1 for labels in real_labels()]
    folder.mkdir()
    path = folder / "ILSVRC2012_validation_ground_truth.txt"
    path.write_text("".join(f"{number}\n" for number in lines))
    (folder / "synsets.txt").write_text("\n".join(table) + "\n")
    return path


def test_a_table_of_another_order_is_refused_even_if_only_two_classes_are_swapped(tmp_path: Path) -> None:
    order = [synsets()[at] for at in permute(np.arange(1000), 1000, 5)]
    right = imagenet.read_ground_truth(str(ground_truth(tmp_path / "right", order, order)))
    assert right[1] == synsets()[real_labels()[1][0]]
    with pytest.raises(UserError, match=r"agree with ImageNet's ReaL labels for 0\.\d% of"):
        imagenet.read_ground_truth(str(ground_truth(tmp_path / "sorted", order, synsets())))
    swapped = [order[1], order[0], *order[2:]]
    with pytest.raises(UserError, match=rf"hardly any of .*{min(order[:2])}"):
        imagenet.read_ground_truth(str(ground_truth(tmp_path / "swapped", order, swapped)))


def test_numbers_without_a_table_are_refused_rather_than_guessed(folders: Path, tmp_path: Path) -> None:
    devkit(folders, tmp_path, "none")
    error = refusal(tmp_path, "val")
    assert "there is no table of them beside it" in error.seen
    assert "meta.mat" in (error.hint or "")


def test_a_solution_with_permuted_classes_is_refused(tmp_path: Path) -> None:
    labelled = [(number, labels[0]) for number, labels in enumerate(real_labels()[:60], 1) if labels]
    names = {f"ILSVRC2012_val_{number:08d}": synsets()[(label + 1) % 1000] for number, label in labelled}
    write_solution(tmp_path / "LOC_val_solution.csv", names)
    with pytest.raises(UserError, match=r"ReaL labels for \d\.\d% of"):
        imagenet.classes_of_images(str(tmp_path / "LOC_val_solution.csv"), [f"{name}.JPEG" for name in names])


def test_a_metadata_file_without_labels_leaves_the_class_folders_as_they_are(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders, tmp_path / "data")
    write_list(tmp_path / "data" / "train" / "metadata.csv", [("a.jpg", "a bird")], ("file_name", "caption"))
    assert content(opened(tmp_path / "data", "train")) == content(opened(folders, "train"))


# Bad input


def damaged_solution(folders: Path, root: Path, change: Callable[[list[str]], list[str]]) -> UserError:
    solution_beside_val(folders, root)
    path = root / "LOC_val_solution.csv"
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
    return refusal(root, "val")


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda lines: lines[:3] + lines[4:], "no row for 1 image: ILSVRC2012_val_00000010.JPEG"),
        (lambda lines: [*lines, lines[2]], "line 14: a second row for ILSVRC2012_val_00000011"),
        (lambda lines: [lines[0], "ILSVRC2012_val_00000001,85 1 499", *lines[2:]], "line 2: expected an image"),
        (lambda lines: ["image,boxes", *lines[1:]], "line 1: found the columns image, boxes"),
    ],
    ids=["missing row", "duplicate row", "no id", "other columns"],
)
def test_a_damaged_solution_is_refused_with_its_line(folders: Path, tmp_path: Path, change, seen: str) -> None:
    error = damaged_solution(folders, tmp_path, change)
    assert error.name == "labels-unusable"
    assert seen in error.seen
    assert "LOC_val_solution.csv" in error.seen


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("path,label\n../a.jpg,cat\n", "line 2: ../a.jpg is outside"),
        ("path,label\n/etc/a.jpg,cat\n", "line 2: /etc/a.jpg is outside"),
        ("path,label\na/../../b.jpg,cat\n", "line 2: a/../../b.jpg is outside"),
        ("path,label\ns3://bucket/a.jpg,cat\n", "line 2: s3://bucket/a.jpg is outside"),
        ("path,label\na.jpg,cat\n./a.jpg,dog\n", "line 3: a.jpg is already in line 2"),
        ("path,label\na.jpg,\n", "line 2: no label"),
        ("path,label\na.jpg\n", "line 2: 1 value for 2 columns"),
        ("a.jpg,cat\nb.jpg,dog\n", "no column of images among a.jpg, cat"),
        ("path,words,more\na.jpg,cat,x\n", "no column of labels among path, words, more"),
        ('path,label\n"a.jpg,cat\n', "not a CSV"),
        ("path,label\n", "it has no rows"),
        ("path,label,split\na.jpg,cat,trian\na.jpg2,cat,train\n", "line 2: the split trian is unknown"),
        ("path,label\nmissing.jpg,cat\n", "line 2: missing.jpg does not exist"),
    ],
)
def test_a_bad_list_is_refused_with_its_line(tmp_path: Path, text: str, seen: str) -> None:
    (tmp_path / "list.csv").write_text(text)
    error = refusal(tmp_path, "train", "samples_csv=list.csv")
    assert seen in error.seen
    assert "list.csv" in error.seen


@pytest.mark.parametrize("columns", ["file_path,target", "id,breed", "what,img_path", "image_id,class_id,width"])
def test_columns_with_unusual_names_are_recognised(folders: Path, tmp_path: Path, columns: str) -> None:
    shutil.copytree(folders / "train", tmp_path / "train")
    header = columns.split(",")
    rows = [[f"train/{name}/{path.name}", name, "224"][: len(header)] for path, name in images_of(folders, "train")]
    if header[0] == "what":
        rows = [[label, path] for path, label in rows]
    write_list(tmp_path / "list.csv", rows, tuple(header))
    assert opened(tmp_path, "train", "samples_csv=list.csv", "val_fraction=0.25").classes == tuple(CLASSES)


def test_a_test_split_that_is_not_used_is_said(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders, tmp_path, dirs_exist_ok=True)
    shutil.copytree(folders / "val", tmp_path / "test")
    said: list[str] = []
    open_samples(load_config(None, [f"data_root={tmp_path}"]).config, "val", say=said.append)
    assert any("test/ is not used" in line for line in said)


def test_a_list_that_is_not_text_or_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "list.csv").write_bytes(b"path,label\n\xff\xfe.jpg,cat\n")
    assert "line 2: it is not UTF-8" in refusal(tmp_path, "train", "samples_csv=list.csv").seen
    assert refusal(tmp_path, "train", "samples_csv=lits.csv").name == "list-not-found"


def test_numbers_as_labels_are_classes_in_the_order_of_the_numbers(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "train", tmp_path / "train")
    rows = [
        (f"train/{name}/{path.name}", str(2 + 4 * CLASSES.index(name))) for path, name in images_of(folders, "train")
    ]
    write_list(tmp_path / "list.csv", rows)
    assert opened(tmp_path, "train", "samples_csv=list.csv").classes == ("2", "6", "10")


@pytest.mark.parametrize(
    ("names", "seen"),
    [("a\nb\n", "2 names, but the label 2 needs 3"), ("a\nb\na\n", "line 3: a is already in line 1"),
     ("a\n\nb\n", "line 2: it is empty")],
)  # fmt: skip
def test_class_names_that_do_not_fit_the_tars_are_refused(folders: Path, tmp_path: Path, names: str, seen: str) -> None:
    tars_in_folders(folders, tmp_path)
    (tmp_path / "classes.txt").write_text(names)
    assert seen in refusal(tmp_path, "train").seen


def test_a_tar_that_is_cut_off_or_lacks_a_label_is_named(folders: Path, tmp_path: Path) -> None:
    tars_in_folders(folders, tmp_path)
    tar = tmp_path / "train" / "000001.tar"
    whole = tar.read_bytes()
    tar.write_bytes(whole[: len(whole) // 2])
    error = refusal(tmp_path, "train")
    assert error.name == "tar-unreadable"
    assert "train/000001.tar" in error.seen
    tar.unlink()
    with tarfile.open(tar, "w") as archive:
        archive.add(images_of(folders, "train")[0][0], "a.jpg")
    assert "train/000001.tar: a has no label, only jpg" in refusal(tmp_path, "train").seen


def test_a_parquet_file_without_its_columns_or_cut_off_is_named(folders: Path, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as files

    path = tmp_path / "train-0.parquet"
    files.write_table(pyarrow.table({"text": ["a"], "label": [0]}), path)
    assert "no column with image bytes among text, label" in refusal(tmp_path, "train").seen
    parquet(folders, tmp_path / "whole")
    data = (tmp_path / "whole" / "data" / "train-00000-of-00002.parquet").read_bytes()
    path.write_bytes(data[:-100])
    assert refusal(tmp_path, "train").name == "parquet-unreadable"


def test_the_speed_of_storage_is_not_measured_on_parquet_files(folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    parquet(folders, tmp_path)
    samples, missing = opened(tmp_path, "train"), []
    measure_storage_of(samples, open_sample_store(samples.index), 0.1, missing.append)
    assert missing == ["the storage's speed: images in parquet files cannot be read alone"]


def test_parquet_files_with_paths_alone_or_an_unknown_label_are_refused(folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "train-0.parquet"
    write_parquet(path, images_of(folders, "train"), CLASSES, with_bytes=False)
    assert "no images, only their paths" in refusal(tmp_path, "train").seen
    write_parquet(path, images_of(folders, "train"), CLASSES[:2], shift=1)
    assert "the label 2 is not one of the 2 classes" in refusal(tmp_path, "train").seen


def test_a_store_of_parquet_files_keeps_a_bounded_number_of_row_groups(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    parquet(folders, tmp_path)
    index = opened(tmp_path, "train").index
    monkeypatch.setattr("stoker.tasks.images.layouts.parquet_files.KEPT_BYTES", 20_000)
    store = open_sample_store(index)
    for sample in permute(np.arange(len(index)), len(index), 1).tolist():
        store.read(*index.location(sample))
        held = [group.nbytes for group in store._kept.values()]
        assert len(held) == 1 or sum(held) <= 20_000
    assert index.facts["notes"] == []
    listed = list_parquet(index.root, index.shards)
    assert "a row group of 6 images" in listed.facts["notes"][0]
    assert "stoker pack" in listed.facts["notes"][0]


# A share of the training images


def test_a_fraction_of_each_class_is_for_validation_whatever_the_order(folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "train", tmp_path / "data")
    options = ("val_fraction=0.25",)
    train, val = (opened(tmp_path / "data", split, *options) for split in ("train", "val"))
    assert np.bincount(val.labels(np.arange(len(val)))).tolist() == [2, 2, 2]
    names = [{part.index.name(int(number)) for number in part.indices(np.arange(len(part)))} for part in (train, val)]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 24
    # As a list in another order, with the same names.
    rows = [(f"{name}/{path.name}", name) for path, name in images_of(folders, "train")]
    write_list(tmp_path / "data" / "list.csv", rows[::-1])
    listed = opened(tmp_path / "data", "val", "samples_csv=list.csv", *options)
    assert {listed.index.name(int(number)) for number in listed.indices(np.arange(len(listed)))} == names[1]
    other = opened(tmp_path / "data", "val", "subset_seed=1", *options)
    assert content(other) != content(val)


def test_a_fraction_beside_a_validation_split_is_refused_but_not_beside_a_test_split(
    folders: Path, tmp_path: Path
) -> None:
    assert refusal(folders, "train", "val_fraction=0.1").name == "two-validation-sets"
    renamed_val("test")(folders, tmp_path)
    assert len(opened(tmp_path, "train", "val_fraction=0.25")) == 18


# Changes are noticed


def test_a_list_that_changed_is_read_again(folders: Path, tmp_path: Path) -> None:
    (override,) = list_with_splits(folders, tmp_path)
    file = tmp_path / "list.csv"
    os.utime(file, (time.time() - 3600, time.time() - 3600))
    first = opened(tmp_path, "train", override)
    assert opened(tmp_path, "train", override).index.folder == first.index.folder
    file.write_text(file.read_text().replace(",val", ",train"))
    assert (len(first), len(opened(tmp_path, "train", override))) == (24, 36)


def test_a_tar_that_was_replaced_is_indexed_again(folders: Path, tmp_path: Path) -> None:
    tars_in_folders(folders, tmp_path)
    for path in (tmp_path / "train").iterdir():
        os.utime(path, (time.time() - 3600, time.time() - 3600))
    assert len(opened(tmp_path, "train")) == 24
    write_tars(tmp_path / "train", images_of(folders, "train")[:20], CLASSES)
    assert len(opened(tmp_path, "train")) == 20


@pytest.mark.parametrize("key", ["runs_dir", "cache_dir", "index_dir", "stage_to"])
def test_a_folder_of_ours_among_the_classes_is_refused(folders: Path, tmp_path: Path, key: str) -> None:
    shutil.copytree(folders, tmp_path / "data")
    error = refusal(tmp_path / "data", "train", f"{key}={tmp_path}/data/train/ours")
    assert error.name == "folder-inside-data"
    assert key in error.seen
