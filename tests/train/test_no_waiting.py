"""The loop never waits for the device: proven without one, on tensors that have no values to read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stoker.config import Config, load_config
from stoker.tasks.device_copies import kept_on
from stoker.tasks.images.augment import operations, pipeline
from stoker.tasks.images.augment.pipeline import TrainAugment, build_train_augment
from stoker.tasks.images.classify import prepare_batch
from stoker.tasks.images.image_loader import ImageBatch
from stoker.tasks.images.models import build_loss, build_model
from stoker.train.compute import Precision
from stoker.train.ema import WeightAverage
from stoker.train.evaluate import Accumulator
from stoker.train.optimizers import build_optimizer
from stoker.train.ranks import Ranks
from stoker.train.step import Pending, TrainStep
from stoker.train.transfers import Uploader
from tests.support.operators import counted

CLASSES, SIZE, SAMPLES = 7, 32, 8


def config_for(**keys: Any) -> Config:
    return load_config(None, ["model=test_resnet", *(f"{key}={value}" for key, value in keys.items())]).config


def batch_of_bytes(number: int = 0) -> ImageBatch:
    keys = np.arange(SAMPLES, dtype=np.uint64) * 977 + number
    return ImageBatch(
        images=torch.zeros(SAMPLES, SIZE, SIZE, 3, dtype=torch.uint8), labels=np.arange(SAMPLES) % CLASSES,
        indices=np.arange(SAMPLES), flips=keys % 2 == 0, keys=keys, epoch=0, step=number, next_position=0,
    )  # fmt: skip


class Parts:
    """Everything of a run that works on the device in a step."""

    def __init__(self, config: Config, device: str, queue: Any = None) -> None:
        with torch.device(device):
            model = build_model(config.model, CLASSES, img_size=SIZE, channels_last=False)
        self.model = model.train()
        self.ema = WeightAverage(model, 0.9)
        self.metrics = Accumulator(device)
        self.augment: TrainAugment = build_train_augment(config, CLASSES)
        self.uploader = Uploader(queue)
        self.step = TrainStep(
            model, build_optimizer(config, model, 0.1), build_loss(config),
            Precision(config.precision, torch.device(device)), Ranks(), micro_batch=SAMPLES // 2,
            clip_grad_norm=config.clip_grad_norm, seed=0, say=lambda _text: None,
        )  # fmt: skip

    def pending(self, number: int) -> Pending:
        batch = batch_of_bytes(number)
        make = lambda: prepare_batch(self.augment, 0, self.uploader.copy, batch, 0, number, 0)  # noqa: E731
        return Pending(SAMPLES, lambda: self.uploader.prepare(make))

    def train(self, number: int) -> Tensor:
        result = self.step([self.pending(2 * number), self.pending(2 * number + 1)], number)
        self.metrics.add_step(result)
        self.ema.update()
        return result.report


MIXING = {
    "plain": {},
    "mixed": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "auto_augment": "randaugment", "random_erasing": 0.5},
}


@pytest.mark.parametrize(
    ("optimizer", "precision", "clip", "mixing"),
    [
        ("sgd", "32", "null", "plain"), ("adamw", "bf16-mixed", "1.0", "mixed"), ("lamb", "16-mixed", "1.0", "plain"),
        ("sgd", "16-mixed", "null", "mixed"),
    ],
)  # fmt: skip
def test_a_whole_step_reads_nothing_from_the_device(optimizer: str, precision: str, clip: str, mixing: str) -> None:
    config = config_for(optimizer=optimizer, precision=precision, clip_grad_norm=clip, **MIXING[mixing])
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = Parts(config, "cpu")
        reports = [parts.train(number) for number in range(2)]
        with pytest.raises(Exception, match=r"(?i)data.dependent|_local_scalar_dense"):
            reports[0].tolist()  # what reading would have looked like


class FakeCuda:
    """The queues of a device that exists only as a name."""

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def copy(self, source: Tensor) -> Tensor:
        return source.to("cuda", non_blocking=True)

    def mark(self) -> Any:
        return _Passed()

    def join(self, ready: Any, tensors: Any) -> None:
        assert all(tensor.device.type == "cuda" for tensor in tensors)

    def fetch(self, source: Tensor) -> Any:
        raise AssertionError("not in a step")


class _Passed:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


@pytest.mark.parametrize(("optimizer", "mixing"), [("sgd", "plain"), ("adamw", "mixed"), ("lamb", "mixed")])
def test_only_batches_are_copied_to_the_device_and_none_of_the_copies_waits(
    optimizer: str, mixing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(optimizer=optimizer, clip_grad_norm=1.0, **MIXING[mixing])
    gradients: list[Tensor] = []

    def backward(tensor: Tensor, *_: Any) -> None:
        # Autograd's engine needs a real device for CUDA tensors; gradients come from nowhere instead.
        for parameter in parts.model.parameters():
            parameter.grad = torch.empty_like(parameter)
        gradients.append(tensor)

    monkeypatch.setattr(Tensor, "backward", backward)
    monkeypatch.setattr(TrainStep, "_seed_generators", lambda *_: None)
    # torch has no shape function for it; it is one kernel, which gets the flag as a tensor.
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *_, **__: None)
    kept: dict[Any, Any] = {}  # fake constants are not kept otherwise, because they end with their mode

    def keep(device: torch.device, key: Any, make: Any) -> Any:
        if key not in kept:
            kept[key] = kept_on(device, key, make)
        return kept[key]

    for module in (pipeline, operations):
        monkeypatch.setattr(module, "kept_on", keep)
    with FakeTensorMode(allow_non_fake_inputs=True):
        parts = Parts(config, "cuda", FakeCuda())
        for number in range(2):  # constants are made at the first step, and cached
            with counted() as operators:
                parts.train(number)
    assert len(gradients) == 8
    assert operators.blocking == []
    # One for the images and one for everything else about them, for each of two batches.
    assert operators.copies == 4
