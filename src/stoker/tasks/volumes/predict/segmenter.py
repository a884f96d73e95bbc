"""Segments a volume of any size with networks that take patches: sliding windows, blended, in bounded memory.

Windows are predicted row by row. A row's sums are in memory only while windows still add to them; what the next layer
of windows will add to waits in a file (`Carried`). So memory grows with the length of one axis, not with the volume.

segmenter = segmenter_of([open_trained(path)])
mask = predicted_mask(segmenter, [open_volume(ref)])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from stoker.core.console import Advance, say
from stoker.core.errors import UserError
from stoker.tasks.volumes.augment import memory_format_of, normalise
from stoker.tasks.volumes.cases.survey import Normalization, Statistics, measure, value_range
from stoker.tasks.volumes.formats.volume import (
    Region,
    Shape,
    Volume,
    Voxels,
    as_shape,
    box_at,
    check_finite,
    read_padded,
)
from stoker.tasks.volumes.predict.windows import SlidingWindow, Window, WindowGrid
from stoker.tasks.volumes.segment import TrainedVolumeModel
from stoker.train.compute import Precision, set_matmul_precision

Take = Callable[[Region, Tensor], None]
"""Takes a finished box: its region, and the probabilities (classes but the first, z, y, x) of its voxels in float32, on
the device. The probability of class 0 is the rest to one. The tensor is reused: copy what is needed later."""
Numbers = tuple[list[float], list[float]]
"""For each channel, what is subtracted from its voxels; and what divides them."""
Scale = Literal["float16", "uint8"]
READERS = 2
"""Threads that read the next windows while the network works on these."""


@dataclass(frozen=True)
class Segmenter:
    """Networks on their device, which agree in what they take and give; their probabilities are averaged."""

    models: tuple[nn.Module, ...]
    device: torch.device
    precision: Precision
    patch: Shape
    channels: int
    classes: int
    normalize: Normalization
    batch: int = 1
    """Windows at once."""
    memory_format: torch.memory_format = torch.contiguous_format

    @torch.inference_mode()
    def probabilities(self, voxels: Tensor, statistics: Numbers, mirrored: Sequence[tuple[int, ...]]) -> Tensor:
        """The probabilities (windows, classes but the first, z, y, x) in float32 for voxels (windows, channels, z, y,
        x) of any kind, averaged over networks and mirror images; waits for nothing."""
        inputs = self.inputs(voxels, statistics)
        total: Tensor | None = None
        for axes in mirrored:
            dimensions = [axis + 2 for axis in axes]
            turned = inputs.flip(dimensions) if dimensions else inputs
            for model in self.models:
                with self.precision.autocast():
                    logits = model(turned)
                found = logits.float().softmax(dim=1)[:, 1:]
                found = found.flip(dimensions) if dimensions else found
                total = found.clone() if total is None else total.add_(found)
        assert total is not None
        return total.div_(len(mirrored) * len(self.models))

    def inputs(self, voxels: Tensor, statistics: Numbers) -> Tensor:
        """What the networks take for these voxels: normalised as in training, by the same code."""
        inputs = voxels.to(self.device, non_blocking=True).float()
        for window in inputs:
            normalise(window, self.normalize, *statistics)
        return inputs.contiguous(memory_format=self.memory_format)


def segmenter_of(trained: Sequence[TrainedVolumeModel], device: torch.device | None = None) -> Segmenter:
    """The networks of these checkpoints on the GPU if there is one, in the first one's precision."""
    first = trained[0]
    for other in trained[1:]:
        _check_same(first, other)
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = first.config
    set_matmul_precision(config.matmul_precision)
    assert config.patch_size is not None
    if first.classes < 2:
        raise UserError("one-class", f"{first.path} knows one class", why="every voxel would be of class 0")
    return Segmenter(
        models=tuple(one.model.to(device).eval() for one in trained), device=device,
        precision=Precision(config.precision, device), patch=config.patch_size, channels=first.channels,
        classes=first.classes, normalize=config.normalize, batch=config.val_batch_size or config.batch_size,
        memory_format=memory_format_of(config),
    )  # fmt: skip


def _check_same(first: TrainedVolumeModel, other: TrainedVolumeModel) -> None:
    for what, mine, its in (
        ("classes", first.classes, other.classes),
        ("channels", first.channels, other.channels),
        ("patch_size", first.config.patch_size, other.config.patch_size),
        ("normalize", first.config.normalize, other.config.normalize),
    ):
        if mine != its:
            raise UserError(
                "checkpoints-differ",
                f"{what}: {mine} in {first.path}, {its} in {other.path}",
                why="the networks look at the same windows, and their probabilities are averaged voxel by voxel",
                hint="predict them one by one with --probabilities float16, and average those",
            )


