"""`stoker lr-find` finds a learning rate on real data and leaves nothing behind."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import pytest
from PIL import Image

from stoker.cli import main
from stoker.tasks.demo import write_digits
from tests.conftest import PROJECT, Run
from tests.support.ready_process import ReadyProcess
from tests.support.trained import train_on_colours, write_colours
from tests.support.waiting import wait_until

SMALL = [
    "model=test_convnext",
    "decoder=pillow",
    "epochs=2",
    "num_workers=1",
    "batch_size=32",
    "subset_train_per_class=40",
    "subset_val_per_class=2",
]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_digits(tmp_path_factory.mktemp("lr-find") / "digits")


def files_below(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file() and "home" not in path.relative_to(folder).parts}


def test_it_suggests_a_rate_that_is_neither_tiny_nor_huge(stoker: Run, digits: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    picture = work / "lr.png"
    ended = stoker(
        "lr-find", PROJECT / "configs/demo.yaml", f"data_root={digits}", *SMALL, "--steps", "20", "--json",
        "--plot", picture, cwd=work,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    found = ended.json
    assert 1e-4 < found["suggestion"] < 3
    assert found["lr_key"] == pytest.approx(found["suggestion"] * 256 / 32, rel=0.06)
    assert found["interval"][0] <= found["suggestion"] <= found["interval"][1]
    assert len(found["sweeps"]) == 3
    assert len(found["lrs"]) == max(map(len, found["sweeps"])) <= 20
    assert found["lrs"][0] == pytest.approx(1e-6)
    assert files_below(work) == {picture}, "no run folder, no checkpoint"
    with Image.open(picture) as image:
        assert image.size[0] > 400


def test_it_stops_where_the_loss_diverges(stoker: Run, digits: Path, tmp_path: Path) -> None:
    ended = stoker(
        "lr-find", PROJECT / "configs/demo.yaml", f"data_root={digits}", *SMALL, "--steps", "15", "--sweeps", "1",
        "--min", "0.01", "--max", "1e6", "scale_lr=false",
    )  # fmt: skip
    assert ended.code in (0, 1), ended.err
    assert "the loss diverged at" in ended.out
    assert files_below(tmp_path) == set()


@pytest.mark.release
def test_it_begins_each_sweep_from_a_checkpoint_in_mid_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_colours(tmp_path / "data")
    run = train_on_colours(tmp_path, epochs=8)
    last = run / "checkpoints" / "last.ckpt"
    words = ["lr-find", str(tmp_path / "colours.yaml"), "--steps", "12", "--sweeps", "2", "--max", "100", "--json"]
    before = files_below(tmp_path)
    found, printed = {}, {}
    for name, more in (("ours", ["--from", last]), ("other", ["--from", last, "optimizer=sgd"])):
        capsys.readouterr()
        assert main([*words, *map(str, more)]) in (0, 1)
        captured = capsys.readouterr()
        found[name], printed[name] = json.loads(captured.out), captured.err
    assert "begin at epoch 8, step 24: weights, batch norm statistics and momenta of the checkpoint" in printed["ours"]
    assert "begins anew: optimizer: adamw in the checkpoint, sgd in this run" in printed["other"]
    assert (found["ours"]["from"]["weights"], found["ours"]["from"]["optimizer_kept"]) == ("raw", True)
    assert found["other"]["from"]["weights"] == "ema"
    # Both sweeps begin with the trained weights, the second in spite of what the highest rates did to the first.
    first, second = found["ours"]["sweeps"]
    assert max(first[0], second[0]) < 0.9 * math.log(3), "better than chance"
    assert first[-1] is None or first[-1] > math.log(3)
    assert files_below(tmp_path) == before


@pytest.mark.release
def test_ctrl_c_leaves_nothing_behind(ready: ReadyProcess, digits: Path, tmp_path: Path) -> None:
    words = ["lr-find", PROJECT / "configs/demo.yaml", f"data_root={digits}", "--steps", "5000"]
    process = ready.start(*words, cwd=tmp_path, HOME=str(tmp_path / "home"))
    process.wait_for(lambda: "range test" in process.err)
    os.killpg(process.pid, signal.SIGINT)  # a terminal signals every process of the group
    assert process.wait() == 130
    assert "stopped by Ctrl-C" in process.err
    assert files_below(tmp_path) == set()
    wait_until(lambda: not group_exists(process.pid))


def group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_error_of_the_trial_reaches_the_user(stoker: Run, tmp_path: Path) -> None:
    ended = stoker("lr-find", PROJECT / "configs/demo.yaml", f"data_root={tmp_path}/nowhere", "--json")
    assert ended.code == 1
    assert "nowhere" in ended.json["error"]["message"]
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    "wrong",
    [["--min", "1", "--max", "0.1"], ["--min", "0"], ["--plot", "nowhere/lr.png"], ["--plot", "lr.txt"], ["--raw"]],
)
def test_mistakes_are_refused_before_anything_starts(stoker: Run, wrong: list[str]) -> None:
    ended = stoker("lr-find", PROJECT / "configs/demo.yaml", *wrong)
    assert ended.code == 2
    assert wrong[0] in ended.err
