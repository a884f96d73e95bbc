"""Opens a split: loads its index from packed shards or from where it is kept, or lists it once, whatever its layout."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.core.console import Advance, Say, shown, some
from stoker.core.errors import UserError
from stoker.core.files import write_bytes
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.stores import ReadFailure, Store, StoreDown, is_url
from stoker.tasks.images.layouts.imagenet_labels import GROUND_TRUTH, SOLUTION
from stoker.tasks.images.layouts.kept_index import (
    KeptIndex,
    building,
    cannot_be_saved,
    changed_classes,
    index_left_in_data,
    keeping_folder,
    not_keepable,
    note_of_left_index,
    read_kept,
    whole_folder,
    write_kept,
)
from stoker.tasks.images.layouts.layouts import open_labelled_place, told
from stoker.tasks.images.layouts.listing import (
    IMAGE_SUFFIXES,
    ClassListing,
    Seen,
    check_folder,
    class_names,
    class_of_index,
    index_of_classes,
    list_classes,
    list_objects,
    split_place,
)
from stoker.tasks.images.layouts.sample_index import (
    META,
    IndexUnreadable,
    SampleIndex,
    digest_of,
    encode_name,
    load_index,
)
from stoker.tasks.images.layouts.splits import FoundSplit, find_split, no_split
from stoker.tasks.images.pack.tar_shards import KEY_DIGITS
from stoker.tasks.packing import RECORDS

if TYPE_CHECKING:
    from stoker.io.object_store import ObjectStore

# Enough for an array of a hundred million samples; a larger file is not ours.
MAX_ARRAY_BYTES = 8_000_000_000


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


def files_directly_in(place: str) -> tuple[int, int]:
    """The number of images and tar files directly in a folder; 0 for a URL."""
    if is_url(place):
        return 0, 0
    with os.scandir(encode_name(place)) as entries:
        names = [entry.name.lower() for entry in entries if not entry.name.startswith(b".")]
    return sum(name.endswith(IMAGE_SUFFIXES) for name in names), sum(name.endswith(b".tar") for name in names)


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
    except IndexUnreadable as error:
        raise _changing(place, error.reason) from None
    except ReadFailure as failure:
        raise _changing(place, str(failure)) from None
    return load_index(final)


def _load_if_whole(folder: Path, damage: list[str] | None = None) -> SampleIndex | None:
    try:
        return load_index(folder)
    except IndexUnreadable as error:
        if error.damaged and damage is not None:
            damage.append(f"the copy of the index in {folder} is damaged ({error.reason}): it is fetched again")
        return None


def _changing(place: str, reason: str) -> UserError:
    return UserError(
        "packed-data-incomplete",
        f"the index at {place} does not match its arrays: {reason}",
        why="it was read while it was being written, or only a part of it was copied",
        hint="copy the packed folder again, index.json last",
    )


def open_index(
    root: str,
    split: str,
    *,
    index_dir: Path | None,
    progress: Advance | None = None,
    rebuild: bool = False,
    say: Say | None = None,
) -> SampleIndex:
    """The samples of a split of a folder or URL, in any layout: class folders, packed shards, or labels in files.

    The first call lists the class folders (`progress` counts folders, or objects at a URL) and keeps the index; later
    calls load it, and list only the class folders that changed. A URL is listed again only with `rebuild`. `say` gets
    notes for the user, which are also in `facts["notes"]`. `split=""` opens a root that contains the class folders.
    """
    found = FoundSplit("") if not split else find_split(root, split)
    if found is None and is_url(split_place(root, "")):
        raise no_split(root, split)
    folder = split if found is None else found.folder
    if not is_url(split_place(root, "")):
        check_folder(root, folder)  # raises if nothing was found
    assert found is not None
    place, notes = split_place(root, folder), [] if found.note is None else [found.note]
    if not found.files:
        if (packed := open_packed(place, index_dir)) is not None:
            return told(packed, [*notes, *packed.facts.get("notes", [])], say)
        _refuse_unfinished_pack(place)
    options: Any = {"index_dir": index_dir, "progress": progress, "rebuild": rebuild, "say": say}
    if (index := open_labelled_place(place, found.files, **options)) is not None:
        return told(index, [*notes, *index.facts.get("notes", [])], say)
    kept, news = _open_kept_or_list(place, index_dir, progress, rebuild, say)
    return told(kept.index, [*notes, *news, *_notes(place, kept)], say)


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


def _open_kept_or_list(
    place: str, index_dir: Path | None, progress: Advance | None, rebuild: bool, say: Say | None
) -> tuple[KeptIndex, list[str]]:
    if not is_url(place) and not class_names(place):
        raise _no_class_folders(place)
    keep = keeping_folder(place, index_dir)
    damage: list[str] = []
    before = read_kept(keep, place, damage)
    if before is not None and not rebuild and _still_holds(place, before):
        return before, _about_left_index(place, keep)
    # An earlier version's index saves listing folders that have not changed since.
    known = None if rebuild else before or index_left_in_data(place)
    listed: list[ClassListing] = []
    try:
        with building(keep, say):
            # Another process may have done the work while we waited for the lock.
            kept = read_kept(keep, place)
            is_new = kept is not None and (before is None or kept.made_ns != before.made_ns)
            if kept is not None and (is_new or not rebuild) and _still_holds(place, kept):
                return kept, _about_left_index(place, keep)
            listed, news = _list(place, None if rebuild else kept or known, progress)
            kept = write_kept(keep, _index_of(place, listed), listed)
            return kept, [*damage, *news, *_about_left_index(place, keep)]
    except OSError as error:
        if index_dir is not None:
            raise not_keepable(place, index_dir, error) from None
        trouble = error
    if not listed:
        listed, news = _list(place, known, progress)
    index = _index_of(place, listed)
    kept = KeptIndex(replace(index, digest=digest_of(index)), {one.name: one.seen for one in listed}, 0)
    return kept, [*damage, *news, cannot_be_saved(trouble), *_about_left_index(place, keep)]


def _about_left_index(place: str, keep: Path) -> list[str]:
    note = note_of_left_index(place, keep)
    return [] if note is None else [note]


def _still_holds(place: str, kept: KeptIndex) -> bool:
    if is_url(place):
        return True
    now, changed = changed_classes(place, kept)
    return not changed and tuple(now) == kept.index.classes


def _list(place: str, kept: KeptIndex | None, progress: Advance | None) -> tuple[list[ClassListing], list[str]]:
    """All classes, listing only those that changed, and a note about the changes."""
    if is_url(place):
        from stoker.io.object_store import ObjectStore

        return list_objects(ObjectStore(place).list(), progress), []
    if kept is None:
        return list_classes(place, class_names(place), progress), []
    now, changed = changed_classes(place, kept)
    fresh = {one.name: one for one in list_classes(place, [name for name in now if name in changed], progress)}
    listed = [fresh[name] if name in fresh else class_of_index(kept.index, name, kept.seen[name]) for name in now]
    differing = _differing(kept, fresh) | (set(kept.index.classes) - set(now))
    if not differing:
        return listed, []  # the folders were only touched, or too recent to be sure
    return listed, [
        f"the index of {place} was out of date: {count(len(differing), 'class folder')} changed "
        f"({some(sorted(differing))}) and {'was' if len(differing) == 1 else 'were'} listed again"
    ]


def _differing(kept: KeptIndex, fresh: Mapping[str, ClassListing]) -> set[str]:
    return {
        name
        for name, one in fresh.items()
        if name not in kept.seen
        or one.name_bytes.tobytes() != class_of_index(kept.index, name, Seen()).name_bytes.tobytes()
    }


def _index_of(place: str, listed: list[ClassListing]) -> SampleIndex:
    if sum(map(len, listed)):
        return index_of_classes(place, listed)
    if not listed:
        raise _no_class_folders(place)
    where = shown(redact_text(place))
    known = ", ".join(suffix.decode() for suffix in IMAGE_SUFFIXES)
    raise UserError(
        "no-images",
        f"{where} has {count(len(listed), 'class folder')} but no images in them",
        why=f"images are recognised by their suffix: {known}",
        hint=f"ls '{where}/{shown(listed[0].name)}'",
    )


def _no_class_folders(place: str) -> UserError:
    where = shown(redact_text(place))
    flat, _ = files_directly_in(place)
    if flat:
        why = (
            f"it contains {count(flat, 'image')} outside of class folders, and neither {SOLUTION} nor {GROUND_TRUTH} "
            "is there or above"
        )
    else:
        why = "the class of an image is the name of its folder"
    return UserError(
        "no-class-folders",
        f"{where} has no class folders",
        why=why,
        hint=f"the images should be {where}/CLASS/IMAGE.jpg; other layouts: docs/bring-your-data.md",
    )


def _notes(place: str, kept: KeptIndex) -> Iterator[str]:
    """Notes for the user each time the data is opened."""
    index, where = kept.index, shown(redact_text(place))
    if is_url(place) and kept.made_ns:
        made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(kept.made_ns / 1e9))
        yield f"the index of {where} is from {made}; later objects are not in it"
    counts = np.bincount(index.labels, minlength=len(index.classes))
    if empty := [name for name, images in zip(index.classes, counts.tolist(), strict=True) if not images]:
        yield f"{count(len(empty), 'class folder')} of {where} without images: {some(empty)}"
    left_out: Counter[str] = Counter()
    for seen in kept.seen.values():
        left_out.update(seen.left_out)
    if left_out:
        kinds = some([f"{suffix} ({files:,})" for suffix, files in left_out.most_common()])
        yield f"{count(left_out.total(), 'file')} of {where} skipped, without the suffix of an image: {kinds}"
