"""Before staging: the rates of source and disk, and when the copy pays off."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.plan.break_even import payback_of, payback_text
from stoker.stage.copying import measure_payback
from stoker.stage.sources import open_source
from tests.support.proxy import Proxy
from tests.support.s3_server import S3Server


def test_a_slow_bucket_is_measured_before_the_first_byte_and_not_if_told_so(
    s3_proxy: Proxy,
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    proxy = s3_proxy
    for number in range(10):
        s3_server.put(f"payback/{number}", os.urandom(100_000))
    proxy.bytes_per_second = 2e6
    monkeypatch.setattr("stoker.stage.staging.MEASURED_FROM", 500_000)
    assert main(["stage", "s3://bucket/payback", str(tmp_path / "a" / "copy"), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)["break_even"]
    # Loosely: the other tests use the cores, too.
    assert 2e5 < found["source_bytes_per_second"] < 4e6
    assert found["bytes"] == 1_000_000
    assert found["epochs"] == pytest.approx(found["copy_s"] / (found["epoch_s"] - found["local_epoch_s"]))
    assert "the source delivers" in said.err
    assert "pays off after" in said.err
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["copy"]  # nothing of the measurement stays
    proxy.bytes_per_second = None
    assert main(["stage", "s3://bucket/payback", str(tmp_path / "b"), "--json", "--no-measure"]) == 0
    assert json.loads(capsys.readouterr().out)["break_even"] is None


def test_what_cannot_be_read_is_not_a_rate(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for number in range(5):
        (tmp_path / "data" / str(number)).write_bytes(b"x" * 1000)
    source = open_source(str(tmp_path / "data"))
    files = list(source.files())
    for number in range(5):
        (tmp_path / "data" / str(number)).unlink()
    assert measure_payback(source, files, str(tmp_path), seconds=0.2) is None


def test_the_words_say_when_it_pays_off() -> None:
    slow, fast = (payback_of(5.46e9, rate, 64, 9e8) for rate in (31e6, 500e6))
    assert payback_text(slow) == (
        "the source delivers 31 MB/s to 64 readers, the local disk 900 MB/s to one: copying takes about 2.9 min. "
        "An A100 on ResNet-50 takes 105 MB/s: for it the copy pays off after 1.4 epochs"
    )
    assert "which the source already delivers" in payback_text(fast)
