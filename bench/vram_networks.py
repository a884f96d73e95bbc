"""Networks with published memory figures, rebuilt: nnU-Net's U-Nets, with patch sizes from its planner's rules.

Written from the published architectures (Isensee et al., arXiv 2404.09556, and the planners of nnU-Net 2.5): plain
stages of two convolutions, or residual encoder stages of 1, 3, 4, 6, 6, 6 blocks with one convolution per stage in the
decoder; instance norm, leaky ReLU, strided convolutions down, transposed ones up, a head at each resolution.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

FEATURES = (32, 64, 128, 256, 320, 320)
RESIDUAL_BLOCKS = (1, 3, 4, 6, 6, 6)
STEP = 32  # between 128 and 224 px the network halves every side five times
LARGEST_SIDE = 224


class ConvNorm(nn.Sequential):
    """Convolution, instance norm and, unless `active=False`, leaky ReLU in place."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, *, active: bool = True) -> None:
        layers: list[nn.Module] = [
            nn.Conv3d(inputs, outputs, kernel, stride, kernel // 2, bias=kernel > 1),
            nn.InstanceNorm3d(outputs, eps=1e-5, affine=True),
        ]
        super().__init__(*layers, *([nn.LeakyReLU(inplace=True)] if active else []))


class Residual(nn.Module):
    """Two convolutions with a shortcut, which is pooled and projected where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = ConvNorm(inputs, outputs, stride=stride)
        self.second = ConvNorm(outputs, outputs, active=False)
        pool: list[nn.Module] = [nn.AvgPool3d(stride, stride)] if stride > 1 else []
        project: list[nn.Module] = [ConvNorm(inputs, outputs, 1, active=False)] if inputs != outputs else []
        self.shortcut = nn.Sequential(*pool, *project)
        self.active = nn.LeakyReLU(inplace=True)

    def forward(self, values: Tensor) -> Tensor:
        shortcut = self.shortcut(values)
        changed = self.second(self.first(values))
        changed += shortcut
        result: Tensor = self.active(changed)
        return result


class NnUNet(nn.Module):
    """A 3D U-Net with a head at every resolution; the coarser outputs are stored in `coarse` for the loss."""

    def __init__(self, classes: int, *, residual: bool, channels: int = 1) -> None:
        super().__init__()
        self.stem = ConvNorm(channels, FEATURES[0]) if residual else nn.Identity()
        inputs = FEATURES[0] if residual else channels
        self.down, self.up, self.merge, self.heads = (nn.ModuleList() for _ in range(4))
        for stage, outputs in enumerate(FEATURES):
            stride = 1 if stage == 0 else 2
            if residual:
                blocks: list[nn.Module] = [Residual(inputs, outputs, stride)]
                blocks += [Residual(outputs, outputs, 1) for _ in range(RESIDUAL_BLOCKS[stage] - 1)]
            else:
                blocks = [ConvNorm(inputs, outputs, stride=stride), ConvNorm(outputs, outputs)]
            self.down.append(nn.Sequential(*blocks))
            inputs = outputs
        for below, outputs in zip(FEATURES[:0:-1], FEATURES[-2::-1], strict=True):
            self.up.append(nn.ConvTranspose3d(below, outputs, 2, 2))
            more: list[nn.Module] = [] if residual else [ConvNorm(outputs, outputs)]
            self.merge.append(nn.Sequential(ConvNorm(2 * outputs, outputs), *more))
            self.heads.append(nn.Conv3d(outputs, classes, 1))
        self.coarse: list[Tensor] = []

    def forward(self, values: Tensor) -> Tensor:
        values, skips = self.stem(values), []
        for stage in self.down:
            values = stage(values)
            skips.append(values)
        logits = []
        for up, merge, head, skip in zip(self.up, self.merge, self.heads, skips[-2::-1], strict=True):
            values = merge(torch.cat((up(values), skip), 1))
            logits.append(head(values))
        *coarse, finest = logits
        self.coarse[:] = coarse
        result: Tensor = finest
        return result


def dice_and_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of both losses in float32, as in nnU-Net."""
    logits = logits.float()
    shares = logits.softmax(1)
    with torch.no_grad():
        wanted = torch.zeros(shares.shape, dtype=torch.bool, device=shares.device).scatter_(1, targets[:, None], 1)
        sizes = wanted.sum((2, 3, 4))
    overlap, found = (shares * wanted).sum((2, 3, 4)), shares.sum((2, 3, 4))
    dice = (2 * overlap + 1e-5) / (sizes + found + 1e-5)
    return functional.cross_entropy(logits, targets) - dice[:, 1:].mean()


@cache
def planned_patch(voxels: int, residual: bool, classes: int) -> tuple[int, int, int]:
    """The patch that nnU-Net plans for large isotropic volumes; its budget of `voxels` values is for a batch of two."""
    sides = [LARGEST_SIDE] * 3
    while _values(tuple(sides), residual, classes) > voxels:
        sides[sides.index(max(sides))] -= STEP
    first, second, third = sides
    return first, second, third


def _values(patch: tuple[int, ...], residual: bool, classes: int) -> int:
    """Number of values in all convolution outputs for one patch: nnU-Net's estimate of memory."""
    found: list[int] = []
    with torch.device("meta"):
        network = NnUNet(classes, residual=residual)
        for layer in network.modules():
            if isinstance(layer, (nn.Conv3d, nn.ConvTranspose3d)):
                layer.register_forward_hook(lambda _layer, _inputs, out: found.append(math.prod(out.shape)))
        with torch.no_grad():
            network(torch.empty(1, 1, *patch))
    return sum(found)


class DilatedFcn(nn.Module):
    """FCN on a ResNet-C, output stride 8, like mmsegmentation's fcn_r50-d8: two convolutions and an auxiliary head."""

    def __init__(self, backbone: str, classes: int) -> None:
        super().__init__()
        import timm

        self.backbone = timm.create_model(backbone, features_only=True, output_stride=8, out_indices=(3, 4))
        self.convs = nn.Sequential(_conv_norm(2048, 512), _conv_norm(512, 512))
        self.merge, self.head = _conv_norm(2048 + 512, 512), nn.Conv2d(512, classes, 1)
        self.aside = nn.Sequential(_conv_norm(1024, 256), nn.Dropout2d(0.1), nn.Conv2d(256, classes, 1))
        self.drop = nn.Dropout2d(0.1)
        self.coarse: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        third, fourth = self.backbone(images)
        logits = self.head(self.drop(self.merge(torch.cat((fourth, self.convs(fourth)), 1))))
        full, aside = (
            functional.interpolate(found, size=images.shape[-2:], mode="bilinear", align_corners=False)
            for found in (logits, self.aside(third))
        )
        self.coarse[:] = [aside]
        return full


def _conv_norm(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    )
