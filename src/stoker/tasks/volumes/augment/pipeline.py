"""What happens to a batch of patches on the device: geometry, floats, normalisation, changes of the voxels' values.

Samples are prepared one after the other, not stacked: each has its own size of region and its own changes, and its
result cannot depend on its neighbours. A batch is a few samples of a million voxels each, so a kernel works
for far longer than its launch takes. Choices are made on the host, from the samples' keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.config import Config
from stoker.tasks.device_copies import Copy, pack
from stoker.tasks.volumes.augment.intensity import Chances, Changes, blur_arrays, change_voxels, deviation, draw_changes
from stoker.tasks.volumes.augment.resampling import Points, displace, draw_deformation, resample, turned
from stoker.tasks.volumes.cases.survey import Normalization, Statistics
from stoker.tasks.volumes.patches.patch_collate import PatchBatch
from stoker.tasks.volumes.patches.patches import MOST_DISPLACED, TransformRange

Arrays = Mapping[str, Tensor]
UNCHANGED, NO_CHANGES = Changes(), Chances()
# The smallest deviation of a patch to divide by; a constant one has none.
SMALLEST_DEVIATION = 1e-6


@dataclass(frozen=True)
class VolumeEvalPrepare:
    """Turns a batch of patches, as they were read, into a network's inputs, without anything random."""

    normalize: Normalization
    means: Statistics
    stds: Statistics
    """(cases, channels): what is subtracted from a case's voxels, and what divides them."""
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.contiguous_format

    def prepare(self, batch: PatchBatch, copy: Copy) -> tuple[Tensor, Tensor | None]:
        """Inputs (samples, channels, z, y, x) and labels (samples, z, y, x) in int64, None for a batch without them.

        Outside of a volume the image is 0 *before* normalisation, as in the empty space of a scan, and the label is the
        one that never counts: both are in the rows already."""
        changes = self._choose(batch)
        there = _arrays_on_device(batch, changes, copy)
        rows = _copied(batch, copy)
        device, size = rows[0].device, (len(batch), batch.layout.channels, *batch.patch)
        inputs = torch.empty(size, device=device, dtype=self.dtype, memory_format=self.memory_format)
        labels = None
        if batch.layout.label is not None:
            labels = torch.empty((len(batch), *batch.patch), device=device, dtype=torch.int64)
        for slot, (row, change) in enumerate(zip(rows, changes, strict=True)):
            target = inputs[slot]
            # In place where that is possible.
            in_place = target.dtype == torch.float32 and target.is_contiguous()
            voxels = target if in_place else torch.empty(size[1:], device=device, dtype=torch.float32)
            _cut(batch, slot, row, there[slot], voxels, None if labels is None else labels[slot])
            case = int(batch.cases[slot])
            normalise(voxels, self.normalize, self.means[case].tolist(), self.stds[case].tolist())
            change_voxels(voxels, change, int(batch.keys[slot]), there[slot], unit_deviation=self.normalize != "range")
            if not in_place:
                target.copy_(voxels)
        return inputs, labels

    def _choose(self, batch: PatchBatch) -> list[Changes]:
        return [UNCHANGED] * len(batch)


@dataclass(frozen=True)
class VolumeAugment(VolumeEvalPrepare):
    """The same for training: voxels are changed at random, as each sample's key says."""

    chances: Chances = NO_CHANGES

    def _choose(self, batch: PatchBatch) -> list[Changes]:
        return draw_changes(batch.keys, self.chances, batch.layout.channels, batch.patch)


def normalise(voxels: Tensor, kind: Normalization, means: Sequence[float], stds: Sequence[float]) -> None:
    """Normalises the voxels (channels, z, y, x) of a patch in place. `means` and `stds` have a number for each channel,
    on the host: they reach the kernels as arguments, and nothing is copied."""
    for channel, mean, std in zip(voxels, means, stds, strict=True):
        if kind == "patch":
            channel.sub_(channel.mean())
            channel.div_(deviation(channel).clamp_(min=SMALLEST_DEVIATION))
        else:
            channel.sub_(mean).mul_(1 / std)


