"""`stoker verify` as people type it, and the warnings of `stoker train`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker.core.errors import Interrupted
from stoker.verify.run_checks import all_checks
from tests.support.tiny_training import write_config

FAIR = {"optimizer": "adamw", "lr": 0.001, "scale_lr": False}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # One thread: two that wait for each other on busy cores are many times slower.
    monkeypatch.setattr("stoker.profile.host.usable_cpus", lambda: 1)
    return tmp_path


def verify(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str, str]:
    code = main(["verify", *map(str, words)])
    ended = capsys.readouterr()
    return code, ended.out, ended.err


def test_a_healthy_config_passes_and_no_run_folder_appears(
    here: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(here, images, **FAIR)
    code, out, err = verify(capsys, config, "--json", "--price", "2", "--out", here / "pictures")
    document: dict[str, Any] = json.loads(out)
    assert code == 0, out
    assert document["fail_count"] == 0
    # Whether labels are right cannot be told from names that are not ImageNet's.
    unsure = [check["topic"] for check in document["checks"] if check["status"] == "unknown"]
    assert set(unsure) <= {"labels"}
    assert document["unknown_count"] == len(unsure)
    assert document["pass_count"] == len(document["checks"]) - len(unsure) > 12
    assert len(document["checks"]) + len(document["not_applicable"]) == sum(not check.deep for check in all_checks())
    assert document["expected"]["hours"] > 0
    assert document["expected"]["cost"] == pytest.approx(2 * document["expected"]["hours"])
    assert "checking: model" in err
    assert {path.name for path in here.iterdir()} <= {"tiny.yaml", "pictures", "cache"}
    assert (here / "pictures" / "lr_schedule.png").is_file()


def test_a_failing_check_ends_with_code_1_and_skipping_it_with_0(
    here: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(here, images, **FAIR, lr_scheduler="step")
    only = [word for check in all_checks() if check.topic != "config" for word in ("--skip", check.name)]
    code, out, _ = verify(capsys, config, *only)
    assert code == 1
    assert "  ✗ schedule" in out
    assert "fix: lr_step_epochs=1" in out
    code, out, _ = verify(capsys, config, *only, "--skip", "schedule")
    assert code == 0
    assert "0 failed" in out


def test_checks_are_listed_without_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = verify(capsys, "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == [check.name for check in all_checks()]
    assert all(check.title in out for check in all_checks())
    code, out, _ = verify(capsys, "--list", "--json")
    listed = json.loads(out)["checks"]
    assert (code, [check["name"] for check in listed]) == (0, [check.name for check in all_checks()])
    assert {check["task"] for check in listed} == {None, "classify", "segment3d"}
    code, _, err = verify(capsys)
    assert (code, "no config given" in err) == (2, True)
    code, _, err = verify(capsys, "tiny.yaml", "--weights", "no.pt")
    assert (code, "--weights no.pt does not exist" in err) == (2, True)
    code, _, err = verify(capsys, "none.yaml", "--weights", ".")  # as a run folder
    assert (code, "none.yaml does not exist" in err) == (2, True)


def test_ctrl_c_during_a_check_ends_with_130(
    here: Path, images: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("stoker.verify.trial.build_run", interrupted)
    before = set(Path("/tmp").glob("stoker-verify-*"))
    code, out, err = verify(capsys, write_config(here, images))
    assert (code, out) == (Interrupted.exit_code, "")
    assert "stopped by Ctrl-C" in err
    assert set(Path("/tmp").glob("stoker-verify-*")) <= before


def test_several_devices_start_as_many_ranks(
    here: Path, images: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[int, int]] = []

    def launch(_command: list[str], devices: int, nodes: int) -> int:
        started.append((devices, nodes))
        return 1

    monkeypatch.setattr("stoker.train.launch.launch", launch)
    monkeypatch.setattr("stoker.profile.host.usable_cpus", lambda: 2)
    config = write_config(here, images)
    assert verify(capsys, config, "devices=2")[0] == 1, "the exit code of the ranks"
    assert started == [(2, 1)]
    nodes = [word for check in all_checks() if check.topic != "config" for word in ("--skip", check.name)]
    verify(capsys, config, "devices=2", *nodes)
    assert started == [(2, 1)], "without a check that needs them, ranks are not started"


def test_training_warns_of_a_name_that_claims_too_much_and_starts_anyway(
    here: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(here, images, epochs=1, run_name="my-a2")
    assert main(["train", str(config)]) == 0
    err = capsys.readouterr().err
    assert "warning: recipe: called my-a2 and tiny, but it is A2" in err
    assert "; fix: stoker train" in err
    assert (here / "runs" / "my-a2" / "checkpoints" / "last.ckpt").is_file()
