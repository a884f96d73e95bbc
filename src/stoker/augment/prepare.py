"""From the loader's bytes to the model's numbers: mirroring, floats, layout."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

Colour = tuple[float, float, float]

IMAGENET_MEAN: Colour = (0.485, 0.456, 0.406)
IMAGENET_STD: Colour = (0.229, 0.224, 0.225)


def to_device(values: NDArray[Any] | Tensor, device: torch.device) -> Tensor:
    """A small array on the device, without waiting for it."""
    tensor = values if isinstance(values, Tensor) else torch.from_numpy(values)
    if device.type == "cuda" and tensor.device.type == "cpu":
        # From ordinary memory the driver may wait for the stream before it copies; from page-locked it never does.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def flip(images_nhwc: Tensor, flips: Tensor) -> Tensor:
    """The images, mirrored left to right where `flips` says so. On bytes: a quarter of the traffic of floats."""
    return torch.where(flips[:, None, None, None], images_nhwc.flip(2), images_nhwc)


def to_float(images_nhwc: Tensor, mean: Colour, std: Colour, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normalised NCHW images in channels_last layout: the bytes keep their order, only their type changes."""
    shift, scale = _normalisation(mean, std, images_nhwc.device)
    # In float32 whatever `dtype` is: 123.675 would lose its last digits in half precision. Subtraction and product
    # stay two steps: fused, the last bit of a pixel would depend on where in the batch it stands (on a CPU).
    images_nchw = images_nhwc.permute(0, 3, 1, 2).to(torch.float32).sub_(shift).mul_(scale)
    return images_nchw.to(dtype)


@lru_cache(maxsize=16)
def _normalisation(mean: Colour, std: Colour, device: torch.device) -> tuple[Tensor, Tensor]:
    # Kept: making them anew would be two copies to the device in every step.
    shift = torch.tensor(mean, dtype=torch.float64) * 255
    scale = 1 / (torch.tensor(std, dtype=torch.float64) * 255)
    shaped = [to_device(values.to(torch.float32).view(1, 3, 1, 1), device) for values in (shift, scale)]
    return shaped[0], shaped[1]
