"""Opening a split: what is found, that it is listed only once, and that a change is noticed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import obstore
import pytest
from obstore.store import from_url

from stoker.core.errors import UserError
from stoker.tasks.images.layouts.class_folders import list_objects
from stoker.tasks.images.layouts.opening import check_same_classes, open_index
from stoker.tasks.images.layouts.sample_index import SampleIndex, pack_names, save_index
from tests.support.waiting import DEADLINE_S

TREE = {"cat": ["b.jpg", "a.JPEG", "c.PNG"], "dog": ["x.webp", "deep/y.jpg"], "ant": ["z.tiff"]}
SORTED = ["ant/z.tiff", "cat/a.JPEG", "cat/b.jpg", "cat/c.PNG", "dog/deep/y.jpg", "dog/x.webp"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make_tree(root: Path, files: dict[str, list[str]], split: str = "train") -> Path:
    for name, inside in files.items():
        (root / split / name).mkdir(parents=True, exist_ok=True)
        for file in inside:
            path = root / split / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"x" * len(file))
    return root


def age(root: Path) -> None:
    """Makes every folder old enough for a change to show in its modification time."""
    for folder, _, _ in os.walk(root):
        os.utime(folder, (time.time() - 3600, time.time() - 3600))


class Opening:
    """Opens a split and records the messages and how many class folders were listed."""

    def __init__(self, root: Path | str, split: str = "train", **options) -> None:
        self.said: list[str] = []
        self.listed = 0
        options = {"index_dir": None, "progress": self.progress, "say": self.said.append} | options
        self.index = open_index(str(root), split, **options)

    def progress(self, done: int, total: int | None) -> None:
        assert total is None or done <= total
        self.listed = done

    @property
    def names(self) -> list[str]:
        return [self.index.name(sample) for sample in range(len(self.index))]


def opened_names(root: Path | str, split: str = "train") -> list[str]:
    return Opening(root, split).names


def refusal(*arguments, **options) -> UserError:
    with pytest.raises(UserError) as caught:
        open_index(*map(str, arguments), **({"index_dir": None} | options))
    return caught.value


# What is found


def test_classes_and_files_are_sorted_and_numbered(tmp_path: Path) -> None:
    opening = Opening(make_tree(tmp_path / "data", TREE))
    assert opening.names == SORTED
    assert opening.index.classes == ("ant", "cat", "dog")
    assert opening.index.labels.tolist() == [0, 1, 1, 1, 2, 2]
    assert opening.index.root == str(tmp_path / "data" / "train")
    assert opening.said == []


def test_a_class_whose_name_begins_another_comes_first(tmp_path: Path) -> None:
    assert opened_names(make_tree(tmp_path, {"a-b": ["1.jpg"], "a": ["2.jpg"]})) == ["a/2.jpg", "a-b/1.jpg"]


def test_a_folder_can_be_written_in_several_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = make_tree(tmp_path / "data", TREE)
    monkeypatch.chdir(tmp_path)
    for root in (str(data), f"file://{data}", "data"):
        opening = Opening(root)
        assert opening.names == SORTED
        assert opening.index.root == str(data / "train")
    assert opened_names(data / "train", "") == SORTED


def test_images_are_recognised_by_their_suffix_in_any_case(tmp_path: Path) -> None:
    images = [
        f"1.{s}"
        for s in ["jpg", "JPG", "jpeg", "JPEG", "png", "webp", "bmp", "tif", "tiff", "gif", "ppm", "pgm", "jfif", "Jpg"]
    ]
    others = ["2.txt", "3.xml", "4.xml", "jpg", "5"]
    opening = Opening(make_tree(tmp_path, {"a": [*images, *others]}))
    assert sorted(opening.names) == sorted(f"a/{name}" for name in images)
    assert len(opening.said) == 1
    assert "5 files of" in opening.said[0]
    assert ".xml (2)" in opening.said[0]
    assert opening.index.facts["notes"] == opening.said
    assert Opening(tmp_path).said == opening.said, "a note is repeated when the index comes from where it is kept"


def test_hidden_files_and_folders_are_ignored(tmp_path: Path) -> None:
    make_tree(tmp_path, TREE | {".git": ["1.jpg"], "cat": [*TREE["cat"], "._a.jpg", ".thumbs/1.jpg"]})
    (tmp_path / "train" / "readme.txt").write_text("not a class")
    opening = Opening(tmp_path)
    assert opening.names == SORTED
    assert opening.said == []


def test_links_are_followed_and_loops_are_not(tmp_path: Path) -> None:
    data = make_tree(tmp_path / "data", TREE)
    links = tmp_path / "links" / "train"
    (links / "mouse").mkdir(parents=True)
    (links / "cat").symlink_to(data / "train" / "cat")
    (links / "mouse" / "1.jpg").symlink_to(data / "train" / "cat" / "b.jpg")
    (links / "mouse" / "2.jpg").symlink_to("nowhere")
    (links / "mouse" / "loop").symlink_to(links / "mouse")
    (links / "mouse" / "more").symlink_to(data / "train" / "dog")
    assert opened_names(links.parent) == [
        "cat/a.JPEG", "cat/b.jpg", "cat/c.PNG", "mouse/1.jpg", "mouse/2.jpg", "mouse/more/deep/y.jpg",
        "mouse/more/x.webp",
    ]  # fmt: skip


def test_any_valid_file_name_is_preserved(tmp_path: Path) -> None:
    names = [
        b"caf\xe9.jpg", b"\xff\xfe.jpg", "ünï\u0301 日本 🐈.jpg".encode(), b"new\nline.jpg", b" two  words .jpg",
        b"'\"\\.jpg",
    ]  # fmt: skip
    for class_name in (b"plain", b"cl\xe4ss", "日本".encode()):
        folder = tmp_path / "train" / os.fsdecode(class_name)
        folder.mkdir(parents=True)
        for name in names:
            (folder / os.fsdecode(name)).write_bytes(name)
    Opening(tmp_path)
    opening = Opening(tmp_path)
    assert len(opening.names) == 18
    assert opening.index.folder is not None
    for name in opening.names:
        assert (tmp_path / "train" / name).read_bytes() == os.fsencode(name.split("/")[1])
    json.dumps(opening.index.classes)
    pickle.loads(pickle.dumps(opening.index))


# Listed only once


def test_the_second_opening_lists_nothing(tmp_path: Path) -> None:
    age(make_tree(tmp_path, TREE))
    first, second = Opening(tmp_path), Opening(tmp_path)
    assert (first.listed, second.listed) == (3, 0)
    assert second.names == first.names
    assert second.index.digest == first.index.digest
    assert isinstance(second.index.labels, np.memmap)
    assert first.index.folder is not None
    assert first.index.folder.parent.parent == tmp_path / "cache" / "stoker" / "index"


def test_a_folder_that_has_just_changed_is_silently_listed_again(tmp_path: Path) -> None:
    """It could change again within the same tick of the file system's clock."""
    age(make_tree(tmp_path, TREE))
    os.utime(tmp_path / "train" / "cat")
    first, second = Opening(tmp_path), Opening(tmp_path)
    assert (first.listed, second.listed) == (3, 1)
    assert second.said == []
    age(tmp_path / "train" / "cat")
    assert Opening(tmp_path).listed == 1
    assert Opening(tmp_path).listed == 0
    now = time.time_ns()
    os.utime(tmp_path / "train" / "cat", ns=(now, now))
    Opening(tmp_path)
    make_tree(tmp_path, {"cat": ["new.jpg"]})
    os.utime(tmp_path / "train" / "cat", ns=(now, now))
    assert "cat/new.jpg" in opened_names(tmp_path)


