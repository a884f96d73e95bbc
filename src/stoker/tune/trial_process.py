"""What a trial of settings does: the real loader with the real step, or with a paced consumer. Runs in a child process
(`stoker.tune.trial` starts it)."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from stoker.clock.file import HEADER, clock_header, interval_record
from stoker.clock.steps import Interval, StepClock
from stoker.config import config_values
from stoker.data.store.stores import is_url
from stoker.doctor.trial_process import build_trial, ceiling_trial
from stoker.machine.host import HostConfig, HostWatch
from stoker.machine.loader_speed import WARM_UP_STEPS, LinkBalance, ReportSeconds
from stoker.tasks.dispatch import task_for
from stoker.train.loop import train
from stoker.train.observer import Silence, loader_shape
from stoker.train.step import Prepared
from stoker.tune.space import HARMLESS

KEPT_BATCHES = 160
"""Single steps and batches that are kept: what one simulation draws from (doctor/what_if.py)."""
LEDGER_UPDATES = 2
"""Updates whose samples are compared with the original's."""
PARTS = 6
"""Windows of a trial that runs for its whole time."""
FEWEST_PARTS = 3
MOST_EQUAL = 1000
"""Windows that one stall counts as: it is in the answer of the process."""
AGREED = 0.008
"""Relative standard error of the windows' mean from which on more of them would tell nothing new: well below the
smallest gain that counts."""
ENOUGH_BATCHES = 40
FEWEST_BATCHES = 20
"""Workers hand over several batches at once: with fewer, the last of them would decide the rate."""
UNSURE = 0.08
"""The same, from which on a trial goes on beyond its time: with a huge image now and then, two seconds of the same
settings differed by a third. Half of it is what whole batches in short windows amount to."""
FOR_THE_LEAST_S = 15.0
"""However short a trial is meant to be: three seconds of 16 processes were anything between 320 and 450 images/s."""
ROUNDS, ROUNDS_AT_MOST_S = 3, 30.0
"""Requests that share a link arrive together, in rounds; the first batch took about one. What has come of a request
that is under way does not count yet, so a trial is wrong by up to one of its rounds: over 6 MB/s (52 images/s), trials
that lasted for one saw anything between 2 and 99 images/s."""
LONGEST = 2.5
"""Times the wanted seconds, for batches that take long and for rates that vary."""

Job = dict[str, Any]
"""`seconds`, `cpus`, `pace_s` (None: the real model), `ranks`, `pixels` (whether they are part of the ledger), `began`
(time.time() when its process was asked for)."""


def run_trial(config: HostConfig, job: Job, tell: ReportSeconds) -> dict[str, Any]:
    """Rate in windows, clock, ledger and start of these settings."""
    trial = _Trial(config, job, tell)
    interval, header, names = _feed_at_pace(trial) if job["pace_s"] is not None else _train(trial)
    host = {name: value for name, value in asdict(trial.host.facts()).items() if value is not None}
    line = {"kind": "step", **interval_record(interval, names), "host": host}
    starts = interval.epoch_starts_s
    return {
        "windows": trial.windows,
        "first_batch_s": statistics.median(starts) if starts else None,
        "start_s": trial.start_s,
        "ledger": trial.ledger.digest(),
        "epoch_samples": trial.epoch_samples,
        "lines": [{"kind": "event", "event": HEADER, **header}, line],
    }


def run_ceiling(config: HostConfig, job: Job, tell: ReportSeconds) -> dict[str, Any]:
    """Samples per second of the real step on batches that are already in memory."""
    return {"samples_per_second": ceiling_trial(config, job, tell)["images_per_second"]}


