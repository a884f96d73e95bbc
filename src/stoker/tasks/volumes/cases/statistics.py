"""Mean and standard deviation of volumes, from an even sample of blocks; measured once and remembered."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.core.console import Advance
from stoker.core.files import remember_all
from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.cases.survey import THREADS, volume_identity
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.volume import Volume, box_at

Normalization = Literal["volume", "patch", "range"]
Statistics = NDArray[np.float32]
FORMAT = 1
FILE = "volumes/statistics.json"
# 64 blocks of 32³ are two million voxels: a 320³ volume's mean is then known to a hundredth of its deviation, and a
# 6,000³ one takes no longer to look at.
BLOCKS_PER_AXIS, BLOCK = 4, 32


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
        # Sums of squares lose their digits if the mean is large: they are of differences to a first value.
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
            stds[place] = _range(ref, volumes)
        return means, stds
    keys = [json.dumps([FORMAT, volume_identity(ref, volumes), ref.level]) for ref in refs]

    def measured(missing: list[int]) -> Iterator[list[float] | None]:
        with ThreadPoolExecutor(THREADS) as pool:
            for done, found in enumerate(pool.map(lambda n: _measured(refs[n], volumes), missing), 1):
                if progress is not None:
                    progress(done, len(missing))
                yield found

    found = remember_all(FILE, keys, measured, _is_pair)
    for place, pair in zip(places, found, strict=True):
        means[place], stds[place] = pair if pair is not None else (0.0, 1.0)
    return means, stds


def _measured(ref: VolumeRef, volumes: OpenVolumes) -> list[float] | None:
    try:
        return list(measure(volumes.get(ref)))
    except ReadFailure:
        return None


def _range(ref: VolumeRef, volumes: OpenVolumes) -> float:
    try:
        return value_range(volumes.get(ref).dtype)
    except ReadFailure:
        return 1.0


def _is_pair(value: Any) -> bool:
    numbers = isinstance(value, list) and len(value) == 2 and all(isinstance(one, int | float) for one in value)
    return numbers and bool(np.isfinite(value).all()) and value[1] > 0


def _spread(size: int) -> list[int]:
    """Where blocks begin along an axis: four of them, evenly spread; a short axis is read whole."""
    if size <= BLOCKS_PER_AXIS * BLOCK:
        return list(range(0, size, BLOCK))
    return [round(number * (size - BLOCK) / (BLOCKS_PER_AXIS - 1)) for number in range(BLOCKS_PER_AXIS)]
