"""Makes decoding an image, and reading a patch, take a fixed CPU time, in every process with this folder on PYTHONPATH.

On a shared host the speed of a core changes by a third from one second to the next, and that of the memory by more; it
hides what settings change. With this, the CPU time that decoding or copying leaves of its fixed time is filled up with
work that holds no lock: how many cores are used, and what waits for what, stays as it is. Chunks of a volume are
decoded beside it, by threads of a library, as fast as they are.
"""

import functools
import hashlib
import importlib.util
import sys
import time
from collections.abc import Callable
from typing import Any

LEAST_S, SECONDS_PER_BYTE = 0.5e-3, 30e-9
"""CPU time of an image: about twice what a photo took here."""
PATCH_S = 3e-3
"""Several times what copying a patch and its label took here."""
BLOCK = memoryview(bytes(4_000_000))
"""Hashed in one call as far as it is needed: each call gives Python's lock back and takes it again, which a library
that decodes an image does once. With calls of 40 kB, four threads on two cores lost 40 to 56 % of their speed."""
LEAST_BYTES = 20_000

_rate = [1e9]
"""Bytes per second that this core hashes, as seen last."""


def _steady(function: Callable[..., None], seconds: Callable[..., float]) -> Callable[..., None]:
    @functools.wraps(function)
    def run(*arguments: Any, **keywords: Any) -> None:
        end_s = time.thread_time() + seconds(*arguments)
        function(*arguments, **keywords)
        while (left_s := end_s - (now_s := time.thread_time())) > 0:
            size = max(LEAST_BYTES, int(left_s * _rate[0]))
            hashlib.sha256(BLOCK[:size]).digest()
            _rate[0] += 0.2 * (min(size, len(BLOCK)) / max(1e-6, time.thread_time() - now_s) - _rate[0])

    return run


def _image(_decoding: Any, data: Any, *_rest: Any) -> float:
    return LEAST_S + SECONDS_PER_BYTE * len(data)


PATCHES = {
    "stoker.tasks.images.decode.crops": ("Decoding", "crop_into", _image),
    "stoker.tasks.volumes.patches.patch_collate": ("PatchReader", "read", lambda *_any: PATCH_S),
}


class _Finder:
    """Changes a module right after its import: importing it here would slow down processes that never need it."""

    @classmethod
    def find_spec(cls, name: str, _path: Any = None, _target: Any = None) -> Any:
        change = PATCHES.pop(name, None)
        if change is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            owner, method, seconds = change
            found = getattr(module, owner)
            setattr(found, method, _steady(getattr(found, method), seconds))

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder)