class _Trial:
    """Warm-up, windows and end of one trial, told of each step."""

    def __init__(self, config: HostConfig, job: Job, tell: ReportSeconds) -> None:
        self.config, self.job = config, job
        self.host = HostWatch()
        self.clock = StepClock(keep=KEPT_BATCHES)
        self.ledger = Ledger(config, job["ranks"], pixels=job["pixels"])
        self._windows: list[float] = []
        self.start_s: float | None = None
        self.epoch_samples: int | None = None
        self._tell, self._told_s = tell, 0.0
        self._seconds: float = job["seconds"]
        # While a slow first step runs, the loader fills its queue: until that is used up, the rate is not the loader's.
        queued = config.num_workers * (config.prefetch_factor or 2)
        self._warm_up = max(WARM_UP_STEPS * config.gradient_accumulation, queued)
        self._least = max(FEWEST_BATCHES, 4 * config.num_workers)
        self._remote = config.data_root is not None and is_url(config.data_root)
        self._asked_s = time.perf_counter()
        self._rounds_s = 0.0
        self._link = LinkBalance()
        self._noted: tuple[int, int] = (-1, -1)
        self._batches = 0
        self._began_s: float | None = None
        self._measured_from_s: float | None = None
        self._window_from_s = 0.0
        self._window_samples = 0
        self._starts: list[float] = []

    @property
    def windows(self) -> list[float]:
        """Samples per second, as far as their bytes came while it was measured."""
        share = self._link.share_that_came
        return [share * rate for rate in self._windows]

    def note(self, batch: Any) -> None:
        """Call it for each batch, before its step; one that is prepared a second time counts once."""
        self.ledger.add(batch)
        if (batch.epoch, batch.step) > self._noted:
            self._noted = (batch.epoch, batch.step)
            self._link.take(batch.cost)

    def step(self, batches: int, samples: int) -> bool:
        """Call it after each step; True after the last one."""
        now_s = time.perf_counter()
        self._batches += batches
        if self._began_s is None:
            self._began_s, self.start_s = now_s, time.time() - self.job["began"]
            self._rounds_s = min(ROUNDS_AT_MOST_S, ROUNDS * (now_s - self._asked_s)) if self._remote else 0.0
            return False
        if self._measured_from_s is None:
            if self._batches >= self._warm_up or now_s - self._began_s > self._seconds:
                self._begin(now_s)
            return False
        self._window_samples += samples
        elapsed_s, wanted_s = now_s - self._window_from_s, self._seconds / PARTS
        if elapsed_s >= wanted_s:
            # A stall makes one window as long as many. It counts as many: the mean is one over time.
            self._windows += [self._window_samples / elapsed_s] * min(MOST_EQUAL, round(elapsed_s / wanted_s))
            self._window_from_s, self._window_samples = now_s, 0
        if now_s - self._told_s > 0.2:
            self._told_s = now_s
            self.host.look()
            self._tell(now_s - self._measured_from_s)
        return self._is_over(now_s - self._measured_from_s)

    def interval(self) -> Interval:
        """The steps after the warm-up, and the waits at the start of every epoch."""
        interval = self.clock.take_interval()
        interval.epoch_starts_s = self._starts + interval.epoch_starts_s
        return interval

    def _begin(self, now_s: float) -> None:
        self._starts = self.clock.take_interval().epoch_starts_s
        self._measured_from_s = self._window_from_s = now_s
        self._batches = 0
        self._link.begin()
        self.host.facts()  # resets its figures: building the model says nothing about steps
        self._tell(0.0)

    def _is_over(self, elapsed_s: float) -> bool:
        if not self._windows or not self.ledger.is_full or elapsed_s < self._rounds_s:
            return False
        return is_enough(self._windows, self._batches, self._least, elapsed_s, self._seconds)


def is_enough(windows: Sequence[float], batches: int, least: int, elapsed_s: float, wanted_s: float) -> bool:
    """Whether a trial has measured enough: sooner where its windows agree, later where they do not."""
    if elapsed_s >= max(LONGEST * wanted_s, 0.0 if batches >= least else FOR_THE_LEAST_S):
        return True
    if len(windows) < FEWEST_PARTS or batches < least:
        return False
    error = statistics.stdev(windows) / statistics.fmean(windows) / math.sqrt(len(windows))
    if elapsed_s >= wanted_s:
        return error < UNSURE
    return batches >= ENOUGH_BATCHES and error < AGREED


