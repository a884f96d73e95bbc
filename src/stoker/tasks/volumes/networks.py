"""Builds networks for volumes by name, for the patch they will get: MONAI's, nnU-Net's residual encoders, our own.

How often a network halves the patch is fixed, or follows from the patch's size by nnU-Net's rule. A patch that does
not fit is refused with the nearest sizes that fit, or padded with zeros at its far end; then the output is cropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from operator import le
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from stoker.config import Config
from stoker.core.console import silent_libraries
from stoker.core.errors import UserError, did_you_mean
from stoker.tasks.volumes import unets
from stoker.tasks.volumes.formats.volume import Shape, as_shape, sizes_text
from stoker.tasks.volumes.unets import SMALLEST_EDGE, Wanted, nnunet_strides, supervised_levels

_USUAL: Shape = (32, 32, 32)
RESENC_PATCHES: dict[str, Shape] = {
    "resenc_m": (128, 128, 128),
    "resenc_l": (192, 192, 192),
    "resenc_xl": (224, 224, 256),
}
"""nnU-Net's presets are one architecture; they differ in the patch that fits their memory target of 8, 24 and 40 GB at
batch 2. These are the planner's patches for large volumes of cubic voxels."""


@dataclass(frozen=True)
class Architecture:
    """A network that can be built by name."""

    build: Callable[[Wanted], nn.Module]
    strides: Callable[[Shape], list[Shape]]
    """The factors by which each level but the first reduces the patch."""
    fewest_levels: int = 2
    supervised: bool = True
    """Whether it has outputs at lower resolutions."""
    dropout: bool = True
    blocks: Callable[[], tuple[type[nn.Module], ...]] = lambda: unets.BLOCKS
    """The blocks that gradient checkpointing recomputes, one at a time."""


class VolumeModel(nn.Module):
    """A network that takes patches of any size, or of multiples of `divisor`.

    Returns logits (N, classes, Z, Y, X); in training mode with deep supervision a list of them, full resolution first.
    """

    def __init__(self, network: nn.Module, divisor: Shape, *, pads: bool) -> None:
        super().__init__()
        self.network = network
        self.divisor = divisor
        self.pads = pads

    def forward(self, inputs: Tensor) -> Tensor | list[Tensor]:
        size = inputs.shape[2:]
        lacking = [-edge % divisor for edge, divisor in zip(size, self.divisor, strict=True)]
        if not any(lacking):
            outputs: Tensor | list[Tensor] = self.network(inputs)
            return outputs
        if not self.pads:
            raise UserError(
                "patch-does-not-fit",
                f"a patch of {sizes_text(size)} voxels cannot be divided by {sizes_text(self.divisor)}",
                why="the network halves each axis that often",
                hint="indivisible_patch=pad",
            )
        # At the far end only: the voxels of every lower resolution are then where they would be without padding.
        outputs = self.network(functional.pad(inputs, [n for far in reversed(lacking) for n in (0, far)]))
        return _cropped([outputs], size)[0] if isinstance(outputs, Tensor) else _cropped(outputs, size)


