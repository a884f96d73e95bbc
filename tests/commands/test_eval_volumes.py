"""`stoker eval` of volumes: what it prints is what the exact scores say about what the network predicts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from stoker.cli import main
from stoker.report.run_facts import read_evaluation
from stoker.tasks.volumes.predict.postprocess import parse_chain, post_processed
from stoker.tasks.volumes.predict.segmenter import predicted_mask, segmenter_of
from stoker.tasks.volumes.scores import report
from stoker.tasks.volumes.scores.whole import score_volume
from stoker.tasks.volumes.segment import open_trained
from stoker.tasks.volumes.volume_evaluation import choose_cases, read_label
from tests.support.volumes import needs_matcher


@pytest.fixture(scope="module")
def run(scroll_run: Path) -> Path:
    return scroll_run


@pytest.fixture(scope="module")
def predicted(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the network predicts for its validation fold, as another program would have written it."""
    trained = open_trained(run)
    chosen = choose_cases(trained.config, trained.rules, "val")
    folder = tmp_path_factory.mktemp("predicted")
    for case in chosen.cases:
        images = [chosen.volumes.get(ref) for ref in case.images]
        tifffile.imwrite(folder / f"{case.id}.tif", predicted_mask(segmenter_of([trained]), images))
    return folder


@pytest.fixture
def masks(predicted: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    return shutil.copytree(predicted, tmp_path / "masks")


def result(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def labels_of(run: Path) -> Path:
    return run.parents[1] / "scrolls" / "train_labels"


def test_the_validation_fold_is_scored_volume_by_volume_the_worst_first(
    run: Path, predicted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = result(capsys, "eval", run)
    trained = open_trained(run)
    chosen = choose_cases(trained.config, trained.rules, "val")
    assert {one["id"] for one in found["volumes"]} == {case.id for case in chosen.cases}
    assert len(chosen.cases) == 2
    for one in found["volumes"]:
        case = next(case for case in chosen.cases if case.id == one["id"])
        prediction = tifffile.imread(predicted / f"{case.id}.tif")
        label = read_label(case, chosen.volumes, trained.rules)
        expected = score_volume(case.id, prediction, label, classes=2, ignore=2)
        assert expected.mean.dice is not None
        assert expected.mean.surface_dice is not None
        assert one["dice"] == pytest.approx(100 * expected.mean.dice)
        assert one["surface_dice"] == pytest.approx(100 * expected.mean.surface_dice)
    dices = [one["dice"] for one in found["volumes"]]
    assert dices == sorted(dices)
    assert found["mean"]["dice"] == pytest.approx(sum(dices) / 2)
    assert (found["split"], found["left"], found["unreadable"]) == ("fold 0 of 3", 0, [])
    # The run keeps them for its report, with a picture of the worst.
    shown = read_evaluation(run / "evaluation.json", run / "worst.jpg")
    assert shown is not None
    assert [one["id"] for one in shown["volumes"]] == [one["id"] for one in found["volumes"]]
    assert shown["volumes"][0]["dice"] == pytest.approx(dices[0], rel=1e-3)
    assert shown["picture"] is not None
    with Image.open(run / "worst.jpg") as sheet:
        assert sheet.width > 6 * 100

    assert main(["eval", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("small_unet after 1 epoch (6 steps)")
    rows = [line.split() for line in lines[4:6]]
    assert [row[0] for row in rows] == [one["id"] for one in found["volumes"]]
    assert rows[0][1] == f"{dices[0]:.2f}"
    assert lines[6].startswith("mean")


def test_another_data_folder_is_scored_whole_and_a_threshold_changes_the_masks(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    everything = result(capsys, "eval", run, run.parents[1] / "scrolls", "predict_overlap=0")
    assert len(everything["volumes"]) == 6
    assert everything["split"] == "all volumes"
    training = result(capsys, "eval", run, "--split", "train", "predict_threshold=0.3", "predict_overlap=0")
    assert len(training["volumes"]) == 4
    by_id = {one["id"]: one["dice"] for one in everything["volumes"]}
    assert any(one["dice"] != pytest.approx(by_id[one["id"]]) for one in training["volumes"])


def test_masks_on_disk_have_the_scores_of_the_network_that_made_them(
    run: Path, masks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_network = result(capsys, "eval", run)
    by_masks = result(capsys, "eval", "--predictions", masks, "--labels", run.parents[1] / "scrolls")
    assert by_masks["volumes"] == by_network["volumes"]
    # A folder of labels does not say which value means unlabelled.
    plain = result(capsys, "eval", "--predictions", masks, "--labels", labels_of(run), "ignore_label=2")
    assert plain["volumes"] == by_network["volumes"]
    # Probabilities, as floats or bytes.
    for path in masks.iterdir():
        mask = tifffile.imread(path)
        values = mask * np.float16(0.8) if path == min(masks.iterdir()) else (mask * 200).astype(np.uint8)
        tifffile.imwrite(path, values)
    assert main(["eval", "--predictions", str(masks), "--labels", str(run.parents[1] / "scrolls")]) == 1
    assert "predict_threshold" in capsys.readouterr().err
    by_threshold = result(
        capsys, "eval", "--predictions", masks, "--labels", run.parents[1] / "scrolls", "predict_threshold=0.5"
    )
    assert by_threshold["volumes"] == by_network["volumes"]


def test_masks_are_cleaned_before_they_are_scored(run: Path, masks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["eval", "--predictions", masks, "--labels", run.parents[1] / "scrolls"]
    cleaned = result(capsys, *arguments, "predict_postprocess=remove_small=20")
    for path in masks.iterdir():
        tifffile.imwrite(path, post_processed(tifffile.imread(path), parse_chain("remove_small=20")))
    assert cleaned["volumes"] == result(capsys, *arguments)["volumes"]
    assert cleaned["post"] == "remove_small=20"
    # A network averaged with itself predicts the same.
    twice = result(capsys, "eval", run, "--checkpoint", run, "predict_postprocess=remove_small=20")
    assert twice["volumes"] == cleaned["volumes"]


@needs_matcher
def test_the_competitions_score_of_masks_and_of_the_network_agree(
    run: Path, masks: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "scores"
    by_network = result(capsys, "eval", run, "--score", "vesuvius-surface", "--out", out)
    by_masks = result(capsys, "eval", "--predictions", masks, "--labels", labels_of(run), "--score", "vesuvius-surface")
    assert by_masks["volumes"] == by_network["volumes"]
    scores = [one["competition"]["score"] for one in by_network["volumes"]]
    assert scores == sorted(scores)
    assert by_network["mean"]["score"] == pytest.approx(sum(scores) / 2)
    assert 0 < scores[0] < 1
    assert json.loads((out / "scores.json").read_text()) == by_network
    with Image.open(out / "worst.png") as sheet:
        assert sheet.width > 6 * 190


@pytest.mark.parametrize("fault", ["another shape", "no label", "bytes", "nothing"])
def test_masks_that_cannot_be_scored_are_refused_by_name(
    run: Path, masks: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    first = min(masks.iterdir())
    if fault == "another shape":
        tifffile.imwrite(first, np.zeros((24, 24, 12), np.uint8))
    elif fault == "no label":
        first.rename(masks / "unknown.tif")
    elif fault == "bytes":
        tifffile.imwrite(first, tifffile.imread(first) * np.uint8(255))
    else:
        shutil.rmtree(masks)
    arguments = ["eval", "--predictions", str(masks), "--labels", str(labels_of(run)), "ignore_label=2"]
    assert main(arguments) == 1
    said = capsys.readouterr().err
    name = {"another shape": first.name, "no label": "unknown", "bytes": first.stem, "nothing": "masks"}[fault]
    assert name in said
    assert "hint:" in said


def test_an_interrupted_evaluation_keeps_what_it_has_scored(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []

    def interrupted(name: str, *arguments: Any, **options: Any) -> Any:
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return score_volume(name, *arguments, **options)

    monkeypatch.setattr(report, "score_volume", interrupted)
    assert main(["eval", str(run), "predict_overlap=0", "--out", str(tmp_path / "out")]) == 130
    kept = json.loads((tmp_path / "out" / "scores.json").read_text())
    assert [one["id"] for one in kept["volumes"]] == calls[:1]
    assert kept["left"] == 1


def test_a_volume_that_cannot_be_read_is_left_out_and_named(
    run: Path, masks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = min(masks.iterdir())
    bad.write_bytes(bad.read_bytes()[:500])
    found = result(capsys, "eval", "--predictions", masks, "--labels", labels_of(run), "ignore_label=2")
    assert [one["name"] for one in found["unreadable"]] == [bad.stem]
    assert len(found["volumes"]) == 1


def test_options_of_the_other_task_are_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", str(run), "--per-class"]) == 2
    assert main(["eval"]) == 2
    assert main(["eval", str(run), "--predictions", "masks", "--labels", "labels"]) == 2
    assert main(["eval", "--predictions", "masks"]) == 2
    assert main(["eval", str(run), "--spacing", "0", "1", "1"]) == 2
    capsys.readouterr()
    assert main(["eval", str(run), "fold=all"]) == 1
    assert "no volumes for validation" in capsys.readouterr().err
