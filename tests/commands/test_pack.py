"""`stoker pack` as a user runs it: results, refusals, interruptions."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import simplejpeg

from stoker.cli import main
from tests.conftest import Run
from tests.support.ready_process import ReadyProcess
from tests.support.waiting import DEADLINE_S, is_running, wait_until

ANEW = ("--shard-size", "300KB", "--quality", "90", "--workers", "2")


def make_split(folder: Path, per_class: int, side: int = 32) -> None:
    """Class folders with images of different sizes; links to a few files, so that large sets cost nothing."""
    random = np.random.default_rng(0)
    kinds = [simplejpeg.encode_jpeg(random.integers(0, 255, (side, side + n, 3), np.uint8), 60) for n in range(4)]
    for class_name in ("cat", "dog"):
        (folder / class_name).mkdir(parents=True)
        for number in range(per_class):
            path = folder / class_name / f"{number:04d}.jpg"
            if number < len(kinds):
                path.write_bytes(kinds[number])
            else:
                path.hardlink_to(folder / class_name / f"{number % len(kinds):04d}.jpg")


def content(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    make_split(tmp_path / "images" / "train", 8)
    make_split(tmp_path / "images" / "val", 4)
    return tmp_path / "images"


def test_both_splits_are_packed_and_the_source_is_left_alone(stoker: Run, source: Path, tmp_path: Path) -> None:
    before = content(source)
    ended = stoker("pack", source, tmp_path / "packed", "--json")
    assert ended.code == 0
    splits = ended.json["splits"]
    assert {name: split["samples"] for name, split in splits.items()} == {"train": 16, "val": 8}
    assert splits["train"]["shards"] == 1
    assert splits["train"]["skipped"] == 0
    assert splits["train"]["images_per_second"] > 0
    assert splits["train"]["bytes"] == (tmp_path / "packed/train/shard-000000.tar").stat().st_size
    assert Path(splits["val"]["folder"]) == tmp_path / "packed" / "val"
    assert content(source) == before
    assert not (tmp_path / "packed/.pack/source-index").exists()


def test_the_text_describes_the_result_and_a_second_run_keeps_it(stoker: Run, source: Path, tmp_path: Path) -> None:
    first = stoker("pack", source, "packed")
    assert first.code == 0
    assert "train" in first.out
    assert str(tmp_path / "packed" / "train") in first.out
    before = content(tmp_path / "packed")
    again = stoker("pack", source, "packed")
    assert "1 (1 kept)" in again.out
    assert content(tmp_path / "packed") == before


def test_a_split_that_gets_no_images_is_named_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_split(tmp_path / "images", 1)
    config = tmp_path / "config.yaml"
    config.write_text(f"data_root: {tmp_path / 'images'}\nval_fraction: 0.1\n")
    assert main(["pack", str(config), str(tmp_path / "packed"), "--workers", "1"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert f"val of {tmp_path / 'images'} has no images" in said
    assert "each class has a single image, which is for training (val_fraction=0.1)" in said


def test_a_folder_of_class_folders_is_packed_into_the_destination_itself(
    stoker: Run, source: Path, tmp_path: Path
) -> None:
    assert (
        stoker("pack", source / "train", tmp_path / "packed" / "train", "--json").json["splits"]["."]["samples"] == 16
    )
    assert (tmp_path / "packed" / "train" / "shard-000000.tar").exists()


def test_only_the_requested_splits(stoker: Run, source: Path, tmp_path: Path) -> None:
    ended = stoker("pack", source, tmp_path / "packed", "--split", "val", "--json")
    assert list(ended.json["splits"]) == ["val"]
    assert not (tmp_path / "packed" / "train").exists()


def test_other_options_are_refused_until_fresh_removes_the_pack(stoker: Run, source: Path, tmp_path: Path) -> None:
    assert stoker("pack", source, "packed").code == 0
    (tmp_path / "packed" / "train" / "notes.txt").write_text("mine")
    refused = stoker("pack", source, "packed", "--longest", "20")
    assert (refused.code, "error: pack-options-differ" in refused.err, "--fresh" in refused.err) == (1, True, True)
    assert stoker("pack", source, "packed", "--longest", "20", "--fresh").code == 0
    assert (tmp_path / "packed" / "train" / "notes.txt").read_text() == "mine"
    assert json.loads((tmp_path / "packed/train/index.json").read_text())["facts"]["packed_with"]["longest"] == 20


def test_bad_files_are_a_warning_or_an_error_with_the_list(stoker: Run, source: Path, tmp_path: Path) -> None:
    (source / "train" / "cat" / "page.jpg").write_text("<html>")
    refused = stoker("pack", source, "packed", "max_bad_fraction=0", "--json")
    assert refused.code == 1
    assert refused.json["error"]["name"] == "too-many-bad-images"
    assert "cat/page.jpg: not an image" in refused.err
    assert not (tmp_path / "packed/train/index.json").exists()
    allowed = stoker("pack", source, "packed", "--json")
    assert allowed.code == 0
    assert allowed.json["splits"]["train"]["skipped"] == 1
    assert "skipped.jsonl" in allowed.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--longest", "0"], "--longest 0"),
        (["--quality", "0"], "not in 1..100"),
        (["--workers", "0"], "--workers 0"),
        (["--shard-size", "256"], "has no unit"),
        (["--shard-size", "0"], "too small"),
        (["max_bad_fraction=2"], "must be at most 1"),
        (["--split", "../elsewhere"], "points outside"),
    ],
)
def test_wrong_options_exit_2_and_write_nothing(
    stoker: Run, source: Path, tmp_path: Path, options: list[str], expected: str
) -> None:
    ended = stoker("pack", source, "packed", *options)
    assert ended.code == 2
    assert expected in ended.err
    assert "hint:" in ended.err
    assert not (tmp_path / "packed").exists()


def test_impossible_places_are_refused_and_nothing_is_written(stoker: Run, source: Path, tmp_path: Path) -> None:
    before = content(tmp_path / "images")
    (tmp_path / "file").write_text("")
    for source_name, destination, expected in [
        ("images", "images", "destination-inside-source"),
        ("images", "images/packed", "destination-inside-source"),
        ("imges", "packed", "did you mean images"),
        ("images", "file", "is a file"),
        ("images", "s3://bucket/packed", "is a URL"),
    ]:
        ended = stoker("pack", source_name, destination)
        assert ended.code in (1, 2)
        assert expected in ended.err
        assert "Traceback" not in ended.err
    assert content(tmp_path / "images") == before
    assert not (tmp_path / "packed").exists()


def test_a_split_that_does_not_exist_is_named(stoker: Run, source: Path) -> None:
    ended = stoker("pack", source, "packed", "--split", "tran")
    assert ended.code == 1
    assert "did you mean train" in ended.err


def test_a_destination_without_permission_is_refused(open_folder: Path) -> None:
    make_split(open_folder / "images", 1)
    (open_folder / "closed").mkdir(mode=0o555)
    program = (
        # Import what the command needs first: the new user may not be able to read our environment.
        "# warm\nimport os, sys\n"
        "import stoker.commands.pack, stoker.tasks.images.pack.split_packing\n"
        "import stoker.tasks.images.layouts.opening, stoker.profile.host, stoker.config.fields\n"
        "import stoker.core.console, stoker.tasks.volumes.task\n"
        "from stoker.cli import main\n"
        "if os.getuid() == 0:\n"
        "    os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for destination in sys.argv[1:]: print(main(['pack', 'images', destination]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "closed", "closed/packed"], cwd=open_folder, capture_output=True, text=True,
        timeout=DEADLINE_S, env=os.environ | {"HOME": "/nonexistent"},
    )  # fmt: skip
    assert done.stdout == "1\n1\n", done.stderr
    assert done.stderr.count("error: destination-not-writable") == 2, done.stderr


def test_a_failed_write_names_the_shard_and_leaves_no_partial_file(
    source: Path, tmp_path: Path, ready: ReadyProcess
) -> None:
    words = ("pack", source, "packed", "--split", "train")
    done = ready.run(*words, cwd=tmp_path, before="tests.support.training_faults:small_files")
    assert done.code == 1
    assert "error: pack-failed" in done.err
    assert "train/shard-000000.tar could not be made" in done.err
    assert list((tmp_path / "packed" / "train").iterdir()) == []


@pytest.fixture(scope="module")
def slow_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set that takes a few seconds to encode."""
    folder = tmp_path_factory.mktemp("slow") / "images"
    make_split(folder, 20, side=900)
    return folder


