"""How windows are laid over a volume, how much each counts at a voxel, and what predicting with them takes.

Windows form a grid: layers along z, in a layer rows along y, in a row one window beside the other along x. Along each
axis the Gaussian weights of all windows are divided by their sum, so the weights at a voxel sum to one, and the result
needs no division.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UserError
from stoker.tasks.volumes.formats.volume import Region, Shape, as_shape, box_at
from stoker.tasks.volumes.patches.patches import grid_starts

AXES = "zyx"
# As a share of the window's length, nnU-Net's choice: a window counts 3,000 times less at its border, where a network
# sees only half of what surrounds a voxel, than in its middle.
SIGMA = 1 / 8
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class SlidingWindow:
    """How windows are laid over a volume."""

    overlap: float = 0.5
    """Share of a window that overlaps the next one, at least."""
    flips: str = ""
    """Axes along which windows are also predicted mirrored (`zyx`: eight predictions of each window, averaged)."""

    def __post_init__(self) -> None:
        if len(set(self.flips)) < len(self.flips):
            raise UserError(
                "bad-flips", f"the axes to flip are {self.flips!r}", why="the axes are z, y and x", hint="zyx, or yx"
            )

    @property
    def mirrored(self) -> list[tuple[int, ...]]:
        """The sets of axes (0 to 2) along which a window is mirrored, none at all first."""
        axes = sorted(AXES.index(name) for name in self.flips)
        return [chosen for count in range(len(axes) + 1) for chosen in itertools.combinations(axes, count)]


@dataclass(frozen=True)
class AxisWindows:
    length: int
    """Length of a window."""
    starts: tuple[int, ...]
    """Negative if the window is longer than the volume, which is then centred in it."""

    @property
    def extent(self) -> int:
        """From the start of the first window to the end of the last."""
        return self.starts[-1] + self.length - self.starts[0]

    def closes_at(self, number: int) -> int:
        """No later window adds anything before this place."""
        return self.starts[number + 1] if number + 1 < len(self.starts) else self.starts[-1] + self.length

    @cached_property
    def weights(self) -> NDArray[np.float32]:
        """(windows, length): how much a window counts at each of its voxels; over all windows, one at every voxel."""
        distance = (np.arange(self.length) - (self.length - 1) / 2) / (self.length * SIGMA)
        gaussian = np.exp(-0.5 * distance**2)
        total = np.zeros(self.extent)
        for start in self.starts:
            total[start - self.starts[0] :][: self.length] += gaussian
        shares = [gaussian / total[start - self.starts[0] :][: self.length] for start in self.starts]
        return np.array(shares, np.float32)


class Window(NamedTuple):
    """One window by its numbers along the axes."""

    layer: int
    row: int
    column: int


@dataclass(frozen=True)
class WindowGrid:
    shape: Shape
    patch: Shape
    overlap: float

    @cached_property
    def axes(self) -> tuple[AxisWindows, ...]:
        return tuple(
            AxisWindows(length, tuple(grid_starts(size, length, self.overlap)))
            for size, length in zip(self.shape, self.patch, strict=True)
        )

    @property
    def layers(self) -> int:
        return len(self.axes[0].starts)

    def __len__(self) -> int:
        return self.layers * self.windows_per_layer

    @property
    def windows_per_layer(self) -> int:
        return len(self.axes[1].starts) * len(self.axes[2].starts)

    def layer(self, number: int) -> Iterator[Window]:
        """The windows of a layer, row by row."""
        for row, column in itertools.product(range(len(self.axes[1].starts)), range(len(self.axes[2].starts))):
            yield Window(number, row, column)

    def region(self, window: Window) -> Region:
        """The region of a window; it sticks out of a volume that is smaller than the patch."""
        start = as_shape(axis.starts[number] for axis, number in zip(self.axes, window, strict=True))
        return box_at(start, self.patch)

    def carried_planes(self, layer: int) -> int:
        """Planes at the start of a layer that the layer before has already added to."""
        z = self.axes[0]
        return 0 if layer == 0 else z.starts[layer - 1] + z.length - z.starts[layer]

    def carried_shape(self, layer: int, classes: int) -> tuple[int, int, int, int]:
        """Sums that are carried into a layer: (y, classes but the first, z, x)."""
        return self.axes[1].extent, classes - 1, self.carried_planes(layer), self.axes[2].extent

    def row_shape(self, classes: int) -> tuple[int, int, int, int]:
        """Sums of the row that is being predicted: (classes but the first, z, y, x)."""
        return classes - 1, self.patch[0], self.patch[1], self.axes[2].extent


@dataclass(frozen=True)
class PredictionSize:
    """What it takes to predict one volume."""

    windows: int
    layers: int
    passes: int
    """Windows times the flips and the networks: what the time is proportional to."""
    sums_bytes: int
    """On the device: the sums of the row of windows that is open. Linear in the length of x; y and z do not matter."""
    carried_bytes: int
    """On disk: the sums of planes that two layers share, of two layers."""
    result_bytes: int
    """On disk: the result before it is compressed into its format."""

    @property
    def disk_bytes(self) -> int:
        """While predicting: sums, the result, and once more the result in its format, if nothing can be compressed."""
        return self.carried_bytes + 2 * self.result_bytes


def prediction_size(
    shape: Shape, patch: Shape, sliding: SlidingWindow, *, classes: int, networks: int = 1, voxel_bytes: int = 1
) -> PredictionSize:
    """Windows, memory and disk for a volume; `voxel_bytes` are those of a voxel of the result."""
    grid = WindowGrid(shape, patch, sliding.overlap)
    carried = [math.prod(grid.carried_shape(layer, classes)) for layer in range(grid.layers)]
    return PredictionSize(
        windows=len(grid),
        layers=grid.layers,
        passes=len(grid) * len(sliding.mirrored) * networks,
        sums_bytes=math.prod(grid.row_shape(classes)) * _FLOAT_BYTES,
        carried_bytes=2 * max(carried) * _FLOAT_BYTES,
        result_bytes=math.prod(shape) * voxel_bytes,
    )
