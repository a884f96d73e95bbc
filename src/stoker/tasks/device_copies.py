"""One copy a batch: every choice made on the host travels to the device in a single buffer.

Dozens of small copies cost a launch each, and every one needs page-locked memory of its own. Here the arrays are laid
out in one run of bytes, copied once, and read on the device through views.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Copy = Callable[[Tensor], Tensor]
"""Takes a tensor to the device, if it is not there, without waiting for it."""

# Wide enough for every type in use, and for loads of 16 bytes.
ALIGNMENT = 16


@dataclass(frozen=True)
class PackedArray:
    """The place of an array in the buffer, and how to read it."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class PackedChoices:
    """The arrays of a batch in one host buffer; the caller that copies it keeps it unchanged until the copy is done."""

    host_tensor: Tensor
    """uint8, in ordinary memory."""
    layout: Mapping[str, PackedArray]

    def to_device(self, copy: Copy) -> dict[str, Tensor]:
        """The arrays on the device, by name: views of one tensor."""
        there = copy(self.host_tensor)
        return {
            name: there[section.start : section.stop].view(section.dtype).view(section.shape)
            for name, section in self.layout.items()
        }


def pack(arrays: Mapping[str, NDArray[Any]]) -> PackedChoices:
    """The arrays side by side in one buffer, each at an aligned address."""
    layout, stop = {}, 0
    for name, array in arrays.items():
        start = -(-stop // ALIGNMENT) * ALIGNMENT
        stop = start + array.nbytes
        layout[name] = PackedArray(start, stop, _DTYPES[array.dtype], array.shape)
    buffer = np.empty(stop, np.uint8)
    for name, array in arrays.items():
        section = layout[name]
        buffer[section.start : section.stop].view(array.dtype).reshape(array.shape)[...] = array
    return PackedChoices(torch.from_numpy(buffer), layout)


_DTYPES = {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


def copy_to(device: torch.device) -> Copy:
    """A copy without a pool of page-locked memory: enough outside a training loop. On a CPU nothing is copied."""
    return lambda tensor: tensor.to(device, non_blocking=True)


_kept: dict[Hashable, dict[str, Tensor]] = {}


def kept_on(device: torch.device, key: Hashable, make: Callable[[], Mapping[str, NDArray[Any]]]) -> dict[str, Tensor]:
    """Constants on the device: made and copied when they are first used, then kept."""
    found = _kept.get((device, key))
    if found is None:
        found = pack(make()).to_device(copy_to(device))
        # A tracer's fake tensors end with it: the next caller needs real ones.
        if all(type(tensor) is Tensor for tensor in found.values()):
            _kept[device, key] = found
    return found
