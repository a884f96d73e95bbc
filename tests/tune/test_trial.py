"""Trials of a config: real processes that measure, are killed, hang, or take too much memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.cli import main
from stoker.config import load_config
from stoker.profile.host import HostConfig, fit_to_machine, read_machine
from stoker.profile.memory import tree_pids
from stoker.trial.fork_server import ForkServer
from stoker.tune.config_search import ConfigTrier
from stoker.tune.records import Measured, Settings
from stoker.tune.space import settings_of
from tests.support.tiny_training import write_config, write_images
from tests.support.waiting import is_running, wait_until

SECONDS = 0.3


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tune")
    images = write_images(folder / "data", train=20)
    return write_config(folder, images, num_workers=2, gradient_accumulation=2, index_dir=str(folder / "index"))


def load(path: Path, *words: str) -> HostConfig:
    return fit_to_machine(load_config(path, words).config, read_machine())[0]


def trials() -> list[int]:
    """Trial processes below this one: they are the first that the kernel may kill."""
    found = []
    for pid in tree_pids(os.getpid()):
        try:
            found += [pid] if Path(f"/proc/{pid}/oom_score_adj").read_text().strip() == "1000" else []
        except OSError:
            continue
    return found


@pytest.fixture
def attempt(config_file: Path, server: ForkServer) -> Callable[..., Measured]:
    def run(change: Settings | None = None, *words: str, **keys: Any) -> Measured:
        config = load(config_file, *words)
        trier = ConfigTrier(config, server=server, **{"pace_s": 0.002} | keys)
        return trier.run(settings_of(config) | (change or {}), SECONDS)

    return run


def test_the_same_training_has_the_same_ledger_whatever_the_loader_does(attempt: Callable[..., Measured]) -> None:
    original = attempt()
    assert original.result == "measured", original.detail
    assert len([rate for rate in original.windows if rate > 0]) >= 3
    assert original.epoch_samples == 48, "three updates of 16, of 60 images"
    assert original.observed is not None
    assert original.observed.loader is not None
    assert original.observed.loader.workers == 2
    assert original.observed.rates.pace == pytest.approx(8 / 0.002)
    assert original.peak_bytes is None or original.peak_bytes > 50_000_000
    assert original.start_s is not None
    assert original.took_s > SECONDS
    same: list[Settings] = [
        {"num_workers": 0},
        {"num_workers": 1, "loader": "process"},
        {"batch_size": 16, "gradient_accumulation": 1},
        {"batch_size": 4, "gradient_accumulation": 4},
    ]
    for change in same:
        assert attempt(change).ledger == original.ledger, change
    for change in ({"seed": 1}, {"img_size": 40}, {"gradient_accumulation": 1}, {"horizontal_flip": 0.1}):
        assert attempt(change).ledger != original.ledger, change


def test_a_pack_counts_only_with_the_same_pixels(
    attempt: Callable[..., Measured], config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = load(config_file).data_root or ""
    assert main(["pack", data, str(tmp_path / "same")]) == 0
    assert main(["pack", data, str(tmp_path / "small"), "--longest", "16"]) == 0
    capsys.readouterr()
    original = attempt(compare_pixels=True)
    assert original.result == "measured", original.detail
    assert attempt({"data_root": str(tmp_path / "same")}, compare_pixels=True).ledger == original.ledger
    assert attempt({"data_root": str(tmp_path / "small")}, compare_pixels=True).ledger != original.ledger


def test_the_real_step_is_fed_what_the_paced_consumer_is(attempt: Callable[..., Measured]) -> None:
    real = attempt(pace_s=None)
    assert real.result == "measured", real.detail
    assert real.observed is not None
    assert real.observed.times.compute_s is not None
    assert real.observed.times.compute_s > 0
    assert real.ledger == attempt().ledger
    assert real.epoch_samples == 48


def test_a_trial_that_is_killed_hangs_or_takes_too_much_memory_is_a_result(attempt: Callable[..., Measured]) -> None:
    def send(number: signal.Signals) -> Callable[[float], None]:
        return lambda _seconds: [os.kill(pid, number) for pid in trials()] and None

    # Slow steps: the trials go on until they are ended, however late that is.
    slow: dict[str, Any] = {"pace_s": 0.05}
    killed = attempt(report=send(signal.SIGKILL), **slow)
    assert (killed.result, killed.detail) == ("killed", "the process was killed by SIGKILL")
    hung = attempt(report=send(signal.SIGSTOP), patience_s=2.0, **slow)
    assert (hung.result, hung.detail) == ("hung", "not finished after 2 s")
    assert hung.took_s >= 2
    greedy = attempt(memory_limit_bytes=60_000_000, **slow)
    assert greedy.result == "out-of-memory"
    assert "0.06 GB were left" in greedy.detail
    crashed = attempt({"num_workers": -1})
    assert crashed.result in ("crashed", "refused")
    assert crashed.detail
    assert trials() == []
    assert attempt().result == "measured", "the next trial works"


def test_an_error_of_the_config_itself_is_kept_for_the_user(
    config_file: Path, server: ForkServer, tmp_path: Path
) -> None:
    config = load(config_file, f"data_root={tmp_path}/nowhere")
    trier = ConfigTrier(config, pace_s=0.002, server=server)
    assert trier.run(settings_of(config), SECONDS).result == "refused"
    assert trier.first_error is not None
    assert trier.first_error.name == "data-not-found"
    assert trier.first_error.hint


def test_ctrl_c_ends_the_trial_and_everything_below_it(attempt: Callable[..., Measured]) -> None:
    seen: list[int] = []

    def interrupt(_seconds: float) -> None:
        seen.extend(trials())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attempt({"loader": "process"}, report=interrupt, pace_s=0.05)
    assert len(seen) >= 3, "the trial and its two workers"
    wait_until(lambda: not any(is_running(pid) for pid in seen))
