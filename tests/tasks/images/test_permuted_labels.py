"""When training asks 'labels?', and what it says about the permutation."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch._subclasses.fake_tensor import FakeTensorMode

from stoker.tasks.images.permuted_labels import (
    Confusion,
    Figures,
    describe_mapping,
    fewest_images,
    judge_labels,
    likely_mapping,
)
from tests.support.operators import counted

Counts = NDArray[np.int64]


def names(classes: int) -> list[str]:
    return [f"n{number:04d}" for number in range(classes)]


def answers(holds: list[int], accuracy: float, images: int = 50, seed: int = 0) -> Counts:
    """Counts of a model with this accuracy on folders that hold these classes; its errors are spread over all."""
    rng = np.random.default_rng(seed)
    counts = np.zeros((len(holds), len(holds)), np.int64)
    for folder, held in enumerate(holds):
        guesses = np.where(rng.random(images) < accuracy, held, rng.integers(0, len(holds), images))
        np.add.at(counts, (folder, guesses), 1)
    return counts


def scattered(classes: int) -> Counts:
    """Counts of a good model on images that were spread over the folders at random."""
    return np.random.default_rng(1).multinomial(50, [1 / classes] * classes, classes)


def collapsed(classes: int) -> Counts:
    """Counts of a model that takes every image for the same class."""
    counts = np.zeros((classes, classes), np.int64)
    counts[:, 1] = 50
    return counts


def biased(holds: list[int], accuracy: float, images: int = 50) -> Counts:
    """A model of that accuracy that takes all other images for the first two classes."""
    counts = np.zeros((len(holds), len(holds)), np.int64)
    for folder, held in enumerate(holds):
        right = round(images * accuracy)
        counts[folder, held] += right
        counts[folder, 0] += (images - right) // 2
        counts[folder, 1] += images - right - (images - right) // 2
    return counts


RIGHT = list(range(100))
SHIFTED = [*range(1, 100), 0]
MIXED = np.random.default_rng(3).permutation(100).tolist()
SILENT, UNNAMED = "no alarm", "an alarm without a permutation"


@pytest.mark.parametrize(
    ("what", "figures", "counts", "expected"),
    [
        ("the case study: 56 % and 1 %", Figures(1.0, 56.0), answers(MIXED, 0.56), "holds"),
        ("the case study, later: 89 % and 1 %", Figures(1.0, 89.0), answers(SHIFTED, 0.7), "shifted by one"),
        ("images spread at random", Figures(1.0, 89.0), scattered(100), UNNAMED),
        ("too many classes to count", Figures(1.0, 89.0), None, UNNAMED),
        ("an honest start: 2 % and 1 %", Figures(1.0, 2.0), collapsed(100), SILENT),
        ("overfitting: 99 % and 20 %", Figures(20.0, 99.0), answers(RIGHT, 0.2), SILENT),
        ("a moving average that is still that of the start", Figures(1.0, 40.0), collapsed(100), SILENT),
        ("all batches mixed, by the loss", Figures(1.0, None, 2.9), answers(MIXED, 0.5), "holds"),
        ("another loss, the permutation is proof", Figures(1.0), answers(SHIFTED, 0.5), "shifted by one"),
        ("another loss and no permutation", Figures(1.0), scattered(100), SILENT),
        ("two classes, swapped", Figures(6.0, 95.0), answers([1, 0], 0.9), "n0000 and n0001 are swapped"),
        ("two classes, overfitting", Figures(51.0, 95.0), np.array([[26, 24], [25, 25]]), SILENT),
        ("three classes, what an untrained model says", Figures(0.0, 35.0), answers([1, 2, 0], 1.0), SILENT),
        ("no validation", Figures(None, 99.0), None, SILENT),
        (
            "four of ten folders swapped, after two epochs",
            Figures(33.0, 55.0),
            answers([1, 0, 3, 2, *range(4, 10)], 0.55),
            "n0000 holds n0001",
        ),
        (
            "a cycle of three among a hundred",
            Figures(70.0, 80.0),
            answers([1, 2, 0, *range(3, 100)], 0.7),
            "n0002 holds n0000",
        ),
        (
            "ten classes, and most errors look like two of them",
            Figures(9.0, 60.0),
            biased([*range(1, 10), 0], 0.4),
            "shifted by one",
        ),
        (
            "right labels, and a model that prefers two classes",
            Figures(30.0, 60.0),
            biased(list(range(10)), 0.2),
            SILENT,
        ),
        (
            "a network that knows little, and takes two classes for each other",
            Figures(20.0, 60.0),
            answers([1, 0, *range(2, 10)], 0.25) + answers([*range(2, 10), 0, 1], 0.3),
            SILENT,
        ),
        ("cats are dogs, and dogs are dogs", Figures(85.0, 90.0), answers([1, 1, *range(2, 10)], 0.9), SILENT),
    ],
)
def test_the_alarm_rule(what: str, figures: Figures, counts: Counts | None, expected: str) -> None:
    classes = 100 if counts is None else len(counts)
    alarm = judge_labels(figures, counts, names(classes))
    if expected == SILENT:
        assert alarm is None, what
        return
    assert alarm is not None, what
    assert alarm.details()["hint"] == "stoker verify CONFIG"
    if expected == UNNAMED:
        assert alarm.permutation is None
    else:
        assert alarm.permutation is not None, what
        assert expected in alarm.permutation


def test_too_few_images_to_see_a_permutation_are_said() -> None:
    needed = fewest_images(100)
    few = judge_labels(Figures(1.0, 60.0), answers(MIXED, 0.5, images=1), names(100))
    assert few is not None
    assert few.permutation is None
    assert f"1.0 validation images per class are too few to see a permutation: it takes {needed}" in few.text()
    enough = judge_labels(Figures(1.0, 60.0), answers(MIXED, 0.8, images=needed), names(100))
    assert enough is not None
    assert enough.permutation is not None
    assert [fewest_images(classes) for classes in (2, 10, 1000)] == sorted(
        (fewest_images(classes) for classes in (2, 10, 1000)), reverse=True
    )


def test_a_mapping_says_what_each_folder_holds_and_nothing_where_that_is_unclear() -> None:
    found = likely_mapping(answers(MIXED, 0.5))
    known = [(held, truth) for held, truth in zip(found.holds, MIXED, strict=True) if held is not None]
    assert len(known) >= 95
    assert all(held == truth for held, truth in known)
    assert found.explained == pytest.approx(0.5, abs=0.05)
    for unclear in (collapsed(3), collapsed(100), scattered(100), np.zeros((4, 4))):
        assert set(likely_mapping(unclear).holds) == {None}


def test_permutations_are_named_by_their_rule() -> None:
    def described(folders: list[str], holds: list[int]) -> str:
        return describe_mapping(likely_mapping(answers(holds, 0.9)), folders, folders)

    folders = names(30)
    assert described(folders, [29, *range(29)]).startswith("shifted by one: each folder holds the images of the prev")
    assert described(folders, [*range(7, 30), *range(7)]).startswith(
        "shifted by 7: each folder holds the class 7 after"
    )
    swapped = list(range(30))
    swapped[4], swapped[20] = 20, 4
    assert described(folders, swapped) == "n0004 and n0020 are swapped"
    # Folder '10' is the third of the names sorted as text, and got the images of class 2.
    numbers = sorted(map(str, range(30)))
    as_numbers = [numbers.index(str(place)) for place in range(30)]
    text = described(numbers, as_numbers)
    assert text.startswith("the images were sorted into the folders by names in the order of numbers instead of text")
    assert "10 holds 2" in text


def test_counting_never_waits_for_the_device() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        confusion = Confusion(7, torch.device("cuda"))
        logits, labels = torch.empty(5, 7, device="cuda"), torch.empty(5, dtype=torch.int64, device="cuda")
        with counted() as operators:
            confusion.reset()
            confusion.add(logits, labels)
        assert (operators.blocking, operators.copies) == ([], 0)