def test_data_that_was_moved_is_listed_again_and_what_takes_its_place_is_not_mistaken_for_it(tmp_path: Path) -> None:
    age(make_tree(tmp_path / "old", TREE))
    Opening(tmp_path / "old")
    shutil.move(tmp_path / "old", tmp_path / "new")
    moved = Opening(tmp_path / "new")
    assert moved.listed == 3
    assert moved.index.root == str(tmp_path / "new" / "train")
    assert pickle.loads(pickle.dumps(moved.index)).root == moved.index.root
    make_tree(tmp_path / "old", {"cat": ["other.jpg"]})
    assert Opening(tmp_path / "old").names == ["cat/other.jpg"]


def test_an_index_of_another_place_is_not_used_even_under_its_name(tmp_path: Path) -> None:
    """As if two places had the same hash, or somebody copied a folder of the cache."""
    for place in ("a", "b"):
        age(make_tree(tmp_path / place, TREE))
    (kept,) = {Opening(tmp_path / "a").index.folder.parent}
    other = Opening(tmp_path / "b").index.folder.parent
    shutil.rmtree(other)
    shutil.copytree(kept, other)
    assert Opening(tmp_path / "b").listed == 3


def leave_an_old_index(root: Path) -> Path:
    """What versions before kept inside the data."""
    age(root)
    kept = Opening(root).index.folder.parent
    left = root / "train" / ".stoker-index"
    shutil.move(kept, left)
    return left


