"""`stoker demo` learns to read digits, or to find sheets in volumes, with the code that every run uses."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.commands import demo as command
from stoker.tasks.demo import DIGITS, SCROLLS, Demo, DemoResult, TimeSpent, demo_text
from tests.conftest import PROJECT, Run


@pytest.mark.parametrize("demo", [DIGITS, SCROLLS], ids=lambda demo: demo.folder)
def test_the_packaged_config_is_the_one_in_configs(demo: Demo) -> None:
    packaged, shown = (PROJECT / folder / demo.config_name for folder in ("src/stoker/tasks", "configs"))
    assert packaged.read_text() == shown.read_text()


def test_make_demo_is_this_command() -> None:
    assert "stoker demo" in (PROJECT / "Makefile").read_text().split("\ndemo:")[1].split("\n\n")[0]


@pytest.mark.release
def test_it_reaches_97_percent(stoker: Run, tmp_path: Path) -> None:
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
    assert stoker("demo", "--folder", folder).code == 0


def test_it_says_where_the_time_went_and_trains_only_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a demo"  # a path that needs quoting
    few = ["epochs=1", "subset_train_per_class=20", "subset_val_per_class=5"]
    code, first = command.run_demo(DIGITS, folder, fresh=False, overrides=few)
    assert code == 0
    found = first.as_dict()
    assert found["best_val_acc1"] >= 0
    assert found["epochs"] == 1
    assert found["computing_s"] > 0
    assert 0 <= found["waiting_s"] < found["seconds"]
    assert found["stages"]["decode"] > 0
    assert list(folder.glob("runs/demo/checkpoints/epoch=*-val_acc1=*.ckpt"))
    capsys.readouterr()
    code, second = command.run_demo(DIGITS, folder, fresh=False, overrides=few)
    said, text = capsys.readouterr().err, demo_text(second)
    assert code == 0
    assert "is finished" in said
    assert "Epoch" not in said
    assert "where the time of the epochs went" in text
    assert "waiting for data" in text
    # The commands it suggests work.
    line = next(line for line in text.splitlines() if line.strip().startswith("stoker eval"))
    assert main([*shlex.split(line, comments=True)[1:], "--json"]) == 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    assert main(["demo", "--folder", str(blocker / "demo")]) == 1
    said = capsys.readouterr().err
    assert "demo-folder-not-writable" in said
    assert "--folder" in said


@pytest.mark.release  # tests/end_to_end/test_volumes.py trains on scrolls
def test_a_short_run_on_volumes_finds_most_of_the_sheets_of_a_scroll_it_has_not_seen(tmp_path: Path) -> None:
    # A fraction of the demo's voxels, and a lower threshold: the whole takes minutes.
    short = ["epochs=1", "steps_per_epoch=20", "patch_size=[24,32,32]"]
    code, result = command.run_demo(SCROLLS, tmp_path / "demo", fresh=False, overrides=short)
    text = demo_text(result)
    assert code == 0
    assert result.best > 80
    assert "val/dice " in text
    assert "waiting for data" in text
    assert "patches/s in training" in text
    assert list((tmp_path / "demo/runs/demo_volumes/checkpoints").glob("epoch=*-val_dice=*.ckpt"))


@pytest.mark.parametrize(("dice", "code", "words"), [(90.0, 0, "had not seen"), (89.9, 1, "below the expected 90 %")])
def test_the_exit_code_says_whether_the_stated_dice_was_reached(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dice: float,
    code: int,
    words: str,
) -> None:
    def run_demo(demo: Demo, folder: Path, _fresh: bool) -> tuple[int, DemoResult]:
        return 0, DemoResult(folder / demo.config_name, folder / "runs", demo, dice, 6, 1.0, TimeSpent())

    monkeypatch.setattr(command, "run_demo", run_demo)
    arguments = ["demo", "--volumes", "--folder", str(tmp_path)]
    assert main(arguments) == code
    assert words in capsys.readouterr().out
    assert main([*arguments, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["best_val_dice"] == dice
