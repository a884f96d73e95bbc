"""How a sample becomes a square of pixels: a random crop for training, a centred one for validation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.data.crops import CropDraws, CropRange, draw_crops
from stoker.data.decode.decoding import Decoding, Interpolation
from stoker.data.draws import Keys


class View(Protocol):
    """Turns bytes into a slot of a batch."""

    @property
    def size(self) -> int: ...

    def draw(self, keys: Keys) -> Any:
        """What is random about the samples with these keys."""

    def decode(self, data: Any, draws: Any, slot: int, out: NDArray[np.uint8]) -> None:
        """Decodes one sample of the batch into its slot; raises BadImage."""


@dataclass(frozen=True)
class RandomCrop:
    """A random resized crop."""

    size: int
    bounds: CropRange
    decoding: Decoding
    faithful: bool = False
    interpolation: Interpolation = "bilinear"

    def draw(self, keys: Keys) -> CropDraws:
        return draw_crops(keys, self.bounds)

    def decode(self, data: Any, draws: CropDraws, slot: int, out: NDArray[np.uint8]) -> None:
        header = self.decoding.read_header(data)
        box = draws.box(slot, header.width, header.height)
        if self.faithful:
            self.decoding.faithful_crop_into(data, header, box, out, self.interpolation)
        else:
            self.decoding.fast_crop_into(data, header, box, out)


@dataclass(frozen=True)
class CentreCrop:
    """The shorter side resized, the middle kept: as torchvision does it."""

    size: int
    resize: int
    decoding: Decoding
    interpolation: Interpolation = "bicubic"

    def draw(self, keys: Keys) -> None:  # noqa: ARG002 - nothing about validation is random
        return None

    def decode(self, data: Any, draws: None, slot: int, out: NDArray[np.uint8]) -> None:  # noqa: ARG002
        header = self.decoding.read_header(data)
        self.decoding.faithful_centre_into(data, header, self.resize, out, self.interpolation)
