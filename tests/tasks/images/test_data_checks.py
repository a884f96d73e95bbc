"""The checks of data: whole data passes, planted faults are named with what to type."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from stoker.io.stores import Buffer, LocalStore
from stoker.profile.mounts import Mount
from stoker.tasks.images import data_checks
from stoker.tasks.images.data_checks import DATA_CHECKS as CHECKS
from stoker.tasks.images.data_checks import judge_first_reads
from stoker.tasks.images.layouts.imagenet import synsets
from stoker.tasks.images.layouts.sample_index import SampleSet
from tests.support.layouts import images_of, write_parquet
from tests.support.s3_server import BUCKET, S3Server
from tests.support.tiny_training import write_images
from tests.tasks.images.data_sets import listed, outcome, subject_of, subject_with


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 training images and 9 for validation, in three classes."""
    return write_images(tmp_path_factory.mktemp("whole"), train=8, val=3)


@pytest.fixture
def data(whole: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return shutil.copytree(whole, tmp_path / "data")


def found(name: str, data: Path, **keys: Any) -> Any:
    return outcome(CHECKS, name, subject_of(data, **keys))


def test_whole_data_passes_every_check(whole: Path) -> None:
    subject = subject_of(whole)
    for check in CHECKS:
        result = check.run(subject)
        assert result is not None, check.name
        assert (result.status, result.fix) == ("passed", None), (check.name, result)
    present = outcome(CHECKS, "data-present", subject)
    assert present.facts == {"train": 24, "val": 9, "classes": 3}


def test_data_that_is_not_there_fails_with_what_to_type(data: Path) -> None:
    missing = found("data-present", data.with_name("dota"))
    assert missing.status == "failed"
    assert "dota does not exist" in missing.seen
    assert missing.fix == "did you mean data?"
    for file in (data / "train").rglob("*.jpg"):
        file.unlink()
    empty = found("data-present", data)
    assert (empty.status, empty.facts["reason"]) == ("failed", "no-images")


@pytest.mark.parametrize("name", ["valid", "Evaluation-images"])
def test_a_validation_folder_of_another_name_is_loaded_or_named(data: Path, name: str) -> None:
    (data / "val").rename(data / name)
    result = found("validation-split", data)
    if result.status == "passed":  # loaded as it is
        assert result.seen == f"9 images in {data / name}"
        return
    assert result.status == "failed"
    assert f"there is no val/, but {name}/ has 3 of the 3 classes" in result.seen
    assert result.fix == f"ln -s {name} {data}/val"


def test_no_validation_at_all_is_said(data: Path) -> None:
    shutil.rmtree(data / "val")
    (data / "test").mkdir()  # without classes: somebody's other folder
    result = found("validation-split", data)
    assert (result.status, "val/CLASS/" in result.fix) == ("unknown", True)
    assert found("classes-agree", data) is None


def test_classes_of_only_one_split_are_reported(data: Path) -> None:
    shutil.rmtree(data / "val" / "class1")
    for file in (data / "val" / "class2").iterdir():
        file.unlink()
    result = found("classes-agree", data)
    assert (result.status, result.facts["lacking"]) == ("failed", ["class1", "class2"])
    assert "no images of 2 of the 3 classes: class1, class2" in result.seen
    assert result.fix == f"copy them to {data}/val/class1/ and so on"
    (data / "val" / "class1").mkdir()
    (data / "train" / "class1").rename(data / "train" / "class-1")
    result = found("classes-agree", data)
    assert (result.status, "val has 1 class that" in result.seen) == ("failed", True)
    assert found("data-present", data).status == "passed", "one finding is enough"


def test_empty_and_strangely_small_classes_are_named(data: Path) -> None:
    for file in (data / "train" / "class1").iterdir():
        file.unlink()
    empty = found("class-counts", data)
    assert (empty.status, empty.facts["empty"]) == ("failed", ["class1"])

    def counted(counts: list[int]) -> Any:
        names = {f"c{at:02d}": [f"{n}.jpg" for n in range(images)] for at, images in enumerate(counts)}
        return outcome(CHECKS, "class-counts", subject_with(listed(names), None))

    small = counted([500] * 19 + [12])
    assert (small.status, small.facts["small"]) == ("failed", ["c19"])
    assert "strangely few in c19 (12), where the usual class has 500" in small.seen
    tail = counted([500] * 12 + [12] * 8)
    assert (tail.status, "a long tail, 8 classes" in tail.seen) == ("passed", True)
    assert counted([12, 9, 1]).status == "passed", "too few images to say"


def test_imagenet_is_recognised_by_its_classes_and_counted() -> None:
    def imagenet(per_class: dict[str, int], val: int) -> tuple[SampleSet, SampleSet]:
        names = [f"{n}.jpg" for n in range(1300)]
        train = {synset: names[: per_class[synset]] for synset in synsets()}
        return listed(train), listed(dict.fromkeys(synsets(), names[:val]))

    counts = dict.fromkeys(synsets(), 1300)
    left = 1300 * 1000 - 1_281_167
    for synset in synsets():
        counts[synset] -= min(500, left)
        left -= 1300 - counts[synset]
    train, val = imagenet(counts, 50)
    right = outcome(CHECKS, "class-counts", subject_with(train, val))
    assert right.status == "passed"
    assert right.seen == "ImageNet: 1,281,167 training images, 50,000 for validation, as published"
    few, _ = imagenet(counts | {synsets()[7]: 100}, 50)
    assert outcome(CHECKS, "class-counts", subject_with(few, val)).details == ("train/n01514668: 100 (732 to 1,300)",)
    cut = listed({synset: [f"{n}.jpg" for n in range(49)] for synset in synsets()})
    wrong = outcome(CHECKS, "class-counts", subject_with(train, cut))
    assert wrong.status == "failed"
    assert "49,000 for validation, instead of 1,281,167 and 50,000; 1,000 class folders" in wrong.seen
    assert (wrong.details[0], wrong.details[-1]) == ("val/n01440764: 49 (50)", "and 988 more")


def test_images_that_do_not_decode_are_named(data: Path) -> None:
    broken = data / "val" / "class2" / "002.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    (data / "train" / "class0" / "000.jpg").write_text("not an image")
    result = found("images-decode", data, deep=True)
    assert result.status == "failed"
    assert "2 of 33 images" in result.seen
    assert [text.partition(":")[0] for text in result.details] == ["class0/000.jpg", "class2/002.jpg"]


def test_parquet_files_are_checked_through_their_rows(whole: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for split in ("train", "val"):
        write_parquet(tmp_path / f"{split}-0.parquet", images_of(whole, split), ["class0", "class1", "class2"])
    subject = subject_of(tmp_path)
    results = {check.name: check.run(subject) for check in CHECKS}
    assert results.pop("storage-ready") is None
    assert "images in parquet files" in results.pop("duplicates").seen
    assert {result.status for result in results.values()} == {"passed"}


def test_every_class_has_its_turn_before_the_time_is_up(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = subject_of(whole).data.train
    members = data_checks.in_turns(train, 3)
    assert train.labels(members).tolist() == [0, 1, 2] * 3
    assert len(set(members.tolist())) == 9
    monkeypatch.setattr(data_checks, "DECODING_S", 0.0)
    assert found("images-decode", whole).status == "unknown"


def test_files_that_lustre_released_are_named(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands in for Lustre's own program: prints what that prints.
    state = tmp_path / "state"
    program = tmp_path / "bin" / "lfs"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\n[ "$1" = hsm_state ] || exit 1\nshift\nfor file; do echo "$file: $(cat {state})"; done\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    state.write_text("(0x0000000d) released exists archived, archive_id:1")
    assert found("storage-ready", whole).status == "passed", "not on Lustre: nobody asks"
    monkeypatch.setattr(data_checks, "mount_of", lambda _path: Mount("lustre", True))
    result = found("storage-ready", whole)
    assert (result.status, result.facts["share"]) == ("failed", 1.0)
    assert f"24 of 24 files below {whole}/train are released" in result.seen
    assert "lfs hsm_restore" in result.fix
    assert result.details[0] == f"{whole}/train/class0/000.jpg"
    state.write_text("(0x00000009) exists archived, archive_id:1")
    assert found("storage-ready", whole).status == "passed"
    program.write_text("#!/bin/sh\nexit 3\n")
    assert found("storage-ready", whole).status == "unknown"


class LazyStore(LocalStore):
    """A folder whose files are fetched when they are first read, which takes a while; reading them again takes 2 ms."""

    now_s = 100.0

    def __init__(self, root: str, **keys: Any) -> None:
        super().__init__(root, **keys)
        self._fetched: set[str] = set()

    def read(self, path: str, offset: int = 0, size: int | None = None, *, whole: bool = False) -> Buffer:
        LazyStore.now_s += 0.002 if path in self._fetched else 0.12
        self._fetched.add(path)
        return super().read(path, offset, size, whole=whole)


def test_files_that_load_lazily_are_noticed_by_their_first_read(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_checks, "open_store", LazyStore)
    monkeypatch.setattr(data_checks, "FIRST_READS", 3)
    monkeypatch.setattr(data_checks.time, "perf_counter", lambda: LazyStore.now_s)
    result = found("storage-ready", whole)
    assert result.status == "failed"
    assert "files load lazily; all 33 would take" in result.seen
    assert (result.facts["first_read_ms"], result.facts["second_read_ms"]) == pytest.approx((120, 2))


def test_the_case_study_would_have_been_told_how_long_it_takes() -> None:
    lazy = judge_first_reads([0.94] * 100, [0.001] * 100, 1_331_167, "/fsx")  # 100 files in 94 s
    assert "the first read of a file takes 940.00 ms, the second 1.00 ms: files load lazily" in lazy.seen
    assert "all 1,331,167 would take 21.7 h with 16 readers" in lazy.seen
    cases = {"passed": ([0.012], [0.0001]), "unknown": ([], []), "failed": ([0.94], [0.001])}
    assert all(judge_first_reads(*reads, 1000, "/disk").status == status for status, reads in cases.items())
    slow = judge_first_reads([0.3] * 9, [0.25] * 9, 1000, "/nfs")
    assert (slow.status, "slow, but the files are there" in slow.seen) == ("passed", True)


def test_images_in_both_splits_are_found_whatever_their_names(data: Path) -> None:
    shutil.copy(data / "train" / "class0" / "003.jpg", data / "val" / "class0" / "other.jpg")
    # The same size, but other bytes.
    twin = data / "val" / "class1" / "twin.jpg"
    raw = bytearray((data / "train" / "class1" / "001.jpg").read_bytes())
    raw[-3] ^= 1
    twin.write_bytes(raw)
    result = found("duplicates", data)
    assert result.status == "failed"
    assert result.facts["same"] == [["class0/other.jpg", "class0/003.jpg"]]
    assert "1 image is in both" in result.seen
    assert result.details == ("class0/other.jpg is class0/003.jpg",)


def test_what_was_not_compared_is_not_claimed(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_checks, "COMPARED", 4)
    part = found("duplicates", whole)
    assert "4 validation images compared with 24 training images, none in both; --deep compares all" in part.seen
    assert found("duplicates", whole, deep=True).facts["val"] == 9
    monkeypatch.setattr(data_checks, "COMPARING_S", 0.0)
    assert found("duplicates", whole).status == "unknown"
    store = listed({"a": ["1.jpg"], "b": ["2.jpg"]}, "s3://bucket/train")
    unknown = outcome(CHECKS, "duplicates", subject_with(store, store))
    assert (unknown.status, "no sizes" in unknown.seen) == ("unknown", True)


def test_a_bucket_is_checked_like_a_folder(data: Path, tmp_path: Path, s3: S3Server) -> None:
    shutil.copy(data / "train" / "class0" / "003.jpg", data / "val" / "class0" / "other.jpg")
    for file in data.rglob("*.jpg"):
        s3.put(f"verify-data/{file.relative_to(data)}", file.read_bytes())
    subject = subject_of(f"s3://{BUCKET}/verify-data", index_dir=tmp_path / "index")
    results = {check.name: check.run(subject) for check in CHECKS}
    assert results.pop("storage-ready") is None, "an object store holds what it lists"
    assert results["duplicates"].facts["same"] == [["class0/other.jpg", "class0/003.jpg"]]
    assert {name for name, result in results.items() if result.status != "passed"} == {"duplicates"}
