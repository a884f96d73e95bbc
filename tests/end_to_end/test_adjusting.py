"""`adjust_loader` in a real run: what it decides is recorded, and what is trained is what a fixed loader gives."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stoker.config import load_config
from stoker.profile import host
from stoker.profile.batch_costs import run_queue_s
from stoker.profile.clock_reading import read_observed
from stoker.tasks import training
from stoker.train import loader_changes
from stoker.train.loader_adjuster import LoaderAdjuster
from tests.end_to_end.conftest import Ledger
from tests.support.tiny_training import assert_same_end, metrics, write_config, write_images

STEPS = 42
WORKERS = 3


@pytest.fixture
def adjusted_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is a look, `auto` is three workers, and the training thread always seems to lack its core, however
    busy this machine is."""
    if run_queue_s() is None:
        pytest.skip("this kernel does not say how long a thread waits for a core")
    for name, value in (("CROWDED_FROM", 0.0), ("WAITS_FROM", 2.0), ("STEADY", 1e9)):
        monkeypatch.setattr(loader_changes, name, value)
    monkeypatch.setattr(training, "LoaderAdjuster", partial(LoaderAdjuster, look_s=0.0, look_steps=1))
    monkeypatch.setattr(host, "workers_for", lambda *_counts, **_kinds: WORKERS)


@pytest.mark.usefixtures("adjusted_often")
def test_an_adjusted_run_trains_the_same_as_a_fixed_one_also_after_a_resume(
    tmp_path: Path, train_until: Callable[..., Ledger], capfd: pytest.CaptureFixture[str]
) -> None:
    images = write_images(tmp_path / "images", train=56)
    runs, ledgers = {}, {}
    for name, workers in (("fixed", WORKERS), ("adjusted", "auto")):
        (tmp_path / name).mkdir()
        config = write_config(tmp_path / name, images, num_workers=workers, drop_path=0.1, random_erasing=0.3)
        parts = [train_until(config, stop, signal.SIGTERM) for stop in (28,) if workers == "auto"]
        ledgers[name] = [entry for part in [*parts, train_until(config)] for entry in part]
        runs[name] = tmp_path / name / "runs" / "tiny"
    assert len(ledgers["fixed"]) == STEPS
    assert ledgers["adjusted"] == ledgers["fixed"]
    assert_same_end(runs["adjusted"], runs["fixed"])

    def decisions(run: Path) -> list[dict[str, Any]]:
        return [line for line in metrics(run, "event") if line["event"] == "loader_adjusted"]

    assert decisions(runs["fixed"]) == []
    decided = decisions(runs["adjusted"])
    first, second = decided[:2]
    assert (first["decision"], first["knob"], first["from"], first["to"]) == ("tried", "workers", WORKERS, WORKERS - 1)
    assert second["decision"] in ("kept", "undone")
    assert "loader: " in capfd.readouterr().err
    headers = [
        line["loader"]["workers"]
        for line in map(json.loads, (runs["adjusted"] / "clock.jsonl").read_text().splitlines())
        if line.get("event") == "clock"
    ]
    assert headers[:2] == [WORKERS, WORKERS - 1]
    observed = read_observed(runs["adjusted"])
    assert observed.loader is not None
    assert observed.loader.workers == headers[-1]


def test_a_number_of_workers_or_the_key_switches_it_off() -> None:
    machine = host.Machine(cpus=4, accelerators=0)
    for words, adjusted in (([], True), (["num_workers=4"], False), (["adjust_loader=false"], False)):
        fitted, _ = host.fit_to_machine(load_config(None, words).config, machine)
        assert (fitted.adjust_loader, fitted.num_workers) == (adjusted, 4)
