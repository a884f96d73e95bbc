"""What happens to voxels once, when they are packed: clipped, median-filtered, resampled, turned into bytes.

Any box of the result is computed from the part of the source that it needs, so a volume never has to fit in memory, and
the result does not depend on how it was cut into boxes.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import UsageError
from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.formats.volume import Region, Shape, Volume, Voxels, as_shape, check_finite

# Percentiles of floats and large integers use this many voxels, evenly spread; those of 8 and 16 bits use all.
SAMPLED_VOXELS = 1 << 22
_SLAB_VOXELS = 1 << 24
MOST_MEDIAN = 7


@dataclass(frozen=True)
class Bound:
    """One end of the range that voxels are clipped to: a value, or a percentile of each volume."""

    number: float
    is_percentile: bool

    def __str__(self) -> str:
        return f"{self.number:g}{'%' if self.is_percentile else ''}"


@dataclass(frozen=True)
class VoxelChanges:
    """Everything that determines the voxels of a pack, apart from its source."""

    clip: tuple[Bound, Bound] | None = None
    median: int | None = None
    scale: tuple[float, float, float] | None = None
    """New voxels for one old one, along z, y and x."""
    spacing: tuple[float, float, float] | None = None
    """The spacing of voxels afterwards, if the source's format records it; excludes `scale`."""
    dtype: Literal["keep", "uint8"] = "keep"

    def as_dict(self) -> dict[str, Any]:
        """As options that a user would type; JSON can hold it."""
        found = {name: value for name, value in asdict(self).items() if value not in (None, "keep")}
        if self.clip is not None:
            found["clip"] = ",".join(map(str, self.clip))
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def parse_changes(
    clip: str | None = None,
    median: int | None = None,
    scale: str | None = None,
    spacing: str | None = None,
    dtype: str = "keep",
) -> VoxelChanges:
    """What the options of the command line ask for; refuses what cannot be done."""
    if dtype not in ("keep", "uint8"):
        raise UsageError("usage", f"--dtype {dtype} is neither keep nor uint8", hint="--dtype uint8")
    changes = VoxelChanges(
        clip=None if clip is None else parse_clip(clip),
        median=median,
        scale=None if scale is None else _numbers("--scale", scale),
        spacing=None if spacing is None else _numbers("--spacing", spacing),
        dtype="uint8" if dtype == "uint8" else "keep",
    )
    sizes = changes.scale or changes.spacing
    if median is not None and (median % 2 == 0 or not 3 <= median <= MOST_MEDIAN):
        raise UsageError("usage", f"--median {median} is not 3, 5 or 7", hint="--median 3")
    if scale is not None and spacing is not None:
        raise UsageError("usage", "--scale and --spacing exclude each other", hint="use one of them")
    if sizes is not None and not all(np.isfinite(one) and 1e-3 <= one <= 1e3 for one in sizes):
        raise UsageError("usage", f"{sizes} is not a size of voxels", hint="--scale 0.5 or --spacing 1,1,1")
    return changes


def _numbers(option: str, text: str) -> tuple[float, float, float]:
    """One number for all axes, or three."""
    try:
        found = [float(part) for part in text.split(",")]
        z, y, x = found * 3 if len(found) == 1 else found
    except ValueError:
        seen = f"{option} {text} is neither a number nor three of them"
        raise UsageError("usage", seen, hint=f"{option} 0.5 or {option} 1,0.5,0.5") from None
    return z, y, x


def parse_clip(text: str) -> tuple[Bound, Bound]:
    """`LOW,HIGH`, each a number or a percentage."""
    bounds = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(%?)\s*", part)
        if found is None or (found[2] and not 0 <= float(found[1]) <= 100):
            raise UsageError("usage", f"--clip {text}: {part!r} is neither a number nor a percentage",
                             hint="--clip 0.5%,99.5% or --clip -1000,1000")  # fmt: skip
        bounds.append(Bound(float(found[1]), bool(found[2])))
    ordered = len(bounds) == 2 and (
        bounds[0].is_percentile != bounds[1].is_percentile or bounds[0].number < bounds[1].number
    )
    if not ordered:
        raise UsageError("usage", f"--clip {text} is not LOW,HIGH with LOW below HIGH", hint="--clip 0.5%,99.5%")
    return bounds[0], bounds[1]


@dataclass(frozen=True)
class Axis:
    """How one axis is resampled: output i is the sum of `weights[i] * input[places[i]]`."""

    places: NDArray[np.int64]
    weights: NDArray[np.float32] | None
    """None for labels: the nearest voxel."""


