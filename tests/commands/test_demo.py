"""`stoker demo` learns to read digits, with the code that every run uses."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.conftest import PROJECT, Run


def test_the_packaged_config_is_the_one_in_configs() -> None:
    assert (PROJECT / "src/stoker/demo.yaml").read_text() == (PROJECT / "configs/demo.yaml").read_text()


def test_make_demo_is_this_command() -> None:
    assert "stoker demo" in (PROJECT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]


@pytest.mark.slow
def test_it_reaches_97_percent_and_says_where_the_time_went(stoker: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a demo"  # a path that needs quoting
    ended = stoker("demo", "--folder", folder, "--json")
    assert ended.code == 0, ended.err
    found = ended.json
    assert found["best_val_acc1"] >= 97.0
    assert found["learned"]
    assert found["epochs"] == 8
    assert found["computing_s"] > 0
    assert 0 <= found["waiting_s"] < found["seconds"]
    assert found["stages"]["decode"] > 0
    assert list(folder.glob("runs/demo/checkpoints/epoch=*-val_acc1=*.ckpt"))

    again = stoker("demo", "--folder", folder)
    assert again.code == 0, again.err
    assert "is finished" in again.err
    assert "Epoch" not in again.err
    assert "where the time of the epochs went" in again.out
    assert "waiting for data" in again.out
    # The commands it suggests work.
    line = next(line for line in again.out.splitlines() if line.strip().startswith("stoker eval"))
    evaluated = stoker(*shlex.split(line, comments=True)[1:], "--json")
    assert evaluated.code == 0, evaluated.err


def test_a_folder_that_cannot_be_written_is_named(stoker: Run, tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    ended = stoker("demo", "--folder", blocker / "demo")
    assert ended.code == 1
    assert "demo-folder-not-writable" in ended.err
    assert "--folder" in ended.err
