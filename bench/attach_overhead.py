"""The overhead of the attached doctor: the same script with and without the timers, alternating step by step.

Batches are made in the training process (num_workers=0) so that the step pays the whole cost; with workers, most of it
would fall on them. Images are JPEGs decoded by Pillow and augmented by torchvision, which uses every kind of timer.
For a step 'without', recording is switched off, as it is after the last step that was asked for; what the replaced
functions then still take is measured apart and added. (Putting the original functions back for every other step
measures that as well: Python forgets what it has learnt about a class when a method of it is replaced.) We compare the
thread's CPU time, which stays stable when other programs use the same cores, and report wall time next to it. What the
looking thread itself takes is measured over steps in a row, at the rate of the first thousand looks, which later ones
do not reach; it is added too. The first batches of a process are all split into stages, later ones in part: both are
measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
import torchvision
from torchvision import transforms

from bench.rounds import Spread, keep
from stoker.attach import fetching, sampling, session
from stoker.attach.session import start
from stoker.attach.stage_clock import DECODE
from stoker.attach.stages import timed

LARGEST_RATIO = 1.02
"""For 20 ms steps."""
PICTURE_SIDE = 256


FIRST_BATCHES = fetching.STAGES_BELOW


class Case(NamedTuple):
    """A script: its batch size and the length of its step; and whether these are its first batches."""

    batch_size: int
    step_ms: float
    first: bool = False


# Computing fills whatever part of the step loading the images leaves.
CASES = {"20 ms steps": Case(4, 20.0), "20 ms steps, first batches": Case(4, 20.0, first=True),
         "2 ms steps": Case(1, 2.0), "2 ms steps, first batches": Case(1, 2.0, first=True)}  # fmt: skip


def nothing(*_: Any) -> None:
    """What a replaced function is compared on."""


def passing_on_s() -> float:
    """What a replaced function takes longer while nothing is recorded."""
    replaced, calls = timed(nothing, DECODE), 20_000
    took = []
    for function in (nothing, replaced) * 9:
        began = time.thread_time()
        for _ in range(calls):
            function(1)
        took.append((time.thread_time() - began) / calls)
    return min(took[1::2]) - min(took[::2])


def write_pictures(folder: Path, count: int) -> None:
    """The same picture many times, so it does not matter which one a step gets."""
    coarse = np.random.default_rng(0).integers(0, 256, (PICTURE_SIDE // 8, PICTURE_SIDE // 8, 3), np.uint8)
    picture = PIL.Image.fromarray(coarse).resize((PICTURE_SIDE, PICTURE_SIDE))
    (folder / "class").mkdir()
    for number in range(count):
        picture.save(folder / "class" / f"{number}.jpg", quality=90)


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def capped_mean(took: list[float], more: float = 0.0) -> float:
    """The mean of steps of which none counts for more than the median and a quarter of it."""
    most = 1.25 * statistics.median(took)
    return statistics.mean(min(each, most) for each in took) + more


def measure(case: Case, folder: Path, rounds: int, pairs: int) -> dict[str, Any]:
    opened = session.current()
    assert opened is not None
    fetching.STAGES_BELOW = sys.maxsize if case.first else FIRST_BATCHES
    pipeline = transforms.Compose([transforms.Resize(232), transforms.CenterCrop(224), transforms.ToTensor()])
    data = torchvision.datasets.ImageFolder(str(folder), pipeline)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=case.batch_size, shuffle=True, drop_last=True)
    batches = endless(loader)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(4, 8)

    def step(compute_s: float) -> tuple[float, float, float]:
        wall, cpu, whole = time.perf_counter(), time.thread_time(), time.process_time()
        next(batches)
        model(inputs).sum().backward()
        optimizer.step()
        spin(compute_s)
        took = time.thread_time() - cpu
        return time.perf_counter() - wall, took, time.process_time() - whole - took

    opened.recording = True
    for _ in range(FIRST_BATCHES):
        step(0.0)
    clock = list(fetching.fetches.totals.values())[-1].clock
    calls = sum(clock.calls)
    for _ in range(FIRST_BATCHES):
        step(0.0)
    passing_s = passing_on_s() * (sum(clock.calls) - calls) / FIRST_BATCHES * (1 if case.first else 4)
    opened.recording = False
    alone = statistics.median(step(0.0)[1] for _ in range(30))
    compute_s = max(0.0, case.step_ms / 1000 - alone)
    turns = [("with", True), ("without", False)]
    cpu_ratios, wall_ratios, looking, plain_ms = [], [], [], []
    for number in range(rounds):
        cpu: dict[str, list[float]] = {"with": [], "without": []}
        wall: dict[str, list[float]] = {"with": [], "without": []}
        for pair in range(pairs):
            # The order alternates from pair to pair.
            for name, opened.recording in turns if pair % 2 == 0 else turns[::-1]:
                step_wall, step_cpu, _ = step(compute_s)
                wall[name].append(step_wall)
                cpu[name].append(step_cpu)
        # Single steps are capped: an interrupted step says nothing about the timers. Not their median: only some of
        # the batches are split into stages.
        cpu_ratios.append(capped_mean(cpu["with"], passing_s) / capped_mean(cpu["without"]))
        wall_ratios.append(capped_mean(wall["with"], passing_s) / capped_mean(wall["without"]))
        opened.recording = True
        together = [step(compute_s) for _ in range(pairs)]
        looking.append(sum(beside for _, _, beside in together) / sum(own for _, own, _ in together))
        plain_ms.append(statistics.median(cpu["without"]) * 1000)
        sys.stderr.write(f"round {number + 1}/{rounds}  cpu {cpu_ratios[-1]:.4f}  wall {wall_ratios[-1]:.4f}  ")
        sys.stderr.write(f"looking {looking[-1]:.4f}\n")
    return {
        "images_a_batch": case.batch_size,
        "step_ms_without": Spread(tuple(plain_ms)).as_dict(),
        "making_the_batch_ms": round(alone * 1000, 3),
        "passing_on_us": round(passing_s * 1e6, 2),
        "cpu_time_with_over_without": Spread(tuple(cpu_ratios)).as_dict(),
        "wall_time_with_over_without": Spread(tuple(wall_ratios)).as_dict(),
        "looking_thread_over_step": Spread(tuple(looking)).as_dict(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps per round")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sampling.MANY_LOOKS = sys.maxsize
    with tempfile.TemporaryDirectory() as name:
        pictures, records = Path(name) / "pictures", Path(name) / "records"
        pictures.mkdir()
        records.mkdir()
        write_pictures(pictures, 64)
        start(str(records))
        measured = {name: measure(case, pictures, options.rounds, options.pairs) for name, case in CASES.items()}
        left = sorted(path.name.split("-")[0] for path in records.iterdir())
        assert "steps" in left and "fetch" in left, f"the timers did not run: {left}"  # noqa: PT018
    keep("attach_overhead", measured)
    figures = measured["20 ms steps"]
    ratio = figures["cpu_time_with_over_without"]["median"] + figures["looking_thread_over_step"]["median"]
    sys.stdout.write(f"20 ms steps: {(ratio - 1) * 100:.2f} % slower (limit {(LARGEST_RATIO - 1) * 100:.0f} %)\n")
    return 0 if ratio <= LARGEST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
