"""The index of a pack of volumes, `volumes.json`: its cases, and what is known of every file. It is written last.

DST/.pack/lock                     one `stoker pack` at a time
DST/.pack/pack.json                how it is packed; written first
DST/.pack/cases/train/ID.json      what a finished case holds; written after its files
DST/train/images/ID.npy            the volumes; ID_0001.npy for a second channel
DST/train/labels/ID.npy
DST/volumes.json                   the index
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from stoker.core.errors import UserError
from stoker.core.files import has_whole_seal, sealed, write_text
from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.cases.places import Place, bytes_of
from stoker.tasks.volumes.formats.packed import KINDS, PackedFacts

INDEX = "volumes.json"
FORMAT = 1
# A hundred thousand volumes fit.
MAX_INDEX_BYTES = 256_000_000


@dataclass(frozen=True)
class PackedFile:
    path: str
    """Relative to the pack."""
    facts: PackedFacts


@dataclass(frozen=True)
class PackedCase:
    id: str
    group: str
    part: str
    images: tuple[PackedFile, ...]
    label: PackedFile | None

    @property
    def files(self) -> tuple[PackedFile, ...]:
        return self.images if self.label is None else (*self.images, self.label)

    def as_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for file in (*found["images"], *([found["label"]] if found["label"] else [])):
            file["facts"] = {name: value for name, value in file["facts"].items() if value is not None}
        return found


@dataclass(frozen=True)
class PackIndex:
    """Everything that `volumes.json` says."""

    cases: tuple[PackedCase, ...]
    classes: int | None = None
    ignore: int | None = None
    notes: tuple[str, ...] = ()
    """Remarks about the source, such as retired volumes."""
    skipped: tuple[dict[str, str], ...] = ()
    """Volumes that could not be read when it was packed."""
    options: dict[str, Any] = field(default_factory=dict)


def write_index(root: Path, index: PackIndex) -> None:
    """Writes the index: one line for a case, and a checksum over all."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "classes": index.classes,
        "ignore": index.ignore,
        "notes": list(index.notes),
        "skipped": list(index.skipped),
        "options": index.options,
        "cases": [case.as_dict() for case in index.cases],
    }
    content["xxh3"] = _digest(content)
    head = {name: value for name, value in content.items() if name != "cases"}
    cases = ",\n".join(json.dumps(case) for case in content["cases"])
    write_text(root / INDEX, json.dumps(head)[:-1] + ', "cases": [\n' + cases + "\n]}\n")


def read_index(root: Place) -> PackIndex:
    """The index of a pack, checked; raises UserError."""
    path = root / INDEX
    try:
        text = bytes_of(path, MAX_INDEX_BYTES)
        if text is None:
            raise ValueError("it is larger than any index")
        content = json.loads(text)
        if content.get("format") != FORMAT:
            raise ValueError(f"its format is {content.get('format')}; this version reads {FORMAT}")
        if content.pop("xxh3") != _digest(content):
            raise ValueError("its checksum is wrong")
        return PackIndex(
            tuple(case_of(one) for one in content["cases"]),
            content["classes"],
            content["ignore"],
            tuple(content["notes"]),
            tuple(content["skipped"]),
            content["options"],
        )
    except OSError as error:
        reason = error.strerror or str(error)
    except ReadFailure as failure:
        reason = failure.reason
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = str(error) or type(error).__name__
    raise UserError(
        "pack-damaged",
        f"{path} cannot be used: {reason}",
        why="it says which volumes the pack has, and how they are stored",
        hint=f"stoker pack SRC {root} writes it anew from the finished volumes",
    )


def case_of(parts: dict[str, Any]) -> PackedCase:
    """A case from its part of the index; raises ValueError, TypeError or KeyError if it is not one."""
    images = tuple(_file_of(one) for one in parts["images"])
    label = None if parts["label"] is None else _file_of(parts["label"])
    if not images:
        raise ValueError(f"case {parts['id']} has no image")
    return PackedCase(str(parts["id"]), str(parts["group"]), str(parts["part"]), images, label)


def _file_of(parts: dict[str, Any]) -> PackedFile:
    path = str(parts["path"])
    if os.path.isabs(path) or ".." in path.split("/"):  # noqa: PTH117 - a text, not a file
        raise ValueError(f"{path} is outside of the pack")
    facts = dict(parts["facts"])
    if facts["kind"] not in KINDS:
        raise ValueError(f"{path} is stored as {facts['kind']!r}")
    z, y, x = (int(size) for size in facts["shape"])
    facts["shape"] = (z, y, x)
    for name in ("labels", "affine"):
        facts[name] = tuple(facts[name]) if facts.get(name) is not None else None
    return PackedFile(path, PackedFacts(**facts))


def read_case(path: Path) -> tuple[PackedCase, str] | None:
    """A finished case, and the fingerprint of its source; None if there is no such record."""
    try:
        record = json.loads(path.read_text("utf-8"))
        if has_whole_seal(record) is False:
            return None  # changed after it was written: its files are made again
        return case_of(record["case"]), str(record["source"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_case(path: Path, case: PackedCase, source: str) -> None:
    write_text(path, json.dumps(sealed({"source": source, "case": case.as_dict()})) + "\n")


def file_names(ids: Sequence[str]) -> dict[str, str]:
    """A file name for each id: the id itself, where that can be one."""
    names: dict[str, str] = {}
    for one in ids:
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in one)[:100].lstrip(".")
        # Different ids must not become the same name, even on a case-insensitive file system.
        plain = safe == one and one == one.lower()
        names[one] = safe if plain else f"{safe}-{xxhash.xxh3_64_hexdigest(one.encode('utf-8', 'surrogateescape'))[:8]}"
    return names


def _digest(content: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
