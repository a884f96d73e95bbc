"""Looks at every case before training: shape and type of its voxels, whether image and label fit together, and the mean
and standard deviation of its voxels.

Opening hundreds of stacks, each with hundreds of pages, takes time, so the results are kept until a file changes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Advance
from stoker.core.errors import UserError
from stoker.core.files import cache_folder, has_whole_seal, remember_all, sealed, write_text
from stoker.core.units import count
from stoker.io.stores import ReadFailure, is_url
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.packed import packed_identity
from stoker.tasks.volumes.formats.volume import Shape, Volume, box_at, failure_of, identity_of
from stoker.tasks.volumes.patches.labels import check_pair

SURVEY_FORMAT, STATISTICS_FORMAT = 2, 1
STATISTICS_FILE = "volumes/statistics.json"
Normalization = Literal["volume", "patch", "range"]
Statistics = NDArray[np.float32]
# Requests in flight to a network file system or an object store; most of opening a volume is waiting there.
THREADS = 16
# 64 blocks of 32³ are two million voxels: a 320³ volume's mean is then known to a hundredth of its deviation, and a
# 6,000³ one takes no longer to look at.
BLOCKS_PER_AXIS, BLOCK = 4, 32


@dataclass(frozen=True)
class CaseFacts:
    """What is known about a case without reading its voxels."""

    shape: Shape
    dtype: str
    """The type of the image's voxels, by numpy's name."""
    label_dtype: str | None


@dataclass(frozen=True)
class BadCase:
    """A case that cannot be read, and why."""

    id: str
    reason: str


@dataclass(frozen=True)
class Survey:
    """The cases that can be read, with their facts, and those that cannot."""

    cases: tuple[Case, ...]
    facts: dict[str, CaseFacts]
    """By id."""
    bad: tuple[BadCase, ...]

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: facts.shape for name, facts in self.facts.items()}


def survey(
    cases: Sequence[Case], volumes: OpenVolumes, *, max_bad_fraction: float = 0.01, progress: Advance | None = None
) -> Survey:
    """Opens every case. Those that cannot be read are set aside, up to `max_bad_fraction` (one always); labels that do
    not fit their image raise BadLabels."""
    with ThreadPoolExecutor(THREADS) as pool:
        identities = list(pool.map(lambda case: case_identity(case, volumes), cases))
    key = hashlib.blake2b(json.dumps([SURVEY_FORMAT, identities]).encode(), digest_size=16).hexdigest()
    file = cache_folder() / "volumes" / f"survey-{key}.json"
    known = _read(file, cases)
    facts: dict[str, CaseFacts] = {}
    bad: list[BadCase] = []
    if known is not None:
        facts = known
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            for done, (case, found) in enumerate(zip(cases, pool.map(lambda c: _look(c, volumes), cases), strict=True)):
                if isinstance(found, ReadFailure):
                    bad.append(BadCase(case.id, str(found)))
                else:
                    facts[case.id] = found
                if progress is not None:
                    progress(done + 1, len(cases))
        if not bad:
            document = {name: [list(one.shape), one.dtype, one.label_dtype] for name, one in facts.items()}
            with suppress(OSError):  # the next start opens them again
                write_text(file, json.dumps(sealed(document)) + "\n")
    if len(bad) > max(1, max_bad_fraction * len(cases)) or not facts:
        raise UserError(
            "too-many-bad-volumes",
            f"{len(bad)} of {count(len(cases), 'volume')} cannot be read\n"
            + "\n".join(f"{one.id}: {one.reason}" for one in bad[:20]),
            why=f"max_bad_fraction allows {max_bad_fraction:g}; the run would train on other data than you expect",
            hint="repair these files or copy them again, or raise max_bad_fraction",
        )
    return Survey(tuple(case for case in cases if case.id in facts), facts, tuple(bad))


def case_identity(case: Case, volumes: OpenVolumes) -> list[str]:
    """Changes if a file of the case, or the way it is read, changes; local files are not opened for this."""
    refs = [*case.images, *([case.label] if case.label is not None else [])]
    missing = volumes.options.missing_chunks
    return [f"{volume_identity(ref, volumes)} {ref.level} {missing}" for ref in refs]


def image_dtype(facts: Sequence[CaseFacts]) -> np.dtype[Any]:
    """The type that holds the voxels of all cases; their own, if they agree."""
    dtype = np.result_type(*(np.dtype(one.dtype) for one in facts))
    return np.dtype(np.float32) if dtype == np.float64 else dtype


def volume_identity(ref: VolumeRef, volumes: OpenVolumes) -> str:
    """Changes if the volume's file changes; a local file is not opened for this."""
    try:
        if ref.version:
            return f"{ref.location} {ref.version}"
        if ref.packed is not None and not is_url(ref.location):
            return packed_identity(ref.location, ref.packed)
        if not is_url(ref.location) and Path(ref.location).is_file():
            return identity_of(ref.location)
        return volumes.get(ref).identity
    except ReadFailure as failure:
        return f"bad {failure}"
    except OSError as error:
        return f"bad {failure_of(ref.location, error)}"