class Ledger:
    """Hash of which samples were fed, with which draws and labels, and of everything else that a training depends on.

    The same for any division of an update into batches. `pixels`: what was decoded counts, too.
    """

    _COLUMNS = ("indices", "labels", "keys", "flips", "starts", "shapes", "orders", "matrices", "offsets", "elastic")
    """Of a batch of images or patches, as far as it has them."""

    def __init__(self, config: HostConfig, ranks: int, *, pixels: bool = False) -> None:
        self._pixels = pixels
        values = config_values(config)
        total = config.batch_size * config.gradient_accumulation
        settings = {name: value for name, value in values.items() if name not in HARMLESS}
        settings |= {"total_batch": total * ranks}
        if config.mixup_alpha > 0 or config.cutmix_alpha > 0:
            settings["mixed"] = config.batch_size  # samples are mixed with others of their own batch
        self._hash = xxhash.xxh3_128(json.dumps(settings, sort_keys=True).encode())
        self._left = LEDGER_UPDATES * total
        self._last: tuple[int, int] = (-1, -1)
        self._shape: tuple[int, ...] = ()

    @property
    def is_full(self) -> bool:
        return self._left <= 0

    def add(self, batch: Any) -> None:
        """Takes the next batch; one that is prepared a second time counts once."""
        if self.is_full or (batch.epoch, batch.step) <= self._last:
            return
        self._last = (batch.epoch, batch.step)
        taken = min(self._left, len(batch))
        self._left -= taken
        # An image of another size is another training; the length of a patch's row says nothing.
        shape = () if hasattr(batch, "layout") else tuple(batch.images.shape[1:])
        if shape != self._shape:
            self._shape = shape
            self._hash.update(str(shape).encode())
        columns = [getattr(batch, name, None) for name in self._COLUMNS]
        self._hash.update(np.hstack([_row_bytes(column, taken) for column in columns if column is not None]).tobytes())
        if self._pixels:
            for array in _pixels_of(batch, taken):
                self._hash.update(array.contiguous().numpy())

    def end_of_epoch(self, updates: int) -> None:
        """Takes the length of an epoch."""
        self._hash.update(f"{updates} updates".encode())

    def digest(self) -> str:
        return self._hash.hexdigest()


def _pixels_of(batch: Any, samples: int) -> list[Any]:
    if not hasattr(batch, "layout"):
        return [batch.images[:samples]]
    # The rest of a patch's row is left from another one.
    parts = [part for slot in range(samples) for part in batch.region(slot)]
    return [part for part in parts if part is not None]


def _row_bytes(column: NDArray[Any], rows: int) -> NDArray[np.uint8]:
    flat = np.ascontiguousarray(column[:rows]).reshape(rows, -1)
    return flat.view(np.uint8).reshape(rows, -1)


class _TimeIsUp(Exception):
    """Not an error: the only way out of the endless loop."""


class _Until(Silence):
    def __init__(self, trial: _Trial) -> None:
        self._trial = trial

    def step(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:  # noqa: ARG002
        config = self._trial.config
        accumulated = config.gradient_accumulation
        if self._trial.step(accumulated, accumulated * config.batch_size):
            raise _TimeIsUp


def _train(trial: _Trial) -> tuple[Interval, dict[str, Any], Any]:
    run, header = build_trial(trial.config, trial.job)
    trial.clock = StepClock(run.device, keep=KEPT_BATCHES)
    trial.epoch_samples = run.horizon.steps_per_epoch * run.total_batch
    trial.ledger.end_of_epoch(run.horizon.steps_per_epoch)
    prepare = run.prepare

    def watched(batch: Any, epoch: int, step: int, number: int) -> Prepared:
        trial.note(batch)
        return prepare(batch, epoch, step, number)

    run = replace(run, prepare=watched, clock=trial.clock)
    try:
        with suppress(_TimeIsUp):
            train(run, _Until(trial))
    finally:
        run.close()
    return trial.interval(), header, run.name_samples


def _feed_at_pace(trial: _Trial) -> tuple[Interval, dict[str, Any], Any]:
    """The loader with a consumer that takes a batch every `pace_s` seconds and uses no core."""
    config, job = trial.config, trial.job
    task = task_for(config)
    data = task.open_data(config, lambda _text: None)
    loader = task.open_training_loader(config, data)
    try:
        updates = loader.steps() // config.gradient_accumulation
        trial.epoch_samples = updates * config.gradient_accumulation * config.batch_size
        trial.ledger.end_of_epoch(updates)
        _consume(trial, loader, updates * config.gradient_accumulation)
    finally:
        loader.close()
    header = clock_header(
        loader_shape(config, data.samples, config.num_workers), cpus=job["cpus"], world=1,
        torch_version=torch.__version__, device="paced", storage=data.storage(),
        convolves_3d=True if config.task == "segment3d" else None,
    )  # fmt: skip
    return trial.interval(), header, data.names


def _consume(trial: _Trial, loader: Any, steps: int) -> None:
    clock, pace_s, epoch = trial.clock, trial.job["pace_s"], trial.config.epochs - 1
    while True:
        batches = loader.epoch(epoch)
        clock.epoch_begins()
        for _ in range(steps):
            with clock.waiting():
                batch = next(batches)
            trial.note(batch)
            with clock.computing():
                time.sleep(pace_s)
            clock.step_ends([batch])
            if trial.step(1, len(batch)):
                return
        batches.close()
        epoch += 1


KINDS = {"trial": run_trial, "ceiling": run_ceiling}
