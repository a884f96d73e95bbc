"""Losses, compared with timm's."""

from __future__ import annotations

import pytest
import torch
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy, SoftTargetCrossEntropy

from stoker.config import Config
from stoker.tasks.images.augment.mixing import soft_targets
from stoker.tasks.images.models import binary_cross_entropy, build_loss, cross_entropy

CLASSES = 11


def logits() -> torch.Tensor:
    return torch.randn(6, CLASSES, generator=torch.Generator().manual_seed(0)) * 3


def labels() -> torch.Tensor:
    return torch.tensor([3, 1, 10, 0, 0, 7])


def mixed_targets(smoothing: float) -> torch.Tensor:
    rows = soft_targets(labels(), CLASSES, smoothing)
    return 0.7 * rows + 0.3 * rows.flip(0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_timms_for_labels(smoothing: float) -> None:
    theirs = LabelSmoothingCrossEntropy(smoothing)(logits(), labels())
    torch.testing.assert_close(cross_entropy(logits(), labels(), smoothing), theirs)


def test_cross_entropy_is_timms_for_soft_targets() -> None:
    targets = mixed_targets(0.1)
    torch.testing.assert_close(cross_entropy(logits(), targets), SoftTargetCrossEntropy()(logits(), targets))


def test_labels_and_their_soft_targets_give_the_same_loss() -> None:
    rows = soft_targets(labels(), CLASSES, 0.1)
    torch.testing.assert_close(cross_entropy(logits(), rows), cross_entropy(logits(), labels(), 0.1))
    torch.testing.assert_close(
        binary_cross_entropy(logits(), rows), binary_cross_entropy(logits(), labels(), smoothing=0.1)
    )


def test_soft_targets_are_not_smoothed_again() -> None:
    rows = soft_targets(labels(), CLASSES)
    assert torch.equal(cross_entropy(logits(), rows, smoothing=0.5), cross_entropy(logits(), rows))


@pytest.mark.parametrize("threshold", [None, 0.2, 0.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("soft", [False, True])
def test_binary_cross_entropy_is_timms(soft: bool, smoothing: float, threshold: float | None) -> None:
    targets = mixed_targets(smoothing) if soft else labels()
    theirs = BinaryCrossEntropy(smoothing=smoothing, target_threshold=threshold)(logits(), targets)
    torch.testing.assert_close(binary_cross_entropy(logits(), targets, smoothing, threshold), theirs)


def test_a_threshold_cancels_smoothing_and_makes_both_classes_of_a_mix_whole() -> None:
    smoothed = binary_cross_entropy(logits(), mixed_targets(0.1), threshold=0.2)
    torch.testing.assert_close(smoothed, binary_cross_entropy(logits(), mixed_targets(0.0), threshold=0.2))
    both = ((soft_targets(labels(), CLASSES) + soft_targets(labels().flip(0), CLASSES)) > 0).float()
    torch.testing.assert_close(smoothed, binary_cross_entropy(logits(), both))


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_the_loss_is_float32_under_autocast(loss: str) -> None:
    compute = build_loss(Config(loss=loss, label_smoothing=0.1))
    low = logits().bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for targets in (labels(), mixed_targets(0.1), mixed_targets(0.1).bfloat16()):
            value = compute(low, targets)
            assert value.dtype == torch.float32
            assert value.shape == ()
    torch.testing.assert_close(compute(low, labels()), compute(low.detach().float(), labels()))
    compute(low, labels()).backward()
    assert low.grad is not None
    assert low.grad.isfinite().all()


def test_the_config_chooses_the_loss() -> None:
    smooth = build_loss(Config(label_smoothing=0.1))
    torch.testing.assert_close(smooth(logits(), labels()), cross_entropy(logits(), labels(), 0.1))
    bce = build_loss(Config(loss="bce", bce_target_threshold=0.2, label_smoothing=0.1))
    expected = binary_cross_entropy(logits(), mixed_targets(0.1), 0.1, 0.2)
    torch.testing.assert_close(bce(logits(), mixed_targets(0.1)), expected)


def test_huge_logits_stay_finite() -> None:
    huge = logits() * 1e4
    for targets in (labels(), mixed_targets(0.1)):
        assert cross_entropy(huge, targets).isfinite()
        assert binary_cross_entropy(huge, targets).isfinite()
