"""The checks of labels: right folders pass, planted permutations are named."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from stoker.core.finding import Finding
from stoker.tasks.images.label_checks import LABEL_CHECKS
from stoker.tasks.images.layouts.imagenet import DEVKIT_FIRST, real_labels, synsets
from stoker.tasks.images.layouts.sample_index import SampleSet
from stoker.tasks.images.models import restore_model
from tests.support.trained import train_on_colours, write_colours
from tests.tasks.images.data_sets import listed, outcome, subject_of, subject_with

Folders = dict[str, list[str]]
CLASSES = synsets()


def true_classes(agree: float = 0.9) -> list[int]:
    """A class for each validation image that ReaL labels agree with for that share of the images."""
    rng = random.Random(0)
    return [rng.choice(entry) if entry and rng.random() < agree else rng.randrange(1000) for entry in real_labels()]


def validation(folder_of: Callable[[int], str | None], agree: float = 0.9) -> Folders:
    """The 50,000 names, those of each class in the folder that the function gives it, or left out."""
    found: Folders = {}
    for number, label in enumerate(true_classes(agree), 1):
        folder = folder_of(label)
        if folder is not None:
            found.setdefault(folder, []).append(f"ILSVRC2012_val_{number:08d}.JPEG")
    return found


def training(classes: Sequence[str], folders: Mapping[str, str] | None = None) -> SampleSet:
    """Three training files of each class, in its folder."""
    named = folders or {synset: synset for synset in classes}
    return listed({named[synset]: [f"{synset}_{number}.JPEG" for number in (18, 36, 117)] for synset in classes})


def by_names(train: SampleSet, val: Folders) -> Finding:
    found: Finding = outcome(LABEL_CHECKS, "val-labels", subject_with(train, listed(val)))
    return found


def test_right_folders_agree_with_the_known_labels_and_make_a_network_unnecessary() -> None:
    train, val = training(CLASSES), validation(lambda label: CLASSES[label])
    found = by_names(train, val)
    assert found.status == "passed", found
    assert found.facts["images"] == 46_837
    assert found.facts["share"] == pytest.approx(0.9, abs=0.01)
    assert "of 46,837 validation images agree with their folder by ReaL labels" in found.seen
    assert outcome(LABEL_CHECKS, "labels-by-network", subject_with(train, listed(val))) is None
    # A few classes are enough, and the others are left out.
    found = by_names(training(CLASSES[::10]), val)
    assert (found.status, found.facts["folders"]) == ("passed", 100)
    assert by_names(training(CLASSES[3:5]), {name: val[name] for name in CLASSES[3:5]}).status == "passed"


def test_folders_may_be_numbers_or_names_that_the_training_files_explain() -> None:
    empty = listed({str(number): ["a.jpg"] for number in range(1000)})
    assert by_names(empty, validation(str)).status == "passed"
    words = {synset: f"word{999 - number}" for number, synset in enumerate(CLASSES)}
    val = validation(lambda label: words[CLASSES[label]])
    assert by_names(training(CLASSES, words), val).status == "passed"
    # A hundred classes that were numbered anew, in their order; and not in their order.
    some = {label: number for number, label in enumerate(range(5, 1000, 10))}
    few = listed({str(number): ["a.jpg"] for number in range(100)})
    val = validation(lambda label: str(some[label]) if label in some else None)
    assert by_names(few, val).status == "passed"
    val = validation(lambda label: str((some[label] * 7) % 100) if label in some else None)
    assert by_names(few, val).status == "failed"
    strange = validation(lambda label: f"word{label}")
    unknown = by_names(listed({name: ["a.jpg"] for name in strange}), strange)
    assert (unknown.status, unknown.fix is not None) == ("unknown", True)


@pytest.mark.parametrize(
    ("folder_of", "words"),
    [
        (lambda label: CLASSES[(label - 1) % 1000], "shifted by one: each folder holds the images of the next class"),
        (lambda label: CLASSES[(label + 3) % 1000], "shifted by 3: each folder holds the class 3 before"),
        (lambda label: CLASSES[{7: 900, 900: 7}.get(label, label)], f"{CLASSES[7]} and {CLASSES[900]} are swapped"),
    ],
)
def test_permuted_folders_are_named_with_their_rule(folder_of: Callable[[int], str], words: str) -> None:
    found = by_names(training(CLASSES), validation(folder_of))
    assert found.status == "failed"
    assert words in found.seen
    assert found.fix is not None
    right = {folder: synset for synset, folder in ((CLASSES[label], folder_of(label)) for label in range(1000))}
    assert all(right[folder] == held for folder, held in found.facts["holds"].items())
    assert len(found.facts["holds"]) >= (2 if "swapped" in words else 900)


def test_five_images_of_a_class_are_enough_if_all_folders_are_permuted() -> None:
    words = {synset: f"word{number:03d}" for number, synset in enumerate(CLASSES[:100])}
    val = validation(lambda label: f"word{(label - 1) % 100:03d}" if label < 100 else None)
    found = by_names(training(CLASSES[:100], words), {folder: files[:5] for folder, files in val.items()})
    assert found.status == "failed"
    assert "shifted by one: each folder holds the images of the next class" in found.seen


def test_the_order_of_the_devkit_is_recognised() -> None:
    # Class number i of the devkit went into the folder of the i-th name.
    rest = [synset for synset in CLASSES if synset not in DEVKIT_FIRST]
    random.Random(2).shuffle(rest)
    place = {synset: CLASSES[number] for number, synset in enumerate([*DEVKIT_FIRST, *rest])}
    found = by_names(training(CLASSES), validation(lambda label: place[CLASSES[label]]))
    assert found.status == "failed"
    assert "in the order of the devkit (ILSVRC2012_ID)" in found.seen
    assert any("holds n02119789 kit fox" in line for line in found.details)


def test_images_spread_over_the_folders_are_not_called_a_permutation() -> None:
    found = by_names(training(CLASSES), validation(lambda label: CLASSES[label], agree=0.0))
    assert found.status == "failed"
    assert "no order of the folders explains it" in found.seen
    assert "LOC_val_solution.csv" in (found.fix or "")


def test_the_check_of_names_does_not_apply_to_other_data_and_imports_no_timm() -> None:
    train = training(CLASSES[:3])
    assert outcome(LABEL_CHECKS, "val-labels", subject_with(train, None)) is None
    assert outcome(LABEL_CHECKS, "val-labels", subject_with(train, train)) is None
    text = (
        "import sys; from stoker.tasks.images.layouts.imagenet import real_labels\n"
        "assert real_labels() and 'timm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", text], check=True)


def test_training_files_are_compared_with_their_folder() -> None:
    def found(train: SampleSet) -> Any:
        return outcome(LABEL_CHECKS, "train-labels", subject_with(train, None))

    right = found(training(CLASSES[:20]))
    assert (right.status, right.facts["files"]) == ("passed", 60)
    swapped = dict(zip(CLASSES[:20], [CLASSES[1], CLASSES[0], *CLASSES[2:20]], strict=True))
    wrong = found(training(CLASSES[:20], swapped))
    assert (wrong.status, wrong.facts["wrong"]) == ("failed", 6)
    assert wrong.facts["folders"] == list(CLASSES[:2])
    assert "n01440764 tench has 3 files of n01443537 goldfish" in wrong.details
    assert found(listed({"cat": ["a.jpg"], "dog": ["b.jpg"]})) is None, "other names say nothing"
    assert found(listed({CLASSES[0]: ["a.jpg"], CLASSES[1]: ["b.jpg"]})) is None


@pytest.fixture(scope="module")
def colours(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Images of three colours, and the run folder of a network that knows them."""
    folder = tmp_path_factory.mktemp("colours")
    write_colours(folder / "data")
    cores = os.sched_getaffinity(0)
    # Threads of one process that wait for each other on busy cores are a hundred times slower.
    os.sched_setaffinity(0, {min(cores)})
    try:
        return folder / "data", train_on_colours(folder, epochs=4)
    finally:
        os.sched_setaffinity(0, cores)


