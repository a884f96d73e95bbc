"""The index that `stoker pack` wrote beside its shards, in a folder or at a URL."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.data.index.kept import building, keeping_folders, not_keepable, whole_folder
from stoker.data.index.listing import IMAGE_SUFFIXES
from stoker.data.index.sample_index import META, IndexUnreadable, SampleIndex, digest_of, encode_name, load_index
from stoker.data.store.stores import ReadFailure, Store, is_url
from stoker.errors import UserError
from stoker.files import write_bytes

# An array of a hundred million samples still fits; above it somebody else's file is called like ours.
MAX_ARRAY_BYTES = 8_000_000_000


def open_packed(place: str, index_dir: Path | None) -> SampleIndex | None:
    """The index of packed shards; None where a place holds none."""
    if is_url(place):
        return _packed_in_store(place, index_dir)
    folder = Path(place)
    if not (folder / META).is_file():
        return None
    try:
        index = load_index(folder)
    except IndexUnreadable:
        if files_directly_in(place)[1] == 0:
            return None  # somebody else's file among class folders
        raise
    return replace(index, root=place) if index.shards else None


def files_directly_in(place: str) -> tuple[int, int]:
    """Images and tar files that lie directly in a folder; 0 where nobody knows."""
    if is_url(place):
        return 0, 0
    with os.scandir(encode_name(place)) as entries:
        names = [entry.name.lower() for entry in entries if not entry.name.startswith(b".")]
    return sum(name.endswith(IMAGE_SUFFIXES) for name in names), sum(name.endswith(b".tar") for name in names)


def _packed_in_store(place: str, index_dir: Path | None) -> SampleIndex | None:
    """The same from a URL: one small request tells whether the copy that we keep is still the right one."""
    from stoker.data.store.object_store import ObjectStore

    store = ObjectStore(place, max_object_bytes=MAX_ARRAY_BYTES)
    try:
        raw = bytes(store.read(META))
        meta: Any = json.loads(raw)
        if not meta["shards"]:
            return None
        arrays = [str(name) for name in meta["arrays"]]
    except (ReadFailure, ValueError, KeyError, TypeError):
        return None
    keep = keeping_folders(place, index_dir)[0]
    final = keep / f"packed-{hashlib.blake2b(raw, digest_size=8).hexdigest()}"
    if (index := _load_if_whole(final)) is None:
        try:
            with building(keep):
                # While we waited for our turn another process may have fetched it.
                index = _load_if_whole(final) or _fetch(store, place, arrays, raw, final)
        except OSError as error:
            raise not_keepable(place, keep, error) from None
    return replace(index, root=place)


def _fetch(store: Store, place: str, arrays: list[str], raw: bytes, final: Path) -> SampleIndex:
    try:
        with whole_folder(final) as folder:
            for name in arrays:
                # The last part only: nothing is written outside of the folder.
                write_bytes(folder / f"{Path(name).name}.npy", bytes(store.read(f"{name}.npy")))
            write_bytes(folder / META, raw)
            index = load_index(folder)
            if digest_of(index) != index.digest:
                raise _changing(place)
    except (ReadFailure, IndexUnreadable):
        raise _changing(place) from None
    return load_index(final)


def _load_if_whole(folder: Path) -> SampleIndex | None:
    try:
        return load_index(folder)
    except IndexUnreadable:
        return None


def _changing(place: str) -> UserError:
    return UserError(
        "packed-data-incomplete",
        f"the index at {place} does not fit the arrays beside it",
        why="it was being written while it was read, or only a part of it was copied there",
        hint="copy the packed folder again, index.json last",
    )