def test_an_index_left_in_the_data_is_used_untouched_and_the_user_is_told_once(tmp_path: Path) -> None:
    left = leave_an_old_index(make_tree(tmp_path, TREE))
    before = {path: path.stat().st_mtime_ns for path in left.rglob("*")}
    first, second = Opening(tmp_path), Opening(tmp_path)
    assert (first.names, first.listed) == (SORTED, 0)
    assert {path: path.stat().st_mtime_ns for path in left.rglob("*")} == before
    (note,) = first.said
    assert "makes torchvision's ImageFolder fail" in note
    assert f"rm -r {left}" in note
    assert second.said == []


# Changes are noticed


CHANGES: dict[str, Callable[[Path], object]] = {
    "add file": lambda train: (train / "cat" / "new.jpg").write_text(""),
    "remove file": lambda train: (train / "cat" / "a.JPEG").unlink(),
    "rename file": lambda train: (train / "cat" / "a.JPEG").rename(train / "cat" / "z.jpg"),
    "add file in a nested folder": lambda train: (train / "dog" / "deep" / "new.jpg").write_text(""),
    "remove a nested folder": lambda train: shutil.rmtree(train / "dog" / "deep"),
    "add class": lambda train: make_tree(train.parent, {"bee": ["1.jpg"]}),
    "remove class": lambda train: shutil.rmtree(train / "cat"),
    "rename class": lambda train: (train / "cat").rename(train / "zebra"),
    "add empty class": lambda train: (train / "bee").mkdir(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed_and_only_that_class_is_listed(tmp_path: Path, change: str) -> None:
    age(make_tree(tmp_path / "data", TREE))
    Opening(tmp_path / "data")
    CHANGES[change](tmp_path / "data" / "train")
    opening = Opening(tmp_path / "data")
    assert opening.listed <= 1
    assert "out of date: 1 class folder changed" in opening.said[0] or change == "rename class"
    fresh = Opening(tmp_path / "data", index_dir=tmp_path / "elsewhere")
    assert fresh.names == opening.names
    assert fresh.index.digest == opening.index.digest
    assert fresh.index.classes == opening.index.classes


def test_the_previous_index_stays_for_the_run_that_uses_it_and_older_ones_are_removed(tmp_path: Path) -> None:
    age(make_tree(tmp_path, TREE))
    openings = []
    for number in range(4):
        make_tree(tmp_path, {"cat": [f"new{number}.jpg"]})
        openings.append(Opening(tmp_path).index)
        age(tmp_path / "train" / "cat")
    kept = {path.name for path in openings[-1].folder.parent.iterdir() if path.is_dir()}
    assert kept == {openings[-1].digest, openings[-2].digest}
    assert len(pickle.loads(pickle.dumps(openings[-2]))) == 9


def test_an_index_with_a_missing_or_torn_file_is_rebuilt(tmp_path: Path) -> None:
    age(make_tree(tmp_path, TREE))
    for damaged in ("listing.json", "index.json"):
        for torn in (False, True):
            (file,) = Opening(tmp_path).index.folder.parent.rglob(damaged)
            if torn:
                file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
            else:
                file.unlink()
            assert opened_names(tmp_path) == SORTED
            assert Opening(tmp_path).listed == 0


# Several processes


OPENER = """
import sys, time
from pathlib import Path
from stoker.tasks.images.layouts.opening import open_index
listed = []
print("ready", flush=True)
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
index = open_index(sys.argv[1], "train", index_dir=None, progress=lambda done, total: listed.append(done))
print(len(listed), index.digest, len(index), index.name(len(index) - 1))
"""


def test_one_of_many_processes_lists_and_all_see_the_same(tmp_path: Path) -> None:
    data = make_tree(tmp_path / "data", {f"class{n:03d}": [f"{i}.jpg" for i in range(20)] for n in range(100)})
    age(data)
    go = tmp_path / "go"
    racers = [
        subprocess.Popen([sys.executable, "-c", OPENER, str(data), str(go)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    assert [racer.stdout.readline() for racer in racers if racer.stdout] == ["ready\n"] * 4
    go.write_text("")
    outs = [racer.communicate(timeout=DEADLINE_S)[0].split() for racer in racers]
    assert sorted(int(out[0]) for out in outs) == [0, 0, 0, 100]
    assert len({tuple(out[1:]) for out in outs}) == 1


def test_a_process_killed_while_listing_does_not_block_others(tmp_path: Path) -> None:
    age(make_tree(tmp_path, TREE))
    program = (
        "import os, signal, sys; from stoker.tasks.images.layouts.opening import open_index\n"
        "open_index(sys.argv[1], 'train', index_dir=None, progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)])
    assert done.returncode == -signal.SIGKILL
    opening = Opening(tmp_path)
    assert opening.names == SORTED
    assert opening.listed == 3


# Import what numpy loads lazily first: the new user may not be able to read our environment.
WITHOUT_RIGHTS = """
import mmap, os, sys
from stoker.tasks.images.layouts.opening import open_index
from stoker.core.errors import UserError
if os.getuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
for _ in range(2):
    listed, said = [], []
    try:
        index = open_index(sys.argv[1], "train", index_dir=None, progress=lambda *n: listed.append(n), say=said.append)
        print(len(index), len(listed), index.folder, *said, sep="|")
    except UserError as error:
        print(error.name, error.seen, error.hint, sep="|")
"""


def open_without_rights(data: Path, cache: Path) -> list[list[str]]:
    variables = os.environ | {"XDG_CACHE_HOME": str(cache), "HOME": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RIGHTS, str(data)], capture_output=True, text=True, env=variables, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return [line.split("|") for line in done.stdout.splitlines()]


def closed_data(open_folder: Path) -> Path:
    data = make_tree(open_folder / "data", TREE)
    age(data)
    for folder, _, _ in os.walk(data):
        Path(folder).chmod(0o555)
    return data


def test_read_only_data_has_its_index_in_the_users_cache(open_folder: Path) -> None:
    cache = open_folder / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    first, second = open_without_rights(closed_data(open_folder), cache)
    assert (first[:2], second[:2]) == (["6", "3"], ["6", "0"])
    assert second[2].startswith(str(cache / "stoker" / "index" / "train-"))


def test_where_nothing_can_be_written_the_index_stays_in_memory_and_says_so(open_folder: Path) -> None:
    for line in open_without_rights(closed_data(open_folder), Path("/nonexistent/cache")):
        assert line[:3] == ["6", "3", "None"]
        assert "the index cannot be saved" in line[3]
        assert "index_dir=FOLDER" in line[3]


def test_a_class_folder_that_cannot_be_read_is_named(open_folder: Path) -> None:
    data = make_tree(open_folder / "data", TREE)
    (data / "train" / "cat").chmod(0)
    for line in open_without_rights(data, Path("/nonexistent/cache")):
        assert line[0] == "data-not-readable"
        assert f"{data}/train/cat cannot be listed: Permission denied" in line[1]


def test_an_index_dir_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    make_tree(tmp_path / "data", TREE)
    (tmp_path / "file").write_text("")
    error = refusal(tmp_path / "data", "train", index_dir=tmp_path / "file" / "kept")
    assert error.name == "index-not-writable"
    assert error.hint is not None
    assert "index_dir=" in error.hint


# Errors


def test_a_root_that_does_not_exist_names_what_is_near(tmp_path: Path) -> None:
    (tmp_path / "imagenet").mkdir()
    error = refusal(tmp_path / "imagnet" / "full", "train")
    assert error.name == "data-not-found"
    assert f"{tmp_path} exists and contains imagenet" in (error.why or "")
    assert error.hint == "did you mean imagenet?"


def test_classes_or_a_list_without_splits_are_recognised(tmp_path: Path) -> None:
    for name, files in {"cat": ["1.jpg"], "dog": ["2.png"]}.items():
        (tmp_path / "classes" / name).mkdir(parents=True)
        for file in files:
            (tmp_path / "classes" / name / file).touch()
    assert str(refusal(tmp_path / "classes", "train").hint).startswith("val_fraction=0.1, if these folders are classes")
    (tmp_path / "listed").mkdir()
    for file in ("1.jpg", "labels.csv"):
        (tmp_path / "listed" / file).touch()
    assert str(refusal(tmp_path / "listed", "train").hint).startswith("samples_csv=labels.csv, if it says")


def test_a_missing_split_lists_what_is_there(tmp_path: Path) -> None:
    make_tree(tmp_path, TREE, "training")
    make_tree(tmp_path, TREE, "val")
    error = refusal(tmp_path, "train")
    assert error.name == "split-not-found"
    assert error.why == "it contains training, val"


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train").write_text("")
    assert "is a file" in refusal(tmp_path, "train").seen


def test_a_flat_folder_of_images_is_distinguished_from_an_empty_one(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    assert refusal(tmp_path, "val").name == "no-class-folders"
    for number in range(3):
        (tmp_path / "val" / f"ILSVRC2012_val_{number}.JPEG").write_text("")
    error = refusal(tmp_path, "val")
    assert "3 images outside of class folders" in (error.why or "")
    assert "LOC_val_solution.csv" in (error.why or "")


def test_an_unfinished_pack_is_not_taken_for_the_tars_of_others(tmp_path: Path) -> None:
    packed(tmp_path / "train")
    (tmp_path / "train" / "index.json").unlink()
    (tmp_path / ".pack" / "train").mkdir(parents=True)
    (tmp_path / ".pack" / "train" / "pack.json").write_text("{}")
    error = refusal(tmp_path, "train")
    assert error.name == "pack-unfinished"
    assert "not the index.json" in error.seen


def test_class_folders_without_any_image_are_refused(tmp_path: Path) -> None:
    error = refusal(make_tree(tmp_path, {"a": [], "b": ["readme.txt"]}), "train")
    assert error.name == "no-images"
    assert "2 class folders but no images" in error.seen


def test_an_empty_class_keeps_its_number_and_is_named(tmp_path: Path) -> None:
    opening = Opening(make_tree(tmp_path, TREE | {"bee": []}))
    assert opening.index.classes == ("ant", "bee", "cat", "dog")
    assert opening.index.labels.tolist() == [0, 2, 2, 2, 3, 3]
    assert "without images: bee" in opening.said[0]


def test_validation_classes_that_training_lacks_are_named(tmp_path: Path) -> None:
    make_tree(tmp_path, TREE)
    make_tree(tmp_path, {"cat": ["1.jpg"]} | {f"stranger{n}": ["1.jpg"] for n in range(7)}, "val")
    train, val = Opening(tmp_path).index, Opening(tmp_path, "val").index
    with pytest.raises(UserError, match=r"7 classes that .* lacks: stranger0, .*stranger4 and 2 more"):
        check_same_classes(train, val)
    check_same_classes(val, replace(val, classes=val.classes[:3]))


# Object stores and packed shards


def test_objects_of_a_store_give_the_index_of_the_folder_and_sizes(tmp_path: Path) -> None:
    make_tree(tmp_path, TREE | {"ünï": ["1 2.jpg"], "cat": [*TREE["cat"], "notes.txt", ".hidden.jpg"]})
    (tmp_path / "train" / "index.html").write_text("lies beside the classes")
    store = from_url(f"file://{tmp_path}/train")
    objects = [(entry["path"], entry["size"]) for chunk in obstore.list(store) for entry in chunk]
    listings = list_objects(reversed(objects))
    in_folder = Opening(tmp_path)
    assert tuple(one.name for one in listings) == in_folder.index.classes
    names = b"".join(one.name_bytes.tobytes() for one in listings)
    assert names == in_folder.index.name_bytes.tobytes()
    sizes = [size for one in listings if one.sizes is not None for size in one.sizes.tolist()]
    assert sizes == [(tmp_path / "train" / name).stat().st_size for name in in_folder.names]
    assert [dict(one.seen.left_out) for one in listings if one.seen.left_out] == [{".txt": 1}]


def packed(folder: Path) -> SampleIndex:
    index = SampleIndex(
        "/where/it/was/packed", ("cat", "dog"), np.array([1, 0], np.int32), *pack_names([b"dog/1.jpg", b"cat/2.jpg"]),
        sizes=np.array([3, 4]), shards=("shard-000000.tar",), shard_of=np.zeros(2, np.int32),
        offsets=np.array([512, 1536]),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "shard-000000.tar").write_bytes(b"")
    return save_index(index, folder)


def test_a_torn_pack_is_refused_and_a_foreign_index_file_is_not_ours(tmp_path: Path) -> None:
    packed(tmp_path / "train")
    (tmp_path / "train" / "index.json").write_text("{half")
    with pytest.raises(UserError, match="not what stoker pack wrote"):
        Opening(tmp_path)
    make_tree(tmp_path / "other", TREE)
    (tmp_path / "other" / "train" / "index.json").write_text('{"made": "by somebody else"}')
    assert opened_names(tmp_path / "other") == SORTED


# In a separate process: a client that has been used must not be forked, and other tests fork.
OPEN_URL = """
import sys
from pathlib import Path
from stoker.tasks.images.layouts.opening import open_index
from stoker.core.errors import UserError
try:
    index = open_index(sys.argv[1], "train", index_dir=Path(sys.argv[2]))
    print(index.location(1), index.root, index.classes)
except UserError as error:
    print(error.name)
"""


def test_packed_shards_at_a_url_bring_their_index(tmp_path: Path) -> None:
    packed(tmp_path / "data" / "train")
    server = subprocess.Popen(
        [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path / "data")],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert server.stdout is not None

    def opened() -> str:
        command = [sys.executable, "-c", OPEN_URL, url, str(tmp_path / "kept")]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S).stdout

    try:
        url = server.stdout.readline().split("(")[1].split(")")[0].rstrip("/")
        first = opened()
        assert "shard-000000.tar" in first
        assert "1536" in first
        assert f"{url}/train" in first
        # The arrays are saved locally: only the small file is requested.
        for file in (tmp_path / "data" / "train").glob("*.npy"):
            file.unlink()
        assert opened() == first
        # Packed again and copied only in part: the old arrays must not be used.
        packed(tmp_path / "again")
        meta = json.loads((tmp_path / "again" / "index.json").read_text())
        (tmp_path / "data" / "train" / "index.json").write_text(json.dumps(meta | {"facts": {"packed": "again"}}))
        assert opened() == "packed-data-incomplete\n"
    finally:
        server.kill()
        server.wait()