def permuted_copy(data: Path, to: Path) -> Path:
    """The same images; in val, blue and red are swapped."""
    shutil.copytree(data, to)
    for old, new in (("blue", "spare"), ("red", "blue"), ("spare", "red")):
        (to / "val" / old).rename(to / "val" / new)
    return to


def test_a_checkpoint_or_a_file_of_weights_tells_how_folders_are_permuted(
    colours: tuple[Path, Path], tmp_path: Path
) -> None:
    data, run = colours
    file = tmp_path / "weights.safetensors"
    trained = restore_model(run).model.state_dict()
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in trained.items()}, file)
    permuted = permuted_copy(data, tmp_path / "data")
    for weights in (run, file):
        right = outcome(LABEL_CHECKS, "labels-by-network", subject_of(data, weights=weights))
        assert (right.status, right.facts["classes"]) == ("passed", 3), right
        wrong = outcome(LABEL_CHECKS, "labels-by-network", subject_of(permuted, weights=weights))
        assert (wrong.status, wrong.facts["holds"]) == ("failed", {"blue": "red", "red": "blue"})
        assert "blue and red are swapped" in wrong.seen


def test_without_a_network_that_knows_the_classes_nothing_is_claimed(
    colours: tuple[Path, Path], tmp_path: Path
) -> None:
    data, run = colours
    none = outcome(LABEL_CHECKS, "labels-by-network", subject_of(data))
    assert (none.status, none.fix is not None) == ("unknown", True)
    assert "stoker verify tiny.yaml --weights FILE" in none.fix
    other = shutil.copytree(data, tmp_path / "other")
    for split in ("train", "val"):
        for folder in (other / split).iterdir():
            folder.rename(folder.with_name(f"light-{folder.name}"))
    assert outcome(LABEL_CHECKS, "labels-by-network", subject_of(other, weights=run)).status == "unknown"
    # All images alike: the network has nothing to go by.
    grey = shutil.copytree(data, tmp_path / "grey")
    one = next((data / "val" / "red").iterdir()).read_bytes()
    for file in (grey / "val").rglob("*.jpg"):
        file.write_bytes(one)
    weak = outcome(LABEL_CHECKS, "labels-by-network", subject_of(grey, weights=run))
    assert weak.status == "unknown", weak