def _cropped(outputs: list[Tensor], size: Sequence[int]) -> list[Tensor]:
    """The outputs without the padding; those whose voxels do not end where the patch ends are left out."""
    full = outputs[0].shape[2:]
    kept = []
    for output in outputs:
        steps = [whole // edge for whole, edge in zip(full, output.shape[2:], strict=True)]
        if any(edge % step for edge, step in zip(size, steps, strict=True)):
            break
        z, y, x = (edge // step for edge, step in zip(size, steps, strict=True))
        kept.append(output[..., :z, :y, :x])
    return kept


def build_volume_model(config: Config, channels: int, classes: int) -> VolumeModel:
    """The network that a config asks for, with random weights that follow from its seed alone, on torch's default
    device."""
    assert config.patch_size is not None, "the config was checked"
    name, patch, pads = config.model, config.patch_size, config.indivisible_patch == "pad"
    architecture = _architecture(name)
    if config.deep_supervision and not architecture.supervised:
        others = [other for other, known in ARCHITECTURES.items() if known.supervised]
        raise _not_supported(name, "deep_supervision: true", f"model: {', '.join(others)}")
    if config.dropout > 0 and not architecture.dropout:
        raise _not_supported(name, f"dropout: {config.dropout}", "dropout=0")
    strides = architecture.strides(patch)
    divisor = _product(strides)
    if len(strides) + 1 < architecture.fewest_levels or all(map(le, patch, divisor)):
        raise UserError(
            "patch-too-small",
            f"patch_size: {list(patch)} is too small for model: {name}",
            why="at the lowest level nothing, or a single voxel, would be left of it",
            hint=f"patch_size={[2 * max(edge, SMALLEST_EDGE) for edge in _product(architecture.strides(_USUAL))]}",
        )
    if not pads and any(edge % step for edge, step in zip(patch, divisor, strict=True)):
        raise _does_not_fit(name, patch, divisor)
    wanted = Wanted(channels, classes, patch, config.deep_supervision, config.dropout)
    # No device in the list: the weights are drawn on the CPU, or nowhere (fake tensors).
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = architecture.build(wanted)
    if config.gradient_checkpointing:
        _compute_again(network, architecture.blocks(), keep_draws=config.dropout > 0)
    model = VolumeModel(network, divisor, pads=pads)
    return model.to(memory_format=torch.channels_last_3d) if config.channels_last else model


def divisor_of(name: str, patch: Shape) -> Shape:
    """What each axis of a patch must be a multiple of, without building the network."""
    return _product(_architecture(name).strides(patch))


def fitting_patches(name: str, patch: Shape) -> tuple[Shape | None, Shape]:
    """The nearest sizes below and above that the network divides; None if there is no smaller one."""
    strides = _architecture(name).strides
    return _nearest(patch, strides, -1), _nearest(patch, strides, 1) or patch


def monai(module: str) -> Any:
    """A module of MONAI, as `networks.nets`, without its complaints; the first call takes seconds."""
    try:
        with silent_libraries():
            return import_module(f"monai.{module}")
    except ImportError as error:
        raise UserError(
            "monai-missing",
            f"MONAI could not be imported: {error}",
            why="it comes with the extra for volumes",
            hint="pip install 'stoker[volumes]'",
        ) from error


# Sizes.


def _halved(times: int) -> Callable[[Shape], list[Shape]]:
    return lambda patch: [(2, 2, 2)] * times  # noqa: ARG005


def _product(strides: Sequence[Shape]) -> Shape:
    return as_shape(math.prod(stride[axis] for stride in strides) for axis in range(3))


def _nearest(patch: Shape, strides: Callable[[Shape], list[Shape]], step: int) -> Shape | None:
    """The patch with each axis made smaller or larger until it fits; how often it is halved depends on its size."""
    sizes = list(patch)
    for axis in [0, 1, 2] * 2:  # twice: another rule applies to an axis that is halved alone
        while True:
            if sizes[axis] < 1:
                return None
            if sizes[axis] % _product(strides(as_shape(sizes)))[axis] == 0:
                break
            sizes[axis] += step
    return as_shape(sizes)


def _does_not_fit(name: str, patch: Shape, divisor: Shape) -> UserError:
    near = [size for size in fitting_patches(name, patch) if size is not None]
    padded = [-(-edge // step) * step for edge, step in zip(patch, divisor, strict=True)]
    more = math.prod(padded) / math.prod(patch)
    return UserError(
        "patch-does-not-fit",
        f"patch_size: {list(patch)} cannot be divided by {sizes_text(divisor)}, as model: {name} needs",
        why=f"it halves each axis that often; "
        f"padded to {sizes_text(padded)}, a step computes {more:.2f} times the voxels",
        hint=" or ".join(f"patch_size={list(size)}" for size in near) + ", or indivisible_patch=pad",
    )


# Networks.


class DynUNet(nn.Module):
    """MONAI's blocks without its recursion, which gives every weight a second name and holds on to the last outputs."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__()
        strides = nnunet_strides(wanted.patch)
        heads = supervised_levels(len(strides) + 1) - 1
        net = monai("networks.nets").DynUNet(
            3, wanted.channels, wanted.classes,
            kernel_size=[3] * (len(strides) + 1), strides=[(1, 1, 1), *strides], upsample_kernel_size=strides,
            dropout=wanted.dropout or None, deep_supervision=wanted.deep_supervision, deep_supr_num=heads,
        )  # fmt: skip
        self.input_block, self.downsamples, self.bottleneck = net.input_block, net.downsamples, net.bottleneck
        self.upsamples, self.output_block = net.upsamples, net.output_block
        self.deep_supervision_heads = net.deep_supervision_heads if wanted.deep_supervision else nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor | list[Tensor]:
        x = self.input_block(x)
        skips = [x]
        for down in self.downsamples:
            x = down(x)
            skips.append(x)
        x = self.bottleneck(x)
        outputs: list[Tensor] = []
        for up in self.upsamples:
            x = up(x, skips.pop())
            if self.training and 0 < len(skips) <= len(self.deep_supervision_heads):
                outputs.insert(0, self.deep_supervision_heads[len(skips) - 1](x))
        result: Tensor = self.output_block(x)
        return [result, *outputs] if outputs else result


def _unet(wanted: Wanted) -> nn.Module:
    strides = nnunet_strides(wanted.patch)
    net: nn.Module = monai("networks.nets").UNet(
        3, wanted.channels, wanted.classes,
        channels=[min(32 * 2**level, 320) for level in range(len(strides) + 1)], strides=strides, num_res_units=2,
        norm=("INSTANCE", {"affine": True}), dropout=wanted.dropout,
    )  # fmt: skip
    return net


def _segresnet(wanted: Wanted) -> nn.Module:
    net: nn.Module = monai("networks.nets").SegResNet(
        3, 32, wanted.channels, wanted.classes, dropout_prob=wanted.dropout or None
    )
    return net


def _segresnet_ds(wanted: Wanted) -> nn.Module:
    # As in MONAI's Auto3DSeg.
    net: nn.Module = monai("networks.nets").SegResNetDS(
        3, 32, wanted.channels, wanted.classes, norm="INSTANCE", blocks_down=(1, 2, 2, 4, 4),
        dsdepth=4 if wanted.deep_supervision else 1,
    )  # fmt: skip
    return net


class _NumbersOfSwin(TorchFunctionMode):
    """Lets MONAI read the rates of stochastic depth where tensors have no values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return np.linspace(*args) if function is torch.linspace else function(*args, **(kwargs or {}))


def _swinunetr(wanted: Wanted) -> nn.Module:
    nets = monai("networks.nets")
    with _NumbersOfSwin():
        net: nn.Module = nets.SwinUNETR(
            wanted.channels, wanted.classes, feature_size=48, spatial_dims=3, drop_rate=wanted.dropout
        )
    return net


def _monai_blocks(*names: tuple[str, str]) -> Callable[[], tuple[type[nn.Module], ...]]:
    return lambda: tuple(getattr(monai(module), name) for module, name in names)


_DYNUNET = "networks.blocks.dynunet_block"
ARCHITECTURES: dict[str, Architecture] = {
    "dynunet": Architecture(
        DynUNet, nnunet_strides, fewest_levels=3,
        blocks=_monai_blocks((_DYNUNET, "UnetBasicBlock"), (_DYNUNET, "UnetUpBlock")),
    ),
    "residual_unet": Architecture(lambda wanted: unets.residual_unet(wanted), _halved(4)),
    **{name: Architecture(unets.resenc_unet, nnunet_strides) for name in RESENC_PATCHES},
    "segresnet": Architecture(
        _segresnet, _halved(3), supervised=False, blocks=_monai_blocks(("networks.blocks.segresnet_block", "ResBlock"))
    ),
    "segresnet_ds": Architecture(
        _segresnet_ds, _halved(4), dropout=False,
        blocks=_monai_blocks(("networks.nets.segresnet_ds", "SegResBlock")),
    ),
    "small_unet": Architecture(
        lambda wanted: unets.residual_unet(wanted, base=8, multipliers=(1, 2, 4), blocks=1, bottleneck=1), _halved(2)
    ),
    "swinunetr": Architecture(
        _swinunetr, _halved(5), supervised=False,
        blocks=_monai_blocks(("networks.nets.swin_unetr", "SwinTransformerBlock"), (_DYNUNET, "UnetResBlock")),
    ),
    "unet": Architecture(
        _unet, nnunet_strides, supervised=False, blocks=_monai_blocks(("networks.blocks", "ResidualUnit"))
    ),
}  # fmt: skip
"""`small_unet` (0.1 M parameters) is for trials and demonstrations, and needs no MONAI."""


def _compute_again(network: nn.Module, blocks: tuple[type[nn.Module], ...], *, keep_draws: bool) -> None:
    """Makes blocks keep only their inputs, and recompute what they need during the backward pass."""

    def wrap(part: nn.Module) -> None:
        for child in part.children():
            if isinstance(child, blocks):
                # An attribute of the instance, so names of weights stay as they are.
                child.forward = partial(checkpoint, child.forward, use_reentrant=False, preserve_rng_state=keep_draws)
            else:
                wrap(child)

    wrap(network)


def _architecture(name: str) -> Architecture:
    if name in ARCHITECTURES:
        return ARCHITECTURES[name]
    raise UserError(
        "model-unknown",
        f"model: {name} is not a network for volumes",
        why=f"known are {', '.join(sorted(ARCHITECTURES))}",
        hint=did_you_mean(name, ARCHITECTURES) or "model=dynunet",
    )


def _not_supported(name: str, setting: str, hint: str) -> UserError:
    return UserError(
        "model-lacks-feature",
        f"{setting} is not possible with model: {name}",
        why="this architecture does not support it; the setting would have no effect",
        hint=hint,
    )
