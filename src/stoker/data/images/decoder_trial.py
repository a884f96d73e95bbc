"""Measures decoders on files that come through stdin; a process of its own, because a library may crash.

On stdout: the name of a decoder before each of its decodings, and in the end {name: microseconds} as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from stoker.data.draws import sample_keys
from stoker.data.images.crops import CropRange, draw_crops
from stoker.data.images.decoding import Decoding
from stoker.data.images.headers import BadImage, Box, ImageHeader

ROUNDS = 3
# Of all rounds together; files that do not fit in are left out.
BUDGET_S = 1.0
FEWEST_FILES = 4

Job = tuple[bytes, ImageHeader, Box]


def main() -> None:
    """Reads the order, measures, writes."""
    order = json.loads(sys.stdin.buffer.readline())
    files = [sys.stdin.buffer.read(length) for length in order["lengths"]]
    contenders = {name: Decoding(name, order["max_pixels"]) for name in order["decoders"]}
    _say(json.dumps(compare(contenders, files, order["size"])))


def compare(contenders: dict[str, Decoding], files: list[bytes], size: int) -> dict[str, float]:
    """Microseconds for an image: each image's best of several rounds, all decoders on one image in turn."""
    out = np.empty((size, size, 3), np.uint8)
    contenders = {name: decoding for name, decoding in contenders.items() if _starts(name, decoding, files, out)}
    best: dict[str, dict[int, float]] = {name: {} for name in contenders}
    jobs, start = _jobs(files), time.perf_counter()
    for round_number in range(ROUNDS):
        for number in list(jobs):
            for name in list(contenders):
                seconds = _time(name, contenders[name], jobs[number], out)
                if seconds is None:
                    del contenders[name]
                    continue
                best[name][number] = min(seconds, best[name].get(number, seconds))
            spent = time.perf_counter() - start
            if round_number == 0 and number >= FEWEST_FILES and spent > BUDGET_S / ROUNDS:
                jobs = {kept: job for kept, job in jobs.items() if kept <= number}
                break
    return {name: round(1e6 * sum(best[name].values()) / len(jobs), 1) for name in contenders if jobs}


def _jobs(files: list[bytes]) -> dict[int, Job]:
    """The files that Pillow can decode, each with a random crop; a bad file is no decoder's fault."""
    keys = sample_keys(0, 0, np.arange(len(files)), np.zeros(len(files), np.int64))
    draws, judge, out = draw_crops(keys, CropRange()), Decoding(), np.empty((8, 8, 3), np.uint8)
    jobs = {}
    for number, data in enumerate(files):
        try:
            header = judge.read_header(data)
            judge.fast_crop_into(data, header, Box(0, 0, header.height, header.width), out)
        except BadImage:
            continue
        jobs[number] = data, header, draws.box(number, header.width, header.height)
    return jobs


def _starts(name: str, decoding: Decoding, files: list[bytes], out: Any) -> bool:
    """Whether the library loads; its first decoding, which pays for that, is not counted."""
    _say(name)
    try:
        header = decoding.read_header(files[0])
        decoding.fast_crop_into(files[0], header, Box(0, 0, header.height, header.width), out)
    except BadImage:
        pass
    except Exception:
        return False
    return True


def _time(name: str, decoding: Decoding, job: Job, out: Any) -> float | None:
    data, header, box = job
    _say(name)
    start = time.perf_counter()
    try:
        decoding.fast_crop_into(data, header, box, out)
    except Exception:  # whatever it is: not a decoder for these files
        return None
    return time.perf_counter() - start


def _say(line: str) -> None:
    # Unbuffered: after a crash the last line must have arrived.
    os.write(1, line.encode() + b"\n")


if __name__ == "__main__":
    main()
