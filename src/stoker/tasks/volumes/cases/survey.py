"""Looks at every case before training: shape and type of its voxels, whether image and label fit together, and the mean
and standard deviation of its voxels.

Opening hundreds of stacks with hundreds of pages each takes time, so the results are kept until a file changes.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Advance
from stoker.core.errors import UserError
from stoker.core.files import remember_all
from stoker.core.units import count
from stoker.io.stores import ReadFailure, is_url
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.packed import packed_identity
from stoker.tasks.volumes.formats.volume import Shape, Volume, as_shape, box_at, failure_of, identity_of
from stoker.tasks.volumes.patches.labels import check_pair

SURVEY_FORMAT, STATISTICS_FORMAT = 3, 1
SURVEY_FILE, STATISTICS_FILE = "volumes/survey.json", "volumes/statistics.json"
Normalization = Literal["volume", "patch", "range"]
Statistics = NDArray[np.float32]
Found = TypeVar("Found")
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


@dataclass(frozen=True)
class Survey:
    """The cases that can be read, with their facts, and why the others cannot; facts and reasons by id."""

    cases: tuple[Case, ...]
    facts: dict[str, CaseFacts]
    bad: dict[str, str]
    volumes: OpenVolumes = field(compare=False)

    @property
    def shapes(self) -> dict[str, Shape]:
        return {name: facts.shape for name, facts in self.facts.items()}

    def image_dtype(self, cases: Sequence[Case]) -> np.dtype[Any]:
        """The type that holds the voxels of these cases; their own, if they agree."""
        dtype = np.result_type(*(np.dtype(self.facts[case.id].dtype) for case in cases))
        return np.dtype(np.float32) if dtype == np.float64 else dtype


def survey(
    cases: Sequence[Case], volumes: OpenVolumes, *, max_bad_fraction: float = 0.01, progress: Advance | None = None
) -> Survey:
    """Opens every case. Those that cannot be read are set aside, up to `max_bad_fraction` (one always); labels that do
    not fit their image raise BadLabels."""
    with ThreadPoolExecutor(THREADS) as pool:
        identities = list(pool.map(lambda case: case_identity(case, volumes), cases))
    keys = [json.dumps([SURVEY_FORMAT, *identity]) for identity in identities]
    reasons: dict[str, str] = {}

    def look(number: int) -> list[Any] | None:
        case = cases[number]
        try:
            images = tuple(volumes.get(ref) for ref in case.images)
            label = volumes.get(case.label) if case.label is not None else None
        except ReadFailure as failure:
            reasons[case.id] = str(failure)
            return None
        check_pair(case.id, images, label)
        dtype = np.result_type(*(image.dtype for image in images))
        return [list(images[0].shape), dtype.name]

    found = remember_all(
        SURVEY_FILE, keys, lambda missing: _in_threads(look, missing, progress), lambda facts: isinstance(facts, list)
    )
    facts = {
        case.id: CaseFacts(as_shape(one[0]), one[1]) for case, one in zip(cases, found, strict=True) if one is not None
    }
    bad = {case.id: reasons[case.id] for case in cases if case.id in reasons}
    if len(bad) > max(1, max_bad_fraction * len(cases)) or not facts:
        raise UserError(
            "too-many-bad-volumes",
            f"{len(bad)} of {count(len(cases), 'volume')} cannot be read\n"
            + "\n".join(f"{name}: {reason}" for name, reason in list(bad.items())[:20]),
            why=f"max_bad_fraction allows {max_bad_fraction:g}; the run would train on other data than you expect",
            hint="repair these files or copy them again, or raise max_bad_fraction",
        )
    return Survey(tuple(case for case in cases if case.id in facts), facts, bad, volumes)


def case_identity(case: Case, volumes: OpenVolumes) -> list[str]:
    """Changes if a file of the case, or the way it is read, changes; local files are not opened for this."""
    missing = volumes.options.missing_chunks
    return [f"{_volume_identity(ref, volumes)} {ref.level} {missing}" for ref in case.refs]


def _volume_identity(ref: VolumeRef, volumes: OpenVolumes) -> str:
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


def _in_threads(
    work: Callable[[int], Found], numbers: Sequence[int], progress: Advance | None = None
) -> Iterator[Found]:
    with ThreadPoolExecutor(THREADS) as pool:
        for done, found in enumerate(pool.map(work, numbers), 1):
            if progress is not None:
                progress(done, len(numbers))
            yield found


def measure(volume: Volume) -> tuple[float, float]:
    """Mean and standard deviation of a volume's voxels, from blocks on an even grid; the same on every machine.

    NaN and infinite voxels do not count. A volume without any variation has the deviation 1, to divide by."""
    count, total, squares = 0, 0.0, 0.0
    shift: float | None = None
    for z, y, x in itertools.product(*(_block_starts(size) for size in volume.shape)):
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


def statistics_of(cases: Sequence[Case], volumes: OpenVolumes, kind: Normalization) -> tuple[Statistics, Statistics]:
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
    keys = [json.dumps([STATISTICS_FORMAT, _volume_identity(ref, volumes), ref.level]) for ref in refs]

    def measured(number: int) -> list[float] | None:
        with suppress(ReadFailure):
            return list(measure(volumes.get(refs[number])))
        return None

    found = remember_all(STATISTICS_FILE, keys, lambda missing: _in_threads(measured, missing), _is_pair)
    for place, pair in zip(places, found, strict=True):
        means[place], stds[place] = pair if pair is not None else (0.0, 1.0)
    return means, stds


def _is_pair(value: Any) -> bool:
    numbers = isinstance(value, list) and len(value) == 2 and all(isinstance(one, int | float) for one in value)
    return numbers and bool(np.isfinite(value).all()) and value[1] > 0


def _block_starts(size: int) -> list[int]:
    """Where blocks begin along an axis: four of them, evenly spread; a short axis is read whole."""
    if size <= BLOCKS_PER_AXIS * BLOCK:
        return list(range(0, size, BLOCK))
    return [round(number * (size - BLOCK) / (BLOCKS_PER_AXIS - 1)) for number in range(BLOCKS_PER_AXIS)]
