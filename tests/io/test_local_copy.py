"""The record of a local copy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stoker.core.errors import UserError
from stoker.io.local_copy import MANIFEST, LocalCopy, open_copy
from stoker.io.stores import ReadFailure

SOURCE = "s3://bucket/data"


def test_a_file_counts_when_it_is_committed_and_is_found_by_the_next_process(tmp_path: Path) -> None:
    copy = LocalCopy(tmp_path / "copy", SOURCE + "/")
    record = copy.put("train/a/1.jpg", b"hello", '"tag"', "md5")
    assert copy.finished("train/a/1.jpg") is None
    assert (tmp_path / "copy/train/a/1.jpg").read_bytes() == b"hello"
    assert copy.commit() == 1
    parts = copy.create("big.tar", 10)
    parts.write_at(5, b"world")
    parts.write_at(0, b"hello")
    parts.finish("7")
    copy.put("odd\udcff\n.jpg", b"", "")
    copy.close()
    again = LocalCopy(tmp_path / "copy", SOURCE)
    assert again.finished("train/a/1.jpg") == again.present("train/a/1.jpg") == record
    assert [one.path for one in again.records()] == ["train/a/1.jpg", "big.tar", "odd\udcff\n.jpg"]
    assert (tmp_path / "copy/big.tar").read_bytes() == b"helloworld"
    (tmp_path / "copy/train/a/1.jpg").unlink()
    assert again.present("train/a/1.jpg") is None
    # No folder of ours: to ImageFolder each is a class.
    assert [path.name for path in (tmp_path / "copy").iterdir() if path.is_dir()] == ["train"]


def test_what_a_kill_leaves_of_a_line_is_ignored_and_hides_nothing_after_it(tmp_path: Path) -> None:
    first = LocalCopy(tmp_path, SOURCE)
    first.put("whole", b"1")
    first.commit()
    with (tmp_path / MANIFEST).open("ab") as manifest:
        manifest.write(b'{"path":"torn","size":3,"vers')
    second = LocalCopy(tmp_path, SOURCE)
    second.put("after", b"22")
    second.put("whole", b"333", "newer")
    second.commit()
    for copy in (second, LocalCopy(tmp_path, SOURCE)):
        assert copy.finished("torn") is None
        assert copy.finished("after") is not None
        newest = copy.finished("whole")
        assert newest.version == "newer"
    first.refresh()
    assert first.finished("after") is not None


def test_a_temporary_file_is_removed_when_its_process_is_gone(tmp_path: Path) -> None:
    script = (
        "import os, sys; from stoker.io.local_copy import LocalCopy;"
        "LocalCopy(sys.argv[1], 's3://bucket/data').create('big', 5).write_at(0, b'xx'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    mine = LocalCopy(tmp_path / "other", SOURCE).create("x", 1)
    assert len(list(tmp_path.glob(".stage-*.tmp"))) == 1
    LocalCopy(tmp_path, SOURCE)
    assert list(tmp_path.glob(".stage-*.tmp")) == []
    LocalCopy(tmp_path / "other", SOURCE)
    mine.write_at(0, b"1")
    mine.finish()


def test_more_lines_than_fit_the_recent_ones_are_all_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.io.copy_manifest._MOST_RECENT", 10)
    copy = LocalCopy(tmp_path, SOURCE)
    for number in range(35):
        copy.put(f"c/{number}", b"x" * number, "old")
        if number % 4 == 0:
            copy.commit()
    copy.put("c/3", b"xxx", "new")
    copy.commit()
    for reader in (copy, LocalCopy(tmp_path, SOURCE)):
        found = [reader.finished(f"c/{number}") for number in range(35)]
        assert [record.size for record in found if record is not None] == list(range(35))
        assert found[3].version == "new"
        assert sorted(record.path for record in reader.records()) == sorted(f"c/{number}" for number in range(35))


@pytest.mark.parametrize(
    "name",
    ["../x", "a/../../x", "/etc/x", "a//b", "./a", "a\0b", "x" * 256, "é" * 200, "ab/" * 1500 + "x", ".stage.json", ""],
)
def test_a_name_that_leads_out_of_the_copy_or_cannot_be_a_file_is_refused(tmp_path: Path, name: str) -> None:
    copy = LocalCopy(tmp_path / "copy", SOURCE)
    with pytest.raises(ReadFailure, match="bad name"):
        copy.put(name, b"x")
    with pytest.raises(ReadFailure, match="bad name"):
        copy.create(name, 1)
    assert {path.name for path in tmp_path.rglob("*")} == {"copy", ".stage.json", MANIFEST}


def test_a_link_in_the_copy_does_not_lead_writes_out_of_it(tmp_path: Path) -> None:
    copy = LocalCopy(tmp_path / "copy", SOURCE)
    (tmp_path / "outside").mkdir()
    (tmp_path / "copy/link").symlink_to(tmp_path / "outside")
    with pytest.raises(ReadFailure, match="not a folder"):
        copy.put("link/x", b"1")
    assert list((tmp_path / "outside").iterdir()) == []


def test_a_folder_with_other_things_or_another_source_is_refused(tmp_path: Path) -> None:
    LocalCopy(tmp_path / "copy", "s3://bucket/misspelt")
    copy = LocalCopy(tmp_path / "copy", SOURCE)  # nothing was copied yet
    copy.put("a", b"1")
    copy.close()
    with pytest.raises(UserError, match="is a copy of s3://bucket/data, not of s3://bucket/other"):
        LocalCopy(tmp_path / "copy", "s3://bucket/other")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x")
    with pytest.raises(UserError, match="not empty"):
        LocalCopy(tmp_path / "mine", SOURCE)
    with pytest.raises(UserError, match="not a copy"):
        open_copy(tmp_path / "mine")
    assert open_copy(tmp_path / "copy").source == SOURCE
