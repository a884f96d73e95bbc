"""The overhead of our loop over a bare torch loop: same model, same batches in memory, same SGD, on one CPU thread.

The two alternate step by step: when our loop asks its loader for a batch, the loader first runs a step of the bare
loop. A disturbance therefore hits both, and the ratio per round is stable; the ratio of CPU times is stable even when
other programs use the same cores.
Our loop runs with its clock, metrics file, progress line, accuracy and checks for bad losses, but without checkpoints.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import timm
import torch
from torch.nn import functional

from bench.rounds import Spread, keep
from stoker.config import Config, load_config
from stoker.profile.host import HostConfig, fit_to_machine, read_machine
from stoker.run.folder import RunFolder
from stoker.run.metrics import MetricsFile
from stoker.run.trackers import trackers_for
from stoker.tasks.building import RunContext
from stoker.tasks.demo import write_digits
from stoker.tasks.images.augment.pipeline import soft_targets
from stoker.tasks.images.classify import build_run
from stoker.tasks.images.data import open_data
from stoker.tasks.images.image_loader import ImageBatch
from stoker.train.loop import Loader, Run, train
from stoker.train.observer import RunObserver
from stoker.train.progress_line import TrainLog, TrainProgress
from stoker.train.ranks import Ranks
from stoker.train.schedule import Horizon, Progress
from stoker.train.step import Prepared

LARGEST_RATIO = 1.02
CLASSES = 10


class Moment(NamedTuple):
    """Wall time and this thread's CPU time, in seconds; or the difference of two."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.thread_time())

    def since(self, other: Moment) -> Moment:
        return Moment(self.wall - other.wall, self.cpu - other.cpu)


