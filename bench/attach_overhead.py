"""The overhead of the attached doctor: the same script with and without the timers, alternating step by step.

Batches are made in the training process (num_workers=0) so that the step pays the whole cost; with workers, most of it
would fall on them. Images are JPEGs decoded by Pillow and augmented by torchvision, which uses every kind of timer.
For a step 'without', the original functions of torch, Pillow, torchvision and `open` are put back first, and the thread
that looks at the stack is ended. We compare the thread's CPU time, which stays stable when other programs use the same
cores, and report wall time next to it. What the looking thread itself takes is measured over steps in a row, at the
rate of the first thousand looks, which later ones do not reach; it is added.
"""

from __future__ import annotations

import argparse
import builtins
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import PIL.ImageFile
import torch
import torch.utils.data._utils.fetch
import torchvision
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import dataloader
from torchvision import transforms

from bench.rounds import Spread, keep
from stoker.doctor.attach.inside import sampling
from stoker.doctor.attach.inside.sampling import sampler
from stoker.doctor.attach.inside.session import start

LARGEST_RATIO = 1.02
"""For 20 ms steps."""
PICTURE_SIDE = 256


class Case(NamedTuple):
    """A script: its batch size and the length of its step."""

    batch_size: int
    step_ms: float


# Computing fills whatever part of the step loading the images leaves.
CASES = {"20 ms steps": Case(4, 20.0), "2 ms steps": Case(1, 2.0)}


class Patches:
    """Switches every function that the timers replaced between the original and the timed version."""

    def __init__(self, hooks: dict[int, Any], hooks_before: set[int]) -> None:
        fetch = torch.utils.data._utils.fetch
        # Creating an iterator stays timed: it happens once per epoch, and an iterator without a name is not watched.
        owners: list[tuple[Any, str]] = [
            (fetch._MapDatasetFetcher, "fetch"), (dataloader._BaseDataLoaderIter, "__next__"),
            (PIL.Image, "open"), (PIL.ImageFile.ImageFile, "load"), (transforms.Compose, "__call__"),
        ]  # fmt: skip
        self._swaps = [(owner, name, getattr(owner, name), getattr(owner, name).__wrapped__) for owner, name in owners]
        self._hooks, self._ours = hooks, {k: hook for k, hook in hooks.items() if k not in hooks_before}
        assert self._ours
        self._plain_open = io.open
        self._clocked_open: Any = None

    def on(self) -> None:
        for owner, name, clocked, _ in self._swaps:
            setattr(owner, name, clocked)
        self._hooks.update(self._ours)
        if self._clocked_open is not None:
            builtins.open = io.open = self._clocked_open
        sampler.start()

    def off(self) -> None:
        sampler.stop()
        for owner, name, _, plain in self._swaps:
            setattr(owner, name, plain)
        for key in self._ours:
            self._hooks.pop(key, None)
        if io.open is not self._plain_open:
            self._clocked_open = io.open
        builtins.open = io.open = self._plain_open


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


def measure(case: Case, folder: Path, patches: Patches, rounds: int, pairs: int) -> dict[str, Any]:
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

    patches.off()
    alone = statistics.median(step(0.0)[1] for _ in range(30))
    compute_s = max(0.0, case.step_ms / 1000 - alone)
    turns: list[tuple[str, Callable[[], None]]] = [("with", patches.on), ("without", patches.off)]
    cpu_ratios, wall_ratios, looking, plain_ms = [], [], [], []
    for number in range(rounds):
        cpu: dict[str, list[float]] = {"with": [], "without": []}
        wall: dict[str, list[float]] = {"with": [], "without": []}
        for pair in range(pairs):
            # The order alternates from pair to pair.
            for name, switch in turns if pair % 2 == 0 else turns[::-1]:
                switch()
                step_wall, step_cpu, _ = step(compute_s)
                wall[name].append(step_wall)
                cpu[name].append(step_cpu)
        # The median over single steps: an interrupted step says nothing about the timers.
        cpu_ratios.append(statistics.median(cpu["with"]) / statistics.median(cpu["without"]))
        wall_ratios.append(statistics.median(wall["with"]) / statistics.median(wall["without"]))
        patches.on()
        together = [step(compute_s) for _ in range(pairs)]
        looking.append(sum(beside for _, _, beside in together) / sum(own for _, own, _ in together))
        plain_ms.append(statistics.median(cpu["without"]) * 1000)
        sys.stderr.write(f"round {number + 1}/{rounds}  cpu {cpu_ratios[-1]:.4f}  wall {wall_ratios[-1]:.4f}  ")
        sys.stderr.write(f"looking {looking[-1]:.4f}\n")
    return {
        "images_a_batch": case.batch_size,
        "step_ms_without": Spread(tuple(plain_ms)).as_dict(),
        "making_the_batch_ms": round(alone * 1000, 3),
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
        hooks: Any = _global_optimizer_post_hooks
        before = set(hooks)
        start(str(records))
        patches = Patches(hooks, before)
        measured = {
            name: measure(case, pictures, patches, options.rounds, options.pairs) for name, case in CASES.items()
        }
        left = sorted(path.name.split("-")[0] for path in records.iterdir())
        assert "steps" in left and "fetch" in left, f"the timers did not run: {left}"  # noqa: PT018
    keep("attach_overhead", measured)
    figures = measured["20 ms steps"]
    ratio = figures["cpu_time_with_over_without"]["median"] + figures["looking_thread_over_step"]["median"]
    sys.stdout.write(f"20 ms steps: {(ratio - 1) * 100:.2f} % slower (limit {(LARGEST_RATIO - 1) * 100:.0f} %)\n")
    return 0 if ratio <= LARGEST_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