class Carried:
    """The sums that one layer of windows leaves to the next: here in memory, for volumes that are not too large."""

    first_layer = 0
    """Where to begin: layers before it are finished."""

    def __init__(self, grid: WindowGrid, classes: int) -> None:
        self._grid, self._classes = grid, classes
        self._layers: dict[int, NDArray[np.float32]] = {}

    def read(self, layer: int, start: int, stop: int) -> NDArray[np.float32]:
        """What was carried into a layer for y from `start` to `stop`: (y, classes but the first, z, x)."""
        return self._layers[layer][start:stop]

    def write(self, layer: int, start: int, sums: NDArray[np.float32]) -> None:
        """Carries sums for y from `start` on into a layer."""
        if layer not in self._layers:
            self._layers[layer] = np.empty(self._grid.carried_shape(layer, self._classes), np.float32)
        self._layers[layer][start : start + len(sums)] = sums

    def layer_done(self, layer: int) -> None:
        """Every finished box of a layer was taken, and all that it carries into the next layer was written."""
        self._layers.pop(layer, None)


def predict_volume(
    segmenter: Segmenter,
    images: Sequence[Volume],
    take: Take,
    *,
    sliding: SlidingWindow | None = None,
    statistics: tuple[Statistics, Statistics] | None = None,
    carried: Carried | None = None,
    progress: Advance | None = None,
) -> None:
    """Gives `take` the probabilities of every voxel, box by box: each voxel exactly once, z ascending.

    `images` are the channels. `statistics` are what is subtracted from each channel and what divides it, measured here
    if not given; a box of a volume needs those of the whole. `progress` counts windows. Raises ReadFailure if the
    volume cannot be read or has NaN voxels. The result does not depend on where `carried` makes it begin.
    """
    sliding = sliding or SlidingWindow()
    check_channels(segmenter, images)
    grid = WindowGrid(images[0].shape, segmenter.patch, sliding.overlap)
    carried = carried or Carried(grid, segmenter.classes)
    means, deviations = statistics or measured(images, segmenter.normalize)
    numbers = means.tolist(), deviations.tolist()
    sums = _RowSums(grid, segmenter, carried, take)
    done, batch = carried.first_layer * grid.windows_per_layer, segmenter.batch
    with ThreadPoolExecutor(READERS) as pool:
        for layer in range(carried.first_layer, grid.layers):
            sums.begin(layer)
            # A batch never crosses layers: a prediction that resumes at one has the same batches and the same bits.
            for windows, voxels in _batches(images, grid, layer, batch, pool):
                begin = 0
                while begin < len(windows):
                    piece = slice(begin, begin + batch)
                    found: Tensor | None = None
                    with suppress(torch.OutOfMemoryError):
                        found = segmenter.probabilities(voxels[piece], numbers, sliding.mirrored)
                    if found is None:  # not in a handler: its traceback would hold the tensors
                        batch = _smaller(batch)
                        continue
                    for window, probabilities in zip(windows[piece], found, strict=True):
                        sums.add(window, probabilities)
                    begin += len(found)
                done += len(windows)
                if progress is not None:
                    progress(done, len(grid))
            sums.close_row()
            carried.layer_done(layer)


def check_channels(segmenter: Segmenter, images: Sequence[Volume]) -> None:
    """Refuses a case with other channels than the networks take, or channels of different shapes."""
    if len(images) != segmenter.channels:
        raise UserError(
            "channels-differ",
            f"{images[0].name}: {len(images)} channel(s); the network takes {segmenter.channels}",
            why="a network has a fixed number of input channels",
            hint="a YAML list with `- {image: [first.tif, second.tif]}`, in the order of training",
        )
    for other in images[1:]:
        if other.shape != images[0].shape:
            raise UserError(
                "shapes-differ",
                f"{images[0].name} is {images[0].shape}, {other.name} is {other.shape}",
                why="the channels of a case must lie on top of each other",
            )


def decided(probabilities: Tensor, threshold: float | None) -> Tensor:
    """The most probable class of each voxel; with a threshold, class 1 wherever it is more probable than that."""
    if len(probabilities) == 1:
        return (probabilities[0] > (0.5 if threshold is None else threshold)).to(torch.uint8)
    assert threshold is None, "a threshold is for two classes"
    best, number = probabilities.max(dim=0)
    kind = torch.uint8 if len(probabilities) < 256 else torch.int16
    return torch.where(best > 1 - probabilities.sum(dim=0), number + 1, 0).to(kind)


def scaled(probabilities: Tensor, scale: Scale) -> Tensor:
    """Probabilities as they are stored: float16, or 0 to 255."""
    if scale == "float16":
        return probabilities.half()
    return probabilities.mul(255).round_().clamp_(0, 255).to(torch.uint8)


def mask_dtype(classes: int) -> np.dtype[Any]:
    """The type of a mask: one byte if that is enough."""
    return np.dtype(np.uint8 if classes <= 256 else np.int16)


def predicted_mask(
    segmenter: Segmenter, images: Sequence[Volume], *, threshold: float | None = None, **options: Any
) -> NDArray[Any]:
    """The class of every voxel, in memory; the options are those of `predict_volume`."""
    mask: NDArray[Any] = np.zeros(images[0].shape, mask_dtype(segmenter.classes))

    def take(region: Region, probabilities: Tensor) -> None:
        mask[region.slices] = decided(probabilities, threshold).cpu().numpy()

    predict_volume(segmenter, images, take, **options)
    return mask


