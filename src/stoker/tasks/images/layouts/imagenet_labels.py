"""The classes of ImageNet's 50,000 validation images, where they lie in one folder beside a file of labels.

Two such files are in circulation. `LOC_val_solution.csv` (Kaggle) has the WordNet id of each image. The devkit's
`ILSVRC2012_validation_ground_truth.txt` has one number per image, 1 to 1000, and these are NOT positions in the sorted
list of ids: the devkit's own table is needed, and guessing it is the classic way to lose a week to accuracy at chance.

Whatever the files say is compared with the ReaL labels (Beyer et al. 2020, shipped with timm), which were made
independently: right labels agree for 90.0 % of all images, permuted ones for 0.1 %. The table cannot be derived from
ReaL alone: by majority vote 9 of 1,000 classes come out wrong, by the best one-to-one assignment 2 (laptop and
notebook computer), both measured with the true labels.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from stoker.core.console import shown, some
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.stores import ReadFailure, is_url, open_store
from stoker.tasks.images.layouts.imagenet import CLASSES, is_synset, real_labels, synsets

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


class LabelFileWrong(UserError):
    """A file of labels that cannot be trusted, with the line at fault."""

    def __init__(self, path: str, line: int | None, seen: str, hint: str) -> None:
        where = f"{redact_text(path)}, line {line:,}" if line is not None else redact_text(path)
        super().__init__("labels-unusable", f"{where}: {seen}", why="images would get wrong classes", hint=hint)


def find_labels(place: str) -> str | None:
    """The file of labels for the flat folder of validation images: in it, or up to four folders above."""
    for folder in _upwards(place):
        if exists(f"{folder}/{SOLUTION}"):
            return f"{folder}/{SOLUTION}"
        for devkit in DEVKITS:
            if exists(path := f"{folder}/{devkit}/{GROUND_TRUTH}".replace("//ILSVRC2012_val", "/ILSVRC2012_val")):
                return path
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


def _upwards(place: str) -> list[str]:
    folders: list[str] = []
    folder = place.rstrip("/")
    while len(folders) < 5 and folder and not folder.endswith(":/"):
        folders.append(folder)
        folder = folder.rpartition("/")[0]
    return folders


def exists(path: str) -> bool:
    """Whether there is a file or object."""
    if not is_url(path):
        return Path(path).is_file()
    folder, _, name = path.rpartition("/")
    try:
        open_store(folder).size_of(name)
    except ReadFailure:
        return False
    return True


def read_text(path: str) -> str:
    """A file's text, or an object's; a byte order mark is dropped."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise LabelFileWrong(path, line, "it is not UTF-8 text", "save it as UTF-8") from None


def read_bytes(path: str) -> bytes:
    """The content of a file or object; raises UserError."""
    folder, _, name = path.rpartition("/")
    try:
        return bytes(open_store(folder or "/").read(name))
    except ReadFailure as failure:
        raise UserError(
            "data-not-readable",
            f"{redact_text(path)} cannot be read: {failure.detail or failure.reason}",
            why="the classes of the images are in it",
            hint="check its name and permissions",
        ) from None
