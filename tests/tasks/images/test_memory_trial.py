"""Measured memory of a loader's parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.loader.loader_memory import STATED
from stoker.profile.memory import TreeMemory
from stoker.tasks.images import memory_trial
from stoker.tasks.images.memory_trial import MemoryTrial, measure_loader_memory, parts_of
from tests.conftest import PROJECT
from tests.support import decoder_trials as trials

MEGABYTE = 1_000_000


def test_a_loader_is_measured_once_and_then_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = measure_loader_memory()
    assert found.measured
    # Wide bounds, but each would fail if a part were left out or counted twice.
    assert 100 * MEGABYTE < found.process < 2_000 * MEGABYTE
    assert 50 * MEGABYTE < found.fork_server < found.process
    assert 2 * MEGABYTE < found.worker < 200 * MEGABYTE
    assert found.thread < 100 * MEGABYTE
    assert 20_000 < found.image_bytes < 500_000
    assert (tmp_path / "stoker" / "loader_memory.json").is_file()
    monkeypatch.setattr(memory_trial, "measure_parts", None)
    assert measure_loader_memory() == found


@pytest.mark.parametrize("trial", [trials.fails, trials.raises])
def test_documented_figures_are_used_where_nothing_can_be_measured(
    trial: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setattr(memory_trial, "run_loaders", trial)
    assert measure_loader_memory() == STATED
    assert not STATED.measured
    assert not list(tmp_path.iterdir())


def test_parts_are_distinguished() -> None:
    batch_bytes, held = 16 * 224 * 224 * 3, 16 * 100_000

    def trial(*anonymous: int) -> MemoryTrial:
        peaks = tuple(TreeMemory(0, size, 0, 250 * MEGABYTE) for size in anonymous)
        return MemoryTrial(TreeMemory(0, 300 * MEGABYTE, 0, 250 * MEGABYTE), peaks, (30,) * len(peaks), 100_000.0)

    def processes(count: int) -> int:
        return 300 * MEGABYTE + 200 * MEGABYTE + count * (20 * MEGABYTE + held)

    threads = trial(300 * MEGABYTE + 3 * (5 * MEGABYTE + held) + 7 * batch_bytes)
    found = parts_of(threads, trial(processes(1), processes(3)))
    assert found.process == 550 * MEGABYTE
    assert found.thread == 5 * MEGABYTE
    assert found.fork_server == 200 * MEGABYTE
    assert found.worker == 20 * MEGABYTE
