"""Staging folders: bad input, kills, several processes, and copies that train to the same bits."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from stoker.cli import main
from stoker.config import load_config
from stoker.core.errors import UserError
from stoker.io.local_copy import LocalCopy, open_copy
from stoker.stage.concurrency import Concurrency
from stoker.stage.copying import check_names, verify_copy
from stoker.tasks.images.data import open_samples
from tests.support.staging import files_of, kill_at_random_moments, start_staging, write_tree
from tests.support.tiny_training import write_config, write_images
from tests.support.waiting import DEADLINE_S


def told(arguments: list[str | Path], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["stage", *map(str, arguments)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def test_bad_sources_and_targets_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    write_tree(source, 3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.tex").write_text("mine")
    before = sorted(map(str, tmp_path.rglob("*")))
    cases: list[tuple[list[str | Path], int, str]] = [
        ([source, source / "copy"], 1, "target-inside-source"),
        ([source / "train", source], 1, "source-inside-target"),
        ([source, source], 1, "target-inside-source"),
        ([tmp_path / "sorce", tmp_path / "new"], 1, "did you mean source?"),
        ([source / "train/c0/0000.jpg", tmp_path / "new"], 1, "is a file, not a folder"),
        ([source, tmp_path / "full"], 1, "not-a-copy"),
        ([source, tmp_path / "new", "--limit-rate", "50"], 2, "no unit"),
        ([source, tmp_path / "new", "--limit-rate", "0MB"], 2, "copy nothing"),
        ([source, "s3://bucket/x"], 2, "DST is a folder"),
        ([source], 2, "expected a source and a target"),
        ([source, tmp_path / "new", "--classes", "3", "--class-list", "x"], 1, "list-not-readable"),
        (["--verify", tmp_path / "full"], 1, "not-a-copy"),
    ]
    for arguments, code, words in cases:
        found, out, err = told(arguments, capsys)
        assert (found, out) == (code, ""), (arguments, err)
        assert words in err
    assert sorted(map(str, tmp_path.rglob("*"))) == before
    code, _, err = told([tmp_path / "empty", tmp_path / "copy"], capsys)
    assert code == 1
    assert "nothing-to-stage" in err


def test_a_link_that_leads_to_itself_or_above_is_refused_and_other_links_are_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a/1.jpg").write_bytes(b"1")
    (source / "b").symlink_to(source / "a")
    (source / "gone.jpg").symlink_to(source / "nothing")
    os.mkfifo(source / "pipe.jpg")
    code, out, _ = told([source, tmp_path / "copy", "--json"], capsys)
    assert code == 1
    assert {one["path"]: one["reason"].split(" ")[0] for one in json.loads(out)["failures"]} == {
        "gone.jpg": "missing",
        "pipe.jpg": "not",
    }
    assert files_of(tmp_path / "copy") == {"a/1.jpg": b"1", "b/1.jpg": b"1"}
    (source / "a/loop").symlink_to(source)
    code, _, err = told([source, tmp_path / "copy2"], capsys)
    assert (code, "symlink-loop" in err) == (1, True)
    (source / "a/loop").unlink()
    (source / "self").symlink_to(source / "self")
    code, _, err = told([source, tmp_path / "copy3"], capsys)
    assert (code, "symlink-loop" in err) == (1, True)


def test_names_that_cannot_be_files_beside_each_other_are_refused() -> None:
    check_names(["a/B.jpg", "a/b.jpg", "c"], ignore_case=False)
    with pytest.raises(UserError, match="except for upper and lower case: a/b"):
        check_names(["a/B.jpg", "a/b.jpg"], ignore_case=True)
    with pytest.raises(UserError, match="used for a file and for a folder: x"):
        check_names(["x/y/1", "x"], ignore_case=False)


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A server whose listing has names that a real bucket can have and a file system cannot."""
    keys = ["d/../../evil", "d//etc/evil", "d/" + "x" * 1000, "d/ok.jpg", "d/folder/", "d/./dot"]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            body = b"evil"
            if "list-type=2" in self.path:
                entries = "".join(
                    f"<Contents><Key>{key}</Key><Size>{0 if key.endswith('/') else 4}</Size><ETag>x</ETag></Contents>"
                    for key in keys
                )
                body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>".encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", "x")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    yield keys
    server.shutdown()


