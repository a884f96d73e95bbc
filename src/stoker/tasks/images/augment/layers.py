"""The operations of a whole batch, one per sample and layer, in as few kernels as possible.

Which sample needs what is known on the host. So each layer first puts the batch in an order in which samples with the
same kind of operation are neighbours: every kind then works on a slice, in place, without gathering and scattering.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.loader.rng import Keys
from stoker.tasks.device_copies import copy_to, pack
from stoker.tasks.images.augment import operations as ops
from stoker.tasks.images.augment.operations import TABLE_SIZE, Floats
from stoker.tasks.images.augment.policies import Layer, Level, Op, Policy

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
    grid = ops.source_grid(_matrices(chosen[warped], arguments[warped], height, width), height, width)
    # Those that follow from the image are filled in on the device.
    tables = np.zeros((counts.tables, 3, TABLE_SIZE), np.uint8)
    tables[counts.equalized + counts.stretched :, :, 1:] = _tables(chosen[fixed], arguments[fixed])[:, None]
    return {
        "by_column": grid.by_column,
        "by_row": grid.by_row,
        "factors": arguments[blended].astype(np.float32),
        "tables": tables,
        "starts": ops.table_starts(counts.tables),
    }


def _matrices(chosen: NDArray[np.int64], arguments: Floats, height: int, width: int) -> Floats:
    makers: dict[Op, Callable[[Floats], Floats]] = {
        Op.ROTATE: lambda degrees: ops.rotate_matrices(degrees, height, width),
        Op.SHEAR_X: ops.shear_x_matrices,
        Op.SHEAR_Y: ops.shear_y_matrices,
        Op.TRANSLATE_X: ops.translate_x_matrices,
        Op.TRANSLATE_Y: ops.translate_y_matrices,
    }
    matrices = np.zeros((len(chosen), 6))
    for op, make in makers.items():
        members = chosen == op
        matrices[members] = make(arguments[members])
    return matrices


def _tables(chosen: NDArray[np.int64], arguments: Floats) -> ops.Tables:
    makers: dict[Op, Callable[[Floats], ops.Tables]] = {
        Op.INVERT: lambda given: ops.invert_tables(len(given)),
        Op.POSTERIZE: ops.posterize_tables,
        Op.SOLARIZE: ops.solarize_tables,
        Op.SOLARIZE_ADD: ops.solarize_add_tables,
        Op.BRIGHTNESS: ops.brightness_tables,
    }
    tables = np.zeros((len(chosen), 256), np.uint8)
    for op, make in makers.items():
        members = chosen == op
        tables[members] = make(arguments[members])
    return tables


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


def apply_layers(layers: Sequence[Layer], images_nhwc: Tensor, fill: Level) -> Tensor:
    """The images (uint8) after these operations; does not change the input."""
    _, height, width, _ = images_nhwc.shape
    arranged = arrange(layers, height, width, fill)
    packed = pack({**arranged.arrays, "first_order": arranged.first_order})
    there = packed.to_device(copy_to(images_nhwc.device))
    return run_layers(images_nhwc.index_select(0, there["first_order"]), arranged.layers, there)


def apply_policy(policy: Policy, images_nhwc: Tensor, keys: Keys) -> Tensor:
    """The images (uint8) after the operations that the policy chooses for their keys; does not change the input."""
    _, height, width, _ = images_nhwc.shape
    return apply_layers(policy.plan(keys, height, width), images_nhwc, policy.fill)
