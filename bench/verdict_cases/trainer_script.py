"""A loop as trainers have it: callbacks, and a loader that looks one batch ahead, as accelerate's does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from bench.verdict_cases.work import Faults, make_loader, read_faults


class ShardLoader(DataLoader[Any]):
    """Knows when a batch is the last one, because it has asked for the next already."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        try:
            current = next(batches)
        except StopIteration:
            return
        while True:
            following = next(batches, None)
            yield {name: value.clone() for name, value in current.items()}
            if following is None:
                return
            current = following


class Callbacks:
    """What trainers call around everything."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))


class Trainer:
    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda _step: 1.0)
        self.callbacks = Callbacks()

    def train(self) -> None:
        loader = make_loader(self.faults, ShardLoader)
        end = time.monotonic() + self.faults.seconds
        while time.monotonic() < end:
            for inputs in loader:
                self.training_step(inputs)
                if time.monotonic() > end:
                    return

    def training_step(self, inputs: dict[str, torch.Tensor]) -> None:
        self.model.train()
        loss = torch.nn.functional.cross_entropy(self.model(inputs["x0"][:, :16]), inputs["label"])
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.callbacks.on_step_end(loss.detach())
        time.sleep(self.faults.step_ms / 1e3)


if __name__ == "__main__":
    Trainer(read_faults()).train()
