"""Loader workers at a lower priority: what a thread that launches kernels gains, and what training on the CPU loses.

The launching thread is imitated by one that computes for a moment and then sleeps, over and over, as one that launches
a step's kernels and waits for the next batch does. Its figure is the wall time for a second of its own CPU time: 1 on a
core of its own. As many workers as cores decode as fast as they can beside it.
For the CPU, a small network trains on batches of the same loader; its figure is images/s.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.rounds import interleave, keep, ratio
from stoker.config import load_config
from stoker.core import priority
from stoker.profile.host import usable_cpus
from stoker.tasks.images.data import choose_decoding, open_loader, open_samples, training_plan
from stoker.tasks.images.image_loader import ImageLoader
from stoker.tasks.images.layouts.sample_index import repeated

BURST_S, PAUSE_S = 2e-3, 2e-3
WARM_UP_BATCHES = 4


def open_real_loader(images: Path, work: Path, engine: str, *, steps_back: int) -> ImageLoader:
    """A loader whose workers run; its priority is set when they start."""
    words = [f"data_root={images}", "batch_size=64", "img_size=128", f"index_dir={work}", "pin_memory=false"]
    config = load_config(None, [*words, f"loader={engine}"]).config
    samples = open_samples(config, "")
    decoding, _ = choose_decoding(config, samples.index)
    plan = training_plan(config, repeated(samples, 1_000_000), decoding)
    priority.STEPS_BACK = steps_back  # worker processes are forked, and so see it
    loader = open_loader(config.model_copy(update={"worker_start": "fork"}), plan, workers=usable_cpus())
    for _ in itertools.islice(loader.epoch(0), WARM_UP_BATCHES):
        pass
    return loader


def launching(loader: ImageLoader, seconds: float) -> float:
    """Wall time per CPU time of the launching thread, while another thread takes batches as fast as they come."""
    stop = threading.Event()

    def take() -> None:
        for _ in loader.epoch(1):
            if stop.is_set():
                return

    taker = threading.Thread(target=take)
    taker.start()
    values = torch.rand(256)
    wall = cpu = 0.0
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        began, began_cpu = time.perf_counter(), time.thread_time()
        while time.thread_time() - began_cpu < BURST_S:
            values = values * 1.0001  # small operators from Python, as launching is
        wall += time.perf_counter() - began
        cpu += time.thread_time() - began_cpu
        time.sleep(PAUSE_S)
    stop.set()
    taker.join()
    return wall / cpu


def training(loader: ImageLoader, seconds: float) -> float:
    """Images/s of a small network that trains on the CPU with the loader's batches."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, began = 0, 0.0
    for number, batch in enumerate(loader.epoch(2)):
        if number == WARM_UP_BATCHES:
            images, began = 0, time.perf_counter()
        inputs = batch.images.permute(0, 3, 1, 2).float() / 255
        loss = nn.functional.cross_entropy(model(inputs), torch.zeros(len(batch), dtype=torch.int64))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        images += len(batch)
        if number > WARM_UP_BATCHES and time.perf_counter() - began >= seconds:
            break
    return images / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("images", type=Path, help="folder of class folders")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    found = {}
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        for engine in ("thread", "process"):
            for consumer in (launching, training):
                loaders = {
                    "same priority": open_real_loader(arguments.images, Path(name), engine, steps_back=0),
                    "lower priority": open_real_loader(arguments.images, Path(name), engine, steps_back=5),
                }
                runs: dict[str, Callable[[], float]] = {
                    case: lambda loader=loader, consumer=consumer: consumer(loader, arguments.seconds)  # type: ignore[misc]
                    for case, loader in loaders.items()
                }
                spreads = interleave(runs, arguments.rounds)
                for loader in loaders.values():
                    loader.close()
                found[f"{consumer.__name__}, {engine}"] = {
                    **{case: spread.as_dict() for case, spread in spreads.items()},
                    "lower / same": ratio(spreads["lower priority"], spreads["same priority"]).as_dict(),
                }
    path = keep("priority", {"cores": usable_cpus(), "workers": usable_cpus(), **found})
    for case, figures in found.items():
        medians = {name: spread["median"] for name, spread in figures.items()}
        print(f"{case}: {medians}")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
