"""A staged copy trains to the same bits as its source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.config import load_config
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import metrics, write_config, write_images


def told(arguments: list[str | Path], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["stage", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_copy_of_a_subset_trains_to_the_same_bits_as_the_source(
    tmp_path: Path, ready: ReadyProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_images(tmp_path / "data", classes=5)
    (data / "train/empty").mkdir()
    chosen = {"subset_classes": 3, "subset_train_per_class": 10, "subset_val_per_class": 3, "epochs": 1}
    config = write_config(tmp_path, data, **chosen)
    code, out, _ = told([config, "--to", tmp_path / "near", "--json"], capsys)
    document = json.loads(out)
    assert (code, document["files"]) == (0, 3 * 13)
    record = json.loads((tmp_path / "near/subset.json").read_text())
    assert (record["samples"], len(record["classes"])) == ({"train": 30, "val": 9}, 3)
    near = load_config(document["config"]).config
    assert near.data_root == str(tmp_path / "near")
    for run, file in (("far", config), ("near", document["config"])):
        ended = ready.run("train", str(file), f"run_name={run}", cwd=tmp_path)
        assert ended.code == 0, ended.err
    lines = [metrics(tmp_path / "runs" / run, "step") for run in ("far", "near")]
    assert [line["train/loss"] for line in lines[0]] == [line["train/loss"] for line in lines[1]] != []
    # Another subset would be mixed up with this one.
    code, _, err = told([config, "--to", tmp_path / "near", "subset_classes=2"], capsys)
    assert (code, "copy-of-another-subset" in err) == (1, True)