class _RowSums:
    """The weighted sums of one row of windows, on the device; closes what no later window adds to."""

    def __init__(self, grid: WindowGrid, segmenter: Segmenter, carried: Carried, take: Take) -> None:
        self._grid, self._carried, self._take = grid, carried, take
        self._sums = torch.zeros(grid.row_shape(segmenter.classes), device=segmenter.device)
        z, y, x = (torch.from_numpy(axis.weights).to(segmenter.device) for axis in grid.axes)
        self._along_z, self._along_y, self._along_x = z[:, :, None, None], y[:, :, None], x[:, None, :]
        self._layer = self._row = 0

    def begin(self, layer: int) -> None:
        """The first row of a layer is next."""
        self._layer, self._row = layer, 0
        self._sums.zero_()
        self._load(0)

    def add(self, window: Window, probabilities: Tensor) -> None:
        """Adds a window; they come in order."""
        while self._row < window.row:
            self.close_row()
        x = self._grid.axes[2]
        begin = x.starts[window.column] - x.starts[0]
        weights = self._along_z[window.layer] * (self._along_y[window.row] * self._along_x[window.column])
        self._sums[..., begin : begin + x.length].addcmul_(probabilities, weights)

    def close_row(self) -> None:
        """The row has no more windows: hands over what no later one adds to, and moves on to the next row, if any."""
        z, y, x = self._grid.axes
        planes = z.closes_at(self._layer) - z.starts[self._layer]
        rows = y.closes_at(self._row) - y.starts[self._row]
        start = z.starts[self._layer], y.starts[self._row], x.starts[0]
        inside = box_at(start, (planes, rows, x.extent)).within(self._grid.shape)
        closed = self._sums[:, *inside.moved(as_shape(-a for a in start)).slices]
        if not bool(closed.isfinite().all()):  # waits for the device, once in a row
            raise UserError(
                "prediction-not-finite",
                f"the network's output is NaN or infinite between {inside.start} and {inside.stop}",
                why="a class cannot be chosen among such numbers",
                hint="precision=32",
            )
        self._take(inside, closed)
        if self._layer + 1 < self._grid.layers and planes < z.length:
            sums = self._sums[:, planes:, :rows].permute(2, 0, 1, 3).contiguous().cpu().numpy()
            self._carried.write(self._layer + 1, y.starts[self._row] - y.starts[0], sums)
        if self._row + 1 < len(y.starts):
            kept = y.length - rows
            self._sums[:, :, :kept] = self._sums[:, :, rows:].clone()
            self._sums[:, :, kept:] = 0
            self._row += 1
            self._load(kept)

    def _load(self, begin: int) -> None:
        """Starts from what the previous layer has left, for the rows of voxels from `begin` on."""
        planes = self._grid.carried_planes(self._layer)
        if planes and begin < self._grid.patch[1]:
            y = self._grid.axes[1]
            start = y.starts[self._row] - y.starts[0]
            sums = self._carried.read(self._layer, start + begin, start + y.length)
            self._sums[:, :planes, begin:] = torch.from_numpy(sums).to(self._sums.device).permute(1, 2, 0, 3)


def _batches(
    images: Sequence[Volume], grid: WindowGrid, layer: int, size: int, pool: ThreadPoolExecutor
) -> Iterator[tuple[list[Window], Tensor]]:
    """The windows of a layer and their voxels, read one batch ahead."""
    kind = np.result_type(*(image.dtype for image in images))
    kind = np.dtype(np.float32) if kind == np.float64 else kind
    windows = list(grid.layer(layer))

    def read(window: Window, out: Voxels) -> None:
        for image, channel in zip(images, out, strict=True):
            read_padded(image, grid.region(window), channel, 0)
            check_finite(channel, image.name)

    def start(begin: int) -> tuple[list[Window], Voxels, list[Future[None]]]:
        part = windows[begin : begin + size]
        voxels: Voxels = np.empty((len(part), len(images), *grid.patch), kind)
        return part, voxels, [pool.submit(read, window, out) for window, out in zip(part, voxels, strict=True)]

    ahead = start(0)
    for begin in range(size, len(windows) + size, size):
        part, voxels, reading = ahead
        ahead = start(begin)
        for one in reading:
            one.result()
        yield part, torch.from_numpy(voxels)


def measured(images: Sequence[Volume], normalize: Normalization) -> tuple[Statistics, Statistics]:
    """What is subtracted from the voxels of each channel, and what divides them; `patch` needs neither."""
    pairs = [(0.0, value_range(image.dtype) if normalize == "range" else 1.0) for image in images]
    if normalize == "volume":
        pairs = [measure(image) for image in images]
    return np.array([mean for mean, _ in pairs], np.float32), np.array([std for _, std in pairs], np.float32)


def _smaller(batch: int) -> int:
    if batch == 1:
        raise UserError(
            "out-of-device-memory",
            "the device does not have enough memory for one window",
            hint="precision=bf16-mixed, or a GPU with more memory",
        )
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    batch = -(-batch // 2)
    say(f"out of device memory: now {batch} window(s) at once")
    return batch
