"""Makes a batch of patches in one buffer: position -> placement -> regions of image and label -> the sample's row.

A row holds what was read for one sample: the image's region, channel after channel, and the label's. Un-rotated patches
fill a row exactly; rotated ones need a larger region, so rows are as long as the largest may be. The device resamples,
swaps axes and flips: a batch carries what that needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.io.prefetch import Prefetcher
from stoker.io.stores import ReadFailure, is_url
from stoker.loader.batch import Allocate, BadSample, LoadedBatch, none_readable, replacements
from stoker.loader.sampler import Steps
from stoker.profile.batch_costs import BatchClock
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.volume import (
    ArrayVolume,
    Region,
    Shape,
    Volume,
    Voxels,
    check_finite,
    read_padded,
)
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patches import Patches, Placement

_ALIGNED = 16
# Regions of remote volumes that are read ahead at once, each of them many requests: first these few.
FIRST_IN_FLIGHT = 4
MOST_IN_FLIGHT = 32


@dataclass(frozen=True)
class RowLayout:
    """The layout of a sample's bytes in its row."""

    channels: int
    image: str
    """Type of the image's voxels; numpy's name."""
    label: str
    """Type of the label's voxels."""
    most_voxels: int

    @property
    def row_bytes(self) -> int:
        """Size of the largest region; a multiple of the alignment, so that every row can be viewed as numbers."""
        return _aligned(self.used_bytes(self.most_voxels))

    def used_bytes(self, voxels: int) -> int:
        """Bytes at the start of a row that a region of so many voxels takes."""
        return self._label_at(voxels) + voxels * self.label_itemsize

    def _label_at(self, voxels: int) -> int:
        return _aligned(self.channels * voxels * self.image_itemsize)

    @property
    def image_itemsize(self) -> int:
        return np.dtype(self.image).itemsize

    @property
    def label_itemsize(self) -> int:
        return np.dtype(self.label).itemsize

    @property
    def voxel_bytes(self) -> int:
        """Bytes of a voxel, in all channels and the label."""
        return self.channels * self.image_itemsize + self.label_itemsize

    def parts(self, row: Any, shape: Sequence[int]) -> tuple[Any, Any]:
        """The image (channels, z, y, x) and the label (z, y, x) in a row, an array or a tensor; no copy."""
        z, y, x = (int(size) for size in shape)
        voxels = z * y * x
        image = _as(row[: self.channels * voxels * self.image_itemsize], self.image).reshape(self.channels, z, y, x)
        begin = self._label_at(voxels)
        label = _as(row[begin : begin + voxels * self.label_itemsize], self.label)
        return image, label.reshape(z, y, x)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _as(row: Any, kind: str) -> Any:
    return row.view(getattr(torch, kind)) if isinstance(row, torch.Tensor) else row.view(np.dtype(kind))


@dataclass
class PatchBatch(LoadedBatch):
    """Patches as they were read, each a row, (samples, row_bytes)."""

    layout: RowLayout
    patch: Shape
    shapes: NDArray[np.int64]
    """(samples, 3): the region that each row holds."""
    orders: NDArray[np.int64]
    """(samples, 3): the region's axis that each axis of the patch runs along."""
    flips: NDArray[np.bool_]
    """(samples, 3): which axes of the patch run backwards."""
    plain: NDArray[np.bool_]
    """Samples that are neither rotated, scaled nor deformed: swapping and flipping axes makes the patch."""
    matrices: NDArray[np.float64]
    offsets: NDArray[np.float64]
    """(samples, 3, 3) and (samples, 3): voxel p of a patch is at `offset + matrix @ p` of its region, displaced if the
    sample is deformed."""
    elastic: NDArray[np.float64]
    """Standard deviation of these displacements, in voxels; 0 where there are none."""
    cases: NDArray[np.int64]
    """The cases' numbers in the plan."""
    starts: NDArray[np.int64]
    """(samples, 3): where each patch's box begins in its volume."""
    valid: NDArray[np.bool_]
    """False for a patch of a grid that could not be read: its row is zero, and it must not be counted."""

    @property
    def indices(self) -> NDArray[np.int64]:
        """The name of a sample in the clock and in messages: its case."""
        return self.cases

    def region(self, slot: int) -> tuple[Any, Any]:
        """The data read for a sample: image (channels, z, y, x) and label (z, y, x); no copy."""
        return self.layout.parts(self.images[slot], self.shapes[slot])


