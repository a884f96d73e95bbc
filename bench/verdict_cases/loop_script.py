"""A training loop with mistakes beside its data pipeline, chosen by its argument; it does not know about stoker."""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

EVERYWHERE: list[np.ndarray[Any, Any]] = []


@dataclass(frozen=True)
class Mistakes:
    """What to do wrong."""

    seconds: float = 6.0
    workers: int = 2
    batch: int = 8
    samples: int = 400_000
    """Samples of an epoch."""
    step_ms: float = 10.0
    sample_ms: float = 0.2
    keep_kb: int = 0
    """What every sample leaves behind, in what `keep_in` names: a list, a list of 32 entries that are replaced, a dict
    by index, a list of the module, or losses and sums of them in the loop."""
    keep_in: str = "list"
    threads: int = 1
    """Threads of torch in the loop."""
    layers: int = 0
    """Small linear layers that a step computes besides."""
    rivals: int = 0
    """Processes that compute without end on the same cores."""
    blur: int = 0
    """Side of an image that OpenCV blurs for every sample."""
    blur_threads: int = 0
    read: str = ""
    """How the loss is read: item, float, tolist."""
    read_every: int = 1
    eval_by: str = ""
    """How the model gets into eval mode: eval, train(False), its first layer only."""
    anew: bool = False
    """A new loader for every epoch."""
    persistent: bool = True
    start_ms: float = 0.0
    validate: int = 0
    """Batches of validation after every epoch."""
    validate_sleep_ms: float = 0.0
    """For each of its samples."""
    benchmark: bool = False
    sides: tuple[int, ...] = (8,)
    """Sides of the images, in turn."""


class Samples(Dataset[Any]):
    """Small images; some of what they are made of may stay."""

    def __init__(self, mistakes: Mistakes, count: int, sleep_ms: float = 0.0) -> None:
        self.mistakes, self.count, self.sleep_ms = mistakes, count, sleep_ms
        self.kept: list[Any] = []
        self.cache: dict[int, Any] = {}
        self.picture = np.zeros((mistakes.blur, mistakes.blur), np.float32)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        mistakes = self.mistakes
        time.sleep((self.sleep_ms or mistakes.sample_ms) / 1e3)
        if mistakes.keep_kb and mistakes.keep_in in ("list", "few", "dict", "module"):
            self.keep(number, np.ones(mistakes.keep_kb * 256, np.float32))
        if mistakes.blur:
            import cv2

            cv2.setNumThreads(mistakes.blur_threads)
            cv2.bilateralFilter(self.picture, 15, 50, 50)
        side = mistakes.sides[number // mistakes.batch % len(mistakes.sides)]
        return torch.ones(1, side, side), number % 2

    def keep(self, number: int, what: np.ndarray[Any, Any]) -> None:
        place = self.mistakes.keep_in
        if place == "dict":
            self.cache[number] = what
        elif place == "module":
            EVERYWHERE.append(what)
        else:
            self.kept.append(what)
            if place == "few":
                del self.kept[:-32]


class Network(torch.nn.Module):
    """A network with batch norm and dropout."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.first = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
        self.last = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(4, 2))
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.more = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(layers))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        beside = torch.ones(64, 256)
        for layer in self.more:
            beside = layer(beside).relu()
        scores: torch.Tensor = self.last(self.first(images).mean((2, 3)))
        return scores + 1e-6 * beside.mean() if len(self.more) else scores

    def penalty(self, values: int) -> torch.Tensor:
        """A number whose graph keeps as many values."""
        return (self.scale * torch.rand(values)).sum()


def start(milliseconds: float, _worker: int) -> None:
    time.sleep(milliseconds / 1e3)


def compute_without_end() -> None:
    while True:
        pass


def make_loader(mistakes: Mistakes) -> DataLoader[Any]:
    workers = mistakes.workers
    return DataLoader(
        Samples(mistakes, mistakes.samples), mistakes.batch, shuffle=mistakes.keep_in == "dict", num_workers=workers,
        worker_init_fn=functools.partial(start, mistakes.start_ms),
        persistent_workers=mistakes.persistent and not mistakes.anew and workers > 0,
    )  # fmt: skip


def read(loss: torch.Tensor, how: str) -> float:
    if how == "item":
        return loss.item()
    shown: Any = loss.tolist() if how == "tolist" else float(loss)
    return float(shown)


def main() -> None:
    given = json.loads(sys.argv[1])
    mistakes = Mistakes(**given | {"sides": tuple(given.get("sides", (8,)))})
    rivals = [multiprocessing.Process(target=compute_without_end, daemon=True) for _ in range(mistakes.rivals)]
    for rival in rivals:
        rival.start()
    torch.set_num_threads(mistakes.threads)
    torch.backends.cudnn.benchmark = mistakes.benchmark
    model = Network(mistakes.layers)
    if mistakes.eval_by == "eval":
        model.eval()
    elif mistakes.eval_by == "train(False)":
        model.train(False)
    elif mistakes.eval_by == "first layer":
        model.first.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = make_loader(mistakes)
    validation = DataLoader(Samples(mistakes, mistakes.validate * 8, mistakes.validate_sleep_ms), 8)
    losses: list[Any] = []
    total: Any = torch.zeros(())
    shown, steps, end = 0.0, 0, time.monotonic() + mistakes.seconds
    while time.monotonic() < end:
        if mistakes.anew:
            loader = make_loader(mistakes)
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            time.sleep(mistakes.step_ms / 1e3)  # an accelerator at work
            if mistakes.keep_kb and mistakes.keep_in in ("losses", "total", "detached"):
                beside = model.penalty(mistakes.keep_kb * 256)  # for a plot; nobody calls backward
                if mistakes.keep_in == "total":
                    total = total + beside
                else:
                    losses.append(beside if mistakes.keep_in == "losses" else beside.detach())
            if mistakes.read and steps % mistakes.read_every == 0:
                shown += read(loss, mistakes.read)
            steps += 1
            if time.monotonic() > end:
                break
        with torch.no_grad():
            for images, _ in validation:
                model(images)
    print(f"{steps} steps, {shown:.2f}, {len(losses)}")


if __name__ == "__main__":
    main()
