"""What each trial of the doctor does. Runs in a child process (`stoker.doctor.trials` starts it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from stoker.clock.file import HEADER, clock_header, interval_record
from stoker.clock.reading import NEWEST
from stoker.clock.steps import Interval, StepClock
from stoker.data.images.parquet_files import open_sample_store
from stoker.machine.accelerators import device_busy_share, measure_transfer
from stoker.machine.host import HostConfig, HostWatch
from stoker.machine.loader_speed import (
    ENDLESS,
    Replay,
    ReportSeconds,
    Stopwatch,
    batches_to_replay,
    consume_at_pace,
)
from stoker.machine.local_disk import find_local_disk
from stoker.machine.storage import measure_local_disk, measure_storage
from stoker.tasks.dispatch import task_for
from stoker.tasks.image_data import open_samples
from stoker.train.loop import Run, pending, train
from stoker.train.observer import Silence, loader_shape, run_header
from stoker.train.ranks import Ranks
from stoker.train.schedule import Progress

LOCAL_SHARE = 0.2
"""Share of the storage trial's time for writing to a local disk and reading it back, if the data is remote."""

TrialJob = dict[str, Any]
"""`seconds`, `cpus`, `pace_s` (None: the real model)."""
TrialResult = dict[str, Any]
Header = dict[str, Any]


def build_trial(config: HostConfig, job: TrialJob) -> tuple[Run, Header]:
    """A run as `stoker train` builds it on one device, without validation, and the header of its clock."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(job["cpus"])
    task = task_for(config)
    data = replace(task.open_data(config, lambda _text: None), val=None)
    run = task.build_run(config, data, Ranks(), device)
    run = replace(
        run,
        clock=StepClock(device, keep=NEWEST),
        # The last epoch has full-size images, where they grow; with a rate of zero the loss cannot diverge.
        progress=Progress(epoch=config.epochs - 1),
        horizon=replace(run.horizon, epochs=ENDLESS),
        peak_lr=0.0,
    )
    return run, run_header(config, run, data.samples, data.storage(), cpus=job["cpus"])


def train_for(run: Run, seconds: float, tell: ReportSeconds) -> Interval:
    """The steps of about `seconds`, after a warm-up."""
    watch = Stopwatch(run.clock, seconds, tell)
    with suppress(_TimeIsUp):
        train(run, _Until(watch))
    return watch.interval()


class _TimeIsUp(Exception):
    """Not an error: the only way out of the endless loop."""


class _Until(Silence):
    """Stops a run when its time is up."""

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def step(self, step: int, epoch: int, metrics: dict[str, Any]) -> None:  # noqa: ARG002
        if self._watch.step():
            raise _TimeIsUp


def feed_at_pace(
    config: HostConfig, job: TrialJob, tell: ReportSeconds
) -> tuple[Interval, Header, Callable[[Sequence[int]], list[str]]]:
    """The loader with a consumer that takes a batch every `pace_s` seconds and uses no core."""
    task = task_for(config)
    data = task.open_data(config, lambda _text: None)
    loader = task.open_training_loader(config, data)
    try:
        clock = StepClock(keep=NEWEST)
        interval = consume_at_pace(loader, config.epochs - 1, job["pace_s"], job["seconds"], clock, tell)
    finally:
        loader.close()
    header = clock_header(
        loader_shape(config, data.samples, config.num_workers), cpus=job["cpus"], world=1,
        torch_version=torch.__version__, device="paced", storage=data.storage(),
    )  # fmt: skip
    return interval, header, data.names


def storage_trial(config: HostConfig, job: TrialJob, tell: ReportSeconds) -> TrialResult:  # noqa: ARG001 - it keeps to its time
    """Latency and throughput of the storage that the data is on."""
    if config.task != "classify":
        facts = task_for(config).open_data(config, lambda _text: None).storage()
        return {"storage": asdict(facts), "missing": ["the storage's speed: it is measured for images only"]}
    samples = open_samples(config, "train")
    missing: list[str] = []
    store = open_sample_store(samples.index, max_object_bytes=config.max_image_bytes)
    facts = measure_storage(store, samples, (1 - LOCAL_SHARE) * job["seconds"], missing.append)
    if facts.remote and facts.bytes_per_sample:
        disk = find_local_disk()
        folder = config.cache_dir if disk is None else config.cache_dir or disk.folder
        seconds = LOCAL_SHARE * job["seconds"] / 2
        facts = replace(
            facts,
            local_bytes_per_second=measure_local_disk(
                None if folder is None else Path(folder), facts.bytes_per_sample, seconds
            ),
            local_folder=None if disk is None else disk.folder,
            local_free_bytes=None if disk is None else disk.free_bytes,
        )
    return {"storage": asdict(facts), "missing": missing}


def loader_trial(config: HostConfig, job: TrialJob, tell: ReportSeconds) -> TrialResult:  # noqa: ARG001
    """The loader with a consumer that takes no time."""
    task = task_for(config)
    data = task.open_data(config, lambda _text: None)
    speed = task.measure_speed(config, data, workers=config.num_workers, seconds=job["seconds"])
    return {"images_per_second": speed.images_per_second, "first_batch_s": speed.first_batch_s}


def ceiling_trial(config: HostConfig, job: TrialJob, tell: ReportSeconds) -> TrialResult:
    """The real model and step on batches that are already in memory, and the copy to the device."""
    run, _ = build_trial(config, job)
    last = config.epochs - 1
    batches = batches_to_replay(run.train_loader(last).epoch(last))
    run.close()  # workers that wait for nothing would still be asked
    # No memory guard: nothing is made ahead that could be held back.
    run = replace(run, train_loader=lambda _epoch: Replay(batches), guard_memory=lambda _loader: None)
    interval = train_for(run, job["seconds"], tell)
    accelerator = measure_transfer(run.device, batches[0].images.nbytes, 1.0, batches[0].images.is_pinned())
    if accelerator is not None:
        busy = device_busy_share(lambda: run.step([pending(run, batches[0], 0, 0)], 0), run.device)
        accelerator = replace(accelerator, device_busy_share=busy)
    return {
        "images_per_second": interval.samples / (interval.elapsed_s - interval.wait_s),
        "accelerator": None if accelerator is None else asdict(accelerator),
    }


def together_trial(config: HostConfig, job: TrialJob, tell: ReportSeconds) -> TrialResult:
    """The loader and its consumer together: the real step, or a paced consumer."""
    watch = HostWatch()

    def look(seconds: float) -> None:
        if seconds == 0:
            watch.facts()  # resets the figures: building the model says nothing about steps
        watch.look()
        tell(seconds)

    interval: Interval
    if job.get("pace_s") is not None:
        interval, header, name_samples = feed_at_pace(config, job, look)
    else:
        run, header = build_trial(config, job)
        name_samples = run.name_samples
        try:
            interval = train_for(run, job["seconds"], look)
        finally:
            run.close()
    host = {name: value for name, value in asdict(watch.facts()).items() if value is not None}
    line = {"kind": "step", **interval_record(interval, name_samples), "host": host}
    return {"lines": [{"kind": "event", "event": HEADER, **header}, line]}


TRIALS: dict[str, Callable[[HostConfig, TrialJob, ReportSeconds], TrialResult]] = {
    "storage": storage_trial,
    "loader": loader_trial,
    "ceiling": ceiling_trial,
    "together": together_trial,
}
