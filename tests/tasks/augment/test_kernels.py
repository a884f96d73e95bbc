"""What a batch costs the device: few kernels, one copy, and the host never waits.

On fake tensors of a GPU that is not there: the code runs as it would on one, and an operator that needs to know a
value, or that mixes tensors of two devices, raises an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from stoker.tasks import device_copies as packing
from stoker.tasks.images.augment.pipeline import Augmented, EvalPrepare, Mixer, TrainAugment
from stoker.tasks.images.augment.policies import RandAugment, TrivialAugmentWide
from tests.support.operators import counted
from tests.tasks.augment.images import some_batch, some_keys

BATCH = 256  # so many that every operation is chosen in both layers
MIXUP, CUTMIX = Mixer(mixup_alpha=0.2), Mixer(cutmix_alpha=1.0)
LIMIT = 100


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A fake one. As on a real one, constants are copied to it once and then kept."""
    device, make = torch.device("cuda:0"), packing.kept_on
    kept: dict[object, dict[str, Tensor]] = {}

    def keep_fakes(device, key, arrays):
        if key not in kept:
            kept[key] = make(device, key, arrays)
        return kept[key]

    for module in ("operations", "pipeline"):
        monkeypatch.setattr(f"stoker.tasks.images.augment.{module}.kept_on", keep_fakes)
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield device


def augmented(augment: TrainAugment, device: torch.device, size: int = 32) -> Augmented:
    images = torch.empty(BATCH, size, size, 3, dtype=torch.uint8, device=device)
    return augment(images, np.arange(BATCH), np.arange(BATCH) % 2 == 0, some_keys(BATCH), 0, 0)


@pytest.mark.parametrize("mixer", [MIXUP, CUTMIX], ids=["mixup", "cutmix"])
@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float32, torch.channels_last), (torch.bfloat16, torch.contiguous_format)]
)
def test_a_batch_takes_at_most_a_hundred_kernels_and_one_copy(gpu, mixer, dtype, layout) -> None:
    augment = TrainAugment(mixer, RandAugment(7, 0.5, 2), dtype=dtype, memory_format=layout)
    augmented(augment, gpu)  # copies the constants
    with counted() as ops:
        inputs, targets, labels, _ = augmented(augment, gpu)
    assert ops.kernels <= LIMIT, ops.by_name
    assert ops.copies == 1
    assert {tensor.device for tensor in (inputs, targets, labels)} == {gpu}
    assert inputs.dtype == dtype
    assert inputs.is_contiguous(memory_format=layout)


@pytest.mark.parametrize("policy", [None, RandAugment(num_ops=3, probability=1), TrivialAugmentWide()])
@pytest.mark.parametrize("mixer", [MIXUP, CUTMIX], ids=["mixup", "cutmix"])
def test_nothing_waits_for_the_device(gpu, policy, mixer) -> None:
    with counted() as ops:
        augmented(TrainAugment(mixer, policy, erasing=0.5), gpu)
    assert ops.blocking == []


def test_on_fake_tensors_of_a_cpu_no_value_is_read_either() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = augmented(TrainAugment(MIXUP, RandAugment(), erasing=0.5), torch.device("cpu")).images
    assert inputs.shape == (BATCH, 3, 32, 32)
    # And no fake tensor is kept for those who come later.
    batch = some_batch(4)
    real = TrainAugment(Mixer(), RandAugment())(batch, np.arange(4), np.zeros(4, bool), some_keys(4), 0, 0)
    assert type(real.images) is Tensor


def test_the_number_of_kernels_does_not_depend_on_the_size_of_the_images(gpu) -> None:
    found = []
    for size in (32, 224):
        with counted() as ops:
            augmented(TrainAugment(MIXUP, RandAugment()), gpu, size)
        found.append(ops.kernels)
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_an_evaluation_batch_takes_two_kernels(gpu, dtype) -> None:
    prepare, images = EvalPrepare(dtype=dtype), torch.empty(8, 32, 32, 3, dtype=torch.uint8, device=gpu)
    prepare(images)
    for layout in (torch.channels_last, torch.contiguous_format):
        with counted() as ops:
            assert replace(prepare, memory_format=layout)(images).dtype == dtype
        assert ops.kernels == 2
        assert ops.copies == 0


def test_on_a_cpu_there_are_no_copies_and_about_as_many_operators() -> None:
    with counted() as ops:
        augmented(TrainAugment(MIXUP, RandAugment()), torch.device("cpu"))
    assert ops.copies == 0
    # Bytes are widened in a step of their own, twice for tables and once for floats, and floats go to and fro in two
    # pieces in each of the two layers.
    assert ops.kernels <= LIMIT + 3 + 4


def test_the_buffer_of_choices_goes_through_the_callers_copy_only() -> None:
    taken: list[Tensor] = []

    def copy(tensor: Tensor) -> Tensor:
        taken.append(tensor)
        return tensor.clone()

    augment = TrainAugment(MIXUP, RandAugment(), erasing=0.5)
    arguments = some_batch(8), np.arange(8), np.arange(8) < 4, some_keys(8), 0, 0
    through_copy = augment(*arguments, copy=copy)
    assert [tensor.dtype for tensor in taken] == [torch.uint8]
    assert torch.equal(through_copy.images, augment(*arguments).images)
    assert torch.equal(through_copy.targets, augment(*arguments).targets)
