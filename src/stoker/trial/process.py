"""What a trial does in its own process (`trial_server` starts it): the loader with the real step or a paced
consumer, the step alone, the loader alone, or reading the storage."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import islice
from typing import Any

import torch

from stoker.core.console import Say
from stoker.io.stores import is_url
from stoker.loader.loader import LinkBalance
from stoker.profile.accelerators import device_busy_share, measure_transfer
from stoker.profile.clock_file import HEADER, ClockHeader, interval_record
from stoker.profile.host import HostConfig, HostWatch, allowed_cores
from stoker.profile.step_clock import Interval, StepClock
from stoker.tasks.base import task_for
from stoker.tasks.building import RunContext, loader_shape, run_header
from stoker.train.loop import Run, pending, train
from stoker.train.observer import Observer
from stoker.train.ranks import Ranks
from stoker.train.schedule import Progress
from stoker.train.step import Prepared
from stoker.trial.ledger import Ledger

FEWEST_BATCHES = 20
"""Workers hand over several batches at once: with fewer, the last of them would decide the rate."""
REPLAYED_BATCHES = 4
"""More than one, so that caches do not hold a single batch; few, so that they fit into memory."""
ENDLESS = 1_000_000_000

Job = dict[str, Any]
"""`kind`, `config`, `seconds`, `cpus`; for `together` also `pace_s` (None: the real model), `keep` (single steps and
batches), `whole` (whether all of the seconds are measured, or as many as are needed to know the rate), `ranks` that
share this machine and `pixels` (whether they are part of the ledger)."""


def run_trial(job: Job, tell: ReportSeconds) -> dict[str, Any]:
    """The measurements of the trial of this kind."""
    cores = sorted(allowed_cores())
    if job.get("ranks", 1) > 1 and job["cpus"] < len(cores) and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores[: job["cpus"]])  # the share of one rank
    return KINDS[job["kind"]](HostConfig.model_validate(job["config"]), job, tell)


def together_trial(config: HostConfig, job: Job, tell: ReportSeconds) -> dict[str, Any]:
    """The loader and its consumer together: rate in windows, clock, ledger and start."""
    accumulated = config.gradient_accumulation
    whole = job.get("whole", False)
    # While a slow first step runs, the loader fills its queue: until that is empty, the rate is not the loader's.
    queued = 0 if whole else config.num_workers * (config.prefetch_factor or 2)
    measurement = Measurement(
        job["seconds"], tell, keep=job["keep"], warm_up=max(WARM_UP_STEPS * accumulated, queued),
        least=None if whole else max(FEWEST_BATCHES, 4 * config.num_workers),
        remote=config.data_root is not None and is_url(config.data_root),
    )  # fmt: skip
    ledger = Ledger(config, job.get("ranks", 1), pixels=job.get("pixels", False))
    consume = _train if job.get("pace_s") is None else _feed_at_pace
    header, name_samples, updates = consume(config, job, measurement, ledger)
    interval = measurement.interval()
    host = {name: value for name, value in asdict(measurement.host.facts()).items() if value is not None}
    line = {"kind": "step", **interval_record(interval, name_samples), "host": host}
    starts = interval.epoch_starts_s
    return {
        "windows": measurement.windows,
        "first_batch_s": statistics.median(starts) if starts else None,
        "start_s": measurement.start_s,
        "ledger": ledger.digest(),
        "epoch_samples": updates * accumulated * config.batch_size,
        "lines": [{"kind": "event", "event": HEADER, **header.as_record()}, line],
    }


def _train(
    config: HostConfig, job: Job, measurement: Measurement, ledger: Ledger
) -> tuple[ClockHeader, Callable[[Sequence[int]], list[str]], int]:
    """The real step."""
    run, header = _endless_run(config, job)
    measurement.clock = StepClock(run.device, keep=job["keep"])
    ledger.end_of_epoch(run.schedule.horizon.steps_per_epoch)
    prepare = run.input.prepare

    def watched(batch: Any, epoch: int, step: int, number: int) -> Prepared:
        ledger.add(batch)
        measurement.batch(batch)
        return prepare(batch, epoch, step, number)

    try:
        train_for(replace(run, input=replace(run.input, prepare=watched)), config, measurement, lambda: ledger.is_full)
    finally:
        run.input.close()
    return header, run.input.name_samples, run.schedule.horizon.steps_per_epoch


def _feed_at_pace(
    config: HostConfig, job: Job, measurement: Measurement, ledger: Ledger
) -> tuple[ClockHeader, Callable[[Sequence[int]], list[str]], int]:
    """A consumer that takes a batch every `pace_s` seconds and uses no core: stands in for an accelerator."""
    task = task_for(config)
    data = task.open_data(config, lambda _text: None)
    loader: Any = task.open_training_loader(config, data)
    updates = loader.steps() // config.gradient_accumulation
    ledger.end_of_epoch(updates)
    clock, epoch, over = measurement.clock, config.epochs - 1, False
    try:
        while not over:
            batches = loader.epoch(epoch)
            clock.epoch_begins()
            for _ in range(updates * config.gradient_accumulation):
                with clock.waiting():
                    batch = next(batches)
                ledger.add(batch)
                measurement.batch(batch)
                with clock.computing():
                    time.sleep(job["pace_s"])
                clock.step_ends([batch])
                over = measurement.step(1, len(batch)) and ledger.is_full
                if over:
                    break
            batches.close()
            epoch += 1
    finally:
        loader.close()
    header = ClockHeader(
        loader_shape(config, data.samples),
        cpus=job["cpus"], world=1,
        torch=torch.__version__, device="paced", storage=data.storage(), convolves_3d=task.convolves_3d,
    )  # fmt: skip
    return header, data.names, updates


def ceiling_trial(config: HostConfig, job: Job, tell: ReportSeconds) -> dict[str, Any]:
    """The real model and step on batches that are already in memory, and the copy to the device."""
    run, _ = _endless_run(config, job)
    last = config.epochs - 1
    batches = _copies_of(run.input.train_loader(last).epoch(last))
    run.input.close()  # workers that wait for nothing would still be asked
    # No memory guard: nothing is made ahead that could be held back.
    replay = replace(run.input, train_loader=lambda _epoch: Replay(batches), guard_memory=lambda _loader: None)
    run = replace(run, input=replay)
    measurement = Measurement(job["seconds"], tell, keep=0, warm_up=WARM_UP_STEPS * config.gradient_accumulation)
    measurement.clock = StepClock(run.device, keep=0)
    train_for(run, config, measurement)
    interval = measurement.interval()
    accelerator = measure_transfer(run.device, batches[0].images.nbytes, 1.0, batches[0].images.is_pinned())
    if accelerator is not None:
        busy = device_busy_share(lambda: run.step([pending(run, batches[0], 0, 0)], 0), run.device)
        accelerator = replace(accelerator, device_busy_share=busy)
    return {
        "images_per_second": interval.samples / (interval.elapsed_s - interval.wait_s),
        "accelerator": None if accelerator is None else asdict(accelerator),
    }


def loader_trial(config: HostConfig, job: Job, tell: ReportSeconds) -> dict[str, Any]:  # noqa: ARG001 - it keeps to its time
    """The loader with a consumer that takes no time."""
    task = task_for(config)
    data = task.open_data(config, lambda _text: None)
    speed = task.measure_speed(config, data, workers=config.num_workers, seconds=job["seconds"])
    return {"images_per_second": speed.images_per_second, "first_batch_s": speed.first_batch_s}


def storage_trial(config: HostConfig, job: Job, tell: ReportSeconds) -> dict[str, Any]:  # noqa: ARG001
    """Latency and throughput of the storage that the data is on."""
    facts, missing = task_for(config).measure_storage(config, job["seconds"])
    return {"storage": asdict(facts), "missing": missing}


KINDS: dict[str, Callable[[HostConfig, Job, ReportSeconds], dict[str, Any]]] = {
    "together": together_trial,
    "ceiling": ceiling_trial,
    "loader": loader_trial,
    "storage": storage_trial,
}


# The real loop, for some seconds.


def open_run(config: HostConfig, cpus: int, say: Say = lambda _text: None) -> tuple[Run, Any]:
    """A run as `stoker train` builds it on one device, without validation, and its data."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(cpus)
    task = task_for(config)
    data = replace(task.open_data(config, say), val=None)
    return task.build_run(config, data, RunContext(Ranks(), device, say)), data


