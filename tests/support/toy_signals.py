"""A third task, as another package would add it: 1-D signals from `.npy`, in `data_root/SPLIT/CLASS.npy`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import cross_entropy

from stoker.config import config_values
from stoker.core.errors import UserError
from stoker.loader.batch import Allocate, BatchSource, LoadedBatch, Quarantine
from stoker.loader.loader import BatchLoader
from stoker.loader.rng import sample_keys
from stoker.loader.sampler import EpochSampler, Steps
from stoker.profile.batch_costs import BatchClock
from stoker.profile.observed import StorageFacts
from stoker.tasks import building
from stoker.tasks.base import Task
from stoker.tasks.checks import StepInput
from stoker.train.checkpoint.changes import Listings, listing_of
from stoker.train.loop import Run, RunRecord
from stoker.train.ranks import Ranks
from stoker.train.step import Prepared, TraceableStep, plain_batch

LENGTH = 64


@dataclass(kw_only=True)
class SignalBatch(LoadedBatch):
    labels: NDArray[np.int64]
    indices: NDArray[np.int64]


@dataclass(frozen=True)
class SignalData:
    signals: NDArray[np.float32]
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    steps: Steps
    seed: int
    val: SignalData | None = None

    @property
    def samples(self) -> int:
        return len(self.labels)

    @property
    def batch_shape(self) -> tuple[int, int]:
        return self.steps.batch_size, 4 * LENGTH

    def storage(self) -> StorageFacts:
        return StorageFacts(bytes_per_sample=4.0 * LENGTH, dataset_bytes=self.signals.nbytes)

    def names(self, samples: Sequence[int]) -> list[str]:
        return [f"{self.classes[self.labels[number]]} {number}" for number in samples]


class InMemory(BatchSource):
    mean_bytes, requests, ready_bytes = 4.0 * LENGTH, 1, 0


class SignalMaker:
    def __init__(self, plan: SignalData) -> None:
        self.plan, self.reader = plan, InMemory()

    def announce(self, epoch: int, step: int, start: int) -> None: ...

    def make(self, epoch: int, step: int, start: int, allocate: Allocate) -> Any:
        plan, steps, clock = self.plan, self.plan.steps, BatchClock()
        members, repeats = EpochSampler(plan.samples, plan.seed).at(epoch, steps.positions(step, start))
        rows = allocate((len(members), 4 * LENGTH))
        clock.begins("decode")
        rows.view(np.float32)[:] = plan.signals[members]
        clock.cost.samples, clock.cost.batch_bytes = len(members), rows.nbytes
        return SignalBatch(
            images=rows, labels=plan.labels[members], indices=members, epoch=epoch, step=step, cost=clock.finish(),
            keys=sample_keys(plan.seed, epoch, members, repeats), next_position=steps.next_position(step, start),
        )  # fmt: skip


def build_network(classes: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = (nn.Conv1d(1, 8, 9, stride=2), nn.BatchNorm1d(8), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
        return nn.Sequential(*layers, nn.Dropout(0.1), nn.Linear(8, classes))


def prepare(copy: Any, batch: SignalBatch, *_place: int) -> Prepared:
    labels = copy(torch.from_numpy(batch.labels))
    return Prepared(copy(batch.images).view(torch.float32)[:, None], labels, labels, mixed=False)


def open_loader(config: Any, ranks: Ranks, plan: SignalData, held: int = 1) -> BatchLoader[Any]:
    plan = replace(plan, steps=Steps(plan.samples, config.batch_size, ranks.world, ranks.rank))
    options = building.loader_options(config, config.num_workers, held)
    return BatchLoader(plan, partial(SignalMaker, plan), Quarantine(None, 0.0, plan.samples), options)


class Signals(Task):
    unit, items, metric, classifies = "signals", "signals", "acc1", True

    def open_data(self, config: Any, say: Any, progress: Any = None, split: str = "train") -> SignalData:
        if not (files := sorted(Path(config.data_root, split).glob("*.npy"))):
            raise UserError("no-signals", f"{config.data_root}/{split} has no .npy files")
        parts = [np.load(file) for file in files]
        labels = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        val = self.open_data(config, say, split="val") if split == "train" else None
        classes, steps = tuple(file.stem for file in files), Steps(len(labels), config.batch_size)
        return SignalData(np.concatenate(parts), labels, classes, steps, config.seed, val)

    def listings(self, data: SignalData) -> Listings:
        return {"train": listing_of(data.names(range(data.samples)), data.labels.tolist()), "val": None}

    def build_run(self, config: Any, data: SignalData, context: building.RunContext) -> Run:
        building.ready_device(config, context.device)
        model = build_network(len(data.classes), config.seed).to(context.device)
        load, plans = partial(open_loader, config, context.ranks), (lambda _epoch: data, data.val)
        return building.assemble_run(
            config, context, model=model, scoring=building.ClassScoring(context.device), val_loss=cross_entropy,
            step=building.train_step(config, model, cross_entropy, context),
            pipeline=building.input_pipeline(config, context, load, plans, prepare, prepare, data.names),
            record=RunRecord(config_values(config), data.classes),
        )  # fmt: skip

    def open_training_loader(self, config: Any, data: SignalData) -> BatchLoader[Any]:
        return open_loader(config, Ranks(), data)

    def traceable_step(self, config: Any, facts: Any = None) -> TraceableStep:
        network = partial(build_network, config.num_classes or 2, config.seed)
        return building.traceable_step(config, network, cross_entropy, plain_batch((1, LENGTH)))

    def step_input(self, config: Any) -> StepInput:
        return StepInput(f"{LENGTH} numbers", "another batch_size=", LENGTH, activations=100)
