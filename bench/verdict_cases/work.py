"""The injected faults: a dataset, a collate function and a worker start-up that are slow in configurable ways."""

from __future__ import annotations

import io
import json
import multiprocessing
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import Compose


@dataclass(frozen=True)
class Faults:
    """What to inject; milliseconds are per sample unless stated otherwise."""

    workers: int = 2
    prefetch: int = 2
    batch: int = 8
    step_ms: float = 5.0
    step_cpu_ms: float = 0.0
    """CPU time of each step on all cores, if nothing else needed them: a model that computes on the CPU."""
    seconds: float = 4.0
    epoch_batches: int = 100_000
    sleep_ms: float = 0.0
    spin_ms: float = 0.0
    """In __getitem__, which belongs to no known stage."""
    transform_ms: float = 0.0
    """In a Compose: the augment stage."""
    jpeg: str | None = None
    """A file to read and decode for each sample."""
    url: str | None = None
    """An object to fetch for each sample."""
    lock_spin_ms: float = 0.0
    lock_sleep_ms: float = 0.0
    """Time spent holding a lock that all workers share."""
    slow_every: int = 0
    slow_ms: float = 0.0
    slow_spins: bool = False
    collate_ms: float = 0.0
    """Per batch."""
    start_ms: float = 0.0
    """Per worker start."""
    persistent: bool = False
    threads: int = 1
    matrix: int = 0
    """Side of a matrix that each sample squares, using torch's threads."""
    tensor_bytes: int = 3072
    tensors: int = 1
    """Tensors per sample."""


def read_faults() -> Faults:
    """The faults in the first command-line argument."""
    return Faults(**json.loads(sys.argv[1]))


def spin(milliseconds: float) -> None:
    """Uses that much CPU time."""
    end = time.thread_time() + milliseconds / 1e3
    while time.thread_time() < end:
        pass


class Samples(Dataset[Any]):
    """Samples that are slow to load."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.lock = multiprocessing.get_context("fork").Lock()
        self.transform = Compose([self.augment])

    def __len__(self) -> int:
        return self.faults.epoch_batches * self.faults.batch

    def augment(self, sample: torch.Tensor) -> torch.Tensor:
        spin(self.faults.transform_ms)
        return sample

    def __getitem__(self, number: int) -> Any:
        faults = self.faults
        if faults.url is not None:
            with urllib.request.urlopen(faults.url) as answer:
                answer.read()
        if faults.jpeg is not None:
            with Image.open(io.BytesIO(Path(faults.jpeg).read_bytes())) as image:
                image.load()
        if faults.sleep_ms:
            time.sleep(faults.sleep_ms / 1e3)
        spin(faults.spin_ms)
        if faults.lock_spin_ms or faults.lock_sleep_ms:
            with self.lock:
                spin(faults.lock_spin_ms)
                time.sleep(faults.lock_sleep_ms / 1e3)
        if faults.slow_every and number % faults.slow_every == faults.slow_every - 1:
            spin(faults.slow_ms) if faults.slow_spins else time.sleep(faults.slow_ms / 1e3)
        if faults.matrix:
            side = torch.ones(faults.matrix, faults.matrix)
            side @ side
        sample = torch.zeros(faults.tensor_bytes // 4)
        if faults.transform_ms:
            sample = self.transform(sample)
        return {f"x{part}": sample.clone() for part in range(faults.tensors)} | {"label": number % 2}


class Collate:
    """torch's default collate, plus the requested CPU time."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def __call__(self, samples: list[Any]) -> Any:
        spin(self.faults.collate_ms)
        return default_collate(samples)


class Start:
    """Worker initialisation that takes the requested time."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def __call__(self, _worker: int) -> None:
        time.sleep(self.faults.start_ms / 1e3)
        torch.set_num_threads(self.faults.threads)


def make_loader(faults: Faults, kind: type[DataLoader[Any]] = DataLoader) -> DataLoader[Any]:
    """A DataLoader over the slow samples."""
    torch.set_num_threads(1)
    some = faults.workers > 0
    return kind(
        Samples(faults), batch_size=faults.batch, num_workers=faults.workers, collate_fn=Collate(faults),
        prefetch_factor=faults.prefetch if some else None, worker_init_fn=Start(faults),
        persistent_workers=faults.persistent and some, multiprocessing_context="fork" if some else None,
    )  # fmt: skip
