"""Data that changed since a run was stopped is named before training continues, and continued with only if that is
meant."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.core.errors import UserError
from tests.end_to_end.conftest import Ledger
from tests.support.tiny_training import last_state, metrics, write_config, write_images
from tests.support.tiny_volumes import write_list, write_volume_config

Train = Callable[..., Ledger]


def refusal(train: Train, config: Path) -> str:
    with pytest.raises(UserError) as caught:
        train(config)
    assert caught.value.name == "data-changed"
    assert "--accept-changed-data" in str(caught.value.hint)
    assert "at all" in str(caught.value.why) or "not comparable" in str(caught.value.why)
    return caught.value.seen


def test_renamed_added_and_removed_images_are_named_and_accepted_only_on_request(
    train_until: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, run = write_images(tmp_path / "data"), tmp_path / "runs" / "tiny"
    config = write_config(tmp_path, data)
    train_until(config, 2)
    first = data / "train" / "class1" / "000.jpg"
    first.rename(first.with_name("zebra.jpg"))
    seen = refusal(train_until, config)
    assert "train (48 samples): 1 sample removed: class1/000.jpg; 1 sample added: class1/zebra.jpg" in seen
    assert "val" not in seen
    (data / "train" / "class0" / "000.jpg").unlink()
    shutil.copy(data / "val" / "class0" / "000.jpg", data / "val" / "class0" / "new.jpg")
    seen = refusal(train_until, config)
    assert "train (48 samples before, 47 now): 2 samples removed: class0/000.jpg, class1/000.jpg" in seen
    assert "val (15 samples before, 16 now): 1 sample added: class0/new.jpg" in seen
    assert last_state(run)["progress"]["step"] == 2
    train_until(config, 4, accept_data=True)
    assert "the data changed, and is accepted: train" in capsys.readouterr().err
    (event,) = [line for line in metrics(run, "event") if line["event"] == "data_changed"]
    assert event["changed"]["train"]["removed"] == {"samples": 2, "some": ["class0/000.jpg", "class1/000.jpg"]}
    # What was accepted is what the next resume compares with; the same files elsewhere are the same data.
    moved = data.rename(tmp_path / "moved")
    train_until(config, data_root=str(moved))
    assert last_state(run)["progress"]["finished"]
    # A finished run has nothing left to train, whatever became of its data.
    (moved / "train" / "class0" / "001.jpg").unlink()
    train_until(config, data_root=str(moved))


def test_images_that_were_made_again_are_noticed_and_a_copy_of_them_is_not(train_until: Train, tmp_path: Path) -> None:
    data = write_images(tmp_path / "data")
    config = write_config(tmp_path, data)
    train_until(config, 2)
    # The same bytes at another time, in another place.
    copy = shutil.copytree(data, tmp_path / "copy", copy_function=shutil.copyfile)
    train_until(config, 3, data_root=str(copy))
    again = data / "train" / "class1" / "003.jpg"
    before = again.read_bytes()
    again.write_bytes(before[:-40] + bytes(byte ^ 1 for byte in before[-40:-2]) + before[-2:])  # as long as it was
    with pytest.raises(UserError) as caught:
        train_until(config)
    assert caught.value.name == "data-changed"
    assert "train (48 samples): 1 of 48 that were read have other contents: class1/003.jpg" in caught.value.seen
    assert caught.value.why == "the steps so far were trained on other images"
    train_until(config, accept_data=True)
    assert last_state(tmp_path / "runs" / "tiny")["progress"]["finished"]


def test_a_relabelled_image_and_lost_names_are_noticed(train_until: Train, tmp_path: Path) -> None:
    data = write_images(tmp_path / "data")
    config = write_config(tmp_path, data)
    train_until(config, 2)
    (data / "train" / "class1" / "000.jpg").rename(data / "train" / "class2" / "zebra.jpg")
    assert "1 sample added: class2/zebra.jpg" in refusal(train_until, config)
    (tmp_path / "runs" / "tiny" / "samples.npz").write_bytes(b"PK damaged")
    assert "train (48 samples): the names of the earlier samples were not kept" in refusal(train_until, config)


def test_other_volumes_and_other_labels_are_named(train_until: Train, tmp_path: Path) -> None:
    cases = write_list(tmp_path / "data")
    config = write_volume_config(tmp_path, cases, folds=4)
    train_until(config, 2)
    text = cases.read_text()
    cases.write_text(text.replace("id: case1", "id: renamed"))
    seen = refusal(train_until, config)
    assert "removed: case1" in seen
    assert "added: renamed" in seen
    cases.write_text(text)
    train_until(config, 3)
    shutil.copy(tmp_path / "data" / "1-label.npy", tmp_path / "data" / "2-label.npy")
    assert "with other labels: case2" in refusal(train_until, config)
