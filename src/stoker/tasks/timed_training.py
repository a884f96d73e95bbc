"""The real loop for so many seconds: no validation, no checkpoint, no run folder."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from stoker.clock.interval import Interval
from stoker.clock.steps import StepClock
from stoker.config import Config
from stoker.output.clock_reading import NEWEST
from stoker.probe.ceiling import ENDLESS, Stopwatch, Tell
from stoker.tasks.classify import build_run, open_data
from stoker.tasks.clock_header import run_header
from stoker.training.loop import Run, train
from stoker.training.observer import Silence
from stoker.training.ranks import Ranks

Header = dict[str, Any]


def build_trial(config: Config, job: dict[str, Any]) -> tuple[Run, Header]:
    """A run as `stoker train` makes it on one device, and the header of its clock."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(job["cpus"])
    data = replace(open_data(config, lambda _text: None), val=None)
    run = build_run(config, data, Ranks(), device, workers=job["workers"])
    run.clock = StepClock(device, keep=NEWEST)
    # Full-size images, where they grow; a rate of zero, with which no loss can run away.
    run.progress.epoch = config.epochs - 1
    run.horizon = replace(run.horizon, epochs=ENDLESS)
    run.peak_lr = 0.0
    return run, run_header(config, data.train, run, workers=job["workers"], cpus=job["cpus"])


def train_for(run: Run, seconds: float, tell: Tell) -> Interval:
    """The steps of about so many seconds, after a warm-up."""
    watch = Stopwatch(run.clock, seconds, tell)
    run.observer = _Until(watch)
    with suppress(_TimeIsUp):
        train(run)
    return watch.interval()


class _TimeIsUp(Exception):
    """Not an error: the loop has no other end here."""


class _Until(Silence):
    """Listens to a run until its time is up."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def step(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:  # noqa: ARG002
        if self._watch.step():
            raise _TimeIsUp
