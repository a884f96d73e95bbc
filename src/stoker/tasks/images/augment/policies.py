"""Augmentation policies: which operations each sample gets, how strong, and all of them in as few kernels as possible.

The choice follows from the samples' keys alone and is known on the host. So each layer of operations, one per sample,
first puts the batch in an order in which samples with the same kind of operation are neighbours: every kind then works
on a slice, in place, without gathering and scattering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.rng import Keys, uniforms
from stoker.tasks.images.augment import operations as ops
from stoker.tasks.images.augment.operations import TABLE_SIZE, Floats, Op

# Purpose of these draws (stoker.loader.rng uses 1 to 15, this package 16 and above).
POLICY = 16

Level = tuple[int, int, int]


@dataclass(frozen=True)
class Layer:
    """One operation for each sample."""

    ops: NDArray[np.int64]
    arguments: Floats
    """The operation's argument: degrees, a factor, pixels, bits, a threshold; 0 if it takes none."""


class Policy(Protocol):
    @property
    def fill(self) -> Level:
        """The colour outside the image."""

    def plan(self, keys: Keys, height: int, width: int) -> list[Layer]:
        """The operations of the samples with these keys, in order."""


@dataclass(frozen=True)
class RandAugment:
    """timm's `rand-mX-mstdY-nZ-inc1`: a few operations of about the same strength, each applied half of the time."""

    magnitude: float = 7.0
    magnitude_std: float = 0.5
    num_ops: int = 2
    fill: Level = (128, 128, 128)
    probability: float = 0.5
    """Probability that each operation is applied. timm's published recipes use a half."""

    def plan(self, keys: Keys, height: int, width: int) -> list[Layer]:
        numbers = uniforms(keys, POLICY, 5 * self.num_ops).reshape(len(keys), self.num_ops, 5)
        layers = []
        for which, applied, radius, angle, sign in (numbers[:, layer].T for layer in range(self.num_ops)):
            normal = np.sqrt(-2 * np.log(1 - radius)) * np.cos(2 * np.pi * angle)
            share = np.clip(self.magnitude + self.magnitude_std * normal, 0, 10) / 10
            chosen = np.array(RANDAUGMENT_OPS)[(which * len(RANDAUGMENT_OPS)).astype(np.int64)]
            arguments = randaugment_arguments(chosen, share, np.where(sign < 0.5, -1.0, 1.0), height, width)
            layers.append(Layer(np.where(applied < self.probability, chosen, Op.IDENTITY), arguments))
        return layers


RANDAUGMENT_OPS = tuple(op for op in Op if op is not Op.IDENTITY)


def randaugment_arguments(chosen: NDArray[np.int64], share: Floats, sign: Floats, height: int, width: int) -> Floats:
    """Each operation's argument at this share (0 to 1) of full strength: timm's set that grows with the magnitude."""
    factor = np.maximum(0.1, 1 + sign * share * 0.9)
    return _choose(
        chosen,
        {
            Op.ROTATE: sign * share * 30,
            Op.POSTERIZE: 4 - np.floor(share * 4),
            Op.SOLARIZE: 256 - np.floor(share * 256),
            Op.SOLARIZE_ADD: np.floor(share * 110),
            Op.COLOR: factor,
            Op.CONTRAST: factor,
            Op.BRIGHTNESS: factor,
            Op.SHARPNESS: factor,
            Op.SHEAR_X: sign * share * 0.3,
            Op.SHEAR_Y: sign * share * 0.3,
            Op.TRANSLATE_X: sign * share * 0.45 * width,
            Op.TRANSLATE_Y: sign * share * 0.45 * height,
        },
    )


@dataclass(frozen=True)
class TrivialAugmentWide:
    """torchvision's TrivialAugmentWide: one operation of any strength, from none to very strong."""

    fill: Level = (0, 0, 0)

    def plan(self, keys: Keys, height: int, width: int) -> list[Layer]:  # noqa: ARG002 (shifts by pixels, not shares)
        which, strength, sign = uniforms(keys, POLICY, 3).T
        chosen = np.array(TRIVIALAUGMENT_OPS)[(which * len(TRIVIALAUGMENT_OPS)).astype(np.int64)]
        bins = np.floor(strength * TRIVIALAUGMENT_BINS)
        return [Layer(chosen, trivialaugment_arguments(chosen, bins, np.where(sign < 0.5, -1.0, 1.0)))]


TRIVIALAUGMENT_OPS = (
    Op.IDENTITY, Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y, Op.ROTATE, Op.BRIGHTNESS, Op.COLOR,
    Op.CONTRAST, Op.SHARPNESS, Op.POSTERIZE, Op.SOLARIZE, Op.AUTO_CONTRAST, Op.EQUALIZE,
)  # fmt: skip
TRIVIALAUGMENT_BINS = 31
# Whole pixels, truncated from torchvision's own numbers: the middle bin is 15.999…, so 15.
TRIVIALAUGMENT_PIXELS = torch.linspace(0.0, 32.0, TRIVIALAUGMENT_BINS).trunc().double().numpy()


