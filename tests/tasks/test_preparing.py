"""A run's batches on their way to the model: layout, precision, and which draw mixes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.config import Config, load_config
from stoker.profile.host import HostConfig
from stoker.tasks.building import RunContext, input_dtype
from stoker.tasks.images.classify import build_run, traceable_step
from stoker.tasks.images.data import open_data
from stoker.tasks.images.image_loader import ImageBatch
from stoker.tasks.images.image_prediction import classifier_of
from stoker.tasks.images.models import TrainedImageModel
from stoker.train.loop import Run
from stoker.train.ranks import Ranks
from stoker.train.step import Prepared
from tests.support.tiny_training import KEYS, write_images

CPU = torch.device("cpu")
ACCUMULATION = 2


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images"))


def config_of(images: Path, **keys: Any) -> HostConfig:
    values = KEYS | {"data_root": str(images), "gradient_accumulation": ACCUMULATION} | keys
    config = load_config(None, [f"{key}={value}" for key, value in values.items()]).config
    return HostConfig.model_construct(config.model_fields_set, **dict(config) | {"devices": 1, "pin_memory": False})


def run_of(config: HostConfig, rank: int = 0) -> Run:
    return build_run(config, open_data(config, lambda _text: None), RunContext(Ranks(rank=rank), CPU))


def batches_of(run: Run) -> list[ImageBatch]:
    return list(run.input.train_loader(0).epoch(0))


def same(first: Prepared, second: Prepared) -> bool:
    return torch.equal(first.inputs, second.inputs) and torch.equal(first.targets, second.targets)


@pytest.mark.parametrize("channels_last", [True, False])
def test_every_input_has_the_layout_of_the_config(images: Path, channels_last: bool) -> None:
    config = config_of(images, channels_last=channels_last, auto_augment="randaugment", mixup_alpha=0.2)
    wanted = torch.channels_last if channels_last else torch.contiguous_format
    run = run_of(config)
    assert run.input.val_loader is not None
    try:
        train, val = batches_of(run)[0], next(iter(run.input.val_loader.epoch(0)))
        trained = TrainedImageModel(
            Path("none"), run.model, config, run.record.classes, averaged=False, epoch=0, step=0
        )
        inputs = {
            "training": run.input.prepare(train, 0, 0, 0).inputs,
            "validation": run.input.prepare_val(val).inputs,
            "eval and predict": classifier_of(trained, CPU).prepare(val.images),
        }
    finally:
        run.input.close()
    for name, tensor in inputs.items():
        assert tensor.is_contiguous(memory_format=wanted), name
        assert tensor.dtype == torch.float32, name


def test_each_batch_of_an_update_is_mixed_by_a_draw_of_its_own_on_each_rank(images: Path) -> None:
    config = config_of(images, mixup_alpha=1.0)
    prepared = []
    for rank in (0, 1):
        # Alone in its world, so that both see the same samples and only the draw differs.
        run = run_of(config, rank)
        try:
            batch = batches_of(run)[0]
            prepared += [run.input.prepare(batch, 0, 0, number) for number in range(ACCUMULATION)]
            assert same(run.input.prepare(batch, 0, 0, 0), prepared[-ACCUMULATION])
        finally:
            run.input.close()
    different = [(first, second) for first in range(4) for second in range(first)]
    assert not any(same(prepared[first], prepared[second]) for first, second in different)


@pytest.mark.parametrize(
    ("precision", "on_a_gpu"), [("32", torch.float32), ("16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)]
)
def test_inputs_are_made_in_what_a_gpu_computes_in_and_in_float32_on_a_cpu(
    precision: str, on_a_gpu: torch.dtype
) -> None:
    config = Config(precision=precision)  # type: ignore[arg-type]
    assert input_dtype(config, torch.device("cuda:0")) == on_a_gpu
    assert input_dtype(config, CPU) == torch.float32
    planned = traceable_step(Config(precision=precision, img_size=32), 10).make_batch(2)  # type: ignore[arg-type]
    assert planned.inputs.dtype == on_a_gpu
    assert planned.targets.dtype == torch.float32
