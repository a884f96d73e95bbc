"""What each step of a training image costs on one core, and how close each way of resizing comes to Pillow's pixels.

Random 224 px crops of real JPEGs. A way of resizing is judged by its mean difference to Pillow in grey levels, and by
its high-frequency energy as a multiple of Pillow's: the spectral energy of the luma above half the Nyquist frequency in
either direction, summed over the crops. Aliasing shows as a ratio above one. All figures by reduction: crops that are
enlarged, reduced by 1-2x, and by more. Ways that start from decoded pixels are timed right after a decoding, as in a
loader, with caches full of other things.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from bench.decode import read_jpegs, smaller
from bench.rounds import Spread, interleave, keep
from stoker.loader.rng import sample_keys
from stoker.tasks.images.decode.crops import (
    RESAMPLING,
    CropDraws,
    CropRange,
    DecodeMode,
    Decoding,
    Interpolation,
    RandomCrop,
    antialias_into,
    draft_into,
    draw_crops,
    pack,
    resize_into,
    stored_box,
)
from stoker.tasks.images.decode.decoders import available_decoders, load_decoder
from stoker.tasks.images.decode.headers import Box, ImageHeader

SIZE = 224
LUMA = np.array([0.299, 0.587, 0.114], np.float32)
CLASSES = ("enlarged", "reduced 1-2x", "reduced more")
Pixels = NDArray[np.uint8]
Way = Callable[[Pixels, Pixels], object]
MODES: tuple[DecodeMode, ...] = ("fast", "draft", "faithful")
HALF = "half decode, then fast"


@dataclass(frozen=True)
class Crop:
    """One file with its random crop."""

    data: bytes
    header: ImageHeader
    box: Box
    """In stored pixels."""
    pixels: Pixels
    """As decoded at full size, with the gaps between rows that the decoder leaves."""

    @property
    def reduction(self) -> str:
        surplus = min(self.box.height, self.box.width) / SIZE
        return CLASSES[0] if surplus < 1 else CLASSES[1] if surplus < 2 else CLASSES[2]


def crops_of(files: list[bytes], decoding: Decoding, epoch: int = 0) -> list[Crop]:
    keys = sample_keys(0, epoch, np.arange(len(files)), np.zeros(len(files), np.int64))
    draws, found = draw_crops(keys, CropRange()), []
    for number, data in enumerate(files):
        header = decoding.read_header(data)
        if header.orientation != 1:
            continue  # so that every way below resizes the same pixels
        box = stored_box(1, header.width, header.height, draws.box(number, header.width, header.height))
        view = load_decoder(decoding.decoder).region(data, header, box, 1)
        rows = np.zeros((view.shape[0], view.strides[0] // 3, 3), np.uint8)
        pixels = rows[:, : view.shape[1]]
        np.copyto(pixels, view)
        found.append(Crop(data, header, box, pixels))
    return found


def by_pillow(pixels: Pixels, interpolation: Interpolation) -> Pixels:
    return np.asarray(Image.fromarray(pixels).resize((SIZE, SIZE), RESAMPLING[interpolation]))


def ways_to_resize(interpolation: Interpolation) -> dict[str, Way]:
    """Ways from decoded pixels to a filled slot."""
    image_size = (SIZE, SIZE)
    cubic = cv2.INTER_CUBIC if interpolation == "bicubic" else cv2.INTER_LINEAR

    def by_interpolate(pixels: Pixels, out: Pixels) -> None:
        image = torch.from_numpy(pixels[None]).permute(0, 3, 1, 2)
        small = torch.nn.functional.interpolate(image, image_size, mode=interpolation, antialias=True)
        np.copyto(out, small[0].permute(1, 2, 0).numpy())

    return {
        "fast": lambda pixels, out: antialias_into(pixels, out, interpolation),
        "faithful (Pillow)": lambda pixels, out: resize_into(pixels, out, interpolation),
        "draft": draft_into,
        "torch.nn.functional.interpolate": by_interpolate,
        f"OpenCV {interpolation}": lambda pixels, out: cv2.resize(pixels, image_size, dst=out, interpolation=cubic),
        "OpenCV INTER_AREA": lambda pixels, out: cv2.resize(pixels, image_size, dst=out, interpolation=cv2.INTER_AREA),
    }


def steps_of(crops: list[Crop], decoding: Decoding) -> dict[str, Callable[[int], object]]:
    """The steps of an image, one at a time, and all of them in each mode."""
    files = [crop.data for crop in crops]
    draws = draw_crops(sample_keys(0, 0, np.arange(len(files)), np.zeros(len(files), np.int64)), CropRange())
    batch = np.zeros((len(files), SIZE, SIZE, 3), np.uint8)
    decoder, tiny = load_decoder(decoding.decoder), np.zeros((8, 8, 3), np.uint8)
    found: dict[str, Callable[[int], object]] = {
        "header": lambda n: decoding.read_header(files[n]),
        "box of the crop": lambda n: draws.box(n, crops[n].header.width, crops[n].header.height),
        "decode": lambda n: decoder.region(files[n], crops[n].header, crops[n].box, 1),
        "resize, alone": lambda n: antialias_into(crops[n].pixels, batch[n], "bilinear"),
        "of this: closing the gaps between rows": lambda n: pack(crops[n].pixels),
        "of this: the call, with 8x8 pixels": lambda n: antialias_into(crops[n].pixels[:8, :8], tiny, "bilinear"),
    }
    for mode in MODES:
        view = RandomCrop(SIZE, CropRange(), decoding, mode)
        found[f"whole image, {mode}"] = partial(_decode_one, view, files, draws, batch)
    return found


def _decode_one(view: RandomCrop, files: list[bytes], draws: CropDraws, batch: Pixels, number: int) -> None:
    view.decode(files[number], draws, number, batch[number])


def timed(count: int, work: Callable[[int], object]) -> Callable[[], float]:
    """Mean microseconds of CPU time, which neighbours on the same cores disturb less than wall time."""

    def measure() -> float:
        start = time.process_time()
        for number in range(count):
            work(number)
        return (time.process_time() - start) / max(1, count) * 1e6

    return measure


def high_frequency_energy(pixels: Pixels) -> float:
    """Spectral energy of the luma above half the Nyquist frequency in either direction."""
    spectrum = np.abs(np.fft.fft2(pixels.astype(np.float32) @ LUMA)) ** 2
    frequency = np.abs(np.fft.fftfreq(len(pixels)))
    return float(spectrum[np.maximum(frequency[:, None], frequency[None, :]) > 0.25].sum())


def quality(crops: list[Crop], resized: Iterable[Pixels], interpolation: Interpolation) -> dict[str, float | int]:
    """Mean difference to Pillow in grey levels, the worst crop's, and the ratio of high-frequency energies."""
    differences, ours, pillows = [], 0.0, 0.0
    for crop, out in zip(crops, resized, strict=True):
        expected = by_pillow(crop.pixels, interpolation)
        differences.append(float(np.abs(out.astype(int) - expected).mean()))
        ours, pillows = ours + high_frequency_energy(out), pillows + high_frequency_energy(expected)
    return {
        "crops": len(crops),
        "mean_difference": round(float(np.mean(differences)), 4),
        "worst_crop_difference": round(max(differences), 4),
        "high_frequency_ratio": round(ours / pillows, 4),
    }


