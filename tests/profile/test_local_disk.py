"""This host's own disk is measured with files the size of a sample, and nothing is left behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.config import load_config
from stoker.io import storage_speed as local_disk
from stoker.io.storage_speed import measure_local_disk
from stoker.trial.process import storage_trial
from tests.support.proxy import Proxy
from tests.support.s3_server import BUCKET, S3Server


def test_a_folder_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    rate = measure_local_disk(tmp_path, 50_000, seconds=0.3)
    assert rate is not None
    assert 1e4 < rate < 1e11
    assert (measure_local_disk(tmp_path, 1e10, seconds=0.2) or 0) > 0, "with a single file"
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_folder_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A folder that does not exist: temporary files go to the usual place.
    assert measure_local_disk(tmp_path / "nowhere", 1000, seconds=0.1) is not None
    if os.geteuid() != 0:  # root may write anywhere
        tmp_path.chmod(0o500)
        assert measure_local_disk(tmp_path, 1000) is None
        tmp_path.chmod(0o700)
    monkeypatch.setattr(local_disk, "LEAST_FREE", 1 << 62)
    assert measure_local_disk(tmp_path, 1000) is None


def test_a_trial_measures_it_where_the_data_is_elsewhere_and_only_there(
    s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path
) -> None:
    s3_proxy.latency = 0.0
    for number in range(8):
        s3_server.put(f"disk/train/class{number % 2}/{number:02d}.jpg", os.urandom(2000))
        here = tmp_path / "train" / f"class{number % 2}" / f"{number:02d}.jpg"
        here.parent.mkdir(parents=True, exist_ok=True)
        here.write_bytes(os.urandom(2000))
    rates = []
    for root in (f"s3://{BUCKET}/disk", str(tmp_path)):
        config = load_config(None, ["task=classify", f"data_root={root}", f"index_dir={tmp_path / 'index'}"]).config
        rates.append(storage_trial(config, {"seconds": 1.0}, lambda _s: None)["storage"]["local_bytes_per_second"])
    assert rates[0] > 0
    assert rates[1] is None
