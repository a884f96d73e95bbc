"""The classes chosen for a subset are shown and saved, so that it can be copied, cited and reproduced."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import Run
from tests.data.test_loader import make_images


def test_the_chosen_classes_are_shown_and_saved(stoker: Run, tmp_path: Path) -> None:
    data = tmp_path / "data"
    make_images(data, "train", 40, classes=4)
    make_images(data, "val", 20, classes=4)
    config = tmp_path / "small.yaml"
    config.write_text(
        f"data_root: {data}\nmodel: test_resnet\nimg_size: 32\nbatch_size: 4\nepochs: 1\nnum_workers: 1\n"
        "subset_classes: 2\nsubset_train_per_class: 6\nsubset_val_per_class: 3\nsubset_seed: 42\n"
    )
    ended = stoker("train", config)
    assert ended.code == 0, ended.err
    chosen = json.loads((tmp_path / "runs" / "small" / "subset.json").read_text())
    assert len(chosen["classes"]) == 2
    assert chosen["samples"] == {"train": 12, "val": 6}
    assert chosen["seed"] == 42
    assert f"classes: {', '.join(chosen['classes'])}" in ended.err