def test_keys_that_lead_elsewhere_are_failures_and_nothing_is_written_outside(
    hostile: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = told(["s3://bucket/d", tmp_path / "deep/copy", "--json"], capsys)
    summary = json.loads(out)
    assert (code, summary["copied"]["files"], summary["failed"]) == (1, 1, len(hostile) - 2)
    assert summary["copied"]["length_only"] == 1
    assert all("bad name" in one["reason"] for one in summary["failures"])
    assert files_of(tmp_path).keys() == {"deep/copy/ok.jpg"}


def test_a_disk_without_room_is_refused_before_the_first_byte_and_a_read_only_one_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    write_tree(source, 3)
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=10m", "tmpfs", disk], check=True)
    try:
        code, _, err = told([source, disk / "copy"], capsys)
        assert (code, "disk-too-small" in err, "--classes" in err) == (1, True, True)
        assert files_of(disk) == {}
        # Something else fills the disk while we copy.
        shutil.rmtree(source / "shards")
        write_tree(source, 100, size=50_000, large=10)

        def fill() -> None:
            while not list((disk / "copy4").rglob("*.jpg")):
                time.sleep(0.01)
            (disk / "other").write_bytes(b"x" * 8_000_000)

        filler = threading.Thread(target=fill)
        filler.start()
        code, _, err = told([source, disk / "copy4", "--limit-rate", "3MB/s"], capsys)
        filler.join()
        assert (code, "error: disk-full" in err) == (1, True)
        (disk / "other").unlink()
        with closing(open_copy(disk / "copy4")) as copy:
            assert verify_copy(copy, lambda _done, _total: None).wrong == []
        assert list(disk.glob("copy4/.stage-*.tmp")) == []
        assert told([source, disk / "copy4"], capsys)[0] == 0
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        code, _, err = told([source, disk / "copy3"], capsys)
        assert (code, "copy-not-writable" in err) == (1, True)
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.release)])
def test_a_kill_at_any_moment_leaves_only_whole_files_and_the_next_run_completes(
    tmp_path: Path, kills: int, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = write_tree(tmp_path / "source", 400, size=150_000)
    assert kill_at_random_moments(str(tmp_path / "source"), tmp_path / "copy", contents, kills) >= 1
    code, out, _ = told([tmp_path / "source", tmp_path / "copy", "--verify", "--json"], capsys)
    assert code == 0
    assert json.loads(out)["verification"]["not_in_the_manifest"] == []
    assert files_of(tmp_path / "copy") == contents
    assert list((tmp_path / "copy").glob(".stage-*.tmp")) == []


def test_ctrl_c_ends_with_130_and_says_how_to_continue_and_three_processes_fill_one_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = write_tree(tmp_path / "source", 300, large=1000)
    process = start_staging(tmp_path / "source", tmp_path / "copy", "--limit-rate", "1MB/s")
    while not list((tmp_path / "copy").rglob("*.jpg")):
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert b"run the same command again" in err
    kept = len(list(LocalCopy(tmp_path / "copy", str(tmp_path / "source")).records()))
    assert 0 < kept < len(contents)
    together = [start_staging(tmp_path / "source", tmp_path / "copy") for _ in range(3)]
    for one in together:
        one.communicate()
    assert [one.returncode for one in together] == [0, 0, 0]
    assert files_of(tmp_path / "copy") == contents
    code, out, _ = told(["--verify", tmp_path / "copy", "--json"], capsys)
    assert (code, json.loads(out)["files"]) == (0, len(contents))


def test_a_config_stages_what_it_reads_in_every_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_images(tmp_path / "data", classes=4, train=10, val=4)
    (data / "test/unlabelled").mkdir(parents=True)
    (data / "test/unlabelled/x.jpg").write_bytes(b"x")
    assert main(["pack", str(data), str(tmp_path / "packed")]) == 0
    rows = [
        f"{path.relative_to(data)},{path.parent.name},{path.parts[-3]}" for path in sorted(data.rglob("*/c*/*.jpg"))
    ]
    (data / "list.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    (tmp_path / "names.txt").write_text("# two of them\nclass3\nclass1\n")
    cases: dict[str, tuple[Path, dict[str, object], list[str]]] = {
        "all": (data, {}, []),
        "fraction": (data / "train", {"val_fraction": 0.2, "subset_classes": 2, "subset_train_per_class": 3}, []),
        "csv": (data, {"samples_csv": "list.csv", "subset_classes": 2}, []),
        "pack": (tmp_path / "packed", {"subset_classes": 2}, []),
        "names": (data, {}, ["--class-list", str(tmp_path / "names.txt")]),
    }
    for name, (root, keys, options) in cases.items():
        config = write_config(tmp_path, root, **keys)
        target = tmp_path / "near" / name
        code, out, err = told([config, "--to", target, "--json", *options], capsys)
        assert code == 0, (name, err)
        far = load_config(str(config)).config
        near = load_config(json.loads(out)["config"]).config
        for split in ("train", "val"):
            here, there = open_samples(near, split), open_samples(far, split)  # type: ignore[arg-type]
            if name == "names":
                assert here.classes == ("class1", "class3")
                continue
            members = np.arange(len(here))
            assert here.classes == there.classes
            assert len(here) == len(there)
            assert (here.labels(members) == there.labels(members)).all()
            names_here = [here.index.name(int(one)) for one in here.indices(members)]
            assert names_here == [there.index.name(int(one)) for one in there.indices(members)]
    assert not (tmp_path / "near/all/test").exists()


def test_concurrency_climbs_while_that_pays_and_backs_off_when_asked() -> None:
    """A store that serves each request in 50 ms, and 2,000 a second in all."""
    now = [0.0]
    found = Concurrency(clock=lambda: now[0])
    for _ in range(60_000):
        now[0] += max(0.05 / found.limit, 1 / 2000)
        found.done(110_000)
    assert 90 <= found.limit <= 250
    found.slow_down()
    halved = found.limit
    found.slow_down()
    assert found.limit == halved < 130
    fixed = Concurrency(64, clock=lambda: now[0])
    fixed.slow_down()
    assert fixed.limit == 64
