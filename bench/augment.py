"""The time from the loader's bytes to the model's input, compared with timm's RandAugment on Pillow images.

Per batch of 64 images of 224 px on the CPU, all in one process with the same number of threads; on a GPU the same code
does not compete with the loader for cores. The lower bound is one pass over the bytes (clone).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image
from tests.tasks.augment.images import apply_policy
from timm.data.auto_augment import rand_augment_transform

from bench.rounds import interleave, keep, ratio
from stoker.loader.rng import Keys, sample_keys
from stoker.tasks.images.augment.pipeline import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Mixer,
    TrainAugment,
    draw_erasures,
    erase,
    fill_targets,
    flip,
    mix_images,
    target_rows,
    to_float,
)
from stoker.tasks.images.augment.policies import RandAugment, TrivialAugmentWide

FILL = (124, 116, 104)
WHOLE, PILLOW, COPY = "all of it", "timm RandAugment (Pillow)", "one copy of the bytes"


def some_images(count: int, size: int) -> torch.Tensor:
    """Smooth waves with noise."""
    random = np.random.default_rng(0)
    y, x = np.mgrid[:size, :size]
    phase = random.uniform(0, 6, (count, 1, 1, 3))
    waves = 128 + 90 * np.sin(x[None, ..., None] / 19 + phase) * np.cos(y[None, ..., None] / 17 + phase)
    return torch.from_numpy(np.clip(waves + random.normal(0, 12, waves.shape), 0, 255).astype(np.uint8))


class Parts:
    """The contenders; each processes one batch, with new keys, and returns milliseconds."""

    def __init__(self, batch: int, size: int) -> None:
        self.batch, self.size, self.step = batch, size, 0
        self.images = some_images(batch, size)
        self.pillow = [Image.fromarray(image) for image in self.images.numpy()]
        self.labels = np.arange(batch) % 1000
        self.flips = np.random.default_rng(1).random(batch) < 0.5
        self.flipped = torch.from_numpy(np.flatnonzero(self.flips))
        self.inputs = to_float(self.images, IMAGENET_MEAN, IMAGENET_STD)
        self.mixup, self.cutmix = Mixer(mixup_alpha=0.2), Mixer(cutmix_alpha=1.0)
        self.rand, self.trivial = RandAugment(fill=FILL), TrivialAugmentWide()
        self.whole = TrainAugment(Mixer(mixup_alpha=0.2, cutmix_alpha=1.0), self.rand, erasing=0.1)
        bilinear = Image.Resampling.BILINEAR
        self.timm = rand_augment_transform("rand-m7-mstd0.5-inc1", {"img_mean": FILL, "interpolation": bilinear})

    def keys(self) -> Keys:
        self.step += 1
        return sample_keys(0, self.step, np.arange(self.batch), np.zeros(self.batch, np.int64))

    def erase(self) -> None:
        erasures = draw_erasures(self.keys(), 0.1, self.size, self.size)
        if len(erasures.samples):
            erase(self.inputs, *map(torch.from_numpy, (erasures.samples, *erasures.masks(self.size, self.size))))

    def mix(self, mixer: Mixer) -> None:
        self.step += 1
        recipe = mixer.draw(0, self.step, 0, self.size, self.size)
        assert recipe is not None
        mix_images(self.inputs, recipe, torch.float32)
        rows = target_rows(self.labels, mixer.num_classes, 0.0, recipe)
        columns, values = torch.from_numpy(rows.columns), torch.from_numpy(rows.values)
        fill_targets(rows.elsewhere, columns, values, mixer.num_classes)

    def contenders(self) -> dict[str, Callable[[], float]]:
        parts: dict[str, Callable[[], object]] = {
            COPY: self.images.clone,
            PILLOW: lambda: [self.timm(image) for image in self.pillow],
            WHOLE: lambda: self.whole(self.images, self.labels, self.flips, self.keys(), 0, self.step),
            "flip": lambda: flip(self.images.clone(), self.flipped),
            "RandAugment": lambda: apply_policy(self.rand, self.images, self.keys()),
            "RandAugment, choices only": lambda: self.rand.plan(self.keys(), self.size, self.size),
            "TrivialAugment": lambda: apply_policy(self.trivial, self.images, self.keys()),
            "float": lambda: to_float(self.images, IMAGENET_MEAN, IMAGENET_STD),
            "erasing (0.1)": self.erase,
            "mixup": lambda: self.mix(self.mixup),
            "CutMix": lambda: self.mix(self.cutmix),
        }
        return {name: lambda run=run: milliseconds(run) for name, run in parts.items()}  # type: ignore[misc]


def milliseconds(run: Callable[[], object], batches: int = 3) -> float:
    """The mean over a few batches, because the operations drawn for a batch change its cost."""
    start = time.perf_counter()
    for _ in range(batches):
        run()
    return (time.perf_counter() - start) / batches * 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--threads", type=int, default=1, help="torch threads; Pillow uses one")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    contenders = Parts(arguments.batch, arguments.size).contenders()
    for run in contenders.values():
        run()  # warms up allocators and caches
    times = interleave(contenders, arguments.rounds)
    policy = ratio(times["RandAugment"], times[PILLOW])
    path = keep(
        "augment",
        {
            "batch": arguments.batch,
            "size": arguments.size,
            "threads": arguments.threads,
            "milliseconds": {name: spread.as_dict() for name, spread in times.items()},
            "RandAugment beside timm's": policy.as_dict(),
            "all of it in copies of the bytes": ratio(times[WHOLE], times[COPY]).as_dict(),
        },
    )
    for name, spread in times.items():
        print(f"{name:<28} {spread.median:8.1f} ms  ({min(spread.values):.1f}-{max(spread.values):.1f})")
    print(f"RandAugment relative to timm's: {policy.median:.2f}x  ({min(policy.values):.2f}-{max(policy.values):.2f})")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