def _cut(batch: PatchBatch, slot: int, row: Tensor, there: Arrays, voxels: Tensor, labels: Tensor | None) -> None:
    """Fills the sample's voxels and labels from its region."""
    image, label = batch.layout.parts(row, batch.shapes[slot])
    if batch.plain[slot]:
        order, flips = batch.orders[slot].tolist(), batch.flips[slot].tolist()
        voxels.copy_(turned(image, order, flips))
        if labels is not None:
            labels.copy_(turned(label, order, flips))
        return
    moved, size = None, float(batch.elastic[slot])
    if size > 0:
        moved = displace(there["points"], [there[f"weights.{axis}"] for axis in range(3)], MOST_DISPLACED * size)
    points = Points(batch.patch, batch.matrices[slot], batch.offsets[slot], moved)
    resample(image, label, points, voxels, labels)


def _arrays_on_device(batch: PatchBatch, changes: Sequence[Changes], copy: Copy) -> list[Arrays]:
    """The arrays that samples need on the device besides their rows: few need any, and all of them are one copy."""
    arrays: dict[str, NDArray[Any]] = {}
    for slot, change in enumerate(changes):
        found: dict[str, NDArray[Any]] = dict(blur_arrays(change, batch.patch))
        if batch.elastic[slot] > 0:
            drawn = draw_deformation(int(batch.keys[slot]), batch.patch, float(batch.elastic[slot]))
            found["points"] = drawn.control_points
            found |= {f"weights.{axis}": weights for axis, weights in enumerate(drawn.weights)}
        arrays |= {f"{slot} {name}": array for name, array in found.items()}
    there: list[dict[str, Tensor]] = [{} for _ in changes]
    if arrays:
        for name, tensor in pack(arrays).to_device(copy).items():
            slot_name, array_name = name.split(" ")
            there[int(slot_name)][array_name] = tensor
    return list(there)


def _copied(batch: PatchBatch, copy: Copy) -> list[Tensor]:
    """The filled part of each row on the device: a sixth of it for most samples."""
    return [copy(row[: batch.layout.used_bytes(shape)]) for row, shape in zip(batch.images, batch.shapes, strict=True)]


def build_volume_augment(
    config: Config, means: Statistics, stds: Statistics, dtype: torch.dtype = torch.float32
) -> VolumeAugment:
    """The augmentation that the config asks for; `dtype` is what the network's inputs have."""
    chances = Chances(
        config.volume_noise, config.volume_blur, config.volume_brightness, config.volume_contrast,
        config.volume_low_resolution, config.volume_gamma, config.volume_cutout,
    )  # fmt: skip
    return VolumeAugment(config.normalize, means, stds, dtype, memory_format_of(config), chances)


def build_volume_eval(
    config: Config, means: Statistics, stds: Statistics, dtype: torch.dtype = torch.float32
) -> VolumeEvalPrepare:
    """The same without anything random, for validation and prediction."""
    return VolumeEvalPrepare(config.normalize, means, stds, dtype, memory_format_of(config))


def transform_range(config: Config) -> TransformRange:
    """How patches may be placed in their volumes, as the config says: drawn by the data layer, which reads only what a
    patch needs, and carried out here."""
    return TransformRange(
        flips=config.volume_flips, turns=config.volume_turns, rotation=config.volume_rotation,
        degrees=config.volume_degrees, scaling=config.volume_scaling, scales=config.volume_scales,
        elastic=config.volume_elastic, elastic_size=config.volume_elastic_size,
    )  # fmt: skip


def memory_format_of(config: Config) -> torch.memory_format:
    """The layout of a network's inputs: that of its weights."""
    return torch.channels_last_3d if config.channels_last else torch.contiguous_format
