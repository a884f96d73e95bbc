"""A subset: the same seed chooses the same classes and images everywhere, for training and validation."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.core.errors import UserError
from stoker.tasks.images.layouts.sample_index import SampleIndex, SampleSet, pack_names
from stoker.tasks.images.layouts.subset import choose_subset, subset_record

CLASSES = [f"n{number:04d}" for number in range(40)]


def index_of(files: dict[str, list[str]], shuffled: bool = False) -> SampleIndex:
    classes = tuple(sorted(files))
    samples = [(label, f"{name}/{file}") for label, name in enumerate(classes) for file in files[name]]
    if shuffled:
        samples = [samples[n] for n in np.random.default_rng(0).permutation(len(samples))]
    labels = np.array([label for label, _ in samples], np.int32)
    return SampleIndex("/data/train", classes, labels, *pack_names([name.encode() for _, name in samples]))


def images(*names: str, each: int = 12) -> dict[str, list[str]]:
    return {name: [f"{name}_{number}.JPEG" for number in range(each)] for name in names}


def chosen_names(index: SampleIndex, subset: SampleSet) -> set[str]:
    return {index.name(sample) for sample in subset.chosen.tolist()}


def test_the_requested_number_of_classes_and_images_is_chosen() -> None:
    index = index_of(images(*CLASSES))
    subset = choose_subset(index, classes=10, per_class=5, seed=42)
    assert len(subset.classes) == 10
    assert list(subset.classes) == sorted(subset.classes)
    assert np.bincount(subset.chosen_labels).tolist() == [5] * 10
    assert (np.diff(subset.chosen) > 0).all()
    for sample, label in zip(subset.chosen.tolist(), subset.chosen_labels.tolist(), strict=True):
        assert index.name(sample).startswith(subset.classes[label] + "/")
    assert (subset.chosen.dtype, subset.chosen_labels.dtype) == (np.int64, np.int32)


def test_the_choice_is_fixed_forever() -> None:
    """The same on every machine and in every version, so that a published subset can be reproduced."""
    subset = choose_subset(index_of(images(*CLASSES)), classes=4, per_class=1, seed=42)
    assert subset.classes == ("n0004", "n0010", "n0011", "n0039")
    assert subset.chosen.tolist() == [58, 126, 134, 479]


def test_over_many_seeds_every_class_is_chosen() -> None:
    index = index_of(images(*CLASSES, each=1))
    times = sum(np.isin(CLASSES, choose_subset(index, classes=10, per_class=None, seed=n).classes) for n in range(400))
    # 100 of 400 on average, with a standard deviation of 9.
    assert times.min() > 55
    assert times.max() < 145


def test_the_order_of_the_samples_does_not_matter() -> None:
    sorted_index, packed = index_of(images(*CLASSES)), index_of(images(*CLASSES), shuffled=True)
    one = choose_subset(sorted_index, classes=7, per_class=3, seed=5)
    other = choose_subset(packed, classes=7, per_class=3, seed=5)
    assert chosen_names(sorted_index, one) == chosen_names(packed, other)
    assert (np.diff(other.chosen) > 0).all()
    assert np.bincount(other.chosen_labels).tolist() == [3] * 7


def test_the_chosen_images_do_not_depend_on_other_classes() -> None:
    small, large = index_of(images(*CLASSES[:5])), index_of(images(*CLASSES))
    of_small = chosen_names(small, choose_subset(small, classes=None, per_class=3, seed=5))
    of_large = chosen_names(large, choose_subset(large, classes=None, per_class=3, seed=5))
    assert of_small == {name for name in of_large if name.split("/")[0] in CLASSES[:5]}


def test_validation_takes_the_classes_of_training_and_numbers_them_alike() -> None:
    train = choose_subset(index_of(images(*CLASSES)), classes=10, per_class=5, seed=5)
    val_index = index_of(images(*CLASSES, "a-first", each=4))
    val = choose_subset(val_index, classes=10, per_class=2, seed=5, names=train.classes)
    assert val.classes == train.classes
    assert np.bincount(val.chosen_labels).tolist() == [2] * 10
    assert {val_index.name(n).split("/")[0] for n in val.chosen.tolist()} == set(train.classes)


def test_more_classes_than_there_are_is_an_error() -> None:
    with pytest.raises(UserError, match="subset_classes is 100; /data/train has 40 classes with images") as caught:
        choose_subset(index_of(images(*CLASSES)), classes=100, per_class=None, seed=0)
    assert caught.value.hint == "subset_classes=40"


def test_a_validation_set_with_none_of_the_classes_is_an_error() -> None:
    with pytest.raises(UserError, match="none of the 2 chosen classes: cat, dog"):
        choose_subset(index_of(images("cats", "dogs")), classes=None, per_class=None, seed=0, names=["cat", "dog"])


def test_a_missing_validation_set_is_recorded_as_null() -> None:
    train = choose_subset(index_of(images(*CLASSES)), classes=3, per_class=5, seed=42)
    assert subset_record(train, None, 42)["samples"] == {"train": 15, "val": None}


def test_small_and_empty_classes_give_what_they_have() -> None:
    subset = choose_subset(index_of(images("a", each=2) | images("b", each=9)), classes=None, per_class=5, seed=0)
    assert np.bincount(subset.chosen_labels).tolist() == [2, 5]
    index = index_of(images(*CLASSES[:5]) | {name: [] for name in CLASSES[5:]})
    assert choose_subset(index, classes=5, per_class=None, seed=3).classes == tuple(CLASSES[:5])
    val = choose_subset(index_of(images("a", "c")), classes=None, per_class=1, seed=0, names=["a", "b", "c"])
    assert val.classes == ("a", "b", "c")
    assert val.chosen_labels.tolist() == [0, 2]
