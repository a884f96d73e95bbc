"""Lists the class folders of a split as arrays, so that no Python object outlives the listing of its class.

Names are handled as the file system's bytes: they sort alike on every machine, and names that are not UTF-8 survive. No
file is asked for its type or size: over a network each question is a round trip.
"""

from __future__ import annotations

import os
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Advance, Say, shown, some
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.stores import is_url
from stoker.tasks.images.layouts.imagenet import GROUND_TRUTH, SOLUTION
from stoker.tasks.images.layouts.kept_index import (
    CLOCK_TICK_NS,
    KeptIndex,
    Seen,
    index_left_in_data,
    keep_or_make,
    keeping_folder,
    note_of_left_index,
)
from stoker.tasks.images.layouts.sample_index import SampleIndex, decode_name, encode_name, pack_names
from stoker.tasks.images.layouts.splits import not_readable

IMAGE_SUFFIXES = (
    b".jpg", b".jpeg", b".jfif", b".png", b".webp", b".bmp", b".tif", b".tiff", b".gif", b".ppm", b".pgm",
)  # fmt: skip
# Requests in flight to a network file system; on a local one they wait for the GIL, and do no harm.
THREADS = 16


@dataclass(frozen=True)
class ClassListing:
    """The samples of one class, sorted by name."""

    name: str
    name_bytes: NDArray[np.uint8]
    name_ends: NDArray[np.int64]
    sizes: NDArray[np.int64] | None
    seen: Seen

    def __len__(self) -> int:
        return len(self.name_ends)


def open_class_folders(
    place: str, *, index_dir: Path | None, progress: Advance | None, say: Say | None
) -> tuple[SampleIndex, list[str]]:
    """The index of a folder or URL with class folders, and notes for the user. The first call lists all of them, later
    ones those that changed; a URL is not listed again."""
    if not is_url(place) and not class_names(place):
        raise _no_class_folders(place)

    def make(kept: KeptIndex | None) -> tuple[KeptIndex, list[str]]:
        # An earlier version's index saves listing folders that have not changed since.
        listed, news = _list(place, kept or index_left_in_data(place), progress)
        return KeptIndex(_index_of(place, listed), {one.name: one.seen for one in listed}), news

    def still_holds(kept: KeptIndex) -> bool:
        if is_url(place):
            return True
        now, changed = _changed_classes(place, kept)
        return not changed and tuple(now) == kept.index.classes

    kept, news = keep_or_make(place, make, still_holds, index_dir=index_dir, say=say)
    left = note_of_left_index(place, keeping_folder(place, index_dir))
    return kept.index, [*news, *([] if left is None else [left]), *_notes(place, kept)]


def _list(place: str, kept: KeptIndex | None, progress: Advance | None) -> tuple[list[ClassListing], list[str]]:
    """All classes, listing only those that changed, and a note about the changes."""
    if is_url(place):
        from stoker.io.object_store import ObjectStore

        return list_objects(ObjectStore(place).list(), progress), []
    if kept is None:
        return list_classes(place, class_names(place), progress), []
    now, changed = _changed_classes(place, kept)
    fresh = {one.name: one for one in list_classes(place, [name for name in now if name in changed], progress)}
    listed = [fresh[name] if name in fresh else class_of_index(kept.index, name, kept.seen[name]) for name in now]
    differing = {
        name
        for name, one in fresh.items()
        if name not in kept.seen
        or not np.array_equal(one.name_bytes, class_of_index(kept.index, name, one.seen).name_bytes)
    }
    differing |= set(kept.index.classes) - set(now)
    if not differing:
        return listed, []  # the folders were only touched, or too recent to be sure
    return listed, [
        f"the index of {place} was out of date: {count(len(differing), 'class folder')} changed "
        f"({some(sorted(differing))}) and {'was' if len(differing) == 1 else 'were'} listed again"
    ]


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


def _changed_classes(place: str, kept: KeptIndex) -> tuple[list[str], set[str]]:
    """The current class folders, and those of them that have to be listed (again)."""
    now = class_names(place)
    with ThreadPoolExecutor(THREADS) as pool:
        same = pool.map(lambda name: name in kept.seen and _unchanged(place, kept.seen[name]), now)
        return now, {name for name, is_same in zip(now, same, strict=True) if not is_same}


def _unchanged(place: str, seen: Seen) -> bool:
    if not seen.folders:
        return False
    try:
        return all(
            changed is not None and os.stat(f"{place}/{folder}").st_mtime_ns == changed  # noqa: PTH116 - hot, and '' joins
            for folder, changed in seen.folders.items()
        )
    except OSError:
        return False


def files_directly_in(place: str) -> tuple[int, int]:
    """The number of images and tar files directly in a folder; 0 for a URL."""
    if is_url(place):
        return 0, 0
    with os.scandir(encode_name(place)) as entries:
        names = [entry.name.lower() for entry in entries if not entry.name.startswith(b".")]
    return sum(name.endswith(IMAGE_SUFFIXES) for name in names), sum(name.endswith(b".tar") for name in names)


def class_names(place: str) -> list[str]:
    """The class folders of a split, sorted, without hidden ones."""
    try:
        with os.scandir(encode_name(place)) as entries:
            names = sorted(e.name for e in entries if not e.name.startswith(b".") and e.is_dir())
    except OSError as error:
        raise not_readable(place, error) from None
    return [decode_name(name) for name in names]


