"""Trainings in this process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.commands import train as command
from stoker.core.errors import Interrupted, Preempted
from stoker.profile import host
from stoker.tasks import training
from stoker.train.loop import Run
from stoker.train.step import Prepared
from tests.support.changed_task import changing_runs
from tests.support.tiny_training import write_images

Ledger = list[tuple[int, int, list[int], list[int]]]
"""Epoch, step, sample indices and keys of every batch that was trained on."""


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training images and 15 for validation, in three classes."""
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture
def train_until(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Ledger]]:
    """Trains in this process, in one thread, and sends it a real signal during step `stop_at`."""
    threads = torch.get_num_threads()
    machine = replace(host.read_machine(), cpus=1)
    monkeypatch.setattr(host, "read_machine", lambda: machine)
    wanted: dict[str, Any] = {}

    def watch(run: Run) -> Run:
        prepare = run.input.prepare

        def watched(batch: Any, epoch: int, step: int, number: int) -> Prepared:
            wanted["ledger"].append((epoch, step, batch.indices.tolist(), batch.keys.tolist()))
            if step + 1 == wanted["stop_at"]:
                wanted["stop_at"] = None  # only once: a second Ctrl-C means 'immediately'
                os.kill(os.getpid(), wanted["number"])
            return prepare(batch, epoch, step, number)

        return replace(run, input=replace(run.input, prepare=watched))

    monkeypatch.setattr(training, "task_for", changing_runs(watch))

    def train(
        config: Path,
        stop_at: int | None = None,
        number: int = signal.SIGTERM,
        *,
        checkpoint: Path | None = None,
        replan: bool = False,
        accept_data: bool = False,
        **keys: Any,
    ) -> Ledger:
        wanted.update(ledger=[], stop_at=stop_at, number=number)
        monkeypatch.chdir(config.parent)
        overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
        options: Any = {"replan": replan, "accept_data": accept_data}
        if stop_at is None:
            assert command.train_from_config(config, overrides, checkpoint, False, **options)[0] == 0
        else:
            with pytest.raises(Interrupted if number == signal.SIGINT else Preempted, match=f"saved at step {stop_at}"):
                command.train_from_config(config, overrides, checkpoint, False, **options)
        return list(wanted["ledger"])

    yield train
    torch.set_num_threads(threads)
