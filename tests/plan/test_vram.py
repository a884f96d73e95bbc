"""The accelerator's memory budget: the parts add up, the search ends, and a bound replaces a missing trace."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stoker.config import load_config
from stoker.plan.records import VramBudget
from stoker.plan.vram import (
    CONTEXT,
    PARTS,
    CachingAllocator,
    OutOfMemory,
    replay,
    segment_size,
    trace_vram,
)
from stoker.tasks.images.classify import traceable_step
from stoker.tasks.images.models import build_model, cross_entropy
from stoker.train.step import TraceableStep, plain_batch
from tests.support.optimizers import build_optimizer

MB = 1 << 20


def resnet18_step() -> TraceableStep:
    step = TraceableStep(
        build_model=lambda: build_model("resnet18", 10, channels_last=True),
        build_optimizer=lambda model: build_optimizer(model, "sgd", 0.1),
        loss=cross_entropy,
        make_batch=plain_batch((3, 64, 64), memory_format=torch.channels_last),
        batch_size=32,
        precision="16-mixed",
    )
    checkpointed = dataclasses.replace(
        step, build_model=lambda: build_model("resnet18", 10, channels_last=True, gradient_checkpointing=True)
    )
    return dataclasses.replace(step, checkpointed=checkpointed)


def planned(step: TraceableStep, *arguments: Any, **more: Any) -> VramBudget:
    return trace_vram(step, *arguments, **more)[0]


def test_the_largest_batch_fits_and_one_more_does_not() -> None:
    step, limit = resnet18_step(), 900 * MB
    budget = planned(step, 32, limit)
    assert budget.fits
    assert budget.largest_batch > 32
    at_it = planned(step, budget.largest_batch, limit, search=False)
    above = planned(step, budget.largest_batch + 1, limit, search=False)
    assert at_it.fits
    assert above.fits is False
    assert budget.largest_batch_checkpointed > budget.largest_batch


def test_the_parts_add_up_to_the_peak_and_several_gpus_hold_the_gradients_twice() -> None:
    one, four = (planned(resnet18_step(), gpus=gpus) for gpus in (1, 4))
    assert set(one.parts) == set(PARTS)
    assert sum(one.parts.values()) == one.peak_bytes
    assert min(one.parts.values()) >= 0
    assert one.parts["context"] == CONTEXT
    assert (one.fits, one.largest_batch) == (None, None)
    parameters = 4 * sum(p.numel() for p in build_model("resnet18", 10).parameters())
    assert four.parts["gradients"] - one.parts["gradients"] >= parameters


def test_a_model_that_cannot_be_traced_gets_a_bound_and_a_note_with_the_operator() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = build_model("resnet18", 10)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.network(images) * (images[images > 9].numel() + 1)

    plain = dataclasses.replace(resnet18_step(), precision="32", checkpointed=None)
    budget, trace = trace_vram(dataclasses.replace(plain, build_model=Reads), 32, 2000 * MB)
    assert trace is None
    assert "aten.nonzero" in budget.note
    traced = planned(plain, 32)
    assert traced.peak_bytes < budget.peak_bytes < 2 * traced.peak_bytes
    assert budget.largest_batch is not None
    assert sum(budget.parts.values()) == budget.peak_bytes


def test_the_step_of_a_config_can_be_planned_without_leaving_fake_tensors() -> None:
    from stoker.tasks.images.augment.pipeline import IMAGENET_MEAN, IMAGENET_STD, to_float

    words = ["data_root=/nowhere", "mixup_alpha=0.2", "ema_decay=0.99"]
    config = load_config(Path(__file__).parents[2] / "configs/demo.yaml", words).config
    step = traceable_step(config, 10)
    budget = planned(step)
    assert budget.parts["ema"] > 0
    # Image bytes become floats; this step's and the previous one's are held, with their soft targets.
    floats = step.batch_size * 3 * config.img_size**2 * 4
    assert budget.parts["batch"] >= 2 * floats
    assert type(to_float(torch.zeros(1, 2, 2, 3, dtype=torch.uint8), IMAGENET_MEAN, IMAGENET_STD)) is torch.Tensor


# torch's CUDA allocator, compared with cases worked out by hand.


def test_sizes_are_rounded_to_512_bytes_and_small_ones_share_a_segment_of_2_mb() -> None:
    usage = replay([0, 1], [1, 513])
    assert usage.allocated_peak == 512 + 1024
    assert usage.reserved_peak == 2 * MB


def test_each_size_class_has_its_segment() -> None:
    assert [segment_size(size) for size in (MB, MB + 512, 10 * MB - 512, 10 * MB, 11 * MB + 512)] == [
        2 * MB, 20 * MB, 20 * MB, 10 * MB, 12 * MB,
    ]  # fmt: skip


def test_a_full_segment_is_followed_by_another_and_freed_memory_is_reused_and_not_returned_to_the_driver() -> None:
    assert replay([0, 1], [MB, MB]).reserved_peak == 2 * MB
    assert replay([0, 1, 2], [MB, MB, 512]).reserved_peak == 4 * MB
    assert replay([0, ~0, 1, ~1], [50 * MB, 50 * MB]).reserved_peak == 50 * MB


def test_the_best_fit_is_taken_and_split_only_if_more_than_a_megabyte_remains() -> None:
    allocator = CachingAllocator()
    for number, size in ((0, 30 * MB), (1, 40 * MB)):
        allocator.allocate(number, size)
    for number in (0, 1):
        allocator.release(number)
    allocator.allocate(2, 29 * MB)  # from the 30 MB block: 1 MB remains, which is not split off
    assert (allocator.allocated, allocator.reserved) == (30 * MB, 70 * MB)
    allocator.allocate(3, 30 * MB)  # from the 40 MB block
    assert (allocator.allocated, allocator.reserved) == (60 * MB, 70 * MB)
    allocator.allocate(4, 10 * MB)  # the part that was split off
    assert allocator.reserved == 70 * MB


def test_neighbours_merge_again_when_both_are_free() -> None:
    sizes = [60 * MB, 20 * MB, 20 * MB, 20 * MB, 60 * MB]
    apart = [0, ~0, 1, 2, 3, ~1, ~3, 4]
    assert replay(apart, sizes).reserved_peak == 120 * MB  # the one in the middle separates them
    assert replay([0, ~0, 1, 2, 3, ~1, ~3, ~2, 4], sizes).reserved_peak == 60 * MB


def test_a_full_device_frees_whole_segments_before_it_fails() -> None:
    sizes = [30 * MB, 40 * MB]
    assert replay([0, ~0, 1], sizes, limit=60 * MB).reserved_peak == 40 * MB
    with pytest.raises(OutOfMemory):
        replay([0, 1], sizes, limit=60 * MB)