@dataclass(frozen=True)
class PreparedVolume:
    """A volume as it will be packed; any region of it can be read."""

    volume: Volume
    shape: Shape
    dtype: np.dtype[Any]
    affine: NDArray[np.float64] | None
    limits: tuple[float, float] | None
    median: int | None
    axes: tuple[Axis, ...] | None
    to_bytes: bool

    def read(self, region: Region) -> Voxels:
        """The prepared voxels of a region; raises ReadFailure, also for NaN."""
        if self.axes is None:
            return self._finished(self._filtered(region))
        needed = [axis.places[part] for axis, part in zip(self.axes, region.slices, strict=True)]
        start = as_shape(int(places.min()) for places in needed)
        voxels = self._filtered(Region(start, as_shape(int(places.max()) + 1 for places in needed)))
        # The last axis first: it shrinks what the others have to move.
        for number in (2, 1, 0):
            voxels = _resampled(voxels, number, self.axes[number], region.slices[number], start[number])
        return self._finished(voxels)

    def _filtered(self, region: Region) -> Voxels:
        """Source voxels, clipped and filtered; the filter sees the neighbours outside the box."""
        around = 0 if self.median is None else self.median // 2
        wide = Region(as_shape(a - around for a in region.start), as_shape(b + around for b in region.stop))
        inside = wide.within(self.volume.shape)
        voxels = self.volume.read(inside)
        check_finite(voxels, self.volume.name)
        if self.limits is not None:
            voxels = np.clip(voxels, *(_as_kind(limit, voxels.dtype) for limit in self.limits))
        if self.median is None:
            return voxels
        missing = [
            (a - low, high - b)
            for low, a, b, high in zip(wide.start, inside.start, inside.stop, wide.stop, strict=True)
        ]
        # Mirrored at the border, the border itself twice: scipy's 'reflect'.
        return median_of(np.pad(voxels, missing, "symmetric"), self.median)

    def _finished(self, voxels: Voxels) -> Voxels:
        if self.to_bytes and self.limits is not None:
            low, high = self.limits
            voxels = np.clip((voxels.astype(np.float64) - low) * (255 / (high - low)), 0, 255)
        if self.dtype.kind in "iu" and voxels.dtype.kind == "f":
            limits = np.iinfo(self.dtype)
            voxels = np.clip(np.rint(voxels), limits.min, limits.max)
        return voxels.astype(self.dtype, copy=False)


def prepare_image(volume: Volume, changes: VoxelChanges) -> PreparedVolume:
    """An image as it will be packed; measures percentiles, which reads the volume once; raises ReadFailure."""
    limits = None if changes.clip is None else _limits(volume, changes.clip)
    dtype = np.dtype(np.float32) if volume.dtype == np.float64 else volume.dtype
    to_bytes = changes.dtype == "uint8" and dtype != np.uint8
    if to_bytes and limits is None:
        raise ReadFailure(
            volume.name, "not bytes", f"its voxels are {volume.dtype}; --dtype uint8 needs --clip LOW,HIGH for them"
        )
    shape, affine = new_grid(volume, changes)
    axes = None if shape == volume.shape else tuple(map(_linear, volume.shape, shape))
    kind = np.dtype(np.uint8) if to_bytes else dtype
    return PreparedVolume(volume, shape, kind, affine, limits, changes.median, axes, to_bytes)


def prepare_label(volume: Volume, changes: VoxelChanges, dtype: np.dtype[Any]) -> PreparedVolume:
    """A label volume as it will be packed: resampled like the image, by its nearest voxels."""
    shape, affine = new_grid(volume, changes)
    axes = None if shape == volume.shape else tuple(map(_nearest, volume.shape, shape))
    return PreparedVolume(volume, shape, dtype, affine, None, None, axes, to_bytes=False)


def new_grid(volume: Volume, changes: VoxelChanges) -> tuple[Shape, NDArray[np.float64] | None]:
    """Shape and affine of a volume when it is packed; raises ReadFailure if that needs a spacing that it does not
    record."""
    factors = changes.scale
    if changes.spacing is not None:
        if volume.affine is None:
            raise ReadFailure(
                volume.name, "no spacing", "its format does not say how far apart voxels are; use --scale"
            )
        # The affine's columns are x, y, z (as in NIfTI); ours are z, y, x.
        has = np.linalg.norm(volume.affine[:3, :3], axis=0)[::-1]
        factors = tuple(float(one) for one in has / np.array(changes.spacing))  # type: ignore[assignment]
    if factors is None:
        return volume.shape, volume.affine
    z, y, x = (max(1, round(size * factor)) for size, factor in zip(volume.shape, factors, strict=True))
    if volume.affine is None:
        return (z, y, x), None
    steps = np.array(volume.shape, float)[::-1] / np.array([x, y, z], float)
    onto = np.eye(4)
    onto[[0, 1, 2], [0, 1, 2]] = steps
    onto[:3, 3] = (steps - 1) / 2  # voxels are boxes: the first one's middle moves
    return (z, y, x), volume.affine @ onto


def _limits(volume: Volume, clip: tuple[Bound, Bound]) -> tuple[float, float]:
    wanted = [bound.number for bound in clip if bound.is_percentile]
    found = iter(percentiles(volume, wanted) if wanted else ())
    low, high = (next(found) if bound.is_percentile else bound.number for bound in clip)
    if not low < high:
        raise ReadFailure(volume.name, "no range", f"--clip {clip[0]},{clip[1]} is {low:g} to {high:g} here")
    return low, high


