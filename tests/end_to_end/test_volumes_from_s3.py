"""`task: segment3d` with volumes in a bucket: the run of the folder, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli import main
from tests.io.test_cache import kept_files
from tests.support.s3_server import BUCKET, S3Server
from tests.support.tiny_training import assert_same_end, metrics
from tests.support.tiny_volumes import write_volume_config, write_volumes


def test_training_from_a_bucket_ends_like_training_from_the_folder(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_volumes(tmp_path / "data")
    url = s3.put_folder(folder, "train-volumes")
    ways = {
        "local": (str(folder), {}),
        "fetched": (url, {"num_workers": 2}),
        "kept": (url, {"cache_dir": str(tmp_path / "kept"), "num_workers": 1, "loader": "process"}),
    }
    for name, (root, keys) in ways.items():
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        config = write_volume_config(tmp_path / name, Path("unused"), **{"data_root": root} | keys)
        assert main(["train", str(config)]) == 0
    runs = [tmp_path / name / "runs" / "tiny" for name in ways]
    for run in runs[1:]:
        assert_same_end(run, runs[0])
        assert metrics(run, "epoch")[1]["val/dice"] == metrics(runs[0], "epoch")[1]["val/dice"]
    # Every image and label once, whole; the two runs on them never fetched one again.
    assert len(kept_files(tmp_path / "kept")) == 6


def test_a_bucket_that_may_not_be_read_is_told_and_nothing_is_left_behind(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    monkeypatch.chdir(tmp_path)
    config = write_volume_config(tmp_path, Path("unused"), data_root=f"s3://{BUCKET}/private")
    assert main(["train", str(config)]) == 1
    said = capsys.readouterr().err
    assert f"error: credentials-refused\n  s3://{BUCKET}/private refused the credentials" in said
    assert "AWS_SECRET_ACCESS_KEY" in said
    assert not (tmp_path / "runs" / "tiny").exists()
