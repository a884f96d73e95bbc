"""A loader that adjusts itself, compared with fixed numbers of workers, under a consumer that uses no core, as a GPU.

All begin with what `num_workers: auto` gives on a host with a GPU. The adjusted loader first runs until it has settled;
then all take turns. The figure is its rate over that of the best fixed number of workers, and over that of its own
start.

decoding       real JPEGs from memory: as many workers as cores are best
blocked reads  batches that block for eight times as long as they compute, as from a slow mount: many workers are best
object store   a real S3 server behind a proxy with a long latency: more requests at once are best
slow consumer  takes less than the loader makes: nothing helps, and nothing may get worse
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.s3_server import BUCKET, running_s3_server

from bench.loaders import PROJECT
from bench.rounds import interleave, keep, ratio
from bench.what_if_loaders import BLOCK, BLOCK_S
from stoker.config import load_config
from stoker.loader.batch import Quarantine
from stoker.loader.loader import BatchLoader, LoaderOptions
from stoker.loader.sampler import Steps
from stoker.profile.batch_costs import BatchClock
from stoker.profile.host import usable_cpus, workers_for
from stoker.profile.step_clock import StepClock
from stoker.tasks.images.data import choose_decoding, open_loader, open_samples, training_plan
from stoker.tasks.images.image_loader import ImageBatch
from stoker.tasks.images.layouts.sample_index import repeated
from stoker.tasks.images.memory_trial import generate_images
from stoker.train.loader_adjuster import LoaderAdjuster
from stoker.train.loader_changes import outcome_text

BATCH = 32
LONG = 2_000_000
LATENCY_MS = 300
OBJECTS = 2000
"""Each is read once an epoch: the look-ahead would keep one that comes twice."""
BLOCKED_S, COMPUTED_S = 0.08, 0.01
FAST_S = 0.005
# A share of what one worker makes.
SLOW = 0.6
WARM_UP_STEPS = 8
MOST_SETTLING_S = 45.0


@dataclass(frozen=True)
class Scenario:
    """Loaders of one source, and the pace of their consumer."""

    open: Callable[[int], BatchLoader[Any]]
    fixed: tuple[int, ...]
    pace_s: float = FAST_S


class _Plan:
    batch_shape = (BATCH, 1, 1, 3)

    def __init__(self) -> None:
        self.steps = Steps(LONG, BATCH)


class _Memory:
    """A source of bytes that nothing is read from."""

    mean_bytes, requests, ready_bytes = 1.0, 1, 0

    def allow(self, lookahead_bytes: int, requests: int) -> None: ...

    def held_back_by(self) -> None: ...

    def forget(self) -> None: ...

    def close(self) -> None: ...


class _BlockingMaker:
    """Batches whose reads block the worker, and whose computing releases Python's lock, as decoders do."""

    def __init__(self, plan: _Plan) -> None:
        self.plan, self.reader = plan, _Memory()

    def announce(self, *_step: int) -> None: ...

    def make(self, epoch: int, step: int, _start: int, allocate: Any) -> ImageBatch:
        clock = BatchClock()
        clock.begins("collate")
        images = allocate(self.plan.batch_shape)
        # Varies by up to 50 %, identically in every run for the same step.
        factor = np.random.default_rng(step).uniform(0.5, 1.5)
        clock.begins("fetch")
        time.sleep(BLOCKED_S * factor)
        clock.begins("decode")
        for _ in range(round(COMPUTED_S * factor / BLOCK_S)):
            hashlib.sha256(BLOCK).digest()
        clock.begins("other")
        clock.cost.samples = BATCH
        nothing = np.zeros(BATCH, dtype=np.int64)
        return ImageBatch(
            nothing, nothing, nothing > 0, images=images, keys=nothing.astype(np.uint64),
            epoch=epoch, step=step, next_position=step, cost=clock.finish(),
        )  # fmt: skip


class _BlockingLoader(BatchLoader[ImageBatch]):
    def __init__(self, workers: int) -> None:
        plan, quarantine = _Plan(), Quarantine(None, 1.0, LONG)
        options = LoaderOptions(engine="thread", workers=workers)
        super().__init__(plan, lambda: _BlockingMaker(plan), quarantine, options)


def open_images(root: str, split: str, work: Path, size: int, workers: int, samples_of: int = 0) -> BatchLoader[Any]:
    """The real loader; with `samples_of`, an epoch takes the images again and again until it has that many."""
    words = [f"data_root={root}", f"batch_size={BATCH}", f"img_size={size}", f"index_dir={work}", "pin_memory=false"]
    config = load_config(None, [*words, "loader=thread", "decoder=simplejpeg"]).config
    samples = open_samples(config, split)  # type: ignore[arg-type]
    decoding, _ = choose_decoding(config, samples.index)
    samples = repeated(samples, samples_of) if samples_of else samples
    return open_loader(config, training_plan(config, samples, decoding), workers=workers)