@pytest.fixture(scope="module")
def uninterrupted(slow_source: Path, ready: ReadyProcess, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole")
    assert ready.run("pack", slow_source, "packed", *ANEW, cwd=folder).code == 0
    return content(folder / "packed")


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers_of(pid: int) -> list[int]:
    """The encoding processes, without Python's own helper process."""
    return [child for child in children_of(pid) if b"make_shards" in Path(f"/proc/{child}/cmdline").read_bytes()]


@pytest.mark.parametrize("how", [pytest.param("kill -9", marks=pytest.mark.release), "Ctrl-C", "kill -9 a worker"])
def test_however_it_is_interrupted_the_same_command_finishes_it_with_the_same_bytes(
    how: str, slow_source: Path, uninterrupted: dict[str, bytes], ready: ReadyProcess, stoker: Run, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    process = ready.start("pack", slow_source, packed, *ANEW, cwd=tmp_path)
    # After the first shard: by then some are finished and others half written.
    process.wait_for(lambda: (packed / ".pack" / "shard-000000.json").exists() and len(workers_of(process.pid)) == 2)
    children = children_of(process.pid)
    if how == "kill -9":
        process.send(signal.SIGKILL)
    elif how == "Ctrl-C":
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals every process of the group
    else:
        os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    code, said = process.wait(), process.err
    wait_until(lambda: not any(map(is_running, children)))

    expected_code = {"kill -9": -9, "Ctrl-C": 130, "kill -9 a worker": 1}[how]
    assert code == expected_code, said
    assert "Traceback" not in said
    assert not (packed / "index.json").exists()
    if how in ("Ctrl-C", "kill -9 a worker"):
        assert not list(packed.glob(".shard-*"))
    if how == "kill -9 a worker":
        assert "error: pack-worker-died" in said
        assert "shard-0000" in said
    finished = stoker("pack", slow_source, packed, *ANEW, "--json").json["splits"]["."]
    assert 0 < finished["kept_shards"] < finished["shards"]
    assert content(packed) == uninterrupted
