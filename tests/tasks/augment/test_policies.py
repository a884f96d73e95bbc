"""The policies: their choices compared with timm's and torchvision's, and independent results per sample."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment as timm_ops
from torchvision.transforms import InterpolationMode
from torchvision.transforms import TrivialAugmentWide as TorchvisionTrivialAugmentWide
from torchvision.transforms.autoaugment import _apply_op

from stoker.tasks.images.augment.operations import Op
from stoker.tasks.images.augment.policies import (
    RANDAUGMENT_OPS,
    TRIVIALAUGMENT_OPS,
    Layer,
    RandAugment,
    TrivialAugmentWide,
    randaugment_arguments,
    trivialaugment_arguments,
)
from tests.tasks.augment.images import HEIGHT, WIDTH, apply_layers, apply_policy, some_batch, some_images, some_keys

IN_TIMM = {
    Op.AUTO_CONTRAST: "AutoContrast", Op.EQUALIZE: "Equalize", Op.INVERT: "Invert", Op.ROTATE: "Rotate",
    Op.POSTERIZE: "PosterizeIncreasing", Op.SOLARIZE: "SolarizeIncreasing", Op.SOLARIZE_ADD: "SolarizeAdd",
    Op.COLOR: "ColorIncreasing", Op.CONTRAST: "ContrastIncreasing", Op.BRIGHTNESS: "BrightnessIncreasing",
    Op.SHARPNESS: "SharpnessIncreasing", Op.SHEAR_X: "ShearX", Op.SHEAR_Y: "ShearY",
    Op.TRANSLATE_X: "TranslateXRel", Op.TRANSLATE_Y: "TranslateYRel",
}  # fmt: skip
IN_TORCHVISION = {
    Op.IDENTITY: "Identity", Op.SHEAR_X: "ShearX", Op.SHEAR_Y: "ShearY", Op.TRANSLATE_X: "TranslateX",
    Op.TRANSLATE_Y: "TranslateY", Op.ROTATE: "Rotate", Op.BRIGHTNESS: "Brightness", Op.COLOR: "Color",
    Op.CONTRAST: "Contrast", Op.SHARPNESS: "Sharpness", Op.POSTERIZE: "Posterize", Op.SOLARIZE: "Solarize",
    Op.AUTO_CONTRAST: "AutoContrast", Op.EQUALIZE: "Equalize",
}  # fmt: skip


def test_randaugment_has_timms_operations() -> None:
    assert [IN_TIMM[op] for op in RANDAUGMENT_OPS] == timm_ops.rand_augment_choices("original", increasing=True)


def test_trivialaugment_has_torchvisions_operations() -> None:
    space = TorchvisionTrivialAugmentWide()._augmentation_space(31)
    assert [IN_TORCHVISION[op] for op in TRIVIALAUGMENT_OPS] == list(space)


@pytest.mark.parametrize("op", RANDAUGMENT_OPS, ids=lambda op: op.name)
def test_randaugment_takes_timms_arguments_at_every_magnitude(op: Op) -> None:
    level_to_argument = timm_ops.LEVEL_TO_ARG[IN_TIMM[op]]
    if level_to_argument is None:
        return
    size = {Op.TRANSLATE_X: WIDTH, Op.TRANSLATE_Y: HEIGHT}.get(op, 1)
    for magnitude in np.arange(0, 10.01, 0.37):
        # timm draws the direction internally: repeat until both have come up.
        theirs = {level_to_argument(magnitude, {})[0] * size for _ in range(40)}
        ours = {
            float(randaugment_arguments(np.array([op]), np.array([magnitude / 10]), np.array([sign]), HEIGHT, WIDTH)[0])
            for sign in (-1.0, 1.0)
        }
        assert sorted(ours) == pytest.approx(sorted(theirs)), magnitude


@pytest.mark.parametrize("op", TRIVIALAUGMENT_OPS, ids=lambda op: op.name)
def test_an_operation_of_trivialaugment_does_what_torchvisions_does_in_every_bin(op: Op) -> None:
    magnitudes, signed = TorchvisionTrivialAugmentWide()._augmentation_space(31)[IN_TORCHVISION[op]]
    images = some_images(31, 32, 32)
    for sign in (-1.0, 1.0):
        arguments = trivialaugment_arguments(np.full(31, op), np.arange(31.0), np.full(31, sign))
        ours = apply_layers([Layer(np.full(31, op), arguments)], torch.from_numpy(images), TrivialAugmentWide().fill)
        for sample, image in enumerate(images):
            magnitude = float(magnitudes[sample]) if magnitudes.ndim else 0.0
            theirs = _apply_op(
                Image.fromarray(image), IN_TORCHVISION[op], sign * magnitude if signed else magnitude,
                InterpolationMode.BILINEAR, None,
            )  # fmt: skip
            different = np.abs(ours[sample].numpy() - np.asarray(theirs).astype(int)) > 1
            # A pixel or two at the edge of the fill may end up on the other side.
            assert different.mean() < 0.004, (sample, sign)


@pytest.mark.parametrize(
    ("policy", "known"), [(RandAugment(), RANDAUGMENT_OPS), (TrivialAugmentWide(), TRIVIALAUGMENT_OPS)]
)
def test_operations_are_equally_frequent(policy, known) -> None:
    count = 30_000
    layers = policy.plan(some_keys(count), HEIGHT, WIDTH)
    drawn = Counter(np.concatenate([layer.ops for layer in layers]).tolist())
    applied = policy.probability if isinstance(policy, RandAugment) else 1.0
    expected = count * len(layers) * applied / len(known)
    for op in known:
        assert drawn[op] == pytest.approx(expected, rel=0.1), op.name
    if applied < 1:
        assert drawn[Op.IDENTITY] == pytest.approx(count * len(layers) * (1 - applied), rel=0.05)


def test_the_two_operations_of_a_sample_are_independent() -> None:
    first, second = RandAugment(probability=1).plan(some_keys(30_000), HEIGHT, WIDTH)
    assert np.mean(first.ops == second.ops) == pytest.approx(1 / 15, rel=0.1)


def test_magnitudes_have_the_requested_spread_and_stay_within_bounds() -> None:
    layer = RandAugment(magnitude=6, magnitude_std=0.5, num_ops=1, probability=1).plan(some_keys(30_000), 10, 10)[0]
    degrees = np.abs(layer.arguments[layer.ops == Op.ROTATE])
    assert degrees.mean() == pytest.approx(18, rel=0.01)
    assert degrees.std() == pytest.approx(1.5, rel=0.1)
    wild = RandAugment(magnitude=9, magnitude_std=5, num_ops=1, probability=1).plan(some_keys(30_000), 10, 10)[0]
    assert np.abs(wild.arguments[wild.ops == Op.ROTATE]).max() == 30


def test_half_of_the_directions_are_negative() -> None:
    layer = TrivialAugmentWide().plan(some_keys(30_000), 10, 10)[0]
    degrees = layer.arguments[layer.ops == Op.ROTATE]
    assert np.mean(degrees[degrees != 0] < 0) == pytest.approx(0.5, abs=0.05)


def test_the_number_of_threads_does_not_matter() -> None:
    images, keys, policy = some_batch(16, 64, 64), some_keys(16), RandAugment(probability=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = apply_policy(policy, images, keys)
        torch.set_num_threads(2)
        assert torch.equal(apply_policy(policy, images, keys), one)
    finally:
        torch.set_num_threads(before)
