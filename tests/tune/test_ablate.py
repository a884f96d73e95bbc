"""Switching off one optimisation at a time: what counts as a speed-up, as noise, and as off already."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.config import Config
from stoker.core.errors import UserError
from stoker.profile.host import HostConfig, Machine, fit_to_machine
from stoker.run.json_lines import read_records
from stoker.tune.ablate import TOGETHER, Ablation, Contribution, ablate, sources_of
from stoker.tune.journal import Journal
from stoker.tune.objective import Objective
from stoker.tune.records import Listener, Measured, Settings
from stoker.tune.trials import Trials
from tests.support.tiny_training import write_config, write_images


class MadeUp:
    """A machine that gets slower with every trial, on which workers double the speed and channels_last does nothing."""

    def __init__(self) -> None:
        self.trials = 0

    def run(self, settings: Settings, seconds: float) -> Measured:
        self.trials += 1
        if settings.get("decoder", "pillow") == "pillow":
            return Measured("crashed", detail="no such decoder")
        rate = 100 * 0.99**self.trials * (0.5 if settings["num_workers"] == 0 else 1.0)
        rate *= 0.8 if settings["precision"] == "32" else 1.0
        return Measured("measured", (rate * 0.99, rate, rate * 1.01))


def config(**keys: object) -> HostConfig:
    machine = Machine(cpus=4, accelerators=1)
    return fit_to_machine(Config(data_root="x", num_workers=4, precision="bf16-mixed", **keys), machine)[0]


def trials_of(trier: MadeUp, journal: Journal, tell: Listener | None = None, budget_s: float = 1e6) -> Trials:
    return Trials(trier, Objective().score, journal, tell, budget_s=budget_s, trial_s=1, same_training=False)


def test_each_source_is_compared_with_the_whole_config_run_beside_it(tmp_path: Path) -> None:
    trier, journal = MadeUp(), Journal(tmp_path / "ablate.jsonl")
    journal.begin({"same": {}})
    whole = config(compile_model=False)
    said: list[int] = []

    class Told(Listener):
        def trial_begins(self, number: int, change: Settings, role: str) -> None:
            said.append(number)

    found = ablate(trials_of(trier, journal, Told()), whole, sources_of(whole, on_gpu=False, remote=False))
    journal.close()
    rows = {row.source.label: row for row in found.rows}
    assert rows["workers: 4"].factor == pytest.approx(2.0, rel=0.02)
    assert rows["workers: 4"].verdict == ""
    # A machine that gets slower by a percent each time is neither a gain nor a loss.
    assert rows["channels_last"].factor == pytest.approx(1.0, abs=0.01)
    assert rows["channels_last"].verdict == "inside the noise"
    assert rows["compile_model"].verdict == "off in this config"
    assert rows["decoder: auto"].verdict == "crashed"
    assert rows["precision: bf16-mixed"].factor == pytest.approx(1.25, rel=0.02)
    assert rows["precision: bf16-mixed"].source.note == "another training"
    assert rows["decode_mode: fast"].source.note == "changes pixels slightly"
    assert TOGETHER in rows
    assert "pin_memory" not in rows, "there is no GPU"
    # In each round the whole config once more than the others; every trial was said and is in the journal.
    assert (found.trials, found.rounds) == (trier.trials, 2)
    assert len(said) == trier.trials
    lines = list(read_records(tmp_path / "ablate.jsonl"))
    assert len([line for line in lines if line["kind"] == "trial"]) == trier.trials
    labels = {line["label"] for line in lines if line["kind"] == "source"}
    assert labels == set(rows)


def test_after_an_interruption_only_the_missing_trials_are_run(tmp_path: Path) -> None:
    whole = config(compile_model=False)
    sources = sources_of(whole, on_gpu=False, remote=False)

    class Interrupted(MadeUp):
        def run(self, settings: Settings, seconds: float) -> Measured:
            if self.trials == 7:
                raise KeyboardInterrupt
            return super().run(settings, seconds)

    def run(trier: MadeUp, name: str) -> Ablation:
        journal = Journal(tmp_path / name)
        journal.begin({"same": {}})
        try:
            return ablate(trials_of(trier, journal), whole, sources)
        finally:
            journal.close()

    uninterrupted = run(MadeUp(), "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run(Interrupted(), "resumed.jsonl")
    rest = MadeUp()
    rest.trials = 7  # the machine is as slow as it had become
    assert run(rest, "resumed.jsonl").as_dict() == uninterrupted.as_dict()
    assert rest.trials == uninterrupted.trials


def test_a_config_that_does_not_run_is_an_error() -> None:
    whole = config(decoder="pillow")
    with pytest.raises(UserError, match="crashed"):
        ablate(trials_of(MadeUp(), Journal()), whole, sources_of(whole, on_gpu=False, remote=False))


def test_no_second_round_is_begun_without_time() -> None:
    whole = config()
    found = ablate(trials_of(MadeUp(), Journal(), budget_s=0.0), whole, sources_of(whole, on_gpu=True, remote=True))
    assert found.rounds == 1
    labels = [row.source.label for row in found.rows]
    assert {"pin_memory", "TF32", "lookahead: 256 MB", "cache_dir"} <= set(labels)


def test_what_is_slower_with_an_optimisation_is_said() -> None:
    (source, *_) = sources_of(config(), on_gpu=False, remote=False)
    assert Contribution(source, factor=0.8, spread=0.03).verdict == "faster without it"
    assert Contribution(source, factor=0.8, spread=0.3).verdict == "inside the noise"


def test_the_command_measures_and_keeps_a_journal_that_has_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write_images(tmp_path / "data", train=20)
    path = write_config(
        tmp_path, data, num_workers=0, decoder="pillow", channels_last=False, index_dir=str(tmp_path / "index")
    )
    words = ["tune", str(path), "--ablate", "--pace", "2ms", "--trial-seconds", "0.5", "--budget", "1s", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["label"] for row in found["sources"] if row["factor"] is not None] == ["decode_mode: fast"]
    assert (found["trials"], found["rounds"]) == (3, 1)
    assert main(["report", found["journal"], "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["tune"]
    assert (shown["what"], shown["state"]) == ("ablation", "finished")
    assert {row["label"]: row["factor"] for row in shown["sources"]}["decode_mode: fast"] == pytest.approx(
        found["sources"][-1]["factor"], rel=1e-3
    )
    assert not (tmp_path / "tuned.yaml").exists()