def _endless_run(config: HostConfig, job: Job) -> tuple[Run, ClockHeader]:
    """A run that only ends when its time is up, and the header of its clock."""
    run, data = open_run(config, job["cpus"])
    run = replace(
        run,
        # The last epoch has full-size images, where they grow; with a rate of zero the loss cannot diverge.
        progress=Progress(epoch=config.epochs - 1),
        schedule=replace(run.schedule, horizon=replace(run.schedule.horizon, epochs=ENDLESS), peak_lr=0.0),
    )
    return run, run_header(config, run, data, job["cpus"])


def train_for(
    run: Run, config: HostConfig, measurement: Measurement, may_end: Callable[[], bool] = lambda: True
) -> None:
    """Trains until the measurement is over."""
    batches = config.gradient_accumulation

    class Until(Observer):
        def step(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:  # noqa: ARG002
            if measurement.step(batches, batches * config.batch_size) and may_end():
                raise _TimeIsUp

    with suppress(_TimeIsUp):
        train(replace(run, clock=measurement.clock), Until())


class _TimeIsUp(Exception):
    """Not an error: the only way out of the endless loop."""


class Replay:
    """A loader that repeats batches from memory: shows how fast the rest of a step is."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def steps(self, start: int = 0) -> int:  # noqa: ARG002 - protocol of the loop
        return ENDLESS

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Any]:  # noqa: ARG002
        while True:
            yield from self._batches


def _copies_of(batches: Iterator[Any]) -> list[Any]:
    """Copies of the first few batches, valid after their loader is closed."""
    kept = []
    for batch in islice(batches, REPLAYED_BATCHES):
        images = batch.images.clone()
        kept.append(replace(batch, images=images.pin_memory() if batch.images.is_pinned() else images))
    return kept


# When a trial is over, and how fast it was.

WARM_UP_STEPS = 3
"""The first steps include allocation, the choice of kernels and an empty pipeline."""
PARTS = 6
"""Windows of a trial that runs for its whole time."""
FEWEST_PARTS = 3
MOST_EQUAL = 1000
"""Most windows that one stall counts as: they are in the result of the process."""
AGREED = 0.008
"""Relative standard error of the windows' mean below which more windows would not change the result: well below the
smallest gain that counts."""
ENOUGH_BATCHES = 40
UNSURE = 0.08
"""The same error, above which a trial continues beyond its time: with a huge image now and then, two seconds of the
same settings differed by a third. Short windows of whole batches alone explain half of that."""
FOR_THE_LEAST_S = 15.0
"""However short a trial is meant to be: three seconds of 16 processes gave between 320 and 450 images/s."""
ROUNDS, ROUNDS_AT_MOST_S = 3, 30.0
"""Requests that share a link arrive together, in rounds; the first batch took about one. The bytes of a request in
flight do not count yet, so a trial is wrong by up to one of its rounds: over 6 MB/s (52 images/s), trials that lasted
for one round gave between 2 and 99 images/s."""
LONGEST = 2.5
"""Factor of the wanted seconds, for batches that take long and for rates that vary."""

ReportSeconds = Callable[[float], None]
"""Called with the seconds measured so far."""


class Measurement:
    """Called for each batch and step of a trial; decides when to stop."""

    def __init__(
        self, seconds: float, tell: ReportSeconds, *, warm_up: int = WARM_UP_STEPS, least: int | None = None,
        remote: bool = False, keep: int,
    ) -> None:  # fmt: skip
        """`warm_up` batches do not count. With `least`, it ends sooner if its windows agree, and later if they do
        not or there were fewer batches; without, when its seconds are over. `remote`: the data is behind a link that
        requests share. `keep` single steps and batches are kept."""
        self.clock = StepClock(keep=keep)
        self.host = HostWatch()
        self.start_s: float | None = None
        """From the beginning to the end of the first step."""
        self._seconds, self._tell, self._warm_up, self._least = seconds, tell, warm_up, least
        self._remote, self._rounds_s = remote, 0.0
        self._asked_s = time.perf_counter()
        self._told_s = self._window_from_s = 0.0
        self._link = LinkBalance()
        self._noted: tuple[int, int] = (-1, -1)
        self._batches = self._window_samples = 0
        self._began_s: float | None = None
        self._measured_from_s: float | None = None
        self._windows: list[float] = []
        self._starts: list[float] = []

    @property
    def windows(self) -> list[float]:
        """Samples per second, as far as their bytes arrived while it was measured."""
        share = self._link.share_that_came
        return [share * rate for rate in self._windows]

    def batch(self, batch: Any) -> None:
        """Call it for each batch, before its step; one that is prepared a second time counts once."""
        if (batch.epoch, batch.step) > self._noted:
            self._noted = (batch.epoch, batch.step)
            self._link.take(batch.cost)

    def step(self, batches: int, samples: int) -> bool:
        """Call it after each step; True after the last one. At least one is measured, however long it takes."""
        now_s = time.perf_counter()
        self._batches += batches
        if self._began_s is None:
            self._began_s, self.start_s = now_s, now_s - self._asked_s
            self._rounds_s = min(ROUNDS_AT_MOST_S, ROUNDS * self.start_s) if self._remote else 0.0
            return False
        if self._measured_from_s is None:
            # A step that takes longer than the whole measurement is warm-up enough.
            if self._batches >= self._warm_up or now_s - self._began_s > self._seconds:
                self._begin(now_s)
            return False
        self._window_samples += samples
        elapsed_s, wanted_s = now_s - self._window_from_s, self._seconds / PARTS
        if elapsed_s >= wanted_s:
            # A stall makes one window as long as many. It counts as many: the mean is one over time.
            self._windows += [self._window_samples / elapsed_s] * min(MOST_EQUAL, round(elapsed_s / wanted_s))
            self._window_from_s, self._window_samples = now_s, 0
        measured_s = now_s - self._measured_from_s
        if now_s - self._told_s > 0.2:
            self._told_s = now_s
            self.host.look()
            self._tell(measured_s)
        if self._least is None:
            return measured_s >= self._seconds
        if not self._windows or measured_s < self._rounds_s:
            return False
        return is_enough(self._windows, self._batches, self._least, measured_s, self._seconds)

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


def is_enough(windows: Sequence[float], batches: int, least: int, elapsed_s: float, wanted_s: float) -> bool:
    """Whether a trial has measured enough: sooner if its windows agree, later if they do not."""
    if elapsed_s >= max(LONGEST * wanted_s, 0.0 if batches >= least else FOR_THE_LEAST_S):
        return True
    if len(windows) < FEWEST_PARTS or batches < least:
        return False
    error = statistics.stdev(windows) / statistics.fmean(windows) / math.sqrt(len(windows))
    if elapsed_s >= wanted_s:
        return error < UNSURE
    return batches >= ENOUGH_BATCHES and error < AGREED