@dataclass(frozen=True)
class PatchPlan:
    """Everything that determines the content of a batch: the same plan gives the same batches anywhere."""

    cases: tuple[Case, ...]
    patches: Patches
    steps: Steps
    layout: RowLayout
    rules: LabelRules

    @property
    def batch_shape(self) -> tuple[int, int]:
        """Shape of a whole batch's bytes."""
        return self.steps.batch_size, self.layout.row_bytes

    def placements(self, epoch: int, step: int, start: int) -> tuple[list[Placement], NDArray[np.uint64]]:
        """The patches of a step, counted from the position `start` of an epoch, and their keys."""
        positions = self.steps.positions(step, start)
        keys = self.patches.keys(epoch, positions)
        return self.patches.place(self.patches.cases(epoch, positions), keys, positions), keys


class _RegionKey(NamedTuple):
    """A region of a remote volume that will be read; it may stick out of the volume."""

    ref: VolumeRef
    box: Region | None
    region: Region
    bytes: int


class PatchReader:
    """Reads the regions of a plan's patches, those of remote volumes ahead of time; one for a process and all its
    threads. Local volumes are not read ahead: copying from a mapping takes less than handing voxels from thread to
    thread."""

    def __init__(self, volumes: OpenVolumes, row_bytes: int, lookahead_bytes: int = 0) -> None:
        self.volumes = volumes
        self.mean_bytes = float(row_bytes)
        """Mean bytes read for a sample: at first those of the largest region, then of the regions announced."""
        self._ahead: Prefetcher[_RegionKey, Voxels] = Prefetcher(
            self._read_ahead, lambda key: key.bytes, lookahead_bytes=lookahead_bytes, requests=MOST_IN_FLIGHT,
            first_requests=FIRST_IN_FLIGHT,
        )  # fmt: skip
        # With `requests` and `ready_bytes`, what an engine asks of a `BatchSource`.
        self.allow, self.held_back_by = self._ahead.allow, self._ahead.held_back_by
        self.forget, self.close = self._ahead.forget, self._ahead.close

    def expect(self, case: Case, placement: Placement, layout: RowLayout) -> None:
        """Announces that a patch will be read."""
        region = placement.region
        sizes = [layout.image_itemsize] * len(case.images) + [layout.label_itemsize]
        keys = [
            _RegionKey(ref, case.box, region, region.voxels * size) for ref, size in zip(case.refs, sizes, strict=True)
        ]
        self._ahead.expect([key for key in keys if self._is_remote(key.ref)])
        self.mean_bytes += (sum(key.bytes for key in keys) - self.mean_bytes) / 32

    def read(self, case: Case, placement: Placement, rules: LabelRules, image: Voxels, label: Voxels) -> None:
        """Fills the parts of a row; raises ReadFailure if the case cannot be read, or has NaN voxels."""
        for channel, ref in zip(image, case.images, strict=True):
            volume, read = self._reading(_RegionKey(ref, case.box, placement.region, channel.nbytes))
            read_padded(volume, placement.region, channel, 0, read)
            if ref.packed is None:  # a pack has no other voxels
                check_finite(channel, volume.name)
        assert case.label is not None, "a case without a label cannot be trained on"
        volume, read = self._reading(_RegionKey(case.label, case.box, placement.region, label.nbytes))
        rules.check_kind(case.id, volume)
        # Packing has checked every label.
        known = case.label.packed is not None and case.label.packed.has_only(rules.classes, rules.ignore)

        def checked(part: Region, out: Voxels | None = None) -> Voxels:
            voxels = read(part, out if volume.dtype == label.dtype else None)
            # Before they are narrowed: 256 would become 0.
            if not known:
                rules.check_values(case.id, volume.name, voxels)
            if out is not None and voxels is not out:
                out[...] = voxels
            return voxels

        read_padded(volume, placement.region, label, rules.outside, checked)

    def _is_remote(self, ref: VolumeRef) -> bool:
        """Whether reading it waits for a network; not if it is mapped from a local copy."""
        return is_url(ref.location) and not isinstance(self.volumes.opened(ref), ArrayVolume)

    def _reading(self, key: _RegionKey) -> tuple[Volume, Callable[..., Voxels]]:
        """The volume of a region, and the function that reads the region: one that was read ahead is handed over."""
        volume = self.volumes.get(key.ref, key.box)
        if self._is_remote(key.ref) and key.region.within(volume.shape).voxels:
            return volume, partial(self._taken, key)
        if is_url(key.ref.location):
            self._ahead.drop([key])  # it may have been announced before the volume was opened
        return volume, volume.read

    def _taken(self, key: _RegionKey, _region: Region, out: Voxels | None = None) -> Voxels:
        (found,) = self._ahead.take([key])
        if isinstance(found, ReadFailure):
            raise found
        if out is None:
            return found
        out[...] = found
        return out

    def _read_ahead(self, keys: Sequence[_RegionKey]) -> Iterator[Voxels]:
        for key in keys:
            volume = self.volumes.get(key.ref, key.box)
            inside = key.region.within(volume.shape)
            yield volume.read(inside) if inside.voxels else np.empty(0)

    @property
    def requests(self) -> int:
        return self._ahead.requests

    @property
    def ready_bytes(self) -> int:
        return self._ahead.ready_bytes


