"""The cases of a data set, by layout: the Vesuvius surface competition's, nnU-Net's raw folders, a YAML list of pairs,
or a pack made of any of them.

A case is a volume to train on or to predict: its image (one file a channel), its label if there is one, and its group,
which is never divided between training and validation.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any, Literal
from urllib.parse import unquote

import yaml

from stoker.core.console import some
from stoker.core.errors import UserError, did_you_mean
from stoker.core.units import count
from stoker.io.stores import ReadFailure, is_url
from stoker.tasks.volumes.cases.places import Place, UrlPath, bytes_of, place_at, ref_to
from stoker.tasks.volumes.formats.opening import VolumeRef, local_path, suffix_of
from stoker.tasks.volumes.formats.volume import Region
from stoker.tasks.volumes.pack.index import INDEX as PACK_INDEX
from stoker.tasks.volumes.pack.index import PackedFile, read_index
from stoker.tasks.volumes.patches.labels import LabelRules

Part = Literal["train", "test"]
# A list of a hundred thousand cases fits.
MAX_TEXT_BYTES = 64_000_000


@dataclass(frozen=True)
class Case:
    """One volume, or a box of one."""

    id: str
    group: str
    images: tuple[VolumeRef, ...]
    """One for each channel."""
    label: VolumeRef | None
    box: Region | None = None
    """Only this part of it, after a split by region; None for all of it."""

    @property
    def refs(self) -> tuple[VolumeRef, ...]:
        """Its channels, and its label if it has one."""
        return self.images if self.label is None else (*self.images, self.label)


@dataclass(frozen=True)
class CaseList:
    """The cases of a data set, sorted by id, and remarks about them."""

    cases: tuple[Case, ...]
    rules: LabelRules | None = None
    """The classes, if the layout names them."""
    notes: tuple[str, ...] = ()


def open_cases(root: str | Path, part: Part = "train") -> CaseList:
    """The cases below a folder or URL, or in a YAML list; the layout is recognised by its files."""
    place = place_at(root)
    if place.suffix.lower() in (".yaml", ".yml") and not place.is_dir():
        listed = _from_list(place)
    elif not place.is_dir():
        raise UserError("data-not-found", f"{place} does not exist or is not a folder", hint="data_root=FOLDER")
    elif (place / PACK_INDEX).is_file():
        listed = _from_pack(place, part)
    elif (place / "dataset.json").is_file():
        listed = _from_nnunet(place, part)
    elif (place / "train.csv").is_file() or (part == "test" and (place / "test_images").is_dir()):
        listed = _from_competition(place, part)
    else:
        raise UserError(
            "layout-unknown",
            f"{place} has none of train.csv, dataset.json and {PACK_INDEX}",
            why="the layouts are the Vesuvius competition's, nnU-Net's raw folders, a YAML list of pairs, and a pack",
            hint="data_root=cases.yaml with a list of `- {image: a.tif, label: b.tif}`",
        )
    return _checked(listed, str(place))


def _from_competition(root: Place, part: Part) -> CaseList:
    """`train.csv` with `id` and `scroll_id`; ids whose files were moved to `deprecated_*` are left out."""
    if part == "test":
        folder = root / "test_images"
        found = volumes_in(folder)
        return CaseList(tuple(Case(name, name, (ref_to(path),), None) for name, path in found.items()))
    images, labels = volumes_in(root / "train_images"), volumes_in(root / "train_labels")
    retired_files: set[str] = set()
    for folder in files_in(root):
        if folder.name.startswith("deprecated_"):
            retired_files |= volumes_in(folder).keys()
    cases, retired, lost = [], [], []
    for name, scroll in _rows_of_table(root / "train.csv"):
        if name in images and name in labels:
            cases.append(Case(name, scroll, (ref_to(images[name]),), ref_to(labels[name])))
        elif name in retired_files:
            retired.append(name)
        else:
            lost.append(name)
    if lost:
        raise UserError(
            "volumes-missing",
            f"{root / 'train.csv'} lists {count(len(lost), 'volume')} without an image or a label: {some(lost)}",
            why="a volume that is missing now may be there in the next run, which would train on other data",
            hint="copy the rest of train_images and train_labels, or leave these rows out",
        )
    notes = []
    if retired:
        notes.append(f"{count(len(retired), 'volume')} of train.csv retired (deprecated_*): {some(retired)}")
    if unlisted := sorted((images.keys() & labels.keys()) - {case.id for case in cases} - set(retired)):
        notes.append(f"{count(len(unlisted), 'volume')} not in train.csv, left out: {some(unlisted)}")
    return CaseList(tuple(cases), LabelRules(2, 2), tuple(notes))


def _rows_of_table(path: Place) -> Iterator[tuple[str, str]]:
    rows = csv.DictReader(_text(path).splitlines())
    names = [name.strip() for name in rows.fieldnames or []]
    if not {"id", "scroll_id"} <= set(names):
        raise UserError(
            "table-without-columns",
            f"{path} has the columns {', '.join(names) or '(none)'}",
            why="id names a volume's files, scroll_id the scroll that must not be divided by a split",
            hint="the first line must contain id,scroll_id",
        )
    for row in rows:
        name, scroll = (row.get("id") or "").strip(), (row.get("scroll_id") or "").strip()
        if not name or not scroll or "/" in name or name.startswith("."):
            raise UserError(
                "bad-row", f"{path}:{rows.line_num}: id {name!r}, scroll_id {scroll!r}", hint=f"edit {path}"
            )
        yield name, scroll


def _from_nnunet(root: Place, part: Part) -> CaseList:
    """`imagesTr/ID_0000.nii.gz …`, `labelsTr/ID.nii.gz`; `dataset.json` in the old form or that of version 2."""
    try:
        meta = json.loads(_text(root / "dataset.json"))
    except ValueError:
        meta = None
    if not isinstance(meta, dict):
        raise _bad_dataset(root, "it is not a JSON object")
    channels = meta.get("channel_names", meta.get("modality"))
    if not isinstance(channels, Mapping) or not channels:
        raise _bad_dataset(root, "it names no channels (channel_names, or modality in the old form)")
    rules = _nnunet_rules(root, meta)
    ending = str(meta.get("file_ending", ".nii.gz"))
    images: dict[str, dict[int, Place]] = {}
    folder = root / ("imagesTr" if part == "train" else "imagesTs")
    for path in files_in(folder):
        found = re.fullmatch(r"(.+)_(\d{4})", path.name.removesuffix(ending)) if path.name.endswith(ending) else None
        if found:
            images.setdefault(found[1], {})[int(found[2])] = path
    wanted = list(range(len(channels)))
    labels = {path.name: path for path in files_in(root / "labelsTr")} if part == "train" else {}
    cases, lost = [], []
    for name, files in sorted(images.items()):
        label = labels.get(f"{name}{ending}")
        if sorted(files) != wanted or (part == "train" and label is None):
            lost.append(name)
            continue
        refs = tuple(ref_to(files[channel]) for channel in wanted)
        cases.append(Case(name, name, refs, None if label is None else ref_to(label)))
    if lost:
        raise UserError(
            "volumes-missing",
            f"{count(len(lost), 'case')} in {folder} without all channels, or without a label: {some(lost)}",
            why=f"dataset.json names the channels {', '.join(map(str, channels.values()))}",
            hint=f"the files of a case are imagesTr/ID_0000{ending} and labelsTr/ID{ending}",
        )
    announced = meta.get("numTraining")
    notes = []
    if part == "train" and isinstance(announced, int) and announced != len(cases):
        notes.append(f"dataset.json announces {announced} training cases; there are {len(cases)}")
    return CaseList(tuple(cases), rules, tuple(notes))


def _nnunet_rules(root: Place, meta: Mapping[str, Any]) -> LabelRules:
    labels = meta.get("labels")
    if not isinstance(labels, Mapping) or not labels:
        raise _bad_dataset(root, "it has no labels")
    try:
        # The old form maps "0" to a name, the new one a name to 0.
        is_old = all(re.fullmatch(r"\d+", str(key)) for key in labels) and all(
            isinstance(value, str) for value in labels.values()
        )
        values = {str(name): int(value) for value, name in labels.items()} if is_old else dict(labels)
        if any(isinstance(value, list | tuple) for value in values.values()):
            raise _bad_dataset(root, "its labels are regions made of several labels, which are not supported")
        values = {name: int(value) for name, value in values.items()}
    except (TypeError, ValueError):
        raise _bad_dataset(root, "its labels are not numbers") from None
    ignore = values.pop("ignore", None)
    if sorted(values.values()) != list(range(len(values))):
        raise _bad_dataset(root, f"its labels are {sorted(values.values())}; they must be 0 to {len(values) - 1}")
    return LabelRules(len(values), ignore)


def _from_list(path: Place) -> CaseList:
    """`cases:` (or just the list) with `image` (a path, or one for each channel), `label`, `group`, `id`, `level`."""
    try:
        document = yaml.safe_load(_text(path))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise UserError("list-unreadable", f"{path} is not YAML: {reason}", hint=f"edit {path}") from None
    rules = None
    if isinstance(document, Mapping):
        _refuse_unknown(path, "the list", document, ("cases", "classes", "ignore_label"))
        if "classes" in document:
            ignore = document.get("ignore_label")
            rules = LabelRules(
                _whole_number(path, document["classes"]),
                None if ignore is None else _whole_number(path, ignore, least=None),
            )
        document = document.get("cases")
    if not isinstance(document, Sequence) or isinstance(document, str) or not document:
        raise UserError(
            "list-empty", f"{path} has no list of cases", hint="cases:\n  - {image: scan1.tif, label: mask1.tif}"
        )
    gone: list[str] = []
    found = [_listed_case(path, number, entry, gone) for number, entry in enumerate(document, 1)]
    if gone:
        raise UserError(
            "volumes-missing",
            f"{path} lists {count(len(gone), 'file')} that cannot be found: {some(gone)}",
            why="paths in a list are relative to the folder it is in",
            hint=f"edit {path}",
        )
    names = iter(_names([images[0].location for own, _, images, _ in found if not own]))
    cases = []
    for own, group, images, label in found:
        name = own or next(names)
        cases.append(Case(name, group or name, images, label))
    return CaseList(tuple(cases), rules)


def _listed_case(
    path: Place, number: int, entry: Any, gone: list[str]
) -> tuple[str, str, tuple[VolumeRef, ...], VolumeRef | None]:
    """Id and group (empty if they are not given), images and label of a case."""
    if not isinstance(entry, Mapping) or not entry.get("image"):
        raise UserError("bad-case", f"{path}: case {number} has no image", hint="- {image: a.tif, label: b.tif}")
    _refuse_unknown(path, f"case {number}", entry, ("id", "image", "label", "group", "level"))
    for key in ("id", "group"):
        if not isinstance(entry.get(key), str | int | float | None):
            raise UserError("bad-case", f"{path}: {key} of case {number} is not a word", hint=f"{key}: scan1")
    named = entry["image"] if isinstance(entry["image"], list) else [entry["image"]]
    level = _whole_number(path, entry.get("level", 0))
    images = tuple(_ref(path, one, level, gone) for one in named)
    label = None if entry.get("label") is None else _ref(path, entry["label"], level, gone)
    own, group = ("" if entry.get(key) in (None, "") else str(entry[key]) for key in ("id", "group"))
    return own, group, images, label


def _names(locations: Sequence[str]) -> list[str]:
    """An id for each volume: its file's name, or where names repeat (patient0/t1.nii.gz), that of its folder."""
    if not locations:
        return []
    parts = [unquote(one) if is_url(one) else one for one in locations]
    folders, files = zip(*(one.rstrip("/").rpartition("/")[::2] for one in parts), strict=True)
    stems = [file.removesuffix(suffix_of(file)) for file in files]
    above = [folder.rpartition("/")[2] for folder in folders]
    both = [f"{folder}_{stem}" for folder, stem in zip(above, stems, strict=True)]
    return next((names for names in (stems, above, both) if len(set(names)) == len(names) and all(names)), stems)


