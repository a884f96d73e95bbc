"""The cost of the always-on clock: CPU time per step and per batch made, with and without the clock.

Steps and batches are empty apart from the clock's work, so that a difference of microseconds is visible, and runs with
and without the clock alternate. The cost is then given as a share of a 20 ms step. The clock's file is written as in a
real run, one line every 50 steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.rounds import Spread, interleave, keep
from stoker.profile.batch_costs import BatchClock, BatchCost
from stoker.profile.clock_file import ClockFile, ClockHeader
from stoker.profile.host import HostWatch
from stoker.profile.observed import LoaderShape
from stoker.profile.step_clock import StepClock
from stoker.tasks.images.image_loader import ImageBatch

STEP_S = 0.02
LARGEST_SHARE = 0.01
LOG_EVERY = 50
STAGES_OF_A_BATCH = ("collate", "fetch", "decode", "other")
STEPS_OF_AN_EPOCH = 5004


class NoClock:
    """Has the clock's interface but measures nothing."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        yield

    transferring = computing = waiting

    def epoch_begins(self) -> None: ...

    def step_ends(self, batches: Any) -> None: ...


class NoBatchClock:
    """Has the batch clock's interface but measures nothing."""

    def __init__(self) -> None:
        self.cost = BatchCost()

    def begins(self, stage: str) -> None: ...

    def finish(self) -> BatchCost:
        return self.cost


@dataclass
class Sides:
    """A loop and a batch maker, reduced to their calls to the clock."""

    steps: int
    batches: int
    batch_size: int

    def loop(self, clock: Any, file: ClockFile | None) -> float:
        """CPU seconds of a step that does nothing but call the clock."""
        batch = self._batch(BatchClock())
        clock.epoch_begins()
        began = time.thread_time()
        for step in range(1, self.steps + 1):
            with clock.waiting():
                group = [batch]
            with clock.transferring():
                pass
            with clock.computing():
                pass
            clock.step_ends(group)
            if file is not None and step % LOG_EVERY == 0:
                file.step(step, 0, clock.take_interval())
        return (time.thread_time() - began) / self.steps

    def making(self, kind: type[BatchClock] | type[NoBatchClock]) -> float:
        """CPU seconds that making one batch spends on its clock (stoker.tasks.images.image_loader)."""
        began = time.thread_time()
        for _ in range(self.batches):
            clock = kind()
            for stage in STAGES_OF_A_BATCH:
                clock.begins(stage)
            clock.finish()
        return (time.thread_time() - began) / self.batches

    def samples(self) -> float:
        """CPU seconds for timing each sample of a batch, which the maker does with either clock."""
        cost = BatchCost(slowest_s=1e9)
        began = time.thread_time()
        for _ in range(self.batches):
            began_s = time.perf_counter()
            for _ in range(self.batch_size):
                done_s = time.perf_counter()
                if done_s - began_s > cost.slowest_s:
                    raise AssertionError
                began_s = done_s
        return (time.thread_time() - began) / self.batches

    def _batch(self, clock: BatchClock) -> ImageBatch:
        for stage in STAGES_OF_A_BATCH:
            clock.begins(stage)
        cost = clock.finish()
        cost.samples, cost.batch_bytes, cost.slowest_sample, cost.slowest_s = 256, 38_535_168, 7, 0.01
        labels = np.zeros(256, np.int64)
        return ImageBatch(
            labels, labels, labels.astype(bool), images=None, keys=labels.astype(np.uint64),
            epoch=0, step=0, next_position=256, cost=cost,
        )  # fmt: skip


def open_file(folder: Path) -> ClockFile:
    header = ClockHeader(LoaderShape(8, 2), cpus=8, world=1, torch=torch.__version__, device="cpu")
    return ClockFile(
        folder / "clock.jsonl",
        header,
        HostWatch(),
        name_samples=lambda numbers: [f"n0144{n:04d}/x.JPEG" for n in numbers],
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=2000, help="steps of each loop per round")
    parser.add_argument("--batches", type=int, default=2000, help="batches of each maker per round")
    parser.add_argument("--batch-size", type=int, default=256)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as name:
        folder = Path(name)
        sides = Sides(arguments.steps, arguments.batches, arguments.batch_size)
        file = open_file(folder)
        header_bytes = (folder / "clock.jsonl").stat().st_size
        found = interleave(
            {
                "loop with the clock": lambda: sides.loop(StepClock(), file),
                "loop with none": lambda: sides.loop(NoClock(), None),
                "batch with the clock": lambda: sides.making(BatchClock),
                "batch with none": lambda: sides.making(NoBatchClock),
                "timing of samples": sides.samples,
            },
            arguments.rounds,
        )
        file.close()
        lines = arguments.rounds * (arguments.steps // LOG_EVERY)
        line_bytes = ((folder / "clock.jsonl").stat().st_size - header_bytes) / lines
    loop = _difference(found["loop with the clock"], found["loop with none"])
    stages = _difference(found["batch with the clock"], found["batch with none"])
    batch = Spread(tuple(a + b for a, b in zip(stages.values, found["timing of samples"].values, strict=True)))
    share = Spread(tuple((a + b) / STEP_S for a, b in zip(loop.values, batch.values, strict=True)))
    path = keep(
        "clock_cost",
        {
            "step_ms": STEP_S * 1e3,
            "batch_size": arguments.batch_size,
            "loop_us": _microseconds(loop),
            "batch_us": _microseconds(batch),
            "share of a step, in the loop": Spread(tuple(value / STEP_S for value in loop.values)).as_dict(),
            "share of a step, loop and one batch on the same core": share.as_dict(),
            "bytes of a line": round(line_bytes),
            "bytes of an epoch of 5,004 steps": round(line_bytes * (STEPS_OF_AN_EPOCH // LOG_EVERY + 1)),
        },
    )
    print(f"per step: {loop.median * 1e6:.1f} us in the loop, {batch.median * 1e6:.1f} us in the worker")
    print(f"{share.median:.2%} of a {STEP_S * 1e3:.0f} ms step; {line_bytes:.0f} bytes per line; wrote {path}")
    return 0 if share.median <= LARGEST_SHARE else 1


def _difference(with_clock: Spread, without: Spread) -> Spread:
    return Spread(tuple(a - b for a, b in zip(with_clock.values, without.values, strict=True)))


def _microseconds(spread: Spread) -> dict[str, Any]:
    return Spread(tuple(value * 1e6 for value in spread.values)).as_dict()


if __name__ == "__main__":
    sys.exit(main())
