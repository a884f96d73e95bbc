"""Opens a split: loads its index from packed shards or from where it is kept, or makes it once, whatever its layout."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.core.console import Advance, Say, shown, some
from stoker.core.errors import UserError
from stoker.core.files import write_bytes
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.stores import ReadFailure, Store, StoreDown, is_url
from stoker.tasks.images.layouts.class_folders import IMAGE_SUFFIXES, files_directly_in, open_class_folders
from stoker.tasks.images.layouts.imagenet import find_labels, index_of_flat
from stoker.tasks.images.layouts.kept_index import (
    building,
    index_of_files,
    keeping_folder,
    not_keepable,
    states_of_files,
    whole_folder,
)
from stoker.tasks.images.layouts.parquet_files import list_parquet
from stoker.tasks.images.layouts.sample_index import META, IndexUnreadable, SampleIndex, encode_name, load_index
from stoker.tasks.images.layouts.sample_lists import has_labels, index_of_list
from stoker.tasks.images.layouts.splits import list_entries, require_split, split_place
from stoker.tasks.images.layouts.webdataset import list_tars
from stoker.tasks.images.pack.tar_shards import KEY_DIGITS
from stoker.tasks.packing import RECORDS

if TYPE_CHECKING:
    from stoker.io.object_store import ObjectStore

METADATA = ("metadata.csv", "metadata.jsonl")
"""Files in which Hugging Face `datasets` keeps the labels of a folder of images."""
# Enough for an array of a hundred million samples; a larger file is not ours.
MAX_ARRAY_BYTES = 8_000_000_000


def open_index(
    root: str, split: str, *, index_dir: Path | None, progress: Advance | None = None, say: Say | None = None
) -> SampleIndex:
    """The samples of a split of a folder or URL, in any layout: class folders, packed shards, or labels in files.

    The first call lists the class folders (`progress` counts folders, or objects at a URL) and keeps the index; later
    calls load it, and list only the class folders that changed. `say` gets notes for the user, which are also in
    `facts["notes"]`. `split=""` opens a root that contains the class folders.
    """
    found = require_split(root, split)
    place, notes = split_place(root, found.folder), [] if found.note is None else [found.note]
    if not found.files:
        if (packed := open_packed(place, index_dir)) is not None:
            return _told(packed, [*notes, *packed.facts.get("notes", [])], say)
        _refuse_unfinished_pack(place)
    options: Any = {"index_dir": index_dir, "progress": progress, "say": say}
    if (index := _open_labelled_place(place, found.files, **options)) is not None:
        return _told(index, [*notes, *index.facts["notes"]], say)
    index, news = open_class_folders(place, **options)
    return _told(index, [*notes, *news], say)


def check_same_classes(train: SampleIndex, val: SampleIndex) -> None:
    """Refuses a validation set with classes that are not in the training set."""
    known = set(train.classes)
    if strangers := [name for name in val.classes if name not in known]:
        raise UserError(
            "classes-differ",
            f"{val.root} has {count(len(strangers), 'class', 'classes')} that {train.root} lacks: {some(strangers)}",
            why=f"a network trained on {count(len(known), 'class', 'classes')} cannot predict others",
            hint="the class folders of train and val must have the same names",
        )


def open_packed(place: str, index_dir: Path | None) -> SampleIndex | None:
    """The index that `stoker pack` wrote beside its shards; None if there is none."""
    if is_url(place):
        return _packed_in_store(place, index_dir)
    folder = Path(place)
    if not (folder / META).is_file():
        return None
    try:
        index = load_index(folder)
    except IndexUnreadable as error:
        if files_directly_in(place)[1] == 0:
            return None  # an unrelated file among class folders
        raise _pack_damaged(place, error.reason) if error.damaged else error from None
    if not index.shards:
        return None
    if reason := differing_shard(folder, index):
        raise _pack_damaged(place, reason)
    return replace(index, root=place)


def _pack_damaged(place: str, reason: str) -> UserError:
    return UserError(
        "pack-damaged",
        f"the pack {shown(place)} is not what stoker pack wrote: {reason}",
        why="images would be read from wrong places, or get wrong labels, without any other sign of it",
        hint="copy the pack again; or run the same stoker pack again, which keeps the shards that are whole",
    )


def _refuse_unfinished_pack(place: str) -> None:
    """Its shards are plain tars, which could be read, but not all of them are there."""
    folder = Path(place)
    abouts = (folder.parent / RECORDS / folder.name / "pack.json", folder / RECORDS / "pack.json")
    if is_url(place) or not any(about.is_file() for about in abouts):
        return
    raise UserError(
        "pack-unfinished",
        f"{shown(place)} has shards, but not the {META} that `stoker pack` writes last",
        why="some of the images are missing",
        hint="run the same stoker pack again: it continues where it stopped",
    )


def differing_shard(folder: Path, index: SampleIndex) -> str | None:
    """What is wrong with the shards of a pack, as far as their sizes and first members show; reads a block of each."""
    facts = {str(fact["name"]): int(fact["bytes"]) for fact in index.facts.get("shards", [])}
    last_key = -1
    for name, known_bytes in facts.items():
        try:
            with (folder / name).open("rb", buffering=0) as stream:
                found_bytes = os.fstat(stream.fileno()).st_size
                first = stream.read(KEY_DIGITS)  # the name of its first member begins with the sample's key
        except OSError as error:
            return f"{name}: {error.strerror}"
        if found_bytes != known_bytes:
            return f"{name} has {found_bytes:,} bytes; its index says {known_bytes:,}"
        # Keys ascend from shard to shard: two that were exchanged would give every image another's label.
        if first.isdigit():
            if int(first) <= last_key:
                return f"{name} begins with sample {int(first)}, which belongs before the shards above it"
            last_key = int(first)
    return None


def _packed_in_store(place: str, index_dir: Path | None) -> SampleIndex | None:
    """The same from a URL: one small request shows whether our copy is still current."""
    from stoker.io.object_store import ObjectStore

    store = ObjectStore(place, max_object_bytes=MAX_ARRAY_BYTES)
    try:
        raw = bytes(store.read(META))
        meta: Any = json.loads(raw)
        if not meta["shards"]:
            return None
        arrays = [str(name) for name in meta["arrays"]]
    except (ReadFailure, ValueError, KeyError, TypeError):
        return None
    keep = keeping_folder(place, index_dir)
    final = keep / f"packed-{hashlib.blake2b(raw, digest_size=8).hexdigest()}"
    damage: list[str] = []
    if (index := _load_if_whole(final, damage)) is None:
        try:
            with building(keep):
                # Another process may have fetched it while we waited for the lock.
                index = _load_if_whole(final) or _fetch(store, place, arrays, raw, final)
        except OSError as error:
            raise not_keepable(place, keep, error) from None
    if reason := _differing_object(store, index):
        raise _pack_damaged(place, reason)
    return replace(index, root=place, facts={**index.facts, "notes": damage})


def _differing_object(store: ObjectStore, index: SampleIndex) -> str | None:
    """The same for shards in a store, as far as their sizes show; one request for a thousand of them."""
    facts = {str(fact["name"]): int(fact["bytes"]) for fact in index.facts.get("shards", [])}
    if not facts or store.url.startswith("http"):  # a plain web server cannot list
        return None
    try:
        there = dict(store.list())
    except StoreDown:
        return None  # credentials that may read but not list are common
    for name, known_bytes in facts.items():
        if (found_bytes := there.get(name)) != known_bytes:
            seen = "is missing" if found_bytes is None else f"has {found_bytes:,} bytes"
            return f"{name} {seen}; its index says {known_bytes:,}"
    return None


def _fetch(store: Store, place: str, arrays: list[str], raw: bytes, final: Path) -> SampleIndex:
    try:
        with whole_folder(final) as folder:
            for name in arrays:
                # Only the last part of the name: nothing is written outside the folder.
                write_bytes(folder / f"{Path(name).name}.npy", bytes(store.read(f"{name}.npy")))
            write_bytes(folder / META, raw)
            load_index(folder)
    except (IndexUnreadable, ReadFailure) as error:
        reason = error.reason if isinstance(error, IndexUnreadable) else str(error)
        raise UserError(
            "packed-data-incomplete",
            f"the index at {place} does not match its arrays: {reason}",
            why="it was read while it was being written, or only a part of it was copied",
            hint="copy the packed folder again, index.json last",
        ) from None
    return load_index(final)


def _load_if_whole(folder: Path, damage: list[str] | None = None) -> SampleIndex | None:
    try:
        return load_index(folder)
    except IndexUnreadable as error:
        if error.damaged and damage is not None:
            damage.append(f"the copy of the index in {folder} is damaged ({error.reason}): it is fetched again")
        return None


def _open_labelled_place(
    place: str, files: Sequence[str], *, index_dir: Path | None, progress: Advance | None, say: Say | None
) -> SampleIndex | None:
    """The index of a place with its labels in files; None if it has class folders, or no known layout.

    `files` are those of the place that belong to the split; empty for all."""
    entries = None if place.startswith(("http://", "https://")) else list_entries(place)
    if entries is None:
        return None
    mine = list(files) or list(entries.files)
    tars = [name for name in mine if name.endswith(".tar")]
    parquets = [name for name in mine if name.endswith(".parquet")]
    metadata = next((name for name in METADATA if name in entries.files), None)
    flat = [name for name in mine if encode_name(name.lower()).endswith(IMAGE_SUFFIXES)]

    def opened(kind: str, depends_on: Sequence[str], make: Callable[[], SampleIndex]) -> SampleIndex:
        return index_of_files(place, kind, states_of_files(place, depends_on, entries), make, index_dir, say)

    if metadata is not None and (files or not parquets) and has_labels(f"{place}/{metadata}"):
        note = f"labels of {shown(redact_text(place))} from its {metadata}, as in Hugging Face datasets"
        path = f"{place}/{metadata}"
        return opened(metadata, [metadata], lambda: _told(index_of_list(path, place, ""), [note], None))
    if entries.folders and not files:
        return None
    if tars:
        return opened("tar " + " ".join(files), tars, lambda: list_tars(place, tars, progress))
    if parquets:
        return opened("parquet " + " ".join(files), parquets, lambda: list_parquet(place, parquets, progress))
    labels = find_labels(place) if flat else None
    if labels is None:
        return None
    return opened("flat", ["", labels], lambda: index_of_flat(place, flat, labels))


def _told(index: SampleIndex, notes: Sequence[str], say: Say | None) -> SampleIndex:
    """The index with these notes for the user, which are printed."""
    if say is not None:
        for note in notes:
            say(note)
    return replace(index, facts={**index.facts, "notes": list(notes)})