class Consumer:
    """Takes the batches of one loader; the adjusted one has an adjuster."""

    def __init__(self, loader: BatchLoader[Any], pace_s: float, adjuster: LoaderAdjuster | None = None) -> None:
        self.loader, self.adjuster = loader, adjuster
        self.decisions: list[dict[str, Any]] = []
        self._pace_s = pace_s
        self._epochs = itertools.count()
        self._clock = StepClock()

    def settle(self) -> float:
        """Seconds until the adjuster has settled, or until there is no more time for it."""
        assert self.adjuster is not None
        began_s = time.perf_counter()
        for _ in self._steps():
            took_s = time.perf_counter() - began_s
            if self.adjuster.is_settled or took_s > MOST_SETTLING_S:
                return took_s
        raise AssertionError("epochs never end")

    def rate(self, seconds: float) -> float:
        """Samples per second, once the batches that were made before are used up."""
        before, samples, began_s = self.loader.most_in_flight + WARM_UP_STEPS, 0, 0.0
        for number, batch in enumerate(self._steps()):
            now_s = time.perf_counter()
            if number == before:
                began_s = now_s
            elif number > before:
                samples += len(batch)
                if now_s - began_s >= seconds:
                    return samples / (now_s - began_s)
        raise AssertionError("epochs never end")

    def _steps(self) -> Iterator[Any]:
        """The batches of epoch after epoch, as a training takes them."""
        clock = self._clock
        for epoch in self._epochs:
            clock.epoch_begins()
            with closing(self.loader.epoch(epoch)) as batches:  # type: ignore[type-var]
                for _ in range(self.loader.steps()):
                    with clock.waiting():
                        batch = next(batches)
                    with clock.computing():
                        time.sleep(self._pace_s)
                    clock.step_ends([batch])
                    if self.adjuster is not None:
                        decided = self.adjuster.after_step(self.loader, clock)
                        if decided is not None:
                            self.decisions.append(decided)
                    yield batch


def measure(scenario: Scenario, start: int, rounds: int, seconds: float, look_s: float) -> dict[str, Any]:
    """The figures of one scenario."""
    fixed = {workers: Consumer(scenario.open(workers), scenario.pace_s) for workers in sorted({start, *scenario.fixed})}
    adjuster = LoaderAdjuster(usable_cpus(), look_s=look_s, look_steps=4)
    adjusted = Consumer(scenario.open(start), scenario.pace_s, adjuster)
    try:
        settled_s = adjusted.settle()
        contenders = {"adjusted": lambda: adjusted.rate(seconds)}
        for workers, consumer in fixed.items():
            contenders[f"{workers} workers"] = lambda consumer=consumer: consumer.rate(seconds)  # type: ignore[misc]
        spreads = interleave(contenders, rounds)
    finally:
        for consumer in (adjusted, *fixed.values()):
            consumer.loader.close()
    best = max(fixed, key=lambda workers: spreads[f"{workers} workers"].median)
    setup = adjusted.loader.setup
    assert setup is not None
    return {
        "samples_per_second": {name: spread.as_dict() for name, spread in spreads.items()},
        "start": f"{start} workers",
        "best fixed": f"{best} workers",
        "adjusted": {"workers": setup.workers, "prefetch": setup.prefetch, "requests": setup.requests},
        "settled_s": round(settled_s, 1),
        "was_settled": adjuster.is_settled,
        "decisions": adjusted.decisions,
        "adjusted / best fixed": ratio(spreads["adjusted"], spreads[f"{best} workers"]).as_dict(),
        "adjusted / start": ratio(spreads["adjusted"], spreads[f"{start} workers"]).as_dict(),
    }


@contextmanager
def slow_object_store(images: Path) -> Iterator[str]:
    """The images in a real S3 server, behind a proxy with latency; its URL."""
    with running_s3_server() as server:
        files = sorted(images.rglob("*.jpg"))
        with ThreadPoolExecutor(16) as pool:
            for number in range(OBJECTS):
                path = files[number % len(files)]
                name = f"images/train/{path.parent.name}/{number:05d}.jpg"
                pool.submit(server.put, name, path.read_bytes())
        proxy = subprocess.Popen(
            [sys.executable, "-m", "tests.support.proxy", str(server.port), str(LATENCY_MS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=PROJECT,
        )  # fmt: skip
        assert proxy.stdout is not None
        os.environ.update(server.environment(f"http://127.0.0.1:{proxy.stdout.readline().strip()}"))
        try:
            yield f"s3://{BUCKET}/images"
        finally:
            proxy.kill()
            proxy.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--look-s", type=float, default=0.5, help="a training looks for 1 s at a time")
    parser.add_argument("--only", help="one scenario")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    start = workers_for(usable_cpus(), 1, on_gpu=True)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        work = Path(name)
        large = str(generate_images(work / "large"))
        small = generate_images(work / "small", (96, 128, 3))

        def decoding(workers: int) -> BatchLoader[Any]:
            return open_images(large, "", work / "index", 224, workers, LONG)

        alone = Consumer(decoding(1), 0.0)
        slow_s = BATCH / (SLOW * alone.rate(arguments.seconds))
        alone.loader.close()
        with slow_object_store(small) as url:
            scenarios = {
                "decoding": Scenario(decoding, (1, 2, 4)),
                "blocked reads": Scenario(_BlockingLoader, (1, 4, 16)),
                "object store": Scenario(
                    lambda workers: open_images(url, "train", work / "remote", 64, workers), (1, 4, 8)
                ),
                "slow consumer": Scenario(decoding, (1, 2), slow_s),
            }
            found = {
                case: measure(scenario, start, arguments.rounds, arguments.seconds, arguments.look_s)
                for case, scenario in scenarios.items()
                if arguments.only in (None, case)
            }
    for case, figures in found.items():
        for against in ("best fixed", "start"):
            share = figures[f"adjusted / {against}"]
            spread = f"({share['min']:.2f}-{share['max']:.2f})"
            print(f"{case}: {share['median']:.2f} {spread} of {figures[against]} ({against})")
        print(f"    settled after {figures['settled_s']} s at {figures['adjusted']}")
        for line in filter(None, (outcome_text(decided, "images") for decided in figures["decisions"])):
            print(f"    {line}")
    if arguments.only is None:
        path = keep("auto_loader", {"cores": usable_cpus(), "look_s": arguments.look_s, **found})
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
