"""`stoker bench storage`: any files, cold where they can be, and what that feeds."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker.io.storage_profile import SMALL_READ, StorageProfile, small_targets
from stoker.io.storage_speed import Round
from stoker.plan.break_even import appetites, storage_text
from tests.support.s3_server import S3Server

QUICK = ("--seconds", "1.5")


def measured(capsys: pytest.CaptureFixture[str], source: str | Path) -> dict[str, Any]:
    assert main(["bench", "storage", str(source), *QUICK, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def refusal(capsys: pytest.CaptureFixture[str], source: str | Path, *options: str) -> str:
    assert main(["bench", "storage", str(source), *QUICK, *options]) in (1, 2)
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


def test_a_folder_of_any_files_is_read_and_stays_as_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data"
    for number in range(30):
        path = data / f"{number % 3}" / f"-{number} x\n.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(20_000))
    (data / "shard.tar").write_bytes(os.urandom(12 << 20))
    (data / "empty").touch()
    os.sync()
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    found = measured(capsys, data)
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before
    assert (found["files"], found["remote"]) == (32, False)
    assert found["warm"]["at_once"] == 1
    if not found["cold"]:
        pytest.skip("this kernel drops nothing from its page cache")
    assert found["cold"][0]["at_once"] == 1
    for one in (*found["cold"], found["warm"], found["large"]):
        assert one["bytes_per_second"] > 0
        assert 0 < one["p50_s"] <= one["p99_s"]
    best = max(one["bytes_per_second"] for one in found["cold"])
    resnet = found["feeds"][0]
    assert (resnet["gpu"], resnet["model"]) == ("A100", "ResNet-50")
    assert resnet["needs_bytes_per_second"] == pytest.approx(105e6, rel=0.01)
    assert resnet["accelerators"] == pytest.approx(best / resnet["needs_bytes_per_second"])
    assert {one["gpu"] for one in found["feeds"]} == {"A100", "H100"}


def test_objects_are_read_by_many_and_have_no_warm_reads(s3: S3Server, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(40):
        s3.put(f"profile/{number}", os.urandom(30_000))
    s3.put("profile/shard.tar", os.urandom(3 << 20))
    found = measured(capsys, "s3://bucket/profile")
    assert (found["kind"], found["remote"], found["files"], found["warm"]) == ("s3", True, 41, None)
    assert [one["at_once"] for one in found["cold"]] == [1, 4, 16]
    assert any("more than 16 cold reads at once" in text for text in found["not_measured"])
    assert found["large"]["bytes"] >= 3 << 20
    assert measured(capsys, "s3://bucket/profile/shard.tar")["files"] == 1
    assert "no object at or below" in refusal(capsys, "s3://bucket/nothing/here")


def test_what_cannot_be_measured_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny").write_bytes(b"x")
    one = measured(capsys, tmp_path / "tiny")
    assert (one["files"], one["cold"], one["large"]) == (1, [], None)
    assert {text.split(":")[0] for text in one["not_measured"]} == {"cold reads", "large reads"}
    assert one["feeds"][0]["accelerators"] is None
    memory = Path("/dev/shm") / f"stoker-test-{os.getpid()}"
    if memory.parent.is_dir():
        memory.write_bytes(bytes(1000))
        try:
            assert main(["bench", "storage", str(memory), *QUICK]) == 0
            assert "cannot be measured cold" in capsys.readouterr().out
        finally:
            memory.unlink()
    (tmp_path / "empty").mkdir()
    assert "holds no file with content" in refusal(capsys, tmp_path / "empty")
    assert "No such file" in refusal(capsys, tmp_path / "nowhere")
    assert "a100-08" in refusal(capsys, tmp_path / "tiny", "--gpu", "a100-08")


def test_a_bucket_without_credentials_is_refused(
    capsys: pytest.CaptureFixture[str], s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    s3.put("secret/x", b"x")
    assert "credentials" in refusal(capsys, "s3://bucket/secret")


def test_the_text_says_what_the_storage_feeds() -> None:
    slow = Round(16, 1000, 1000 * SMALL_READ, 3.6, 0.05, 0.2)
    profile = StorageProfile(
        "/mnt/imagenet", "nfs4", True, 5000, SMALL_READ, SMALL_READ, cold=(slow,),
        large=Round(16, 400, 4 * 10**9, 2.5, 0.1, 0.3), missing=("warm reads: made up",),
    )  # fmt: skip
    text = storage_text(profile, appetites(None))
    assert text.startswith("feeds 0.3 of an A100 on ResNet-50: 31.9 MB/s of small reads, and one takes 105 MB/s\n")
    assert "  1.0 A100s on 3D U-Net (1.6 GB/s each: MLPerf Storage)" in text
    assert "0.2 of an H100 on ResNet-50 (205 MB/s each: 114,660 bytes an image; MLPerf Storage)" in text
    assert "next: stoker stage /mnt/imagenet /local/disk/imagenet" in text
    assert re.search(r"114,660 bytes, cold +16 +278 +31\.9 +50\.00 +200\.00 +#", text)
    assert text.endswith("not measured: warm reads: made up")
    (v100,) = appetites("V100-16")
    assert v100.bytes_per_second == pytest.approx(1200 * SMALL_READ)


def test_a_few_shards_are_read_all_over_and_many_files_once() -> None:
    shards = small_targets([("a.tar", 10**9), ("b.tar", 10**9)])
    assert len(shards) > 4000
    assert len({(one.path, one.offset) for one in shards}) == len(shards)
    assert all(one.size == SMALL_READ and 0 <= one.offset <= 10**9 - SMALL_READ for one in shards)
    assert max(one.offset for one in shards) > 9 * 10**8
    files = small_targets([(f"{number}", 50_000 + number) for number in range(100)])
    assert sorted((one.path, one.offset, one.size) for one in files) == sorted(
        (f"{number}", 0, 50_000 + number) for number in range(100)
    )
