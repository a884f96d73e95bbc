"""Losses, compared with timm's."""

from __future__ import annotations

import pytest
import torch
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch.testing import assert_close

from stoker.config import Config
from stoker.tasks.images.augment.pipeline import soft_targets
from stoker.tasks.images.models import binary_cross_entropy, build_loss, cross_entropy

CLASSES = 11
LABELS = torch.tensor([3, 1, 10, 0, 0, 7])
LOGITS = torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0)) * 3


def mixed_targets(smoothing: float) -> torch.Tensor:
    rows = soft_targets(LABELS, CLASSES, smoothing)
    return 0.7 * rows + 0.3 * rows.flip(0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_losses_are_timms(smoothing: float) -> None:
    mixed = mixed_targets(smoothing)
    assert_close(cross_entropy(LOGITS, LABELS, smoothing), LabelSmoothingCrossEntropy(smoothing)(LOGITS, LABELS))
    assert_close(cross_entropy(LOGITS, mixed), SoftTargetCrossEntropy()(LOGITS, mixed))
    for threshold in (None, 0.2, 0.5):
        theirs = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)
        for targets in (LABELS, mixed):
            assert_close(binary_cross_entropy(LOGITS, targets, smoothing, threshold), theirs(LOGITS, targets))


def test_labels_and_their_soft_targets_give_the_same_loss_and_soft_targets_are_not_smoothed_again() -> None:
    rows = soft_targets(LABELS, CLASSES, 0.1)
    assert_close(cross_entropy(LOGITS, rows, smoothing=0.5), cross_entropy(LOGITS, LABELS, 0.1))
    assert_close(binary_cross_entropy(LOGITS, rows, smoothing=0.5), binary_cross_entropy(LOGITS, LABELS, smoothing=0.1))


def test_a_threshold_cancels_smoothing_and_makes_both_classes_of_a_mix_whole() -> None:
    smoothed = binary_cross_entropy(LOGITS, mixed_targets(0.1), threshold=0.2)
    both = ((soft_targets(LABELS, CLASSES) + soft_targets(LABELS.flip(0), CLASSES)) > 0).float()
    assert_close(smoothed, binary_cross_entropy(LOGITS, both))


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_the_loss_is_finite_and_float32_under_autocast(loss: str) -> None:
    compute = build_loss(Config(loss=loss, label_smoothing=0.1))
    low = LOGITS.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for targets in (LABELS, mixed_targets(0.1), mixed_targets(0.1).bfloat16()):
            value = compute(low, targets)
            assert (value.dtype, value.shape) == (torch.float32, ())
            assert compute(LOGITS * 1e4, targets).isfinite()
    assert_close(compute(low, LABELS), compute(low.detach().float(), LABELS))
    compute(low, LABELS).backward()
    assert low.grad is not None
    assert low.grad.isfinite().all()


def test_the_config_chooses_the_loss() -> None:
    smooth = build_loss(Config(label_smoothing=0.1))
    assert_close(smooth(LOGITS, LABELS), cross_entropy(LOGITS, LABELS, 0.1))
    bce = build_loss(Config(loss="bce", bce_target_threshold=0.2, label_smoothing=0.1))
    assert_close(bce(LOGITS, LABELS), binary_cross_entropy(LOGITS, LABELS, 0.1, 0.2))
