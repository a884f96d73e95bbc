"""U-Nets for volumes, written here: the residual U-Net of the case study, nnU-Net's residual encoder, and a small one.

The residual encoder follows the published plans of nnU-Net 2 (arXiv 2404.09556): 32 features, doubled at each level up
to 320; 1, 3, 4, 6, 6, 6 … residual blocks; one convolution at each decoder level; instance norm; LeakyReLU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from stoker.tasks.volumes.formats.volume import Shape, as_shape

SMALLEST_EDGE = 4
"""Voxels that nnU-Net leaves along an axis at the lowest level."""
RESENC_BLOCKS = (1, 3, 4, 6)
"""Residual blocks of the encoder's levels; every further level has as many as the last."""
RESENC_FEATURES = 32
RESENC_MOST_FEATURES = 320
SLOPE = 0.01
"""Negative slope of nnU-Net's LeakyReLU."""


@dataclass(frozen=True)
class Wanted:
    """A network to be built."""

    channels: int
    classes: int
    patch: Shape
    deep_supervision: bool
    dropout: float


def nnunet_strides(patch: Shape) -> list[Shape]:
    """nnU-Net's rule for cubic voxels: an axis is halved while at least four voxels would be left of it, or six if no
    other axis is halved with it."""
    sizes = list(patch)
    strides: list[Shape] = []
    while True:
        halved = [size >= 2 * SMALLEST_EDGE for size in sizes]
        if not any(halved):
            return strides
        # An axis that was halved less often than the others is halved alone.
        voxels = [sum(stride[axis] == 2 for stride in strides) for axis in range(3)]
        finest = min(voxels[axis] for axis in range(3) if halved[axis])
        halved = [halved[axis] and voxels[axis] == finest for axis in range(3)]
        if sum(halved) == 1 and sizes[halved.index(True)] < 3 * SMALLEST_EDGE:
            return strides
        strides.append(as_shape(2 if half else 1 for half in halved))
        sizes = [-(-size // stride) for size, stride in zip(sizes, strides[-1], strict=True)]


def supervised_levels(levels: int) -> int:
    """Outputs with deep supervision: all of the decoder's levels but the coarsest, as in nnU-Net, and at least two."""
    return max(levels - 2, min(2, levels - 1))


@dataclass(frozen=True)
class Style:
    """What the blocks of a network have in common."""

    activation: Callable[[], nn.Module]
    bias: bool
    """Whether 3x3x3 convolutions have a bias, which the norm after them cancels."""
    normed_shortcut: bool
    """Where a shortcut changes the number of channels: a 1x1x1 convolution and a norm, or one with a bias alone."""
    dropout: float


class ResidualBlock(nn.Module):
    """Two convolutions beside a shortcut; the first has the stride, as has average pooling in the shortcut."""

    def __init__(self, inputs: int, outputs: int, style: Style, strides: Shape = (1, 1, 1)) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(inputs, outputs, 3, strides, padding=1, bias=style.bias)
        self.norm1 = nn.InstanceNorm3d(outputs, affine=True)
        self.act1 = style.activation()
        self.conv2 = nn.Conv3d(outputs, outputs, 3, padding=1, bias=style.bias)
        self.norm2 = nn.InstanceNorm3d(outputs, affine=True)
        self.dropout = nn.Dropout3d(style.dropout) if style.dropout > 0 else nn.Identity()
        shortcut: list[nn.Module] = []
        if strides != (1, 1, 1):
            shortcut.append(nn.AvgPool3d(strides, strides))
        if inputs != outputs:
            shortcut.append(nn.Conv3d(inputs, outputs, 1, bias=not style.normed_shortcut))
            if style.normed_shortcut:
                shortcut.append(nn.InstanceNorm3d(outputs, affine=True))
        self.shortcut = nn.Sequential(*shortcut)
        self.act2 = style.activation()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.norm1(self.conv1(x)))
        y = self.dropout(self.norm2(self.conv2(y)))
        y += self.shortcut(x)
        result: Tensor = self.act2(y)
        return result


class ConvolutionBlock(nn.Sequential):
    """Convolution, norm, activation."""

    def __init__(self, inputs: int, outputs: int, style: Style) -> None:
        super().__init__(
            nn.Conv3d(inputs, outputs, 3, padding=1, bias=style.bias),
            nn.Dropout3d(style.dropout) if style.dropout > 0 else nn.Identity(),
            nn.InstanceNorm3d(outputs, affine=True),
            style.activation(),
        )


BLOCKS = (ResidualBlock, ConvolutionBlock)
"""The blocks that gradient checkpointing recomputes, one at a time."""


class UNet(nn.Module):
    """An encoder, and a decoder that joins each level's features; returns logits, or a list of them, largest first.

    `strides` has one entry for each level but the first; `levels` decide how many outputs deep supervision has.
    """

    def __init__(
        self,
        encoder: Sequence[nn.Module],
        decoder: Sequence[nn.Module],
        features: Sequence[int],
        lowest: int,
        strides: Sequence[Shape],
        wanted: Wanted,
        levels: int,
    ) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(encoder)
        below = [*features[1:-1], lowest]
        self.up = nn.ModuleList(
            nn.ConvTranspose3d(inputs, outputs, stride, stride)
            for inputs, outputs, stride in zip(below, features[:-1], strides, strict=True)
        )
        self.decoder = nn.ModuleList(decoder)
        supervised = supervised_levels(levels) if wanted.deep_supervision else 1
        self.heads = nn.ModuleList(nn.Conv3d(features[level], wanted.classes, 1) for level in range(supervised))

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        skips = []
        for stage in self.encoder:
            x = stage(x)
            skips.append(x)
        skips.pop()
        outputs: list[Tensor] = []
        for level in reversed(range(len(skips))):
            x = torch.cat([self.up[level](x), skips.pop()], dim=1)
            x = self.decoder[level](x)
            if level == 0 or (self.training and level < len(self.heads)):
                outputs.insert(0, self.heads[level](x))
        return outputs if len(outputs) > 1 else outputs[0]


def residual_unet(
    wanted: Wanted,
    *,
    base: int = 40,
    multipliers: Sequence[int] = (1, 2, 2, 4, 4),
    blocks: int = 3,
    bottleneck: int = 2,
) -> UNet:
    """A residual U-Net with max pooling, Mish and instance norm; the defaults are the case study's, 33.7 M parameters.

    The lowest level continues with blocks of `bottleneck` times its features.
    """
    style = Style(partial(nn.Mish, inplace=True), bias=False, normed_shortcut=False, dropout=wanted.dropout)
    features = [base * multiplier for multiplier in multipliers]
    lowest = features[-1] * bottleneck
    encoder, width = [], wanted.channels
    for level, wider in enumerate(features):
        stage: list[nn.Module] = [] if level == 0 else [nn.MaxPool3d(2)]
        stage += _residual_blocks(width, wider, blocks, style)
        encoder.append(stage)
        width = wider
    encoder[-1] += _residual_blocks(width, lowest, blocks, style)
    decoder = [nn.Sequential(*_residual_blocks(2 * one, one, blocks, style)) for one in features[:-1]]
    # The lowest level counts twice: once before, and once after its features are widened.
    strides, levels = [(2, 2, 2)] * (len(features) - 1), len(features) + 1
    return UNet([nn.Sequential(*stage) for stage in encoder], decoder, features, lowest, strides, wanted, levels)


def resenc_unet(wanted: Wanted) -> UNet:
    """nnU-Net's residual encoder U-Net, with nnU-Net's initial weights."""
    style = Style(partial(nn.LeakyReLU, SLOPE, inplace=True), bias=True, normed_shortcut=True, dropout=wanted.dropout)
    strides = nnunet_strides(wanted.patch)
    levels = len(strides) + 1
    features = [min(RESENC_FEATURES * 2**level, RESENC_MOST_FEATURES) for level in range(levels)]
    blocks = [RESENC_BLOCKS[min(level, len(RESENC_BLOCKS) - 1)] for level in range(levels)]
    stem = ConvolutionBlock(wanted.channels, features[0], style)
    encoder = [nn.Sequential(stem, *_residual_blocks(features[0], features[0], blocks[0], style))]
    for level in range(1, levels):
        stage = _residual_blocks(features[level - 1], features[level], blocks[level], style, strides[level - 1])
        encoder.append(nn.Sequential(*stage))
    decoder = [ConvolutionBlock(2 * one, one, style) for one in features[:-1]]
    model = UNet(encoder, decoder, features, features[-1], strides, wanted, levels)
    model.apply(_start_like_nnunet)
    return model


def _residual_blocks(
    inputs: int, outputs: int, number: int, style: Style, strides: Shape = (1, 1, 1)
) -> list[nn.Module]:
    first = ResidualBlock(inputs, outputs, style, strides)
    return [first, *(ResidualBlock(outputs, outputs, style) for _ in range(number - 1))]


def _start_like_nnunet(part: nn.Module) -> None:
    """He's initialisation, and residual branches that start as zero."""
    if isinstance(part, nn.Conv3d | nn.ConvTranspose3d):
        nn.init.kaiming_normal_(part.weight, a=SLOPE)
        if part.bias is not None:
            nn.init.zeros_(part.bias)
    elif isinstance(part, ResidualBlock):
        nn.init.zeros_(part.norm2.weight)
        nn.init.zeros_(part.norm2.bias)
