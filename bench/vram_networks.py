"""Networks with published memory figures: nnU-Net's U-Nets as `stoker` builds them, with patch sizes from its planner's
rules, and mmsegmentation's FCN, rebuilt.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from stoker.config import Config
from stoker.tasks.volumes.networks import build_volume_model

STEP = 32  # between 128 and 224 px the network halves every side five times
LARGEST_SIDE = 224


def nnunet(name: str, patch: tuple[int, int, int], classes: int) -> nn.Module:
    """`dynunet` is its plain U-Net, `resenc_m` its residual encoder; an output at each resolution but the lowest."""
    config = Config(task="segment3d", model=name, patch_size=patch, deep_supervision=True, channels_last=False)
    return build_volume_model(config, 1, classes)


@cache
def planned_patch(name: str, voxels: int, classes: int) -> tuple[int, int, int]:
    """The patch that nnU-Net plans for large isotropic volumes; its budget of `voxels` values is for a batch of two."""
    sides = [LARGEST_SIDE] * 3
    while _values(name, (sides[0], sides[1], sides[2]), classes) > voxels:
        sides[sides.index(max(sides))] -= STEP
    first, second, third = sides
    return first, second, third


def _values(name: str, patch: tuple[int, int, int], classes: int) -> int:
    """Number of values in all convolution outputs for one patch: nnU-Net's estimate of memory."""
    found: list[int] = []
    with torch.device("meta"):
        network = nnunet(name, patch, classes)
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
