"""The trials of a config, end to end on tiny images: everything measured, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.config import Config, load_config
from stoker.core.errors import UserError
from stoker.core.finding import Estimate
from stoker.doctor import config_trials as trials
from stoker.doctor.checks.verdict import judge
from stoker.doctor.config_trials import run_trials
from stoker.doctor.diagnosing import to_confirm
from stoker.doctor.diagnosis import Prediction
from stoker.doctor.script.run_script import processes_with
from stoker.profile.clock_reading import observed_from
from stoker.profile.host import fit_to_machine, read_machine
from stoker.profile.observed import LoopTimes, Observed
from stoker.trial.fork_server import Ended
from stoker.trial.process import ceiling_trial, together_trial
from tests.support.tiny_training import write_config, write_images
from tests.support.waiting import DEADLINE_S, wait_until

PROGRAM = """# warm
import sys
from pathlib import Path
from stoker.config import load_config
from stoker.profile.host import fit_to_machine
from stoker.profile.host import read_machine
from stoker.doctor.config_trials import run_trials
config, _ = fit_to_machine(load_config(Path(sys.argv[1]), sys.argv[2:]).config, read_machine())
run_trials(config, 300, pace_s=0.01, progress=lambda what, done, total: print(what, done, flush=True))
"""


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    return write_config(folder, write_images(folder / "data", train=20), num_workers=2, index_dir=str(folder / "index"))


def load(path: Path, *words: str) -> Config:
    return fit_to_machine(load_config(path, words).config, read_machine())[0]


def job(seconds: float, **parts: Any) -> dict[str, Any]:
    return {"seconds": seconds, "cpus": 1, "keep": 400, "whole": True} | parts


@pytest.mark.release
def test_a_paced_consumer_measures_everything_but_the_model(config_file: Path) -> None:
    told: list[tuple[str, float, float]] = []
    seen = run_trials(load(config_file), 1.5, pace_s=0.02, progress=lambda *parts: told.append(parts))
    assert seen.missing == ("the model: replaced by a consumer of 400 images/s",)
    assert seen.source == "trial"
    assert seen.steps > 5
    assert seen.times.elapsed_s > 0
    assert 0.019 * seen.steps <= seen.times.compute_s < 0.1 * seen.steps  # a sleep may take longer, but not less
    parts = seen.times.wait_s + seen.times.compute_s + (seen.times.other_s or 0.0)
    assert parts == pytest.approx(seen.times.elapsed_s, abs=1e-3)
    assert seen.rates.ceiling == 8 / 0.02
    assert seen.rates.loader > 0
    assert seen.batches
    assert len(seen.times.waits_s) == len(seen.times.steps_s) > 0
    assert {"fetch", "decode"} <= seen.stages.keys()
    assert seen.times.epoch_starts_s
    assert (seen.loader.workers, seen.loader.samples) == (2, 60)
    assert seen.host.cpu_busy_share is not None
    assert seen.storage.warm_bytes_per_second is not None
    assert seen.accelerator is None
    assert seen.slow_samples[0].name.startswith("class")
    assert told[0][0] == "opening the data"
    assert {"storage", "loader alone", "loader and model together", "done"} <= {what for what, _, _ in told}
    assert all(done <= total for _, done, total in told)


def test_the_real_loop_is_tried_on_batches_in_memory_and_with_its_loader(config_file: Path) -> None:
    told: list[float] = []
    found = ceiling_trial(load(config_file), job(0.5), told.append)
    assert found["images_per_second"] > 1
    assert found["accelerator"] is None
    assert told[0] == 0.0
    found = together_trial(load(config_file), job(0.5), lambda _seconds: None)
    seen = observed_from(found["lines"], "the trial")
    assert seen.steps >= 1
    assert seen.times.compute_s > 0
    assert seen.torch_version is not None
    assert seen.convolves_3d is False
    assert seen.times.consumer_cpu_s > 0


def test_missing_data_is_reported_at_once(config_file: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run_trials(load(config_file, f"data_root={tmp_path}/nowhere"), 1.0)
    assert caught.value.name == "data-not-found"


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_even_a_kill_leave_nothing_behind(config_file: Path, ending: signal.Signals) -> None:
    mark = f"{os.getpid() * 100 + ending}"
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(config_file)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=os.environ | {"DOCTOR_TEST": mark},
    )  # fmt: skip
    for line in process.stdout:
        if line.startswith("storage"):
            break
    wait_until(lambda: len(processes_with(f"DOCTOR_TEST={mark}")) >= 2)
    process.send_signal(ending)
    process.wait(DEADLINE_S)
    wait_until(lambda: processes_with(f"DOCTOR_TEST={mark}") == [])


@pytest.mark.real_time
def test_a_time_for_all_trials_includes_their_starts(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[str, float]] = []

    now_s = 0.0

    def slow_start(_server: object, kind: str, _config: Config, seconds: float, **_keys: object) -> Ended:
        nonlocal now_s
        tried.append((kind, seconds))
        now_s += 0.7 + 1.1 * seconds
        return Ended("killed", detail="for this test", took_s=0.7 + 1.1 * seconds)

    monkeypatch.setattr(trials, "run_trial", slow_start)
    monkeypatch.setattr(trials.time, "monotonic", lambda: now_s)
    monkeypatch.setattr(trials, "LEAST_TRIAL_S", 0.5)
    seen = run_trials(load(config_file), 2.0, within_s=2.0)
    assert tried[0][0] == "together"
    assert 1 <= len(tried) < 4
    assert all(seconds <= 2.0 for _, seconds in tried)
    assert any("no time for it in 2 s; --seconds 8 has some" in line for line in seen.missing)
    tried.clear()
    run_trials(load(config_file), 0.1)
    assert [name for name, _ in tried] == ["storage", "loader", "ceiling", "together"]


def test_what_cannot_be_confirmed_is_said() -> None:
    row = Prediction("accelerator", "half the model's time", Estimate(1.8, 1.9, 2.0), Estimate(1.0, 1.0, 1.0))
    setting = replace(row, id="workers", label="num_workers 2 -> 1", settings=(("num_workers", 1),))
    seen = Observed("trial", 10, 80, LoopTimes(elapsed_s=1.0))
    assert to_confirm(judge(seen, (row, setting))) == (setting, "")
    assert "(half the model's time)" in to_confirm(judge(seen, (row,)))[1]
    assert "higher --seconds" in to_confirm(judge(seen))[1]
    assert "no step" in to_confirm(judge(replace(seen, samples=0, steps=0, times=LoopTimes())))[1]