class BareLoop:
    """A minimal torch training step, with no accuracy and no check for NaN losses."""

    def __init__(self, config: Config, prepared: list[Prepared]) -> None:
        torch.manual_seed(0)
        self.model = timm.create_model(config.model, num_classes=CLASSES).to(memory_format=torch.channels_last)
        self.model.train()
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=config.momentum, nesterov=config.nesterov,
            weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip
        self.prepared = prepared

    def step(self, number: int) -> Moment:
        batch = self.prepared[number % len(self.prepared)]
        began = Moment.now()
        self.optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(self.model(batch.inputs), batch.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return Moment.now().since(began)


class TakingTurns:
    """A loader of in-memory batches that runs a bare step before each one; the time between two is our loop's step."""

    # Attributes that the prefetch guard reads from a loader.
    workers, most_in_flight, batch_bytes = 2, 4, 1

    def __init__(self, batches: list[ImageBatch], bare: BareLoop, count: int) -> None:
        self.batches, self.bare, self.count = batches, bare, count
        self.bare_took: list[Moment] = []
        self.ours_took: list[Moment] = []

    def limit_prefetch(self, batches: int) -> None:
        """Does nothing: no batch is made ahead."""

    def steps(self, start: int = 0) -> int:  # noqa: ARG002 - the loop's protocol
        return self.count

    def epoch(self, epoch: int, start: int = 0) -> Iterator[ImageBatch]:  # noqa: ARG002
        for number in range(self.count):
            self.bare_took.append(self.bare.step(number))
            handed = Moment.now()
            yield self.batches[number % len(self.batches)]
            self.ours_took.append(Moment.now().since(handed))


def synthetic(config: Config, count: int) -> tuple[list[ImageBatch], list[Prepared]]:
    """Random batches, both as the loader yields them and prepared for the model."""
    random, size = np.random.default_rng(0), config.batch_size
    batches, prepared = [], []
    for step in range(count):
        labels = random.integers(0, CLASSES, size)
        whole = np.arange(size)
        images = torch.randn(size, 3, config.img_size, config.img_size).to(memory_format=torch.channels_last)
        targets = soft_targets(torch.from_numpy(labels), CLASSES, config.label_smoothing)
        keys, flips = np.zeros(size, np.uint64), np.zeros(size, np.bool_)
        place: Any = {"epoch": 0, "step": step, "next_position": (step + 1) * size}
        batches.append(ImageBatch(labels, whole, flips, images=images, keys=keys, **place))
        prepared.append(Prepared(images, targets, torch.from_numpy(labels), mixed=False))
    return batches, prepared


def our_run(config: HostConfig, batches: list[ImageBatch], prepared: list[Prepared]) -> Run:
    """A run as `stoker train` builds it, except that its batches come from memory, already augmented."""
    data = open_data(config, lambda _text: None)
    run = build_run(config, data, RunContext(Ranks(), torch.device("cpu")))
    by_identity = {id(batch): ready for batch, ready in zip(batches, prepared, strict=True)}
    return replace(
        run, input=replace(run.input, prepare=lambda batch, *_place: by_identity[id(batch)], val_loader=None)
    )


def our_observer(config: Config, folder: Path) -> RunObserver:
    """The metrics file, trackers and progress line of a run."""
    trackers = trackers_for(config, RunFolder(folder), say=lambda _text: None)
    progress = TrainProgress(TrainLog(folder / "logs"), (folder / "screen").open("w"))
    metrics = MetricsFile(folder / "metrics.jsonl")
    return RunObserver(metrics, trackers, progress, log_every=config.log_every, world=1)


def _always(loader: Loader) -> Callable[[int], Loader]:
    return lambda _epoch: loader


def measure(config: HostConfig, folder: Path, rounds: int, steps: int) -> dict[str, Any]:
    batches, prepared = synthetic(config, 8)
    bare, run, observer = BareLoop(config, prepared), our_run(config, batches, prepared), our_observer(config, folder)
    figures: dict[str, list[float]] = {"bare_ms": [], "ours_ms": [], "ratio": [], "ratio of CPU time": []}
    for number in range(rounds + 1):
        turns = TakingTurns(batches, bare, steps)
        horizon = Horizon(steps_per_epoch=steps, epochs=1)
        turn = replace(run.input, train_loader=_always(turns))
        schedule = replace(run.schedule, horizon=horizon)
        train(replace(run, input=turn, schedule=schedule, progress=Progress()), observer)
        if number == 0:
            continue  # the first steps warm up allocators and caches
        # Our step ends when the loop asks for the next batch, which it does not after the last step: one fewer.
        pairs = list(zip(turns.ours_took, turns.bare_took, strict=False))
        figures["bare_ms"].append(statistics.median(bare.wall for _, bare in pairs) * 1e3)
        figures["ours_ms"].append(statistics.median(ours.wall for ours, _ in pairs) * 1e3)
        figures["ratio"].append(figures["ours_ms"][-1] / figures["bare_ms"][-1])
        cpu = [statistics.median(took.cpu for took in side) for side in zip(*pairs, strict=True)]
        figures["ratio of CPU time"].append(cpu[0] / cpu[1])
        sys.stderr.write(f"round {number}/{rounds}  {figures['ratio'][-1]:.4f}\n")
    about = {"model": config.model, "batch_size": config.batch_size, "img_size": config.img_size, "steps": steps}
    return about | {name: Spread(tuple(values)).as_dict() for name, values in figures.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60, help="steps of each loop per round")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings to change in configs/demo.yaml")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        folder = Path(name)
        words = [f"data_root={write_digits(folder / 'digits')}", f"runs_dir={folder}", *arguments.overrides]
        config, _ = fit_to_machine(
            load_config(
                Path(__file__).parents[1] / "configs/demo.yaml", [*words, "num_workers=0", "prefetch_factor=null"]
            ).config,
            read_machine(),
        )
        found = measure(config, folder, arguments.rounds, arguments.steps)
    path = keep("loop", found)
    for key in ("ratio", "ratio of CPU time"):
        spread = found[key]
        print(f"{key}: {spread['median']:.4f}x ({spread['min']:.4f}-{spread['max']:.4f})")
    print(f"steps of {found['bare_ms']['median']:.1f} ms; wrote {path}")
    return 0 if found["ratio"]["median"] <= LARGEST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
