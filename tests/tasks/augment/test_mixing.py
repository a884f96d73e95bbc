"""Mixup, CutMix and soft targets, compared with timm's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from timm.data import Mixup
from timm.data import mixup as timm_mixup

from stoker.tasks.images.augment.pipeline import Mixer, Recipe, cut_box, fill_targets, mix_images, target_rows
from stoker.tasks.images.decode.headers import Box

CLASSES = 7


def floats(count: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, 12, 10, generator=generator).to(memory_format=torch.channels_last)


def labels(count: int = 6) -> torch.Tensor:
    return torch.arange(count) % CLASSES


def targets_of(labels: torch.Tensor, smoothing: float = 0.0, recipe: Recipe | None = None) -> torch.Tensor:
    rows = target_rows(labels.numpy(), CLASSES, smoothing, recipe)
    return fill_targets(rows.elsewhere, torch.from_numpy(rows.columns), torch.from_numpy(rows.values), CLASSES)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("switch", [0.0, 1.0], ids=["mixup", "cutmix"])
@pytest.mark.parametrize("seed", range(2))
def test_images_and_targets_equal_timms_for_the_same_draws(seed: int, switch: float, smoothing: float) -> None:
    theirs = Mixup(0.4, 1.0, switch_prob=switch, mode="batch", label_smoothing=smoothing, num_classes=CLASSES)
    np.random.seed(seed)
    images, targets = theirs(floats(), labels())
    # The same seed again, to learn what timm drew.
    np.random.seed(seed)
    kept, cut = theirs._params_per_batch()
    box, share = None, kept
    if cut:
        (top, bottom, left, right), share = timm_mixup.cutmix_bbox_and_lam(floats().shape, kept)
        box = Box(int(top), int(left), int(bottom - top), int(right - left))
    recipe = Recipe(share, box)
    assert torch.equal(mix_images(floats(), recipe, torch.float32), images)
    torch.testing.assert_close(targets_of(labels(), smoothing, recipe), targets, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kept", [0.001, 0.3, 0.77, 0.999])
def test_the_box_is_the_one_that_timm_cuts_at_the_same_centre(kept: float) -> None:
    for seed in range(8):
        np.random.seed(seed)
        down, right = np.random.randint(0, 32), np.random.randint(0, 48)
        np.random.seed(seed)
        top, bottom, left, end = map(int, timm_mixup.rand_bbox((1, 3, 32, 48), kept))
        assert cut_box(kept, (down + 0.5) / 32, (right + 0.5) / 48, 32, 48) == Box(top, left, bottom - top, end - left)


def test_boxes_lie_anywhere_and_within_the_image() -> None:
    mixer = Mixer(cutmix_alpha=1.0, num_classes=CLASSES)
    boxes = np.array([recipe.box for step in range(2000) if (recipe := mixer.draw(0, step, 0, 32, 48))])
    top, left, height, width = boxes.T
    assert (boxes >= 0).all()
    assert (top + height).max() == 32
    assert (left + width).max() == 48
    middle = top + height / 2
    assert middle.min() < 5
    assert middle.max() > 27


@pytest.mark.parametrize("box", [None, Box(2, 1, 5, 6)])
def test_the_middle_of_an_odd_batch_is_unchanged(box: Box | None) -> None:
    recipe = Recipe(0.3, box)
    images, targets = mix_images(floats(5), recipe, torch.float32), targets_of(labels(5), 0.0, recipe)
    torch.testing.assert_close(images[2], floats(5)[2])
    torch.testing.assert_close(targets[2], targets_of(labels(5))[2])
    assert not torch.allclose(images[0], floats(5)[0])


def test_two_samples_of_one_class_keep_its_target() -> None:
    same = torch.full((4,), 3)
    torch.testing.assert_close(targets_of(same, 0.1, Recipe(0.3, None)), targets_of(same, 0.1))


def test_a_target_without_mixing_is_one_at_the_label_minus_what_smoothing_takes() -> None:
    assert torch.equal(targets_of(labels()), torch.nn.functional.one_hot(labels(), CLASSES).float())
    smooth = targets_of(labels(), 0.1)
    assert smooth[2, 2].item() == pytest.approx(0.9 + 0.1 / CLASSES)
    assert smooth[2, 3].item() == pytest.approx(0.1 / CLASSES)


def test_a_box_without_pixels_mixes_nothing() -> None:
    recipe = Recipe(1.0, Box(3, 3, 0, 0))
    assert torch.equal(mix_images(floats(), recipe, torch.float32), floats())
    assert torch.equal(targets_of(labels(), 0.0, recipe), targets_of(labels()))


def test_cutmix_keeps_as_much_of_the_target_as_of_the_pixels() -> None:
    recipes = [Mixer(cutmix_alpha=1.0).draw(0, step, 0, 32, 48) for step in range(50)]
    for recipe in recipes:
        assert recipe is not None
        assert recipe.box is not None
        assert recipe.kept == 1 - recipe.box.height * recipe.box.width / (32 * 48)


def test_probabilities_are_kept() -> None:
    mixer = Mixer(mixup_alpha=0.2, cutmix_alpha=1.0, probability=0.8, switch_probability=0.25, num_classes=CLASSES)
    drawn = [mixer.draw(1, step, 0, 32, 32) for step in range(8000)]
    mixed = [recipe for recipe in drawn if recipe is not None]
    assert len(mixed) / 8000 == pytest.approx(0.8, abs=0.02)
    assert np.mean([recipe.box is not None for recipe in mixed]) == pytest.approx(0.25, abs=0.02)


def test_lambda_follows_the_beta_distribution() -> None:
    for alpha in (0.2, 1.0):
        kept = [recipe.kept for step in range(4000) if (recipe := Mixer(mixup_alpha=alpha).draw(0, step, 0, 8, 8))]
        assert np.mean(kept) == pytest.approx(0.5, abs=0.03)
        assert np.var(kept) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.08)


def test_the_recipe_follows_from_seed_epoch_step_and_part() -> None:
    mixer = Mixer(mixup_alpha=0.2, cutmix_alpha=1.0, seed=3)
    np.random.seed(0)  # the global generator must not matter
    first = mixer.draw(2, 5, 1, 32, 32)
    np.random.seed(1)
    assert mixer.draw(2, 5, 1, 32, 32) == first
    others = [
        mixer.draw(2, 6, 1, 32, 32),
        mixer.draw(3, 5, 1, 32, 32),
        mixer.draw(2, 5, 0, 32, 32),
        Mixer(mixup_alpha=0.2, cutmix_alpha=1.0, seed=4).draw(2, 5, 1, 32, 32),
    ]
    assert first not in others


def test_the_batches_of_one_update_are_mixed_independently() -> None:
    mixer = Mixer(mixup_alpha=0.2, cutmix_alpha=1.0)
    updates = [[mixer.draw(0, step, part, 32, 32) for part in range(8)] for step in range(500)]
    assert all(len(set(update)) == 8 for update in updates)
    cut = np.array([[recipe is not None and recipe.box is not None for recipe in update] for update in updates])
    assert np.corrcoef(cut[:, 0], cut[:, 1])[0, 1] == pytest.approx(0, abs=0.15)
    assert cut.mean(axis=0) == pytest.approx(0.5, abs=0.1)
