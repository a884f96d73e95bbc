"""`stage_to`: training from a bucket while its local copy fills. The same bits as from the folder; the copy is whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.data.store.local_copy import LocalCopy
from tests.support.proxy import Proxy
from tests.support.s3_server import S3Server
from tests.support.tiny_training import assert_same_end, steps_done, write_config, write_images
from tests.support.tiny_volumes import write_volume_config, write_volumes
from tests.support.waiting import wait_until


def files_of(folder: Path) -> dict[str, bytes]:
    """The data files below a folder; a copy's own records are hidden."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".stage")
    }


def assert_whole_copy(copy: Path, source: Path, url: str) -> None:
    assert files_of(copy) == files_of(source)
    opened = LocalCopy(copy, url)
    assert {record.path for record in opened.records()} == set(files_of(source))
    opened.close()
    assert not list(copy.glob(".stage-*.tmp"))


def object_requests(proxy: Proxy) -> list[str]:
    return [line for line in proxy.requests if line.startswith("GET") and ".jpg" in line]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"), train=20, val=5)


@pytest.fixture(scope="module")
def reference(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs on the folder."""
    folder = tmp_path_factory.mktemp("reference")
    assert main(["train", str(write_config(folder, images, runs_dir=str(folder / "runs"), epochs=3))]) == 0
    return folder / "runs" / "tiny"


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_training_while_staging_ends_alike_and_later_epochs_fetch_nothing(
    images: Path, reference: Path, s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], engine: str,
) -> None:  # fmt: skip
    url, copy = s3_server.put_folder(images, f"overlap-{engine}"), tmp_path / "copy"
    monkeypatch.chdir(tmp_path)
    keys = {"epochs": 3, "stage_to": str(copy), "index_dir": str(tmp_path / "index"), "loader": engine, "num_workers": 2}
    assert main(["train", str(write_config(tmp_path, Path("unused"), **keys | {"data_root": url}))]) == 0
    assert_same_end(tmp_path / "runs" / "tiny", reference)
    said = capsys.readouterr().err
    assert f"staging to {copy} while training: 0 of 75 files (0 MB) are there" in said
    print(said, len(object_requests(s3_proxy)))
    assert_whole_copy(copy, images, url)
