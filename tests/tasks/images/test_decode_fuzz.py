"""Damaged files through every decoder, in a separate process, where a crash shows as a signal."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from stoker.tasks.images.decode.crops import Decoding
from stoker.tasks.images.decode.decoders import DECODERS, available_decoders
from stoker.tasks.images.decode.headers import BadImage, Box
from tests.support import images

FILES_FOR_EACH = 600


def damaged(data: bytes, random_: random.Random) -> bytes:
    """The file with bytes changed, removed or cut off; usually with its end marker, so that no decoder stops early."""
    changed = bytearray(data)
    kind = random_.random()
    if kind < 0.25:
        del changed[random_.randrange(2, len(changed)) :]
    elif kind < 0.35:
        start = random_.randrange(2, len(changed))
        del changed[start : start + random_.choice([1, 2, 64])]
    else:
        # Headers are short, and damage there matters most.
        end = min(700, len(changed)) if random_.random() < 0.5 else len(changed)
        for _ in range(random_.choice([1, 1, 4, 40])):
            changed[random_.randrange(2, end)] = random_.choice([0, 0xFF, random_.randrange(256)])
    if data.endswith(b"\xff\xd9") and random_.random() < 0.8 and not changed.endswith(b"\xff\xd9"):
        changed += b"\xff\xd9"
    return bytes(changed)


def fuzz(decoder: str, count: int, seed: int) -> Counter[str]:
    """Decodes that many damaged files and returns the outcomes."""
    small = images.noise(70, 52)
    files = [images.jpeg(small, s, progressive=p) for s in ("444", "422", "420", "440", "411") for p in (False, True)]
    files += [images.encode(small, "JPEG", mode, progressive=p) for mode in ("L", "CMYK") for p in (False, True)]
    files += [images.encode(small, "JPEG", restart_marker_rows=1), images.oriented(small, 6)]
    files += [images.encode(small, kind) for kind in ("PNG", "WEBP", "GIF", "BMP", "TIFF")]
    # A size limit that just fits these pictures: a damaged header may claim gigabytes.
    random_, decoding, found = random.Random(seed), Decoding(decoder, max_pixels=1_000_000), Counter[str]()
    batch = np.zeros((3, 24, 20, 3), np.uint8)
    for _ in range(count):
        data = damaged(random_.choice(files), random_)
        try:
            header = decoding.read_header(data)
            height, width = random_.randint(1, header.height), random_.randint(1, header.width)
            top, left = random_.randint(0, header.height - height), random_.randint(0, header.width - width)
            if random_.random() < 0.8:
                decoding.crop_into(data, header, Box(top, left, height, width), batch[1])
            else:
                decoding.crop_into(data, header, Box(top, left, height, width), batch[1], mode="faithful")
            found["decoded"] += 1
        except BadImage as error:
            found["refused"] += 1
            assert error.reason  # noqa: PT017 - anything else that is raised ends the process
        assert not batch[0].any()
        assert not batch[2].any()
    return found


@pytest.mark.parametrize("decoder", DECODERS)
def test_damaged_files_are_decoded_or_refused_but_never_crash(decoder: str) -> None:
    if decoder not in available_decoders():
        pytest.skip(f"{decoder} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "tests.tasks.images.test_decode_fuzz", decoder, str(FILES_FOR_EACH), "0"],
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    decoded, refused = map(int, done.stdout.split())
    assert decoded + refused == FILES_FOR_EACH
    assert decoded > 60
    assert refused > 60


if __name__ == "__main__":
    outcome = fuzz(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(outcome["decoded"], outcome["refused"])
