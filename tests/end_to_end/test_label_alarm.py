"""A run whose validation labels are wrong says so, in the terminal, in its files and in its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.report.document import RunReader
from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import metrics, write_config, write_images


@pytest.mark.parametrize(("permuted", "mixing"), [(True, False), (True, True), (False, False)])
def test_a_run_with_permuted_validation_folders_asks_for_the_labels(
    permuted: bool, mixing: bool, ready: ReadyProcess, tmp_path: Path
) -> None:
    data = write_images(tmp_path / "data")
    if permuted:
        val = data / "val"
        for old, new in (("class0", "spare"), ("class1", "class0"), ("class2", "class1"), ("spare", "class2")):
            (val / old).rename(val / new)
    keys = {"epochs": 4, "lr": 2.0} | ({"mixup_alpha": 0.2, "mix_probability": 1.0} if mixing else {})
    done = ready.run("train", write_config(tmp_path, data, **keys), cwd=tmp_path)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "tiny"
    alarms = [line for line in metrics(run, "event") if line["event"] == "labels?"]
    rows = [row for row in RunReader(run).document()["events"] if row["event"] == "labels?"]
    if not permuted:
        assert (alarms, rows) == ([], [])
        assert "labels?" not in done.err
        return
    (alarm,) = alarms  # once
    assert "train/loss is" in alarm["seen"] if mixing else "train/acc1 is" in alarm["seen"]
    assert alarm["permutation"].startswith("shifted by one: each folder holds the images of the next class")
    assert "class0 holds class1, class1 holds class2, class2 holds class0" in alarm["permutation"]
    assert "warning: labels? " in done.err
    assert "hint: stoker verify CONFIG" in done.err
    (row,) = rows
    assert "class0 holds class1" in row["details"]
    assert "stoker verify CONFIG" in row["details"]
