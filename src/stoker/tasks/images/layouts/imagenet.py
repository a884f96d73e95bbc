"""ImageNet: its class names and counts, known without its images, and the classes of the 50,000 validation images where
they are in one folder beside a file of labels.

Names and ReaL labels (Beyer et al., 'Are we done with ImageNet?', 2020) are read from the package data of timm, without
importing it: that takes seconds.

Two files of labels are in circulation. `LOC_val_solution.csv` (Kaggle) has the WordNet id of each image. The devkit's
`ILSVRC2012_validation_ground_truth.txt` has one number per image, 1 to 1000, and these are NOT positions in the sorted
list of ids: the devkit's own table is needed, and guessing it is the classic way to lose a week to accuracy at chance.

Whatever the files say is compared with the ReaL labels, which were made independently: right labels agree for 90.0 % of
all images, permuted ones for 0.1 %. The table cannot be derived from ReaL alone: by majority vote 9 of 1,000 classes
come out wrong, by the best one-to-one assignment 2 (laptop and notebook computer), both measured with the true labels.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import shown, some
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.tasks.images.layouts.sample_index import SampleIndex, sorted_index
from stoker.tasks.images.layouts.sample_lists import LabelFileWrong, exists, numbered, read_bytes, read_text

CLASSES = 1000
TRAIN_IMAGES = 1_281_167
VAL_IMAGES = 50_000
TRAIN_PER_CLASS = (732, 1300)
VAL_PER_CLASS = 50
DEVKIT_FIRST = ("n02119789", "n02100735", "n02110185")
"""The classes 1 to 3 of the devkit (ILSVRC2012_ID in meta.mat), whose order is not that of the names."""

_SYNSET = re.compile(r"n\d{8}")
# A name's last part, up to the zero that ends it in `_ended_names`.
_VAL_NAME = re.compile(rb"ILSVRC2012_val_(\d{8})[^/\0]*\0")
_TRAIN_NAME = re.compile(rb"(?<![^/\0])n(\d{8})_[^/\0]*\0")

SOLUTION = "LOC_val_solution.csv"
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
TABLES = ("meta.mat", "map_clsloc.txt", "synsets.txt")
"""Tables of ILSVRC numbers and WordNet ids: the devkit's of 2012, the one of later years, and one id per line."""
DEVKITS = ("", "ILSVRC2012_devkit_t12/data", "devkit/data", "ILSVRC/devkit/data")
IMAGE_NUMBER = re.compile(r"ILSVRC2012_val_(\d{8})")

# Right labels agree for 90.0 % of all images, and for at least 17.5 % of each class; permuted ones for 0.1 %.
LEAST_AGREEMENT = 0.7
LEAST_CLASS_AGREEMENT = 0.05
# Fewer images of a class may all be among those that ReaL corrected.
LEAST_IMAGES = 20


@cache
def synsets() -> tuple[str, ...]:
    """The 1,000 classes in the order of their numbers, which is that of their names; empty if timm lacks the list."""
    text = _read("imagenet_synsets.txt")
    return tuple(text.split()) if text is not None else ()


@cache
def real_labels() -> tuple[tuple[int, ...], ...]:
    """The ReaL classes of the 50,000 validation images by number; empty if timm lacks them. 3,163 images have none."""
    text = _read("imagenet_real_labels.json")
    return tuple(map(tuple, json.loads(text))) if text is not None else ()


def spoken(name: str) -> str:
    """The name of a class, with its meaning if it is one of WordNet's numbers: n01440764 tench."""
    meaning = _lemmas().get(name) if is_synset(name) else None
    return name if meaning is None else f"{name} {meaning}"


@cache
def _lemmas() -> dict[str, str]:
    """The first word for each of WordNet's numbers."""
    lines = (line.partition("\t") for line in (_read("imagenet_synset_to_lemma.txt") or "").splitlines())
    return {synset: names.partition(",")[0].strip() for synset, _, names in lines}


def is_synset(name: str) -> bool:
    """Whether a folder is named like a class of ImageNet, any of its 21,841."""
    return _SYNSET.fullmatch(name) is not None


def is_whole_imagenet(classes: Sequence[str]) -> bool:
    return len(classes) == len(synsets()) > 0 and set(classes) == set(synsets())


def is_imagenet(classes: Sequence[str]) -> bool:
    """Whether a model's outputs are ImageNet's 1,000 classes in their usual, sorted order."""
    return len(classes) == CLASSES and list(classes) == sorted(classes) and all(map(is_synset, classes))


