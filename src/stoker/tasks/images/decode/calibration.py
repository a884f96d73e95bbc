"""Chooses a decoder by measuring all of them on the user's own files, and remembers the choice; and how fast this host
decodes at best."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from stoker.core.child import ChildDied, ChildFailed, ChildTooSlow, Parent, call
from stoker.core.errors import UserError
from stoker.core.files import remember
from stoker.loader.rng import sample_keys
from stoker.run.environment import describe_host
from stoker.tasks.images.decode.crops import MAX_PIXELS, CropRange, DecodeMode, Decoding, draw_crops
from stoker.tasks.images.decode.decoders import LIBTURBOJPEG, available_decoders
from stoker.tasks.images.decode.headers import BadImage, Box, ImageHeader

FORMAT = 2
CACHE_FILE = "decoder.json"
MOST_FILES = 64
# A trial decodes for about a second; this is for a library that hangs.
TRIAL_TIMEOUT_S = 60.0
ROUNDS = 3
# Time for all rounds together; files beyond that are left out.
BUDGET_S = 1.0
FEWEST_FILES = 4
_PACKAGES = ("simplejpeg", "opencv-python-headless", "nvidia-nvimgcodec-cu13", "pillow", "turbojpeg", "numpy")


@dataclass(frozen=True)
class CalibrationResult:
    choice: str
    microseconds: dict[str, float]
    """Per image on one core, for each decoder that decoded all files; empty if nothing was measured."""
    remembered: bool
    """Whether the figures were measured by an earlier run."""


def choose_decoder(
    wanted: str,
    sample_files: Callable[[], list[bytes]],
    size: int,
    *,
    max_pixels: int = MAX_PIXELS,
    mode: DecodeMode = "fast",
) -> tuple[Decoding, CalibrationResult | None]:
    """The decoder of that name; for 'auto' the fastest on these files at this crop size, with the measurements."""
    available = list(available_decoders())
    if wanted == "auto":
        result = choose_fastest(available, sample_files(), size, max_pixels, mode)
        return Decoding(result.choice, max_pixels), result
    if wanted not in available:
        raise UserError(
            "decoder-missing",
            f"decoder: {wanted} is not installed, or does not work on this machine",
            why=f"available decoders: {', '.join(available)}",
            hint="decoder=auto picks the fastest of these",
        )
    return Decoding(wanted, max_pixels), None


def choose_fastest(
    available: Sequence[str], files: Sequence[bytes], size: int, max_pixels: int, mode: DecodeMode = "fast"
) -> CalibrationResult:
    """The fastest of the available decoders on these files; the first one if nothing can be measured."""
    files = files[:MOST_FILES]
    if len(available) == 1 or not files:
        return CalibrationResult(available[0], {}, remembered=False)
    measured: dict[str, float] = {}

    def measure_now() -> dict[str, float]:
        measured.update(measure(available, files, size, max_pixels, mode))
        return measured

    key = _key(available, files, size, mode)
    found = remember(CACHE_FILE, key, measure_now, lambda value: _usable(value, available))
    if not found:
        return CalibrationResult(available[0], {}, remembered=False)
    return CalibrationResult(min(found, key=lambda name: found[name]), found, remembered=not measured)


def measure(
    decoders: Sequence[str], files: Sequence[bytes], size: int, max_pixels: int, mode: DecodeMode = "fast"
) -> dict[str, float]:
    """Microseconds per image for each decoder that decodes all files.

    Measured in a child process: a decoder that crashes or hangs is left out, and training continues without it.
    """
    left = list(decoders)
    while left:
        job = {"decoders": left, "size": size, "max_pixels": max_pixels, "mode": mode, "files": list(files)}
        at_work: list[str] = []
        try:
            found = call(decode_in_turn, job, on_message=at_work.append, timeout_s=TRIAL_TIMEOUT_S)
            return found if _usable(found, left) else {}
        except (ChildDied, ChildTooSlow):
            if not at_work:
                return {}
            left.remove(at_work[-1])
        except (ChildFailed, OSError):
            return {}
    return {}


def decode_in_turn(job: dict[str, Any], parent: Parent) -> dict[str, float]:
    """The trial, in the child: each image's best time of several rounds, all decoders on one image in turn.

    Sends the name of a decoder before it decodes: after a crash the parent knows which one it was.
    """
    files: list[bytes] = job["files"]
    out = np.empty((job["size"], job["size"], 3), np.uint8)
    decoders = {}
    for name in job["decoders"]:
        parent.send(name)
        decoding = Decoding(name, job["max_pixels"])
        if _starts(decoding, files[0], out):
            decoders[name] = decoding
    best: dict[str, dict[int, float]] = {name: {} for name in decoders}
    crops, start = _crops(files), time.perf_counter()
    for round_number in range(ROUNDS):
        for number in list(crops):
            for name in list(decoders):
                parent.send(name)
                seconds = _seconds(decoders[name], *crops[number], out, job["mode"])
                if seconds is None:
                    del decoders[name]
                    continue
                best[name][number] = min(seconds, best[name].get(number, seconds))
            spent = time.perf_counter() - start
            if round_number == 0 and number >= FEWEST_FILES and spent > BUDGET_S / ROUNDS:
                crops = {kept: crop for kept, crop in crops.items() if kept <= number}
                break
    return {name: round(1e6 * sum(best[name].values()) / len(crops), 1) for name in decoders if crops}


def _crops(files: list[bytes]) -> dict[int, tuple[bytes, ImageHeader, Box]]:
    """The files that Pillow can decode, each with a random crop; a bad file must not count against a decoder."""
    keys = sample_keys(0, 0, np.arange(len(files)), np.zeros(len(files), np.int64))
    draws, pillow, out = draw_crops(keys, CropRange()), Decoding(), np.empty((8, 8, 3), np.uint8)
    crops = {}
    for number, data in enumerate(files):
        try:
            header = pillow.read_header(data)
            pillow.crop_into(data, header, Box(0, 0, header.height, header.width), out)
        except BadImage:
            continue
        crops[number] = data, header, draws.box(number, header.width, header.height)
    return crops


def _starts(decoding: Decoding, data: bytes, out: Any) -> bool:
    """Whether the library loads; its first decoding includes the loading and is not timed."""
    try:
        header = decoding.read_header(data)
        decoding.crop_into(data, header, Box(0, 0, header.height, header.width), out)
    except BadImage:
        pass
    except Exception:
        return False
    return True


def _seconds(
    decoding: Decoding, data: bytes, header: ImageHeader, box: Box, out: Any, mode: DecodeMode
) -> float | None:
    start = time.perf_counter()
    try:
        decoding.crop_into(data, header, box, out, mode=mode)
    except Exception:  # any error: this decoder cannot decode these files
        return None
    return time.perf_counter() - start


def _usable(value: Any, names: Sequence[str]) -> bool:
    """Whether this is a table of microseconds for some of these decoders."""
    if not isinstance(value, dict) or not value or not set(value) <= set(names):
        return False
    return all(isinstance(time, float) for time in value.values())


def decode_limit(files: list[bytes], workers: int, seconds: float) -> float | None:
    """Images a second that libjpeg-turbo alone decodes in full from memory on `workers` threads; None without JPEGs."""
    import simplejpeg

    jpegs = [data for data in files if simplejpeg.is_jpeg(data)]
    if not jpegs:
        return None
    ends = time.perf_counter() + seconds

    def decode_for_a_while(offset: int) -> int:
        done = 0
        while time.perf_counter() < ends:
            # CMYK and damaged files do not matter for the limit.
            with suppress(ValueError):
                simplejpeg.decode_jpeg(jpegs[(offset + done) % len(jpegs)])
            done += 1
        return done

    started = time.perf_counter()
    with ThreadPoolExecutor(max(1, workers)) as pool:
        done = sum(pool.map(decode_for_a_while, range(0, max(1, workers) * 7, 7)))
    return done / (time.perf_counter() - started)


def _key(available: Sequence[str], files: Sequence[bytes], size: int, mode: DecodeMode) -> str:
    """Everything that a choice depends on, as text; file sizes are rounded to powers of two."""
    mean_bytes = sum(len(data) for data in files) / len(files)
    bucket = round(math.log2(max(mean_bytes, 1)))
    host, library = describe_host()["cpu"], os.environ.get(LIBTURBOJPEG)
    versions: list[str | None] = []
    for name in _PACKAGES:
        try:
            versions.append(metadata.version(name))
        except metadata.PackageNotFoundError:
            versions.append(None)
    return json.dumps([FORMAT, host, versions, list(available), library, size, mode, bucket])
