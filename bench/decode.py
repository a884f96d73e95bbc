"""Microseconds per random 224 px crop on one core, for each decoder, compared with a bare decode of the whole image.

The bare decode is simplejpeg (libjpeg-turbo) on the same files: the originals, and re-encoded with the longest side at
500 px, quality 90.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image

from bench.rounds import Spread, interleave, keep, ratio
from stoker.loader.rng import sample_keys
from stoker.tasks.images.decode.crops import CropRange, Decoding, draw_crops
from stoker.tasks.images.decode.decoders import available_decoders
from stoker.tasks.images.decode.headers import BadImage

SIZE = 224
LONGEST_SIDE, QUALITY = 500, 90
LIMIT = "bare simplejpeg, whole image"
Measure = Callable[[], float]


def read_jpegs(folder: Path, count: int) -> list[bytes]:
    """Up to `count` JPEGs from across the folder that simplejpeg decodes in strict mode."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    found = []
    for path in paths[:: max(1, len(paths) // count)]:
        data = path.read_bytes()
        try:
            simplejpeg.decode_jpeg(data, "RGB")
            header = Decoding().read_header(data)
        except (ValueError, BadImage):
            continue
        if header.jpeg is not None and header.jpeg.colour in ("ycc", "grey"):
            found.append(data)
    return found[:count]


def smaller(data: bytes) -> bytes:
    """The image with its longest side at 500 px, as `stoker pack` would store it."""
    with Image.open(io.BytesIO(data)) as opened:
        image = opened.convert("RGB")
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=QUALITY)
    return stream.getvalue()


def contenders(files: list[bytes]) -> dict[str, Measure]:
    """Measurements by name; each returns the mean microseconds per file."""
    draws = draw_crops(sample_keys(0, 0, np.arange(len(files)), np.zeros(len(files), np.int64)), CropRange())
    batch = np.empty((len(files), SIZE, SIZE, 3), np.uint8)
    found: dict[str, Measure] = {LIMIT: _timed(len(files), lambda n: simplejpeg.decode_jpeg(files[n], "RGB"))}
    for name in available_decoders():
        decoding = Decoding(name)

        def fast(number: int, decoding: Decoding = decoding) -> None:
            header = decoding.read_header(files[number])
            box = draws.box(number, header.width, header.height)
            decoding.crop_into(files[number], header, box, batch[number])

        def faithful(number: int, decoding: Decoding = decoding) -> None:
            header = decoding.read_header(files[number])
            decoding.faithful_centre_into(files[number], header, 256, batch[number], "bicubic")

        found[name] = _timed(len(files), fast)
        found[f"{name}, faithful centre"] = _timed(len(files), faithful)
    return found


def _timed(count: int, work: Callable[[int], object]) -> Measure:
    def measure() -> float:
        start = time.process_time()  # CPU time, which neighbours on the same cores disturb less than wall time
        for number in range(count):
            work(number)
        return (time.process_time() - start) / count * 1e6

    return measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="folder with JPEGs, at any depth")
    parser.add_argument("--files", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    originals = read_jpegs(options.data, options.files)
    if not originals:
        parser.error(f"no JPEGs below {options.data}")
    sets = {"originals": originals, "longest side 500, quality 90": [smaller(data) for data in originals]}
    document: dict[str, object] = {"size": SIZE, "files": len(originals)}
    for title, files in sets.items():
        measures = contenders(files)
        for measure in measures.values():
            measure()  # the first call loads libraries and allocates memory
        times: dict[str, Spread] = interleave(measures, options.rounds)
        speeds = {name: ratio(times[LIMIT], spread) for name, spread in times.items()}
        document[title] = {
            "mean_bytes": round(sum(map(len, files)) / len(files)),
            "microseconds": {name: spread.as_dict() for name, spread in times.items()},
            "times_bare": {name: spread.as_dict() for name, spread in speeds.items()},
        }
        print(title)
        for name, spread in speeds.items():
            low, high = min(spread.values), max(spread.values)
            print(f"  {name:<32} {times[name].median:7.0f} µs  {spread.median:5.2f}x  ({low:.2f}-{high:.2f})")
    print(f"wrote {keep('decode', document)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
