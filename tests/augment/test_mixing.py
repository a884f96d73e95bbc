"""Mixup, CutMix and soft targets, compared with timm's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from timm.data import Mixup
from timm.data import mixup as timm_mixup

from stoker.augment.mixing import Mixer, Recipe, apply_mixing, cut_box, soft_targets
from stoker.data.images.headers import Box

CLASSES = 7


def floats(count: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 12, 10, generator=generator).to(memory_format=torch.channels_last)


def labels(count: int = 6) -> torch.Tensor:
    return torch.arange(count) % CLASSES


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("switch", [0.0, 1.0], ids=["mixup", "cutmix"])
@pytest.mark.parametrize("seed", range(6))
def test_images_and_targets_equal_timms_for_the_same_draws(seed: int, switch: float, smoothing: float) -> None:
    theirs = Mixup(0.4, 1.0, switch_prob=switch, mode="batch", label_smoothing=smoothing, num_classes=CLASSES)
    np.random.seed(seed)
    images, targets = theirs(floats(), labels())
    # The same seed again, to learn what timm drew.
    np.random.seed(seed)
    kept, cut = theirs._params_per_batch()
    box = None
    if cut:
        (top, bottom, left, right), _ = timm_mixup.cutmix_bbox_and_lam(floats().shape, kept)
        box = Box(int(top), int(left), int(bottom - top), int(right - left))
    ours = apply_mixing(floats(), soft_targets(labels(), CLASSES, smoothing), Recipe(kept, box))
    assert torch.equal(ours.images, images)
    torch.testing.assert_close(ours.targets, targets, rtol=0, atol=1e-7)
    assert ours.mixed == (not torch.equal(images, floats()))


@pytest.mark.parametrize("kept", [0.001, 0.3, 0.77, 0.999])
@pytest.mark.parametrize("seed", range(8))
def test_the_box_is_the_one_that_timm_cuts_at_the_same_centre(seed: int, kept: float) -> None:
    np.random.seed(seed)
    down, right = np.random.randint(0, 32), np.random.randint(0, 48)
    np.random.seed(seed)
    top, bottom, left, end = map(int, timm_mixup.rand_bbox((1, 3, 32, 48), kept))
    assert cut_box(kept, (down + 0.5) / 32, (right + 0.5) / 48, 32, 48) == Box(top, left, bottom - top, end - left)


def test_boxes_lie_anywhere_and_within_the_image() -> None:
    mixer = Mixer(cutmix_alpha=1.0, num_classes=CLASSES)
    boxes = np.array([recipe.box for step in range(2000) if (recipe := mixer.draw(0, step, 32, 48))])
    top, left, height, width = boxes.T
    assert (boxes >= 0).all()
    assert (top + height).max() == 32
    assert (left + width).max() == 48
    middle = top + height / 2
    assert middle.min() < 5
    assert middle.max() > 27


@pytest.mark.parametrize("box", [None, Box(2, 1, 5, 6)])
def test_the_middle_of_an_odd_batch_is_unchanged(box: Box | None) -> None:
    ours = apply_mixing(floats(5), soft_targets(labels(5), CLASSES), Recipe(0.3, box))
    torch.testing.assert_close(ours.images[2], floats(5)[2])
    torch.testing.assert_close(ours.targets[2], soft_targets(labels(5), CLASSES)[2])
    assert not torch.allclose(ours.images[0], floats(5)[0])


def test_one_sample_can_be_mixed_with_itself() -> None:
    ours = Mixer(mixup_alpha=0.2, num_classes=CLASSES)(floats(1), labels(1), 0, 0)
    torch.testing.assert_close(ours.images, floats(1))


def test_targets_sum_to_one_and_the_layout_is_kept() -> None:
    mixer = Mixer(mixup_alpha=0.2, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=CLASSES)
    for step in range(20):
        ours = mixer(floats(), labels(), 0, step)
        torch.testing.assert_close(ours.targets.sum(1), torch.ones(6))
        assert ours.images.is_contiguous(memory_format=torch.channels_last)


def test_without_mixing_the_batch_is_left_alone() -> None:
    ours = Mixer(label_smoothing=0.1, num_classes=CLASSES)(floats(), labels(), 0, 0)
    assert torch.equal(ours.images, floats())
    assert torch.equal(ours.targets, soft_targets(labels(), CLASSES, 0.1))
    assert not ours.mixed


def test_a_box_without_pixels_mixes_nothing() -> None:
    ours = apply_mixing(floats(), soft_targets(labels(), CLASSES), Recipe(0.9999, Box(3, 3, 0, 0)))
    assert torch.equal(ours.images, floats())
    assert torch.equal(ours.targets, soft_targets(labels(), CLASSES))
    assert not ours.mixed


def test_probabilities_are_kept() -> None:
    mixer = Mixer(mixup_alpha=0.2, cutmix_alpha=1.0, probability=0.8, switch_probability=0.25, num_classes=CLASSES)
    drawn = [mixer.draw(1, step, 32, 32) for step in range(8000)]
    mixed = [recipe for recipe in drawn if recipe is not None]
    assert len(mixed) / 8000 == pytest.approx(0.8, abs=0.02)
    assert np.mean([recipe.box is not None for recipe in mixed]) == pytest.approx(0.25, abs=0.02)


def test_lambda_follows_the_beta_distribution() -> None:
    for alpha in (0.2, 1.0):
        kept = [recipe.kept for step in range(4000) if (recipe := Mixer(mixup_alpha=alpha).draw(0, step, 8, 8))]
        assert np.mean(kept) == pytest.approx(0.5, abs=0.03)
        assert np.var(kept) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.08)


def test_the_recipe_follows_from_seed_epoch_and_step() -> None:
    mixer = Mixer(mixup_alpha=0.2, cutmix_alpha=1.0, seed=3)
    np.random.seed(0)  # the global generator must not matter
    first = mixer.draw(2, 5, 32, 32)
    np.random.seed(1)
    assert mixer.draw(2, 5, 32, 32) == first
    others = [
        mixer.draw(2, 6, 32, 32),
        mixer.draw(3, 5, 32, 32),
        Mixer(mixup_alpha=0.2, cutmix_alpha=1.0, seed=4).draw(2, 5, 32, 32),
    ]
    assert first not in others