def _look(case: Case, volumes: OpenVolumes) -> CaseFacts | ReadFailure:
    try:
        images = tuple(volumes.get(ref) for ref in case.images)
        label = volumes.get(case.label) if case.label is not None else None
    except ReadFailure as failure:
        return failure.with_traceback(None)
    check_pair(case.id, images, label)
    dtype = np.result_type(*(image.dtype for image in images))
    return CaseFacts(images[0].shape, dtype.name, None if label is None else label.dtype.name)


def _read(file: Path, cases: Sequence[Case]) -> dict[str, CaseFacts] | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        document = json.loads(file.read_text())
        if not has_whole_seal(document):
            return None
        facts = {}
        for case in cases:
            (z, y, x), dtype, label_dtype = document[case.id]
            facts[case.id] = CaseFacts((int(z), int(y), int(x)), np.dtype(dtype).name, label_dtype)
        return facts
    return None


def boxed(case: Case, facts: CaseFacts) -> CaseFacts:
    """The facts of a case that a split by region has cut."""
    return facts if case.box is None else replace(facts, shape=case.box.shape)


def measure(volume: Volume) -> tuple[float, float]:
    """Mean and standard deviation of a volume's voxels, from blocks on an even grid; the same on every machine.

    NaN and infinite voxels do not count. A volume without any variation has the deviation 1, to divide by."""
    count, total, squares = 0, 0.0, 0.0
    shift: float | None = None
    for z, y, x in itertools.product(*(_spread(size) for size in volume.shape)):
        block = box_at((z, y, x), (BLOCK, BLOCK, BLOCK)).within(volume.shape)
        voxels = volume.read(block).astype(np.float64)
        voxels = voxels[np.isfinite(voxels)]
        if not voxels.size:
            continue
        # Sums of squares lose digits if the mean is large, so the first value is subtracted.
        shift = float(voxels[0]) if shift is None else shift
        voxels -= shift
        count += voxels.size
        total += float(voxels.sum())
        squares += float(np.square(voxels).sum())
    if shift is None:
        return 0.0, 1.0
    mean = total / count
    deviation = float(np.sqrt(max(0.0, squares / count - mean * mean)))
    return shift + mean, deviation if deviation > 0 else 1.0


def value_range(dtype: np.dtype[Any]) -> float:
    """The divisor of `normalize: range`: the largest value of an integer type; floats stay as they are."""
    return float(np.iinfo(dtype).max) if dtype.kind in "iu" else 1.0


def statistics_of(
    cases: Sequence[Case], volumes: OpenVolumes, kind: Normalization, *, progress: Advance | None = None
) -> tuple[Statistics, Statistics]:
    """What is subtracted from, and what divides, the voxels of each case and channel: (cases, channels) each.

    Uses whole volumes, even if a split has cut them: a prediction sees them whole. Without `volume`, nothing is
    measured, and `patch` leaves it to the device. A volume that cannot be read counts as normalised: its patches are
    never trained on, and reading them reports why."""
    channels = max((len(case.images) for case in cases), default=1)
    means = np.zeros((len(cases), channels), np.float32)
    stds = np.ones((len(cases), channels), np.float32)
    if kind == "patch":
        return means, stds
    places = [(number, channel) for number, case in enumerate(cases) for channel in range(len(case.images))]
    if kind == "volume":
        # A pack has measured all voxels of its volumes.
        for number, channel in places:
            if (facts := cases[number].images[channel].packed) is not None:
                means[number, channel], stds[number, channel] = facts.mean, facts.std
        places = [place for place in places if cases[place[0]].images[place[1]].packed is None]
    refs = [cases[number].images[channel] for number, channel in places]
    if kind == "range":
        for place, ref in zip(places, refs, strict=True):
            with suppress(ReadFailure):
                stds[place] = value_range(volumes.get(ref).dtype)
        return means, stds
    keys = [json.dumps([STATISTICS_FORMAT, volume_identity(ref, volumes), ref.level]) for ref in refs]

    def measured(missing: list[int]) -> Iterator[list[float] | None]:
        with ThreadPoolExecutor(THREADS) as pool:
            for done, found in enumerate(pool.map(lambda n: _measured(refs[n], volumes), missing), 1):
                if progress is not None:
                    progress(done, len(missing))
                yield found

    found = remember_all(STATISTICS_FILE, keys, measured, _is_pair)
    for place, pair in zip(places, found, strict=True):
        means[place], stds[place] = pair if pair is not None else (0.0, 1.0)
    return means, stds


def _measured(ref: VolumeRef, volumes: OpenVolumes) -> list[float] | None:
    try:
        return list(measure(volumes.get(ref)))
    except ReadFailure:
        return None


def _is_pair(value: Any) -> bool:
    numbers = isinstance(value, list) and len(value) == 2 and all(isinstance(one, int | float) for one in value)
    return numbers and bool(np.isfinite(value).all()) and value[1] > 0


def _spread(size: int) -> list[int]:
    """Where blocks begin along an axis: four of them, evenly spread; a short axis is read whole."""
    if size <= BLOCKS_PER_AXIS * BLOCK:
        return list(range(0, size, BLOCK))
    return [round(number * (size - BLOCK) / (BLOCKS_PER_AXIS - 1)) for number in range(BLOCKS_PER_AXIS)]
