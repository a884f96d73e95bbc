"""`stoker export` for volumes: a network that takes normalised patches of the size that it was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from stoker.core.console import say
from stoker.core.errors import UserError
from stoker.io.stores import ReadFailure
from stoker.tasks.export_formats import CPU, Exportable, exportable
from stoker.tasks.volumes.cases.cases import open_cases
from stoker.tasks.volumes.formats.opening import VolumeRef, open_volume
from stoker.tasks.volumes.formats.volume import Volume, as_shape, box_at, read_padded
from stoker.tasks.volumes.predict.segmenter import Segmenter, measured, segmenter_of
from stoker.tasks.volumes.segment import TrainedVolumeModel, open_trained


def export(checkpoint: Path, settings: Sequence[str], *, image: Path | None, raw: bool) -> Exportable:
    """A network that takes normalised patches (batch, channels, z, y, x); other sizes than its own would change what
    its padding and its lowest resolution see, so the size is fixed."""
    trained = open_trained(checkpoint, say, settings, raw=raw)
    segmenter = segmenter_of([trained], CPU)
    config = trained.config
    about = {
        "classes": trained.classes,
        "channels": trained.channels,
        "patch_size": list(config.patch_size or ()),
        "axes": "batch, channels, z, y, x",
        "normalize": config.normalize,
        "probabilities": "softmax",
    }
    size, real = (segmenter.channels, *segmenter.patch), _real_patch(trained, segmenter, image)
    return exportable(trained, "patches", size, (2, 1), about, real)


def _real_patch(trained: TrainedVolumeModel, segmenter: Segmenter, image: Path | None) -> tuple[str, Tensor] | None:
    """The middle of the given volume, or of the first readable one that the network was trained on."""
    if image is not None:
        if segmenter.channels != 1:
            raise UserError(
                "channels-differ",
                f"--image {image} is one channel; the network takes {segmenter.channels}",
                hint="leave out --image: the first case of data_root is used",
            )
        try:
            return image.name, _middle(segmenter, [open_volume(VolumeRef(str(image)))])
        except ReadFailure as failure:
            raise UserError("image-unreadable", str(failure), hint="--image VOLUME.tif") from None
    if trained.config.data_root is not None:
        # Random patches are compared anyway, so data that has moved is no reason to refuse.
        with suppress(UserError, ReadFailure, OSError):
            for case in open_cases(trained.config.data_root).cases:
                if len(case.images) == segmenter.channels:
                    return case.id, _middle(segmenter, [open_volume(ref) for ref in case.images])
    return None


def _middle(segmenter: Segmenter, images: list[Volume]) -> Tensor:
    start = as_shape((size - length) // 2 for size, length in zip(images[0].shape, segmenter.patch, strict=True))
    voxels = torch.empty(1, len(images), *segmenter.patch)
    for image, channel in zip(images, voxels[0].numpy(), strict=True):
        read_padded(image, box_at(start, segmenter.patch), channel, 0)
    means, deviations = measured(images, segmenter.normalize)
    return segmenter.inputs(voxels, (means.tolist(), deviations.tolist()))
