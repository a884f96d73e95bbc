"""What happens to a batch of patches on the device: geometry, floats, normalisation, changes of the voxels' values.

Samples are prepared one after the other, not stacked: each has a region of its own size and its own choice of changes,
and a result that cannot depend on its neighbours. A batch is a few samples of a million voxels each, so a kernel works
for far longer than its launch takes. Choices are made on the host, from the samples' keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.augment.packing import Copy
from stoker.augment.volume_sampling import Points, resample, turned
from stoker.config import Config
from stoker.data.volumes.making import PatchBatch

Statistics = NDArray[np.float32]
Normalization = Literal["volume", "patch", "range"]
_SMALLEST_DEVIATION = 1e-6


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

        Outside of a volume the image is 0 *before* normalisation, as it is in a scan's empty space, and the label is
        the one that never counts: both are in the rows already."""
        rows = _copied(batch, copy)
        device, size = rows[0].device, (len(batch), batch.layout.channels, *batch.patch)
        inputs = torch.empty(size, device=device, dtype=self.dtype, memory_format=self.memory_format)
        labels = None
        if batch.layout.label is not None:
            labels = torch.empty((len(batch), *batch.patch), device=device, dtype=torch.int64)
        for slot, row in enumerate(rows):
            target = inputs[slot]
            # Worked on in place where that is possible.
            in_place = target.dtype == torch.float32 and target.is_contiguous()
            voxels = target if in_place else torch.empty(size[1:], device=device, dtype=torch.float32)
            self._fill(batch, slot, row, voxels, None if labels is None else labels[slot])
            if not in_place:
                target.copy_(voxels)
        return inputs, labels

    def _fill(self, batch: PatchBatch, slot: int, row: Tensor, voxels: Tensor, labels: Tensor | None) -> None:
        image, label = batch.layout.parts(row, batch.shapes[slot])
        if batch.plain[slot]:
            order, flips = batch.orders[slot].tolist(), batch.flips[slot].tolist()
            voxels.copy_(turned(image, order, flips))
            if labels is not None:
                labels.copy_(turned(label, order, flips))
        else:
            points = Points(batch.patch, batch.matrices[slot], batch.offsets[slot])
            resample(image, label, points, voxels, labels)
        self._normalise(voxels, int(batch.cases[slot]))

    def _normalise(self, voxels: Tensor, case: int) -> None:
        for channel, one in enumerate(voxels):
            if self.normalize == "patch":
                one.sub_(one.mean())
                one.div_(deviation(one).clamp_(min=_SMALLEST_DEVIATION))
            else:
                # Numbers of the host: they reach the kernels as arguments, and nothing is copied.
                one.sub_(float(self.means[case, channel])).mul_(1 / float(self.stds[case, channel]))


@dataclass(frozen=True)
class VolumeAugment(VolumeEvalPrepare):
    """The same for training."""


def deviation(centred: Tensor) -> Tensor:
    """The standard deviation of voxels whose mean is 0. (torch's `std` takes ten times as long on a CPU.)"""
    return torch.linalg.vector_norm(centred) * centred.numel() ** -0.5


def _copied(batch: PatchBatch, copy: Copy) -> list[Tensor]:
    """The rows on the device, each as far as it is filled: that is a sixth of a row for most samples."""
    return [copy(row[: batch.layout.used_bytes(shape)]) for row, shape in zip(batch.images, batch.shapes, strict=True)]


def build_volume_augment(
    config: Config, means: Statistics, stds: Statistics, dtype: torch.dtype = torch.float32
) -> VolumeAugment:
    """The augmentation that the config asks for; `dtype` is what the network's inputs have."""
    return VolumeAugment(config.normalize, means, stds, dtype, memory_format_of(config))


def build_volume_eval(
    config: Config, means: Statistics, stds: Statistics, dtype: torch.dtype = torch.float32
) -> VolumeEvalPrepare:
    """The same without anything random, for validation and prediction."""
    return VolumeEvalPrepare(config.normalize, means, stds, dtype, memory_format_of(config))


def memory_format_of(config: Config) -> torch.memory_format:
    """The layout of a network's inputs: that of its weights."""
    return torch.channels_last_3d if config.channels_last else torch.contiguous_format