class PatchMaker:
    """Makes batches for one worker; several threads may share it."""

    def __init__(self, plan: PatchPlan, reader: PatchReader) -> None:
        self.plan = plan
        self.reader = reader
        # Placing patches twice would cost a local run a tenth of its speed.
        self._is_remote = any(is_url(ref.location) for case in plan.cases for ref in case.refs)

    def announce(self, epoch: int, step: int, start: int) -> None:
        """Announces to the reader that a step's batch will be made later, so that remote voxels can be fetched."""
        if not self._is_remote:
            return
        for placement in self.plan.placements(epoch, step, start)[0]:
            self.reader.expect(self.plan.cases[placement.case], placement, self.plan.layout)

    def make(self, epoch: int, step: int, start: int, allocate: Allocate) -> PatchBatch:
        """The batch of a step, counted from the position `start` of an epoch."""
        plan, clock = self.plan, BatchClock()
        placements, keys = plan.placements(epoch, step, start)
        clock.begins("collate")
        rows = allocate((len(placements), plan.layout.row_bytes))
        clock.begins("fetch")
        bad: list[BadSample] = []
        valid = np.ones(len(placements), bool)
        began_s = time.perf_counter()
        for slot, placement in enumerate(placements):
            reason = self._fill(placement, rows[slot])
            clock.cost.bytes_read += placement.region.voxels * plan.layout.voxel_bytes
            if reason is not None and plan.patches.is_random:
                placements[slot] = self._replace(reason, placement, int(keys[slot]), rows[slot], bad)
            elif reason is not None:
                valid[slot] = False
                rows[slot] = 0
                bad.append(BadSample(placement.case, plan.cases[placement.case].id, reason, placement.case))
            done_s = time.perf_counter()
            if done_s - began_s > clock.cost.slowest_s:
                clock.cost.slowest_s, clock.cost.slowest_sample = done_s - began_s, placement.case
            began_s = done_s
        clock.begins("other")
        clock.cost.samples, clock.cost.batch_bytes = len(placements), rows.nbytes
        clock.cost.ready_bytes = self.reader.ready_bytes
        patch = plan.patches.patch
        transforms = [one.transform for one in placements]
        offsets = [one.transform.offset(patch, one.start, one.region) for one in placements]
        return PatchBatch(
            images=rows,
            layout=plan.layout,
            patch=patch,
            shapes=_rows([one.region.shape for one in placements], np.int64),
            orders=_rows([one.order for one in transforms], np.int64),
            flips=_rows([one.flips for one in transforms], np.bool_),
            plain=np.array([one.is_plain for one in transforms], bool),
            matrices=np.array([one.matrix for one in transforms], np.float64).reshape(-1, 3, 3),
            offsets=_rows(offsets, np.float64),
            elastic=np.array([one.elastic for one in transforms], np.float64),
            cases=np.array([one.case for one in placements], np.int64),
            starts=_rows([one.start for one in placements], np.int64),
            valid=valid,
            keys=keys,
            epoch=epoch,
            step=step,
            next_position=plan.steps.next_position(step, start),
            cost=clock.finish(),
            bad=tuple(bad),
        )

    def _fill(self, placement: Placement, row: NDArray[np.uint8]) -> str | None:
        """Reads one sample into its row; returns the reason if that fails."""
        image, label = self.plan.layout.parts(row, placement.region.shape)
        try:
            self.reader.read(self.plan.cases[placement.case], placement, self.plan.rules, image, label)
        except ReadFailure as failure:
            return str(failure)
        return None

    def _replace(
        self, reason: str, placement: Placement, key: int, row: NDArray[np.uint8], bad: list[BadSample]
    ) -> Placement:
        """Puts a patch of another case in place of one that cannot be read, and records every bad case."""
        plan = self.plan
        for other in replacements(key, len(plan.cases)):
            bad.append(BadSample(placement.case, plan.cases[placement.case].id, reason, other))
            places = plan.patches.place(np.array([other]), np.array([key], np.uint64), np.zeros(1, np.int64))
            found = self._fill(places[0], row)
            if found is None:
                return places[0]
            placement, reason = places[0], found
        raise none_readable(bad, "patches", "the volumes no longer match their index")


def _rows(values: list[Any], dtype: Any) -> NDArray[Any]:
    return np.array(values, dtype).reshape(-1, 3)
