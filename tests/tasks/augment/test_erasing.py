"""Random erasing: where, how often and how large, compared with torchvision."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.transforms import functional

from stoker.tasks.images.augment.pipeline import Erasures, draw_erasures, erase
from tests.tasks.augment.images import some_keys


def floats(count: int = 12) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 24, 20, generator=generator).to(memory_format=torch.channels_last)


def erased(images: torch.Tensor, erasures: Erasures) -> torch.Tensor:
    """The images without the rectangles; changes them in place."""
    rows, columns = erasures.masks(*images.shape[2:])
    erase(images, *map(torch.from_numpy, (erasures.samples, rows, columns)))
    return images


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_torchvision_erases_the_same_rectangles(layout: torch.memory_format) -> None:
    erasures = draw_erasures(some_keys(12), 0.5, 24, 20)
    assert 0 < len(erasures.samples) < 12
    expected = floats()
    for sample, (top, left, bottom, right) in zip(erasures.samples, erasures.boxes.tolist(), strict=True):
        zero = torch.zeros(1, 1, 1)
        expected[sample] = functional.erase(expected[sample], top, left, bottom - top, right - left, zero)
    ours = erased(floats().contiguous(memory_format=layout), erasures)
    assert torch.equal(ours, expected)
    assert ours.is_contiguous(memory_format=layout)


def test_areas_and_aspects_are_within_bounds_and_spread_over_them() -> None:
    erasures = draw_erasures(some_keys(20_000), 1.0, 224, 224)
    assert len(erasures.samples) == 20_000
    top, left, bottom, right = erasures.boxes.T
    assert top.min() == 0
    assert left.min() == 0
    assert bottom.max() == right.max() == 224
    share = (bottom - top) * (right - left) / 224**2
    assert share.min() == pytest.approx(0.02, abs=0.002)
    assert share.max() == pytest.approx(1 / 3, abs=0.01)
    assert share.mean() == pytest.approx((0.02 + 1 / 3) / 2, rel=0.03)
    aspect = (bottom - top) / (right - left)
    assert aspect.min() == pytest.approx(0.3, rel=0.05)
    assert aspect.max() == pytest.approx(3.3, rel=0.05)
    assert np.log(aspect).mean() == pytest.approx(0, abs=0.02)


def test_the_requested_share_is_erased() -> None:
    assert len(draw_erasures(some_keys(20_000), 0.1, 64, 64).samples) / 20_000 == pytest.approx(0.1, abs=0.01)
    assert len(draw_erasures(some_keys(100), 0.0, 64, 64).samples) == 0


def test_nothing_to_erase_is_fine() -> None:
    assert torch.equal(erased(floats(), draw_erasures(some_keys(12), 0.0, 24, 20)), floats())


def test_an_image_of_one_pixel_survives() -> None:
    draw = draw_erasures(some_keys(50), 1.0, 1, 1)
    assert erased(torch.ones(50, 3, 1, 1), draw).sum() == 150


def test_a_sample_is_erased_the_same_way_alone_and_in_a_batch() -> None:
    keys = some_keys(12)
    together = erased(floats(), draw_erasures(keys, 0.5, 24, 20))
    for sample in range(12):
        alone = erased(floats()[sample : sample + 1], draw_erasures(keys[sample : sample + 1], 0.5, 24, 20))
        assert torch.equal(alone[0], together[sample])