def _from_pack(root: Place, part: Part) -> CaseList:
    """The cases, groups and classes of a source that `stoker pack` has packed."""
    index = read_index(root)
    if isinstance(root, UrlPath) and any(file.facts.kind == "blocks" for case in index.cases for file in case.files):
        raise UserError(
            "pack-not-local",
            f"{root} has volumes in blocks, which are read from a local disk",
            why="they are mapped into memory",
            hint="copy the pack to a disk, or pack it again with --layout zarr",
        )

    def ref(file: PackedFile) -> VolumeRef:
        return replace(ref_to(root / file.path), packed=file.facts)

    cases = tuple(
        Case(case.id, case.group, tuple(map(ref, case.images)), None if case.label is None else ref(case.label))
        for case in index.cases
        if case.part == part
    )
    notes = list(index.notes)
    if index.skipped:
        left_out = [one["id"] for one in index.skipped]
        notes.append(f"{count(len(left_out), 'volume')} could not be packed: {some(left_out)}")
    rules = None if index.classes is None else LabelRules(index.classes, index.ignore)
    return CaseList(cases, rules, tuple(notes))


def _refuse_unknown(path: Place, what: str, entry: Mapping[Any, Any], known: tuple[str, ...]) -> None:
    for key in entry:
        if key not in known:
            raise UserError(
                "unknown-key",
                f"{path}: {what} has the key {short(key)}",
                why=f"known are {', '.join(known)}",
                hint=did_you_mean(str(key), known) if isinstance(key, str) else None,
            )


