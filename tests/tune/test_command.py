"""`stoker tune` from outside: a real search on tiny images, its files, its errors, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.config import load_config
from stoker.profile.host import fit_to_machine, read_machine
from stoker.run.json_lines import read_records
from stoker.tune import search, space, trials
from stoker.tune.records import key_of
from tests.support.tiny_training import write_config, write_images
from tests.support.waiting import is_running, wait_until

QUICK = ("--pace", "4ms", "--trial-seconds", "0.5")


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    # Large enough that making a batch takes as long as its consumer: one worker beside it is better than none.
    images = write_images(folder / "data", train=16, side=160)
    return write_config(folder, images, img_size=128, index_dir=str(folder / "index"))


def trials_in(path: Path) -> int:
    return sum(record["kind"] == "trial" for record in read_records(path)) if path.exists() else 0


def test_a_search_writes_a_journal_and_a_config_that_was_run(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # One change to try, in trials that never become longer: the search ends long before its budget.
    monkeypatch.setattr(space, "KNOBS", [knob for knob in space.KNOBS if knob.keys == ("data_root",)])
    monkeypatch.setattr(trials, "MOST_LONGER", 1.0)
    monkeypatch.setattr(search, "MOST_ROUNDS", 2)
    text, images = config_file.read_text(), config_file.with_name("data")
    before = sorted(images.rglob("*"))
    shards = tmp_path / "packs" / "shards"
    words = ["--pace", "0.01ms", "--trial-seconds", "0.5", "--pack", str(shards.parent), "--json"]
    assert main(["tune", str(config_file), *words]) == 0
    ended = capsys.readouterr()
    found = json.loads(ended.out)
    assert found["stopped"] == "nothing left to try"
    records = list(read_records(config_file.with_name("tune.jsonl")))
    assert (records[0]["kind"], records[-1]["kind"]) == ("begin", "end")
    tried = [record for record in records if record["kind"] == "trial"]
    assert found["trials"] == len(tried) >= 3
    assert key_of(found["best"]) in [key_of(trial["settings"]) for trial in tried]
    # Nothing that was tried changed the training, not even the data from shards.
    assert {trial["measured"]["result"] for trial in tried} == {"measured"}
    assert len({trial["measured"]["ledger"] for trial in tried}) == 1
    assert str(shards) in [trial["settings"]["data_root"] for trial in tried]
    assert found["ceiling"] == pytest.approx(8 / 0.00001)
    assert found["facts"]["unit"] == "images"
    assert found["steps"][0]["decision"] == "baseline"
    tuned = Path(found["tuned"])
    assert tuned == config_file.with_name("tuned.yaml")
    fitted, _ = fit_to_machine(load_config(tuned).config, read_machine())
    assert key_of(space.settings_of(fitted) | {"data_root": fitted.data_root}) == key_of(found["best"])
    if found["best"] != found["original"]:
        assert found["steps"][-1]["decision"] == "confirmed"
    assert shards.exists() == (tmp_path / "packs").exists() == (found["best"]["data_root"] == str(shards))
    assert sorted(images.rglob("*")) == before
    assert config_file.read_text() == text
    assert "the original: " in ended.err


def test_mistakes_are_told_before_anything_runs(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(config_file), "data_root=/nowhere/at/all", *QUICK]) == 1
    assert "error: data-not-found" in capsys.readouterr().err
    assert main(["tune", str(config_file), *QUICK, "--pack", str(config_file.with_name("data") / "packs")]) == 1
    assert "error: destination-inside-source" in capsys.readouterr().err
    for words, seen in (
        (("--for", "speed"), "--for speed is not one of throughput, epoch-time, cost"),
        (("--also", "dropout"), "--also dropout is not one of precision"),
        (("--budget", "20"), "20 has no unit"),
        (("--ram", "16"), "16 has no unit"),
        (("--pace", "0ms"), "a step must take some time"),
        (("--write", str(config_file)), "is the config itself"),
        (("--ablate", "--pack", "packs"), "--packed and --pack are for a search"),
    ):
        code, told = main(["tune", str(config_file), *words]), capsys.readouterr().err
        assert code == 2, (words, told)
        assert seen in told
        assert "hint: " in told


@pytest.mark.release
def test_a_killed_search_resumes_and_ctrl_c_leaves_nothing_running(config_file: Path, tmp_path: Path) -> None:
    target = tmp_path / "fast.yaml"
    journal = tmp_path / "fast.tune.jsonl"
    command = [sys.executable, "-m", "stoker", "tune", str(config_file), *QUICK, "--write", str(target)]

    def started() -> subprocess.Popen[str]:
        return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    first = started()
    wait_until(lambda: trials_in(journal) >= 2)
    below = [int(pid) for pid in Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()]
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert below
    wait_until(lambda: not any(is_running(pid) for pid in below))
    there = trials_in(journal)

    second = started()
    wait_until(lambda: trials_in(journal) > there)
    second.send_signal(signal.SIGINT)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 130, err
    assert f"resuming: {there} trials" in err
    assert "interrupted; the same command resumes" in out
    assert not target.exists()
    whole = journal.read_bytes()
    assert whole.endswith(b"\n")
    assert list(tmp_path.iterdir()) == [journal]
