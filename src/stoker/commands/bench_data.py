"""The measurements behind `stoker bench data`, in order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from stoker.config import Config
from stoker.config.loading import load_for_command
from stoker.config.machine import fit_to_machine
from stoker.data.loader import choose_engine
from stoker.facts import DataBench, WorkerRate
from stoker.output.progress import progress_bar
from stoker.output.text import say, say_notes
from stoker.probe.host import read_machine
from stoker.probe.loader_speed import decode_limit, measure_loader, repeated
from stoker.probe.published import published_rate
from stoker.tasks.image_data import (
    choose_decoding,
    files_for_measuring,
    open_loader,
    open_samples,
    training_plan,
)

CONFIG_ENDINGS = (".yaml", ".yml")
FOLDER_BATCH_SIZE = 64


def bench_data(
    source: str, overrides: Sequence[str], worker_counts: Sequence[int], seconds: float, gpu: str | None
) -> DataBench:
    """Measures the loader of a config or folder with each number of workers."""
    rate = published_rate(gpu) if gpu is not None else None  # a slip here must not cost a minute first
    config, split = _config_of(source, overrides)
    machine = read_machine()
    config, notes = fit_to_machine(config, machine)
    say_notes(notes)
    with progress_bar("listing", None) as advance:
        samples = open_samples(config, split, progress=advance)
    if config.subset_classes is not None:
        say(f"classes: {', '.join(samples.classes)}")
    decoding, calibration = choose_decoding(config, samples.index)
    counts = list(worker_counts) or _counts_up_to(machine.cpus)
    rates = []
    with progress_bar("measuring", len(counts) + 1) as advance:
        for number, workers in enumerate(counts):
            # Long enough that no epoch ends within the measurement, whatever the speed.
            wanted = max(config.batch_size * (workers + 4) * 3, int(seconds * 20_000 * max(1, workers)))
            plan = training_plan(config, repeated(samples, wanted), decoding)
            speed = measure_loader(partial(open_loader, config, plan, workers=workers), workers, seconds)
            rates.append(WorkerRate(workers, speed.images_per_second, speed.first_batch_s, speed.cost.per_image()))
            advance(number + 1, len(counts) + 1)
        best = max(rates, key=lambda rate: rate.images_per_second)
        limit = decode_limit(files_for_measuring(config, samples.index), max(1, best.workers), min(seconds, 3.0))
        advance(len(counts) + 1, len(counts) + 1)
    return DataBench(
        source=source,
        samples=len(samples),
        batch_size=config.batch_size,
        img_size=config.img_size,
        engine=choose_engine(config.loader, best.workers),
        decoder=decoding.decoder,
        decoder_us=None if calibration is None else calibration.microseconds,
        rates=tuple(rates),
        decode_limit_images_per_second=limit,
        gpu=None if rate is None else rate.name,
        gpu_images_per_second=None if rate is None else rate.images_per_second,
        gpu_source=None if rate is None else rate.source,
    )


def _config_of(source: str, overrides: Sequence[str]) -> tuple[Config, Literal["train", ""]]:
    if source.endswith(CONFIG_ENDINGS):
        return load_for_command(Path(source), overrides, None).config, "train"
    split: Literal["train", ""] = "" if "://" not in source and not (Path(source) / "train").is_dir() else "train"
    batch = [] if any(text.startswith("batch_size=") for text in overrides) else [f"batch_size={FOLDER_BATCH_SIZE}"]
    return load_for_command(None, [f"data_root={source}", *batch, *overrides], None).config, split


def _counts_up_to(cpus: int) -> list[int]:
    counts = [1]
    while counts[-1] * 2 <= cpus:
        counts.append(counts[-1] * 2)
    return counts if counts[-1] == cpus else [*counts, cpus]
