"""The counts that validation makes while training."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from stoker.tasks.demo import scroll_volume
from stoker.tasks.volumes.scores.counts import VolumeCounts

IGNORE = 999


def logits_of(guess: np.ndarray[Any, Any], classes: int) -> Tensor:
    one_hot = torch.nn.functional.one_hot(torch.from_numpy(guess).long(), classes)
    return one_hot.movedim(-1, 1).float()


def random_batch(classes: int, samples: int = 3, seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    shape = (samples, 9, 10, 11)
    smooth = ndimage.gaussian_filter(random.standard_normal(shape), (0, 1.5, 1.5, 1.5))
    labels = np.digitize(smooth, np.quantile(smooth, np.linspace(0, 1, classes + 1)[1:-1]))
    guess = np.roll(labels, 1, axis=2)
    flips = random.random(shape) < 0.05
    guess[flips] = random.integers(0, classes, int(flips.sum()))
    labels[random.random(shape) < 0.2] = IGNORE
    return guess, labels


def edge_of(values: Any, known: Any) -> Any:
    """Voxels that touch a known voxel of another value, found one voxel at a time."""
    edge = np.zeros(values.shape, bool)
    for place in np.ndindex(values.shape):
        for axis in range(3):
            for step in (-1, 1):
                there = list(place)
                there[axis] += step
                if 0 <= there[axis] < values.shape[axis] and known[place] and known[tuple(there)]:
                    edge[place] |= values[place] != values[tuple(there)]
    return edge


def slow_scores(guess: Any, labels: Any, classes: int, tolerance: float) -> dict[str, float]:
    """Dice, IoU and surface Dice of one patch, by distance transforms, class by class."""
    known = labels != IGNORE
    found: dict[str, list[float]] = {"dice": [], "iou": [], "surface_dice": []}
    edges = edge_of(np.where(known, guess, 0), known), edge_of(np.where(known, labels, 0), known)
    for number in range(1, classes):
        one, two = (guess == number) & known, (labels == number) & known
        if one.any() or two.any():
            found["dice"].append(200 * (one & two).sum() / (one.sum() + two.sum()))
            found["iou"].append(100 * (one & two).sum() / (one | two).sum())
        surfaces = one & edges[0], two & edges[1]
        total = surfaces[0].sum() + surfaces[1].sum()
        if total:
            near = 0
            for mine, other in (surfaces, surfaces[::-1]):
                far = ndimage.distance_transform_edt(~other) if other.any() else np.full(other.shape, np.inf)
                near += (mine & (far <= tolerance)).sum()
            found["surface_dice"].append(100 * near / total)
    return {name: float(np.mean(values)) for name, values in found.items()}


@pytest.mark.parametrize(("classes", "tolerance"), [(2, 2.0), (4, 1.5), (300, 2.0)])
def test_counts_equal_distance_transforms_for_any_number_of_classes(classes: int, tolerance: float) -> None:
    guess, labels = random_batch(min(classes, 5))
    if classes == 300:  # more than there are bits in a number
        guess, labels = guess * 70, np.where(labels == IGNORE, IGNORE, labels * 70)
    counts = VolumeCounts(3, classes, "cpu", ignore=IGNORE, tolerance=tolerance)
    counts.add(logits_of(guess, classes), torch.from_numpy(labels), np.array([2, 0, 1]), np.ones(3, bool))
    for slot, case in enumerate((2, 0, 1)):
        expected = slow_scores(guess[slot], labels[slot], classes, tolerance)
        for name, values in counts.per_case().items():
            assert values[case] == pytest.approx(expected[name])


def test_a_case_is_the_sum_of_its_patches_on_all_ranks_without_those_that_were_not_read() -> None:
    guess, labels = random_batch(3)
    whole = VolumeCounts(2, 3, "cpu", ignore=IGNORE)
    whole.add(logits_of(guess, 3), torch.from_numpy(labels), [0, 1, 0])
    ranks = [VolumeCounts(2, 3, "cpu", ignore=IGNORE) for _ in range(2)]
    ranks[0].add(logits_of(guess[:2], 3), torch.from_numpy(labels[:2]), [0, 1])
    twice = [2, 2]
    ranks[1].add(logits_of(guess[twice], 3), torch.from_numpy(labels[twice]), [0, 1], np.array([True, False]))
    ranks[0].tensor += ranks[1].tensor  # what all_reduce does
    assert ranks[0].result() == whole.result()


def test_edge_cases_have_the_scores_one_expects() -> None:
    _, label = scroll_volume((16, 24, 24), seed=1)
    truth = torch.from_numpy(label[None].astype(np.int64))
    blank = np.zeros((1, 16, 24, 24), np.int64)
    everything = {"dice": 100.0, "iou": 100.0, "surface_dice": 100.0}
    nothing = {"dice": 0.0, "iou": 0.0, "surface_dice": 0.0}

    def scores(guess: Any, labels: Tensor) -> dict[str, float]:
        counts = VolumeCounts(3, 2, "cpu", ignore=2)
        counts.add(logits_of(guess, 2), labels, [1])
        return counts.result()

    assert scores(label[None] == 1, truth) == everything
    assert scores(blank, truth) == nothing
    assert scores(label[None] == 1, torch.from_numpy(blank)) == nothing
    # Neither has any foreground: there is nothing to score, and so no score.
    assert scores(blank, torch.from_numpy(blank)) == {}
    # All foreground: right, but there is no surface in the patch.
    assert scores(blank + 1, torch.from_numpy(blank + 1)) == {"dice": 100.0, "iou": 100.0}


def test_adding_a_batch_reads_nothing_from_the_device() -> None:
    with FakeTensorMode():
        counts = VolumeCounts(4, 3, "cpu", ignore=IGNORE)
        logits = torch.empty(2, 3, 8, 8, 8)
        labels = torch.zeros(2, 8, 8, 8, dtype=torch.int64)
        counts.add(logits, labels, np.array([1, 3]), np.array([True, False]))
        with pytest.raises(DataDependentOutputException):
            counts.tensor.sum().item()  # what reading would do
