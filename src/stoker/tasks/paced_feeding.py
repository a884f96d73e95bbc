"""The loader of a config with a consumer that only takes its time; needs no network, and imports none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stoker.clock.interval import Interval
from stoker.clock.steps import StepClock
from stoker.config import Config
from stoker.output.clock_file import clock_header
from stoker.output.clock_reading import NEWEST
from stoker.probe.ceiling import Tell, consume_at_pace
from stoker.probe.storage_speed import describe_storage
from stoker.tasks.image_data import choose_decoding, open_loader, open_samples, training_plan
from stoker.tasks.loader_shape import loader_shape
from stoker.tasks.timed_training import Header


def feed_at_pace(
    config: Config, job: dict[str, Any], tell: Tell
) -> tuple[Interval, Header, Callable[[Sequence[int]], list[str]]]:
    """The loader with a consumer that takes a batch every so many seconds and uses no core."""
    samples = open_samples(config, "train")
    decoding, _ = choose_decoding(config, samples.index)
    plan = training_plan(config, samples, decoding)
    loader = open_loader(config, plan, workers=job["workers"])
    try:
        clock = StepClock(keep=NEWEST)
        interval = consume_at_pace(loader, config.epochs - 1, job["pace_s"], job["seconds"], clock, tell)
    finally:
        loader.close()
    header = clock_header(
        loader_shape(config, len(samples), job["workers"]), cpus=job["cpus"], world=1,
        torch_version=torch.__version__, device="paced", storage=describe_storage(samples),
    )  # fmt: skip
    return interval, header, lambda numbers: [samples.index.name(number) for number in numbers]
