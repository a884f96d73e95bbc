"""A training script with the faults of a published project whose A100 took 18 s a step; nothing in it knows stoker.

It is a normal PyTorch script, to be diagnosed with `stoker doctor -- python bench/document_replica.py DATA`. By default
it does what that project did, written anew: each sample reads a whole TIFF volume, converts it to float32, clips it,
runs a 3x3x3 median filter over all of it, and crops one patch; a small private cache, asked in random order, hardly
ever has the volume; a random zoom changes the shape of every patch; a GradScaler scales a loss that no autocast has
computed. Each fault can be switched off by its option. DATA is a folder in the layout of the Vesuvius surface
competition: train.csv, train_images, train_labels.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
import torch
from numpy.typing import NDArray
from scipy.ndimage import median_filter
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

Array = NDArray[Any]
CLIP = (5.0, 250.0)
ZOOM = (0.8, 1.3)
UNLABELLED = 2


class VolumeCache:
    """The volumes that were used last."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.volumes: OrderedDict[str, tuple[Array, Array]] = OrderedDict()

    def get(self, name: str) -> tuple[Array, Array] | None:
        if name not in self.volumes:
            return None
        self.volumes.move_to_end(name)
        return self.volumes[name]

    def put(self, name: str, volume: tuple[Array, Array]) -> None:
        self.volumes[name] = volume
        while len(self.volumes) > self.size:
            self.volumes.popitem(last=False)


class Patches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Random patches of random volumes."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.root = Path(options.data)
        with (self.root / "train.csv").open(newline="") as file:
            self.names = [row["id"] for row in csv.DictReader(file)][: options.volumes]
        self.patch = tuple(options.patch)
        self.length: int = options.steps * options.batch
        self.filter, self.read, self.zoom = options.filter, options.read, options.zoom
        self.cache = VolumeCache(options.cache)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, label = self.crop(*self.volume(random.choice(self.names)))
        if self.filter == "patch":
            image = median_filter(image, size=3)
        image = (image - image.mean()) / (image.std() + 1e-6)
        return self.augment(torch.from_numpy(image)[None], torch.from_numpy(label)[None])

    def volume(self, name: str) -> tuple[Array, Array]:
        """The preprocessed volume and its labels."""
        found = self.cache.get(name)
        if found is None:
            found = self.load(name)
            self.cache.put(name, found)
        return found

    def load(self, name: str) -> tuple[Array, Array]:
        files = self.root / "train_images" / f"{name}.tif", self.root / "train_labels" / f"{name}.tif"
        if self.read == "patch":
            return tifffile.memmap(files[0], mode="r"), tifffile.memmap(files[1], mode="r")
        image, label = (tifffile.imread(file).astype(np.float32) for file in files)
        image = np.clip(image, *CLIP)
        if self.filter == "volume":
            image = median_filter(image, size=3)  # the whole volume, for one patch of it
        label[label == UNLABELLED] = 0
        return image, label

    def crop(self, image: Array, label: Array) -> tuple[Array, Array]:
        corner = [random.randint(0, have - want) for have, want in zip(image.shape, self.patch, strict=True)]
        box = tuple(slice(start, start + want) for start, want in zip(corner, self.patch, strict=True))
        return np.asarray(image[box], np.float32), np.asarray(label[box] == 1, np.float32)

    def augment(self, image: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.zoom:
            return image, label
        factor = random.uniform(*ZOOM)
        image = functional.interpolate(image[None], scale_factor=factor, mode="trilinear", align_corners=False)[0]
        label = functional.interpolate(label[None], scale_factor=factor, mode="nearest")[0]
        return image, label


def build_network(width: int) -> torch.nn.Module:
    """A small stack of convolutions: what it learns does not matter here."""
    layers: list[torch.nn.Module] = []
    for before in (1, width, width):
        layers += [torch.nn.Conv3d(before, width, 3, padding=1), torch.nn.InstanceNorm3d(width), torch.nn.Mish()]
    return torch.nn.Sequential(*layers, torch.nn.Conv3d(width, 1, 1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", help="a folder in the layout of the competition")
    parser.add_argument("--volumes", type=int, default=None, help="use only the first so many")
    parser.add_argument("--patch", type=int, nargs=3, default=(72, 136, 136))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--width", type=int, default=8, help="channels of the network")
    parser.add_argument("--read", choices=["volume", "patch"], default="volume")
    parser.add_argument("--filter", choices=["volume", "patch", "none"], default="volume")
    parser.add_argument("--cache", type=int, default=2, help="volumes that each worker keeps")
    parser.add_argument("--zoom", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=False)
    return parser.parse_args()


def main() -> int:
    options = parse()
    torch.manual_seed(options.seed)  # and with it the workers' `random`
    device = torch.device(options.device)
    model = build_network(options.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Where there is no GPU, torch has a scaler of the same kind for the CPU.
    scaler = torch.amp.GradScaler(device.type)
    loader = DataLoader(
        Patches(options), batch_size=options.batch, num_workers=options.workers,
        prefetch_factor=1 if options.workers else None,
    )  # fmt: skip
    for image, label in loader:
        image, label = image.to(device), label.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=options.autocast):
            logits = model(image)
        loss = functional.binary_cross_entropy_with_logits(logits.float(), label)
        optimizer.zero_grad()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
    return 0


if __name__ == "__main__":
    sys.exit(main())