def percentiles(volume: Volume, wanted: list[float]) -> list[float]:
    """Percentiles of a volume's voxels, each a value that occurs in it."""
    if volume.dtype.kind in "iu" and volume.dtype.itemsize <= 2:
        low = int(np.iinfo(volume.dtype).min)
        counts = np.zeros(1 << (8 * volume.dtype.itemsize), np.int64)
        for slab in _slabs(volume.shape):
            counts += np.bincount((volume.read(slab).astype(np.int32) - low).reshape(-1), minlength=len(counts))
        ends = np.cumsum(counts)
        return [float(low + int(np.searchsorted(ends, share / 100 * (ends[-1] - 1), side="right"))) for share in wanted]
    step = max(1, int(np.ceil((np.prod(volume.shape, dtype=float) / SAMPLED_VOXELS) ** (1 / 3))))
    parts = []
    for slab in _slabs(volume.shape, step):
        voxels = volume.read(slab)
        check_finite(voxels, volume.name)
        parts.append(voxels[::step, ::step, ::step].reshape(-1))
    found = np.percentile(np.concatenate(parts), wanted, method="lower")
    return [float(value) for value in found]


def median_of(padded: Voxels, size: int) -> Voxels:
    """The median of each box of `size`³ voxels inside the array.

    Sorts whole arrays with minimum and maximum: these are vectorised, which makes it many times faster than
    sorting each box separately. Among a few more than half of the voxels, the smallest and the largest cannot be the
    median: both are dropped and the next voxel is added, until one is left."""
    z, y, x = (length - size + 1 for length in padded.shape)
    made = np.empty((z, y, x), padded.dtype)
    # A plane at a time: the arrays stay in the processor's cache.
    for plane in range(z):
        boxes = [
            padded[plane + dz, dy : dy + y, dx : dx + x]
            for dz in range(size)
            for dy in range(size)
            for dx in range(size)
        ]
        held = [np.array(box) for box in boxes[: len(boxes) // 2 + 2]]
        for coming in [*boxes[len(boxes) // 2 + 2 :], None]:
            _extremes_to_the_ends(held)
            held = held[1:-1] if coming is None else [*held[1:-1], np.array(coming)]
        while len(held) > 1:
            _extremes_to_the_ends(held)
            held = held[1:-1]
        made[plane] = held[0]
    return made


def _extremes_to_the_ends(arrays: list[Voxels]) -> None:
    """Exchanges values between the arrays until the first has the smallest ones and the last the largest."""

    def order(a: int, b: int) -> None:
        low = np.minimum(arrays[a], arrays[b])
        np.maximum(arrays[a], arrays[b], out=arrays[b])
        arrays[a] = low

    count = len(arrays)
    # Pairs first: the smallest is then in one half and the largest in the other, and each is sought only there.
    for a in range(count // 2):
        order(a, count - 1 - a)
    for a in range(1, (count + 1) // 2):
        order(0, a)
    for b in range(count // 2, count - 1):
        order(b, count - 1)


def _resampled(voxels: Voxels, number: int, axis: Axis, wanted: slice, begin: int) -> Voxels:
    places = axis.places[wanted] - begin
    if axis.weights is None:
        return np.take(voxels, places, axis=number)
    weights = axis.weights[wanted]
    shape = [1, 1, 1]
    shape[number] = len(weights)
    total = None
    # In the order of the taps, and never as a matrix product: that may round differently for another size.
    for tap in range(places.shape[1]):
        part = np.take(voxels, places[:, tap], axis=number).astype(np.float32) * weights[:, tap].reshape(shape)
        total = part if total is None else total + part
    assert total is not None
    return total


def _linear(old: int, new: int) -> Axis:
    """Linear between neighbours; where it shrinks, over as many voxels as become one, which avoids aliasing."""
    step = old / new
    reach = max(1.0, step)
    centres = (np.arange(new) + 0.5) * step - 0.5
    first = np.floor(centres - reach).astype(np.int64) + 1
    taps = int(np.ceil(2 * reach))
    places = first[:, None] + np.arange(taps)[None, :]
    weights = np.maximum(0.0, 1 - np.abs(places - centres[:, None]) / reach)
    weights[(places < 0) | (places >= old)] = 0.0
    weights /= weights.sum(axis=1, keepdims=True)
    return Axis(np.clip(places, 0, old - 1), weights.astype(np.float32))


def _nearest(old: int, new: int) -> Axis:
    places = np.minimum(((np.arange(new) + 0.5) * (old / new)).astype(np.int64), old - 1)
    return Axis(places, None)


def _slabs(shape: Shape, step: int = 1) -> list[Region]:
    """A volume in slabs of a limited size, each beginning at a multiple of the step."""
    depth = max(step, _SLAB_VOXELS // max(1, shape[1] * shape[2]) // step * step)
    return [Region((z, 0, 0), (min(z + depth, shape[0]), shape[1], shape[2])) for z in range(0, shape[0], depth)]


def _as_kind(limit: float, dtype: np.dtype[Any]) -> Any:
    """A limit as a number of this kind, so that clipping keeps the kind; limits outside its range do nothing."""
    if dtype.kind not in "iu":
        return dtype.type(limit)
    bounds = np.iinfo(dtype)
    return dtype.type(min(max(round(limit), int(bounds.min)), int(bounds.max)))