def are_class_numbers(folders: Sequence[str]) -> bool:
    """Whether class folders are named by number, as ImageNet-V2's are: 0 to 999, which do not sort as numbers."""
    return all(name.isascii() and name.isdigit() and name == str(int(name)) and int(name) < CLASSES for name in folders)


def validation_numbers(index: SampleIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples named ILSVRC2012_val_…, and their numbers from 1."""
    return _found(index, _VAL_NAME)


def synsets_in_names(index: SampleIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples named like ImageNet's training images, n01440764_18.JPEG, and the numbers of the synsets in them."""
    return _found(index, _TRAIN_NAME)


def _found(index: SampleIndex, pattern: re.Pattern[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The samples whose last part of the name matches, and the numbers in it."""
    # One pass over all names: a million of them one by one would take longer than everything else.
    ends = np.asarray(index.name_ends)
    text = np.insert(np.asarray(index.name_bytes), ends, 0).tobytes()
    starts, numbers = [], []
    for match in pattern.finditer(text):
        starts.append(match.start())
        numbers.append(int(match[1]))
    samples = np.searchsorted(ends + np.arange(len(ends)), np.array(starts, np.int64), side="right")
    return samples.astype(np.int64), np.array(numbers, np.int64)


def _read(name: str) -> str | None:
    package = importlib.util.find_spec("timm")
    if package is None or package.origin is None:
        return None
    file = Path(package.origin).parent / "data" / "_info" / name
    return file.read_text(encoding="utf-8") if file.is_file() else None


def find_labels(place: str) -> str | None:
    """The file of labels for the flat folder of validation images: in it, or up to four folders above."""
    folder = place.rstrip("/")
    for _ in range(5):
        if not folder or folder.endswith(":/"):
            break
        if exists(f"{folder}/{SOLUTION}"):
            return f"{folder}/{SOLUTION}"
        for devkit in DEVKITS:
            if exists(path := f"{folder}/{devkit}/{GROUND_TRUTH}".replace("//ILSVRC2012_val", "/ILSVRC2012_val")):
                return path
        folder = folder.rpartition("/")[0]
    return None


def classes_of_images(labels_file: str, names: Sequence[str]) -> dict[str, str]:
    """The WordNet id of each of these images; raises LabelFileWrong if the file cannot be right."""
    if labels_file.endswith(SOLUTION):
        known = read_solution(labels_file)
        found = {name: known[stem] for name in names if (stem := name.rpartition(".")[0]) in known}
    else:
        by_number = read_ground_truth(labels_file)
        numbers = {name: int(match[1]) for name in names if (match := IMAGE_NUMBER.match(name))}
        found = {name: by_number[at - 1] for name, at in numbers.items() if 1 <= at <= len(by_number)}
    if without := [name for name in names if name not in found]:
        raise LabelFileWrong(
            labels_file,
            None,
            f"no row for {count(len(without), 'image')}: {some(without)}",
            "the file must have a row for every image; is it the file of another folder?",
        )
    check_with_real(labels_file, {int(m[1]): wnid for name, wnid in found.items() if (m := IMAGE_NUMBER.match(name))})
    return found


def index_of_flat(place: str, names: Sequence[str], labels_file: str) -> SampleIndex:
    """The index of a folder of validation images, whose classes are in a file of labels."""
    classes = classes_of_images(labels_file, names)
    note = (
        f"{count(len(names), 'image')} of {shown(redact_text(place))}: classes from {shown(redact_text(labels_file))}"
    )
    labels = numbered([classes[name] for name in names])
    return sorted_index(place, *labels, names, {"layout": "flat", "notes": [note]})


def read_solution(path: str) -> dict[str, str]:
    """Kaggle's file: WordNet id by image, without its suffix."""
    rows = csv.reader(io.StringIO(read_text(path)))
    header = next(rows, [])
    if [cell.strip() for cell in header] != ["ImageId", "PredictionString"]:
        raise LabelFileWrong(path, 1, f"found the columns {some(header)}", "the columns are ImageId,PredictionString")
    found: dict[str, str] = {}
    for row in rows:
        if not row:
            continue
        wnids = {word for word in row[-1].split() if not word.lstrip("-").isdigit()}
        if len(row) != 2 or len(wnids) != 1 or not is_synset(wnid := wnids.pop()):
            seen = f"expected an image and one WordNet id with boxes, found {shown(','.join(row))[:80]}"
            raise LabelFileWrong(
                path, rows.line_num, seen, "a row is ILSVRC2012_val_00000001,n01751748 111 108 189 354"
            )
        if row[0] in found:
            raise LabelFileWrong(path, rows.line_num, f"a second row for {shown(row[0])}", "an image has one row")
        found[row[0]] = wnid
    return found


def read_ground_truth(path: str) -> list[str]:
    """The devkit's file: the WordNet id of each image, in the order of their numbers."""
    numbers: list[int] = []
    for line, text in enumerate(read_text(path).splitlines(), 1):
        if not text.strip().isdigit() or not 1 <= int(text) <= CLASSES:
            seen = f"expected a number from 1 to {CLASSES:,}, found {shown(text)[:60]!r}"
            raise LabelFileWrong(path, line, seen, "use the file from ILSVRC2012_devkit_t12/data")
        numbers.append(int(text))
    table_file, wnids = _number_table(path)
    if unknown := next((number for number in numbers if number not in wnids), None):
        raise LabelFileWrong(table_file, None, f"the number {unknown} is not in it", "use the devkit's meta.mat")
    classes = [wnids[number] for number in numbers]
    check_with_real(f"{path} with {Path(table_file).name}", dict(enumerate(classes, 1)))
    return classes


def _number_table(ground_truth: str) -> tuple[str, dict[int, str]]:
    folder = ground_truth.rpartition("/")[0]
    for name in TABLES:
        path = f"{folder}/{name}"
        if not exists(path):
            continue
        if name == "meta.mat":
            return path, _read_meta(path)
        lines = [line.split() for line in read_text(path).splitlines() if line.strip()]
        if name == "map_clsloc.txt":
            return path, {int(words[1]): words[0] for words in lines if len(words) > 1 and words[1].isdigit()}
        return path, {number: words[0] for number, words in enumerate(lines, 1)}
    raise LabelFileWrong(
        ground_truth,
        None,
        f"its numbers are ILSVRC's own, and there is no table of them beside it ({', '.join(TABLES)})",
        f"copy meta.mat from the devkit into {redact_text(folder)}; "
        f"or download {SOLUTION} from Kaggle, which names the classes",
    )


def _read_meta(path: str) -> dict[int, str]:
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(
            "package-missing", f"reading {redact_text(path)} needs scipy", hint="pip install scipy"
        ) from None
    try:
        synsets = loadmat(io.BytesIO(read_bytes(path)), squeeze_me=True)["synsets"]
        table = {int(one["ILSVRC2012_ID"]): str(one["WNID"]) for one in np.atleast_1d(synsets)}
    except Exception as error:  # scipy raises many kinds for a damaged file
        raise LabelFileWrong(path, None, f"not the devkit's table ({error})", "unpack the devkit again") from None
    # Numbers above 1,000 are inner nodes of the hierarchy.
    return {number: wnid for number, wnid in table.items() if number <= CLASSES}


def check_with_real(source: str, classes: Mapping[int, str]) -> None:
    """Refuses WordNet ids of validation images, by number, that disagree with the ReaL labels."""
    real, wnids = real_labels(), {wnid: number for number, wnid in enumerate(synsets())}
    if not real or not wnids:
        return
    right, judged = np.zeros(CLASSES, np.int64), np.zeros(CLASSES, np.int64)
    for number, wnid in classes.items():
        if number <= len(real) and real[number - 1] and wnid in wnids:
            judged[wnids[wnid]] += 1
            right[wnids[wnid]] += wnids[wnid] in real[number - 1]
    if judged.sum() < LEAST_IMAGES:
        return
    agreement = float(right.sum() / judged.sum())
    wrong = np.flatnonzero((judged >= LEAST_IMAGES) & (right < LEAST_CLASS_AGREEMENT * judged))
    if agreement >= LEAST_AGREEMENT and not len(wrong):
        return
    names = list(wnids)
    seen = f"its labels agree with ImageNet's ReaL labels for {agreement:.1%} of {judged.sum():,} images"
    if agreement >= LEAST_AGREEMENT:
        seen += f", but for hardly any of {some([names[number] for number in wrong])}"
    raise LabelFileWrong(source, None, f"{seen} (right ones: 90 %)", f"the classes are permuted: use {SOLUTION}")
