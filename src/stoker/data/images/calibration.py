"""Chooses a decoder by measuring them on the user's own files, and remembers the choice."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from stoker.files import write_text
from stoker.run.environment import describe_host

FORMAT = 1
MOST_FILES = 64
# The trial decodes for about a second; this is for a library that hangs.
TRIAL_TIMEOUT_S = 60.0
TRIAL = (sys.executable, "-m", "stoker.data.images.decoder_trial")
_PACKAGES = ("simplejpeg", "opencv-python-headless", "nvidia-nvimgcodec-cu13", "pillow", "turbojpeg", "numpy")


@dataclass(frozen=True)
class CalibrationResult:
    """Which decoder was chosen, and why."""

    choice: str
    microseconds: dict[str, float]
    """For one image on one core, by each decoder that got through all files; empty where none was measured."""
    remembered: bool
    """Whether the figures are those of an earlier run."""


def choose_fastest(
    available: Sequence[str], files: Sequence[bytes], size: int, max_pixels: int, command: Sequence[str] = TRIAL
) -> CalibrationResult:
    """The fastest of the available decoders on these files; the first of them where nothing can be measured."""
    files = files[:MOST_FILES]
    if len(available) == 1 or not files:
        return CalibrationResult(available[0], {}, remembered=False)
    path, key = cache_file(), _key(available, files, size)
    remembered = _figures(_read(path).get(key), available)
    if remembered:
        return CalibrationResult(_fastest(remembered), remembered, remembered=True)
    measured = measure(available, files, size, max_pixels, command)
    if not measured:
        return CalibrationResult(available[0], {}, remembered=False)
    with suppress(OSError):  # a home that cannot be written to costs a second at each start, no more
        write_text(path, json.dumps(_read(path) | {key: measured}, indent=1) + "\n")
    return CalibrationResult(_fastest(measured), measured, remembered=False)


def measure(
    decoders: Sequence[str], files: Sequence[bytes], size: int, max_pixels: int, command: Sequence[str] = TRIAL
) -> dict[str, float]:
    """Microseconds for an image by each decoder that gets through all files.

    In a process of its own: a decoder that crashes is left out, and the training lives on."""
    left = list(decoders)
    while left:
        order = {"decoders": left, "size": size, "max_pixels": max_pixels, "lengths": [len(data) for data in files]}
        message = json.dumps(order).encode() + b"\n" + b"".join(files)
        try:
            done = subprocess.run(command, input=message, capture_output=True, timeout=TRIAL_TIMEOUT_S)
            lines, ended = done.stdout.decode(errors="replace").splitlines(), done.returncode == 0
        except subprocess.TimeoutExpired as error:
            lines, ended = (error.stdout or b"").decode(errors="replace").splitlines(), False
        except OSError:
            return {}
        if ended and lines:
            with suppress(ValueError):
                return _figures(json.loads(lines[-1]), left)
            return {}
        # The last line names the decoder that was at work when the process died.
        if not lines or lines[-1] not in left:
            return {}
        left.remove(lines[-1])
    return {}


def cache_file() -> Path:
    """Where choices are remembered."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - Path's raises
    return Path(base) / "stoker" / "decoder.json"


def _fastest(microseconds: Mapping[str, float]) -> str:
    return min(microseconds, key=lambda name: microseconds[name])


def _figures(value: Any, names: Sequence[str]) -> dict[str, float]:
    """A table of figures for these decoders as it was read, or an empty one where it is something else."""
    if not isinstance(value, dict) or not set(value) <= set(names):
        return {}
    return value if all(isinstance(time, float) for time in value.values()) else {}


def _key(available: Sequence[str], files: Sequence[bytes], size: int) -> str:
    """What a choice depends on, as text; file sizes only by powers of two."""
    mean_bytes = sum(len(data) for data in files) / len(files)
    bucket = round(math.log2(max(mean_bytes, 1)))
    host = describe_host()["cpu"]
    return json.dumps([FORMAT, host, _versions(), list(available), os.environ.get("STOKER_LIBTURBOJPEG"), size, bucket])


def _versions() -> list[str | None]:
    found: list[str | None] = []
    for name in _PACKAGES:
        try:
            found.append(metadata.version(name))
        except metadata.PackageNotFoundError:
            found.append(None)
    return found


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_text())
        if isinstance(content, dict):
            return content
    return {}