def list_classes(place: str, names: Sequence[str], progress: Advance | None = None) -> list[ClassListing]:
    """The listings of these class folders; progress counts folders."""
    listings = []
    with ThreadPoolExecutor(min(THREADS, max(1, len(names)))) as pool:
        try:
            for listing in pool.map(lambda name: list_class(place, name), names):
                listings.append(listing)
                if progress is not None:
                    progress(len(listings), len(names))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return listings


def list_class(place: str, name: str) -> ClassListing:
    """Every image below one class folder. Anything named like an image counts, even a folder: reading it will fail and
    report it."""
    root = encode_name(place)
    names: list[bytes] = []
    folders: dict[str, int | None] = {}
    left_out: Counter[str] = Counter()
    waiting: list[tuple[bytes, frozenset[tuple[int, int]]]] = [(encode_name(name), frozenset())]
    while waiting:
        folder, ancestors = waiting.pop()
        path = os.path.join(root, folder)  # noqa: PTH118 - pathlib takes no bytes
        try:
            # Before the listing: a change while we list gives a later time.
            state, now_ns = os.stat(path), time.time_ns()  # noqa: PTH116
            identity = (state.st_dev, state.st_ino)
            if identity in ancestors:
                continue  # a link to a folder above
            folders[decode_name(folder)] = state.st_mtime_ns if state.st_mtime_ns < now_ns - CLOCK_TICK_NS else None
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name.startswith(b"."):
                        continue
                    inner = folder + b"/" + entry.name
                    if entry.name.lower().endswith(IMAGE_SUFFIXES):
                        names.append(inner)
                    elif entry.is_dir():
                        waiting.append((inner, ancestors | {identity}))
                    else:
                        left_out[_suffix(entry.name)] += 1
        except OSError as error:
            raise not_readable(decode_name(path), error) from None
    names.sort()
    return ClassListing(name, *pack_names(names), None, Seen(folders, left_out))


def list_objects(objects: Iterable[tuple[str, int]], progress: Advance | None = None) -> list[ClassListing]:
    """The same from (path, size) of every object below a split, in any order."""
    found: dict[bytes, tuple[bytearray, array[int], array[int]]] = {}
    left_out: dict[bytes, Counter[str]] = {}
    for number, (path, size) in enumerate(objects, 1):
        if progress is not None and number % 1000 == 0:
            progress(number, None)
        name = encode_name(path)
        class_name, _, rest = name.partition(b"/")
        if not rest or rest.endswith(b"/") or name.startswith(b".") or b"/." in name:
            continue
        if not rest.lower().endswith(IMAGE_SUFFIXES):
            left_out.setdefault(class_name, Counter())[_suffix(rest.rpartition(b"/")[2])] += 1
            continue
        names, ends, sizes = found.setdefault(class_name, (bytearray(), array("q"), array("q")))
        names += name
        ends.append(len(names))
        sizes.append(size)
    return [_sorted_class(name, *found[name], left_out.get(name, {})) for name in sorted(found)]


def class_of_index(index: SampleIndex, name: str, seen: Seen) -> ClassListing:
    """The listing of a class according to an index."""
    label = index.classes.index(name)
    first, end = np.searchsorted(index.labels, [label, label + 1])
    start = int(index.name_ends[first - 1]) if first else 0
    ends = index.name_ends[first:end] - start
    stop = start + (int(ends[-1]) if len(ends) else 0)
    sizes = None if index.sizes is None else np.array(index.sizes[first:end])
    return ClassListing(name, np.array(index.name_bytes[start:stop]), ends, sizes, seen)


def index_of_classes(root: str, listings: Sequence[ClassListing]) -> SampleIndex:
    counts = np.array([len(listing) for listing in listings], np.int64)
    starts = np.cumsum([0, *(len(listing.name_bytes) for listing in listings)])
    sizes = [listing.sizes for listing in listings if listing.sizes is not None]
    return SampleIndex(
        root=root,
        classes=tuple(listing.name for listing in listings),
        labels=np.repeat(np.arange(len(listings), dtype=np.int32), counts),
        name_bytes=np.concatenate([listing.name_bytes for listing in listings]),
        name_ends=np.concatenate([one.name_ends + start for one, start in zip(listings, starts, strict=False)]),
        sizes=np.concatenate(sizes) if len(sizes) == len(listings) else None,
    )


def _sorted_class(
    name: bytes, names: bytearray, ends: array[int], sizes: array[int], left_out: Mapping[str, int]
) -> ClassListing:
    starts = [0, *ends[:-1]]
    parts = sorted((bytes(names[start:end]), size) for start, end, size in zip(starts, ends, sizes, strict=True))
    packed = pack_names([part for part, _ in parts])
    sorted_sizes = np.array([size for _, size in parts], np.int64)
    return ClassListing(decode_name(name), *packed, sorted_sizes, Seen(left_out=left_out))


def _suffix(name: bytes) -> str:
    return decode_name(os.path.splitext(name)[1].lower()) or "no suffix"  # noqa: PTH122 - pathlib takes no bytes
