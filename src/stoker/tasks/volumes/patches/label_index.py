"""Where the labels are: for each case, how many voxels each class has, and some thousands of their places.

Built once, a slab of the label volume at a time, and kept in the user's cache folder until a file changes. The pass
also checks every label. Places of a class are an even sample of all its voxels, the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.core.console import Advance, Say
from stoker.core.errors import UserError
from stoker.core.files import atomic_file, cache_folder
from stoker.io.stores import ReadFailure, is_url
from stoker.loader.rng import mix, mix_numbers
from stoker.loader.sampler import permute
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.cases.survey import case_identity
from stoker.tasks.volumes.formats.opening import OpenVolumes
from stoker.tasks.volumes.formats.volume import LruCache, Region, Shape, Volume, Voxels
from stoker.tasks.volumes.patches.labels import LabelRules

FORMAT = 1
"""Version of the sampling: another one gives other places."""
FILE_FORMAT = 2
Places = NDArray[np.int64]
# Memory of the pass: a slab, and up to eight bytes a voxel for the places of one class.
SLAB_VOXELS = 1 << 22
# A 320³ volume keeps 8,000 places a class, more than a run draws from it; a 1024³ one 65,536, half a megabyte.
VOXELS_PER_PLACE, FEWEST_PLACES, MOST_PLACES = 4096, 4096, 65_536
_MOST_PLACES_OF_ALL_CLASSES = 1 << 20
# Comparing bytes is vectorised; a histogram first turns every voxel into eight bytes.
_COUNTED_ONE_BY_ONE = 8
_REMOTE_THREADS = 8
_HEADER = 6
_LOADED_AT_ONCE = 4096


@dataclass(frozen=True)
class LabelMap:
    """The labels of one case."""

    shape: Shape
    counts: NDArray[np.int64]
    """Voxels of each class; those with the ignore label are in none."""
    places: tuple[Places, ...]
    """For each class, voxels that have it, numbered in the order z, y, x."""

    def voxel(self, label: int, share: float) -> Shape:
        """One of the places of a class; `share` in [0, 1) chooses."""
        places = self.places[label]
        plane, x = divmod(int(places[int(share * len(places))]), self.shape[2])
        z, y = divmod(plane, self.shape[1])
        return z, y, x


class LabelIndex:
    """The label maps of all cases; loaded when they are needed, in every process that needs them."""

    def __init__(
        self, files: Sequence[Path | LabelMap], counts: NDArray[np.int64], bad: Mapping[str, str] | None = None
    ) -> None:
        self._files = tuple(files)
        self.counts = counts
        """Voxels by case and class."""
        self.bad = dict(bad or {})
        """Why the labels of a case cannot be read, by its id."""
        self._loaded: LruCache[int, LabelMap] = LruCache(_LOADED_AT_ONCE)

    def __getitem__(self, case: int) -> LabelMap:
        return self._loaded.get(case, lambda: self._open(self._files[case]))

    def _open(self, kept: Path | LabelMap) -> LabelMap:
        loaded = kept if isinstance(kept, LabelMap) else _load(kept)
        if loaded is None:
            raise UserError(
                "label-index-gone",
                f"{kept} was removed or changed while a run was using it",
                why="it says where the labels of a volume are",
                hint="start again: it is rebuilt",
            )
        return loaded

    def chosen(self, cases: Sequence[int]) -> LabelIndex:
        """The index of only these cases, in this order."""
        return LabelIndex([self._files[case] for case in cases], self.counts[list(cases)])

    def __reduce__(self) -> Any:
        # Paths, not places: a worker process maps the same files.
        return LabelIndex, (self._files, self.counts, self.bad)


def build_label_index(
    cases: Sequence[Case],
    volumes: OpenVolumes,
    rules: LabelRules,
    *,
    progress: Advance | None = None,
    say: Say | None = None,
) -> LabelIndex:
    """The index of these labelled cases, from the cache if it is there. A case that cannot be read has no voxel of
    any class and is in `bad`; wrong labels raise BadLabels."""
    folder = cache_folder() / "volumes" / "labels"
    files: list[Path | LabelMap] = []
    bad: dict[str, str] = {}
    counts = np.zeros((len(cases), rules.classes), np.int64)

    def work(case: Case) -> tuple[Path | LabelMap, LabelMap] | ReadFailure:
        file = folder / f"{_key(case, volumes, rules)}.npy"
        if (kept := _load(file)) is not None and len(kept.counts) == rules.classes:
            return file, kept
        if say is not None and file.exists():
            say(f"the label index of {case.id} in {file} is damaged and is rebuilt")
        assert case.label is not None, "a case without a label cannot be indexed"
        try:
            label = volumes.get(case.label, case.box)
            made = map_labels(case.id, label, rules)
        except ReadFailure as failure:
            return failure.with_traceback(None)
        try:
            with atomic_file(file, "wb") as stream:
                np.save(stream, _packed(made), allow_pickle=False)
            return file, made
        except OSError:  # a cache folder that cannot be written to costs the pass at every start
            return made, made

    # Labels behind a URL mostly wait for the network, but each thread holds a slab and its places.
    are_remote = any(case.label is not None and is_url(case.label.location) for case in cases)
    with ThreadPoolExecutor(_REMOTE_THREADS if are_remote else min(4, os.cpu_count() or 1)) as pool:
        for number, found in enumerate(pool.map(work, cases)):
            if isinstance(found, ReadFailure):
                bad[cases[number].id] = str(found)
                files.append(LabelMap((1, 1, 1), counts[number], (np.zeros(0, np.int64),) * rules.classes))
            else:
                files.append(found[0])
                counts[number] = found[1].counts
            if progress is not None:
                progress(number + 1, len(cases))
    return LabelIndex(files, counts, bad)


def map_labels(case: str, label: Volume, rules: LabelRules) -> LabelMap:
    """Counts and places of a label volume, in one pass with bounded memory."""
    rules.check_kind(case, label)
    depth, height, width = label.shape
    most = most_places(label.shape, rules.classes)
    sampled = [_Sample(most, mix_numbers(FORMAT, number)) for number in range(rules.classes)]
    step = max(1, SLAB_VOXELS // (height * width))
    for first in range(0, depth, step):
        last = min(first + step, depth)
        voxels = label.read(Region((first, 0, 0), (last, height, width)))
        rules.check_values(case, label.name, voxels)
        numbers = _counts(voxels, rules.classes)
        for number, found in enumerate(numbers):
            if found:
                sampled[number].add(found, (voxels == number).reshape(-1), first * height * width)
    return LabelMap(
        label.shape, np.array([one.count for one in sampled], np.int64), tuple(one.places for one in sampled)
    )


def most_places(shape: Shape, classes: int) -> int:
    """Places that are kept for a class."""
    voxels = shape[0] * shape[1] * shape[2]
    wanted = min(max(FEWEST_PLACES, voxels // VOXELS_PER_PLACE), MOST_PLACES)
    return max(1024, min(wanted, _MOST_PLACES_OF_ALL_CLASSES // classes))


class _Sample:
    """An even sample of the voxels of a class, extended slab by slab."""

    def __init__(self, most: int, key: int) -> None:
        self.count = 0
        self.places: Places = np.zeros(0, np.int64)
        self._most = most
        self._key = key

    def add(self, found: int, mask: NDArray[np.bool_], offset: int) -> None:
        new = np.flatnonzero(mask)
        key = mix_numbers(self._key, offset)
        if found > self._most:
            # One of each stretch of equal length: as even as a grid, and without its regularity.
            ends = np.arange(self._most + 1) * found // self._most
            inside = (mix(np.arange(self._most), key) >> np.uint64(11)).astype(np.float64) * 2.0**-53
            new = new[ends[:-1] + (inside * np.diff(ends)).astype(np.int64)]
        new = new + offset
        total = self.count + found
        if total > self._most:
            # Both parts keep their share of the voxels seen so far.
            old_share = round(self._most * self.count / total)
            old_share = min(max(old_share, self._most - len(new)), len(self.places))
            self.places = self._some(self.places, old_share, key)
            new = self._some(new, self._most - old_share, key + 1)
        self.places = np.concatenate([self.places, new])
        self.count = total

    def _some(self, places: Places, number: int, key: int) -> Places:
        if number >= len(places):
            return places
        return places[permute(np.arange(number), len(places), key)]


def _counts(slab: Voxels, classes: int) -> list[int]:
    if classes <= _COUNTED_ONE_BY_ONE:
        return [int(np.count_nonzero(slab == number)) for number in range(classes)]
    inside = slab[(slab >= 0) & (slab < classes)]
    return [int(number) for number in np.bincount(inside.reshape(-1), minlength=classes)]


def _key(case: Case, volumes: OpenVolumes, rules: LabelRules) -> str:
    parts = [FORMAT, FILE_FORMAT, case_identity(case, volumes)[-1], case.box, rules.classes, rules.ignore]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


def _packed(labels: LabelMap) -> Places:
    """The map as one array: format, checksum of what follows, shape, classes, counts, numbers of places, places."""
    sizes = [len(places) for places in labels.places]
    header = [FILE_FORMAT, 0, *labels.shape, len(labels.counts), *labels.counts.tolist(), *sizes]
    packed = np.concatenate([np.array(header, np.int64), *labels.places])
    packed[1] = _checksum(packed)
    return packed


def _checksum(packed: Places) -> np.int64:
    return np.uint64(xxhash.xxh3_64_intdigest(np.ascontiguousarray(packed[2:]).data)).astype(np.int64)


def _mapped(file: Path) -> Places:
    """The array of an .npy file, without `np.load`: that parses the header as Python, and in Python 3.11 two threads
    that parse at once may end in a SystemError (cpython issue 106905)."""
    with file.open("rb") as opened:
        start = opened.read(10)
        size = int.from_bytes(start[8:], "little")
        header = opened.read(size)
    if start[:8] != b"\x93NUMPY\x01\x00" or b"'<i8'" not in header or b"'fortran_order': False" not in header:
        raise ValueError(f"{file} is not an array of int64")
    return np.asarray(np.memmap(file, np.dtype("<i8"), "r", offset=10 + size))


def _load(file: Path) -> LabelMap | None:
    """The map in a file, mapped; None if there is none, or if it is damaged: then it is rebuilt."""
    with suppress(OSError, ValueError, EOFError):
        array = _mapped(file)
        if len(array) < _HEADER or array[0] != FILE_FORMAT:
            return None
        # A changed place would draw patches without the class, and a changed count other cases.
        if array[1] != _checksum(array):
            return None
        z, y, x, classes = (int(value) for value in array[2:_HEADER])
        counts, sizes = array[_HEADER : _HEADER + classes], array[_HEADER + classes : _HEADER + 2 * classes]
        ends = _HEADER + 2 * classes + np.cumsum(sizes)
        if classes < 1 or len(sizes) != classes or int(ends[-1]) != len(array) or ((sizes == 0) != (counts == 0)).any():
            return None
        places = tuple(array[end - size : end] for end, size in zip(ends.tolist(), sizes.tolist(), strict=True))
        return LabelMap((z, y, x), np.array(counts), places)
    return None