def judge_ways(crops: list[Crop], decoder: str, interpolation: Interpolation, rounds: int) -> dict[str, Any]:
    """For each way: microseconds by reduction, and its quality by reduction."""
    groups = {"all": crops} | {name: [crop for crop in crops if crop.reduction == name] for name in CLASSES}
    groups = {name: members for name, members in groups.items() if members}
    ways, region = ways_to_resize(interpolation), load_decoder(decoder).region
    times = time_ways(crops, decoder, ways, rounds)

    def through(way: Way, members: list[Crop], *, half: bool = False) -> Iterator[Pixels]:
        out = np.zeros((SIZE, SIZE, 3), np.uint8)
        for crop in members:
            scale = 2 if half and crop.reduction == CLASSES[2] else 1
            way(crop.pixels if scale == 1 else region(crop.data, crop.header, crop.box, scale), out)
            yield out

    found: dict[str, Any] = {}
    for name, way in ways.items():
        found[name] = {
            group: {"microseconds": times[name][group].as_dict()}
            | quality(members, through(way, members), interpolation)
            for group, members in groups.items()
        }
    fast = ways["fast"]
    found[HALF] = {
        group: quality(members, through(fast, members, half=True), interpolation) for group, members in groups.items()
    }
    return found


def time_ways(crops: list[Crop], decoder: str, ways: dict[str, Way], rounds: int) -> dict[str, dict[str, Spread]]:
    """Microseconds of each way and reduction by round; each crop is decoded again just before."""
    out, region = np.zeros((SIZE, SIZE, 3), np.uint8), load_decoder(decoder).region
    values: dict[str, dict[str, list[float]]] = {name: {} for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            spent_us: dict[str, list[float]] = {}
            for crop in crops:
                pixels = region(crop.data, crop.header, crop.box, 1)
                start = time.thread_time()
                way(pixels, out)
                spent = (time.thread_time() - start) * 1e6
                for group in ("all", crop.reduction):
                    spent_us.setdefault(group, []).append(spent)
            for group, found in spent_us.items():
                values[name].setdefault(group, []).append(float(np.mean(found)))
    return {name: {group: Spread(tuple(v)) for group, v in groups.items()} for name, groups in values.items()}


def print_ways(title: str, ways: Mapping[str, Any]) -> None:
    print(f"{title}: µs per crop, grey levels from Pillow, high-frequency energy / Pillow's")
    for name, groups in ways.items():
        cells = "  ".join(
            f"{g['microseconds']['median'] if 'microseconds' in g else float('nan'):6.0f}"
            f" {g['mean_difference']:6.3f} {g['high_frequency_ratio']:5.2f}"
            for g in groups.values()
        )
        print(f"  {name:<34}{cells}")
    first = next(iter(ways.values()))
    print(f"  {'crops':<34}" + "  ".join(f"{group} ({value['crops']})" for group, value in first.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with JPEGs, at any depth")
    parser.add_argument("--files", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    originals = read_jpegs(options.data, options.files)
    if not originals:
        parser.error(f"no JPEGs below {options.data}")
    decoding = Decoding(available_decoders()[0])
    document: dict[str, Any] = {"size": SIZE, "files": len(originals), "decoder": decoding.decoder, "steps": {}}
    for title, files in (("originals", originals), ("longest side 500, quality 90", [*map(smaller, originals)])):
        crops = crops_of(files, decoding)
        measures = {name: timed(len(crops), work) for name, work in steps_of(crops, decoding).items()}
        for measure in measures.values():
            measure()  # the first call loads libraries and allocates memory
        times = interleave(measures, options.rounds)
        document["steps"][title] = {name: spread.as_dict() for name, spread in times.items()}
        print(f"{title}: µs per image")
        for name, spread in times.items():
            print(f"  {name:<42} {spread.median:7.1f}  ({min(spread.values):.1f}-{max(spread.values):.1f})")
    crops = crops_of(originals, decoding)
    for interpolation in RESAMPLING:
        ways = judge_ways(crops, decoding.decoder, interpolation, options.rounds)
        document[interpolation] = ways
        print_ways(interpolation, ways)
    print(f"wrote {keep('resize', document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
