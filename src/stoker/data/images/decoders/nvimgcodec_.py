"""nvImageCodec on the CPU: decodes a region, never scaled."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.data.images.crops import Box
from stoker.data.images.decoders.common import NARROWEST, Refused, is_plain
from stoker.data.images.headers import Bytes, ImageHeader

# The number that the library takes for 'no GPU at all'.
_CPU = -99999
_SUBSAMPLINGS = frozenset({"444", "422", "420", "440", "grey"})
_local = threading.local()
_loading = threading.Lock()


def prepare() -> None:
    """ImportError where the library is missing. It is loaded when it is used: it takes long."""
    if find_spec("nvidia") is None or find_spec("nvidia.nvimgcodec") is None:
        raise ImportError("nvimgcodec")


def region(data: Bytes, header: ImageHeader, box: Box, scale: int) -> NDArray[np.uint8]:  # noqa: ARG001
    """The pixels of a box at their full size; raises Refused."""
    layout = header.jpeg
    if layout is None or not is_plain(layout) or layout.subsampling not in _SUBSAMPLINGS:
        raise Refused
    codec, decoder, parameters = _decoder()
    try:
        stream = codec.CodeStream(data if isinstance(data, bytes) else bytes(data))
        if (stream.width, stream.height) != (header.stored_width, header.stored_height):
            raise Refused
        right = min(max(box.left + box.width, NARROWEST), header.stored_width)
        area = codec.Region((box.top, box.left), (box.top + box.height, right))
        image = decoder.decode(stream.get_sub_code_stream(region=area), params=parameters)
    except RuntimeError as error:
        raise Refused from error
    if image is None:
        raise Refused
    pixels: NDArray[np.uint8] = np.asarray(image.cpu())
    if pixels.shape != (box.height, right - box.left, 3) or pixels.dtype != np.uint8:
        raise Refused
    return pixels[:, : box.width]


def _decoder() -> tuple[Any, Any, Any]:
    """The library, this thread's decoder, and how it is to decode."""
    if not hasattr(_local, "decoder"):
        with _loading, _quiet():
            from nvidia import nvimgcodec

            backend = nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)
            decoder = nvimgcodec.Decoder(device_id=_CPU, max_num_cpu_threads=1, backends=[backend])
        parameters = nvimgcodec.DecodeParams(allow_any_depth=False, apply_exif_orientation=False)
        _local.decoder = nvimgcodec, decoder, parameters
    found: tuple[Any, Any, Any] = _local.decoder
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the library says about each GPU library that it does not find; it writes to stderr itself."""
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