def _ref(path: Place, location: Any, level: int, gone: list[str]) -> VolumeRef:
    """The volume that a list names; one that is not there is added to `gone`."""
    if not isinstance(location, str) or not location:
        raise UserError("bad-case", f"{path}: {short(location)} is not a path", hint="- {image: a.tif, label: b.tif}")
    location = local_path(location)
    if is_url(location):
        # Existence is not checked: a bucket may be readable without being listable.
        return VolumeRef(location, level)
    place: Place
    try:
        if isinstance(path, UrlPath):
            place = path.parent / location
        else:
            place = Path(os.path.normpath(path.parent / Path(location).expanduser()))
        if not place.exists():
            gone.append(str(place))
    except (OSError, RuntimeError, ValueError) as error:  # a name that is too long, a home of nobody, a NUL byte
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError("bad-case", f"{path}: {short(location)}: {reason}", hint=f"edit {path}") from None
    return ref_to(place, level)


def _whole_number(path: Place, value: Any, least: int | None = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise UserError("bad-number", f"{path}: {short(value)} is not a whole number", hint=f"edit {path}")
    return value


def _checked(listed: CaseList, place: str) -> CaseList:
    """The cases sorted by id; refuses a list that is empty, and the same id or file twice."""
    if not listed.cases:
        raise UserError("no-cases", f"{place} has no volumes", hint=f"ls {place}")
    ids = Counter(case.id for case in listed.cases)
    if twice := sorted(name for name, times in ids.items() if times > 1):
        raise UserError(
            "case-twice",
            f"{place} has {count(len(twice), 'id')} more than once: {some(twice)}",
            why="a case could be in training and in validation at once",
            hint="give every case a different id",
        )
    # By the file behind a link: a link to it in another group would leak into validation.
    owners: dict[str, str] = {}
    for case in listed.cases:
        for ref in case.images:
            file = ref.location if is_url(ref.location) else os.path.realpath(ref.location)
            if (other := owners.setdefault(file, case.id)) != case.id:
                raise UserError(
                    "volume-twice",
                    f"{place}: the cases {other} and {case.id} have the same image, {ref.location}",
                    why="one could be trained on and the other validated on",
                    hint="list one of the two",
                )
    return CaseList(tuple(sorted(listed.cases, key=lambda case: case.id)), listed.rules, listed.notes)


def volumes_in(folder: Place) -> dict[str, Place]:
    """The volumes directly in a folder, by their name without suffix; empty if there is no such folder."""
    found: dict[str, Place] = {}
    for path in files_in(folder):
        suffix = suffix_of(path.name)
        if not suffix:
            continue
        name = path.name[: -len(suffix)]
        if name in found:
            raise UserError(
                "volume-twice",
                f"{found[name]} and {path} have the same name",
                hint="move one of the two files elsewhere",
            )
        found[name] = path
    return found


def files_in(folder: Place) -> list[Place]:
    """What is directly in a folder, sorted by name, without hidden names; empty if there is no such folder."""
    found: list[Place] = []
    try:
        found.extend(folder.iterdir())
        return sorted((path for path in found if not path.name.startswith(".")), key=lambda path: path.name)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            "data-not-readable", f"{folder} cannot be listed: {error.strerror}", hint=f"ls {folder}"
        ) from None


def _text(path: Place) -> str:
    try:
        content = bytes_of(path, MAX_TEXT_BYTES)
        if content is None:
            raise UserError("file-too-large", f"{path} has more than {MAX_TEXT_BYTES:,} bytes", hint=f"head {path}")
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, ReadFailure) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        reason = error.reason if isinstance(error, ReadFailure) else reason
        raise UserError("file-unreadable", f"{path} cannot be read: {reason}", hint=f"ls -l {path}") from None


def _bad_dataset(root: Place, reason: str) -> UserError:
    return UserError(
        "bad-dataset-json",
        f"{root / 'dataset.json'}: {reason}",
        why="it names the channels and labels of nnU-Net's raw folders",
        hint=f"edit {root / 'dataset.json'}",
    )