def trivialaugment_arguments(chosen: NDArray[np.int64], bins: Floats, sign: Floats) -> Floats:
    """Each operation's argument in these bins (0 to 30) of strength."""
    share = bins / (TRIVIALAUGMENT_BINS - 1)
    pixels = TRIVIALAUGMENT_PIXELS[bins.astype(np.int64)]
    factor = 1 + sign * share * 0.99
    return _choose(
        chosen,
        {
            Op.ROTATE: sign * share * 135,
            Op.POSTERIZE: 8 - np.round(share * 6),
            Op.SOLARIZE: 255 - share * 255,
            Op.COLOR: factor,
            Op.CONTRAST: factor,
            Op.BRIGHTNESS: factor,
            Op.SHARPNESS: factor,
            Op.SHEAR_X: sign * share * 0.99,
            Op.SHEAR_Y: sign * share * 0.99,
            # torchvision says where pixels go, our matrices where they come from.
            Op.TRANSLATE_X: -sign * pixels,
            Op.TRANSLATE_Y: -sign * pixels,
        },
    )


def _choose(chosen: NDArray[np.int64], arguments: dict[Op, Floats]) -> Floats:
    result = np.zeros(len(chosen))
    for op, values in arguments.items():
        result = np.where(chosen == op, values, result)
    return result


# The groups of a layer in their order. Operations on floats come first, then those on tables, Equalize first
# among them, so that its histograms begin where the tables do. Identity is last.
GEOMETRIC = (Op.ROTATE, Op.SHEAR_X, Op.SHEAR_Y, Op.TRANSLATE_X, Op.TRANSLATE_Y)
FIXED_TABLES = (Op.INVERT, Op.POSTERIZE, Op.SOLARIZE, Op.SOLARIZE_ADD, Op.BRIGHTNESS)
GROUPS = (
    GEOMETRIC, (Op.COLOR,), (Op.CONTRAST,), (Op.SHARPNESS,), (Op.EQUALIZE,), (Op.AUTO_CONTRAST,), FIXED_TABLES,
    (Op.IDENTITY,),
)  # fmt: skip
_GROUP_OF = np.array([next(number for number, group in enumerate(GROUPS) if op in group) for op in Op])


@dataclass(frozen=True)
class Arranged:
    """How many samples of a layer are in each group; their arrays travel with the other choices of the batch."""

    warped: int
    saturated: int
    contrasted: int
    sharpened: int
    equalized: int
    stretched: int
    looked_up: int
    """Samples with tables that do not depend on the image."""
    unchanged: int

    @property
    def floats(self) -> int:
        """Samples whose operation works on floats."""
        return self.warped + self.blended

    @property
    def blended(self) -> int:
        return self.saturated + self.contrasted + self.sharpened

    @property
    def tables(self) -> int:
        """Samples whose operation is a table."""
        return self.equalized + self.stretched + self.looked_up


@dataclass(frozen=True)
class BatchLayers:
    """The operations of a batch, arranged; `arrays` have to be on the device before they run."""

    layers: tuple[Arranged, ...]
    arrays: Mapping[str, NDArray[Any]]
    first_order: NDArray[np.int64]
    """The order in which the first layer expects the samples."""


def arrange(layers: Sequence[Layer], height: int, width: int, fill: Level) -> BatchLayers:
    """Groups the samples of each layer and makes what the device needs for them."""
    before = np.arange(len(layers[0].ops))
    arrays: dict[str, NDArray[Any]] = {"fill": np.array(fill, np.float32).reshape(1, 3, 1, 1)}
    orders, arranged = [], []
    for number, layer in enumerate(layers):
        groups = _GROUP_OF[layer.ops]
        order = np.argsort(groups, kind="stable")
        counts = Arranged(*np.bincount(groups, minlength=len(GROUPS)).tolist())
        arrays |= {f"{number}.{name}": array for name, array in _arrays(layer, order, counts, height, width).items()}
        # Relative to the order of the layer before.
        place = np.empty_like(before)
        place[before] = np.arange(len(before))
        orders.append(place[order])
        arranged.append(counts)
        before = order
    for number, order in enumerate([*orders[1:], np.argsort(before)]):
        arrays[f"{number}.next_order"] = order
    return BatchLayers(tuple(arranged), arrays, orders[0])


