"""Augmentation policies: which operations each sample gets, and how strong.

The choice follows from the samples' keys alone and is known on the host; `layers` carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.loader.rng import Keys, uniforms
from stoker.tasks.images.augment.operations import Floats

# Purpose of these draws (stoker.loader.rng uses 1 to 15, this package 16 and above).
POLICY = 16

Level = tuple[int, int, int]


class Op(IntEnum):
    """The operations on a sample."""

    IDENTITY = 0
    AUTO_CONTRAST = 1
    EQUALIZE = 2
    INVERT = 3
    ROTATE = 4
    POSTERIZE = 5
    SOLARIZE = 6
    SOLARIZE_ADD = 7
    COLOR = 8
    CONTRAST = 9
    BRIGHTNESS = 10
    SHARPNESS = 11
    SHEAR_X = 12
    SHEAR_Y = 13
    TRANSLATE_X = 14
    TRANSLATE_Y = 15


@dataclass(frozen=True)
class Layer:
    """One operation for each sample."""

    ops: NDArray[np.int64]
    arguments: Floats
    """The operation's argument: degrees, a factor, pixels, bits, a threshold; 0 if it takes none."""


class Policy(Protocol):
    """How the operations of a batch are chosen."""

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
