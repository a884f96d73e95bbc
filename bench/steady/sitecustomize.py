"""Makes decoding an image take a fixed CPU time, in every process with this folder on PYTHONPATH.

On a shared host the speed of a core changes by a third from one second to the next, and hides what settings change.
With this, the CPU time that decoding leaves of its fixed time is filled up with work that holds no lock: how many cores
are used, and what waits for what, stays as it is.
"""

import functools
import hashlib
import time
from typing import Any

from stoker.data.images.decoding import Decoding

LEAST_S, SECONDS_PER_BYTE = 0.5e-3, 30e-9
"""About twice what a photo took here."""
BLOCK = bytes(40_000)

_crop_into = Decoding.crop_into


@functools.wraps(_crop_into)
def _steady(self: Decoding, data: Any, *arguments: Any, **keywords: Any) -> None:
    end_s = time.thread_time() + LEAST_S + SECONDS_PER_BYTE * len(data)
    _crop_into(self, data, *arguments, **keywords)
    while time.thread_time() < end_s:
        hashlib.sha256(BLOCK).digest()


Decoding.crop_into = _steady  # type: ignore[method-assign]
