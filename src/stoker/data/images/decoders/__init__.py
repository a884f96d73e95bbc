"""The libraries that decode JPEGs: each takes a region of a file as it is stored and gives RGB pixels.

A decoder is a module with `region(data, header, box, scale)`. `box` is in stored pixels; `scale` is 1, 2, 4 or
8: how much smaller than stored the result may be. The array belongs to the calling thread and is overwritten by
its next call. At scale 1 all decoders give the very pixels that Pillow gives. `Refused` says that
this decoder does not take this file on, or noticed damage: Pillow then has the last word.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.data.images.crops import Box
from stoker.data.images.decoders.common import Refused
from stoker.data.images.headers import ImageHeader

__all__ = ["DECODERS", "Decoder", "Refused", "available_decoders", "load_decoder"]

# In the order in which they are named to people; listed, not discovered.
DECODERS = {
    "turbojpeg": "stoker.data.images.decoders.turbojpeg",
    "simplejpeg": "stoker.data.images.decoders.simplejpeg_",
    "nvimgcodec": "stoker.data.images.decoders.nvimgcodec_",
    "opencv": "stoker.data.images.decoders.opencv_",
    "pillow": "stoker.data.images.decoders.pillow_",
}


class Decoder(Protocol):
    """What each module of this package offers."""

    def region(self, data: Any, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:
        """The pixels of a box, `scale` times smaller where the decoder can; raises Refused."""


@cache
def load_decoder(name: str) -> Decoder:
    """The decoder of that name; ImportError where its library is missing or does not pass its test."""
    module: Any = importlib.import_module(DECODERS[name])
    module.prepare()
    return module  # type: ignore[no-any-return]


@cache
def available_decoders() -> tuple[str, ...]:
    """The decoders whose libraries are here and work."""
    found = []
    for name in DECODERS:
        try:
            load_decoder(name)
        except ImportError:
            continue
        found.append(name)
    return tuple(found)