def _arrays(
    layer: Layer, order: NDArray[np.int64], counts: Arranged, height: int, width: int
) -> dict[str, NDArray[Any]]:
    chosen, arguments = layer.ops[order], layer.arguments[order]
    warped = slice(0, counts.warped)
    blended = slice(counts.warped, counts.floats)
    fixed = slice(counts.floats + counts.equalized + counts.stretched, counts.floats + counts.tables)
    grid = ops.source_grid(ops.matrices_of(chosen[warped], arguments[warped], height, width), height, width)
    # Those that follow from the image are filled in on the device.
    tables = np.zeros((counts.tables, 3, TABLE_SIZE), np.uint8)
    tables[counts.equalized + counts.stretched :, :, 1:] = ops.tables_of(chosen[fixed], arguments[fixed])[:, None]
    return {
        **grid,
        "factors": arguments[blended].astype(np.float32),
        "tables": tables,
        "starts": ops.table_starts(counts.tables),
    }


def run_layers(images_nhwc: Tensor, layers: Sequence[Arranged], there: Mapping[str, Tensor]) -> Tensor:
    """The images after all layers, in the batch's own order.

    They come in the first layer's order and are overwritten; `there` has the arrays of the batch on the device.
    """
    for number, layer in enumerate(layers):
        floats, tables = images_nhwc[: layer.floats], images_nhwc[layer.floats : layer.floats + layer.tables]
        arrays = {name: there[f"{number}.{name}"] for name in ("by_column", "by_row", "factors", "tables", "starts")}
        if layer.warped and layer.blended and images_nhwc.device.type == "cpu":
            # One after the other: the allocator gives pieces above 32 MB back each time, and fresh pages cost more
            # than operators do (TrivialAugment of 64 images of 224 px: 58 instead of 74 ms on one core).
            only_warped = replace(layer, saturated=0, contrasted=0, sharpened=0)
            _run_floats(floats[: layer.warped], only_warped, there["fill"], arrays)
            _run_floats(floats[layer.warped :], replace(layer, warped=0), there["fill"], arrays)
        elif layer.floats:
            _run_floats(floats, layer, there["fill"], arrays)
        if layer.tables:
            _run_tables(tables, layer, arrays)
        images_nhwc = images_nhwc.index_select(0, there[f"{number}.next_order"])
    return images_nhwc


def _run_floats(images_nhwc: Tensor, layer: Arranged, fill: Tensor, arrays: Mapping[str, Tensor]) -> None:
    samples, height, width, _ = images_nhwc.shape
    images_nchw = images_nhwc.permute(0, 3, 1, 2)
    # Twice, by one kernel: the pixels, and what replaces them or is blended with them. One plane for each channel: a
    # grey value that three neighbours share cannot be used by wide instructions.
    both = torch.empty((2, samples, 3, height, width), device=images_nhwc.device, dtype=torch.float32)
    planes, changed = both.copy_(images_nchw).unbind(0)
    warped = slice(0, layer.warped)
    if layer.warped:
        ops.warp(planes[warped], arrays["by_column"], arrays["by_row"], fill, out=changed[warped])
    if layer.blended:
        _run_blends(planes[layer.warped :], changed[layer.warped :], layer, arrays["factors"])
    images_nchw.copy_(changed)  # truncates, as Pillow does


def _run_blends(planes: Tensor, changed: Tensor, layer: Arranged, factors: Tensor) -> None:
    grey_samples = layer.saturated + layer.contrasted
    if grey_samples:
        grey = ops.grey_of(planes[:grey_samples])
        colours, contrasts = changed[: layer.saturated], changed[layer.saturated : grey_samples]
        if layer.saturated:
            torch.floor(grey[: layer.saturated, None].expand_as(colours), out=colours)
        if layer.contrasted:
            contrasts.copy_(ops.mean_of(grey[layer.saturated :]))
    if layer.sharpened:
        ops.smooth(planes[grey_samples:], out=changed[grey_samples:])
    ops.blend(changed, planes, factors)


def _run_tables(images_nhwc: Tensor, layer: Arranged, arrays: Mapping[str, Tensor]) -> None:
    _, height, width, channels = images_nhwc.shape
    tables = arrays["tables"]
    places = ops.plus(images_nhwc, arrays["starts"]).view(-1)
    from_images = layer.equalized + layer.stretched
    if from_images:
        levels = torch.empty((from_images, 3, 256), device=images_nhwc.device, dtype=torch.float64)
        if layer.equalized:
            pixels = height * width
            equalized = places[: layer.equalized * pixels * channels]
            ops.equalize(equalized, layer.equalized, pixels, out=levels[: layer.equalized])
        if layer.stretched:
            ops.stretch(images_nhwc[layer.equalized : from_images], out=levels[layer.equalized :])
        tables[:from_images, :, 1:].copy_(levels.clamp_(0, 255))
    ops.look_up(places, tables, out=images_nhwc)
