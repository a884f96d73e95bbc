"""The faithful path equals torchvision on Pillow images, to the last grey level."""

from __future__ import annotations

import io
from functools import cache

import numpy as np
import pytest
import torchvision.transforms.functional as F  # noqa: N812 - as everybody writes it
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

from stoker.tasks.images.decode.decoders import DECODERS, available_decoders
from stoker.tasks.images.decode.decoding import Decoding, Interpolation, resized_size
from stoker.tasks.images.decode.headers import Box
from tests.support import images

HERE = available_decoders()
every_decoder = pytest.mark.parametrize(
    "decoder",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in HERE, reason=f"{name} is not installed"))
        for name in DECODERS
    ],
)
INTERPOLATIONS: list[Interpolation] = ["bilinear", "bicubic"]
GOOD = images.jpegs() | images.other_kinds() | {"noise": images.jpeg(images.noise(), "420")}
# Not comparable with torchvision: Pillow clips 16 bit to 8.
SEEN = sorted(name for name in GOOD if "16-bit" not in name)

decoder_and_kind = pytest.mark.parametrize(
    ("decoder", "name"),
    [
        pytest.param(name, kind, marks=pytest.mark.skipif(name not in HERE, reason=f"{name} is not installed"))
        for name in DECODERS
        for kind in SEEN
        if kind not in images.other_kinds() or name == "pillow"
    ],
)


@cache
def seen(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def crop(decoder: str, data: bytes, box: Box, size: tuple[int, int], interpolation: Interpolation) -> NDArray[np.uint8]:
    decoding, out = Decoding(decoder), np.full((*size, 3), 77, np.uint8)
    decoding.crop_into(data, decoding.read_header(data), box, out, interpolation, "faithful")
    return out


def centre(
    decoder: str, data: bytes, resize: int, size: tuple[int, int], interpolation: Interpolation
) -> NDArray[np.uint8]:
    decoding, out = Decoding(decoder), np.full((*size, 3), 77, np.uint8)
    decoding.faithful_centre_into(data, decoding.read_header(data), resize, out, interpolation)
    return out


def largest_difference(a: NDArray[np.uint8], b: Image.Image) -> int:
    return int(np.abs(a.astype(int) - np.asarray(b)).max())


@decoder_and_kind
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_crops_equal_torchvisions(decoder: str, name: str, interpolation: Interpolation) -> None:
    mode = InterpolationMode(interpolation)
    for box in (Box(0, 0, 119, 157), Box(13, 21, 90, 70), Box(40, 50, 9, 100), Box(118, 0, 1, 1)):
        for size in ((48, 48), (119, 157), (200, 31)):
            expected = F.resized_crop(seen(GOOD[name]), *box, list(size), mode, antialias=True)
            assert largest_difference(crop(decoder, GOOD[name], box, size, interpolation), expected) == 0


@decoder_and_kind
@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_centres_equal_torchvisions(decoder: str, name: str, interpolation: Interpolation) -> None:
    mode = InterpolationMode(interpolation)
    for resize, size in ((64, (56, 56)), (119, (100, 101)), (40, (64, 48)), (33, (33, 80)), (150, (17, 220))):
        expected = Compose([Resize(resize, mode, antialias=True), CenterCrop(size)])(seen(GOOD[name]))
        assert largest_difference(centre(decoder, GOOD[name], resize, size, interpolation), expected) == 0


@settings(max_examples=37, deadline=None)
@given(
    width=st.integers(1, 90), height=st.integers(1, 90), resize=st.integers(1, 80), rows=st.integers(1, 80),
    columns=st.integers(1, 80), orientation=st.integers(1, 8), interpolation=st.sampled_from(INTERPOLATIONS),
)  # fmt: skip
@example(width=15, height=58, resize=17, rows=2, columns=18, orientation=1, interpolation="bicubic")
def test_any_centre_equals_torchvisions(
    width: int, height: int, resize: int, rows: int, columns: int, orientation: int, interpolation: Interpolation
) -> None:
    data = images.oriented(images.noise(width, height), orientation, "PNG")
    expected = Compose([Resize(resize, InterpolationMode(interpolation)), CenterCrop((rows, columns))])(seen(data))
    # If only part of a long strip is resized, the two passes may round differently.
    resized = seen(data)
    wide, high = resized_size(resized.width, resized.height, resize)
    wasteful = wide * high > 32 * min(wide, columns) * min(high, rows)  # what the crop keeps may be smaller than it
    found = largest_difference(centre("pillow", data, resize, (rows, columns), interpolation), expected)
    assert found <= 1 or (wasteful and found <= 20)


@settings(max_examples=37, deadline=None)
@given(
    top=st.integers(0, 118), left=st.integers(0, 156), height=st.integers(1, 119), width=st.integers(1, 157),
    rows=st.integers(1, 90), columns=st.integers(1, 90), name=st.sampled_from(SEEN),
    interpolation=st.sampled_from(INTERPOLATIONS), decoder=st.sampled_from(HERE),
)  # fmt: skip
def test_any_crop_equals_torchvisions(
    top: int, left: int, height: int, width: int, rows: int, columns: int, name: str,
    interpolation: Interpolation, decoder: str,
) -> None:  # fmt: skip
    box = Box(top, left, min(height, 119 - top), min(width, 157 - left))
    expected = F.resized_crop(seen(GOOD[name]), *box, [rows, columns], InterpolationMode(interpolation), antialias=True)
    assert largest_difference(crop(decoder, GOOD[name], box, (rows, columns), interpolation), expected) == 0


def test_a_strip_does_not_become_gigabytes() -> None:
    # Resized as torchvision would, this is 256 x 10 240 000 pixels.
    data = images.encode(images.smooth(40_000, 1), "PNG")
    out = centre("pillow", data, 256, (224, 224), "bicubic")
    assert np.abs(out.astype(int) - images.smooth(40_000, 1)[0, 20_000]).max() < 4


def test_sixteen_bits_keep_their_range() -> None:
    # Pillow's own conversion would turn almost all of it white.
    for name in ("png-16-bit-grey", "tiff-16-bit-grey"):
        out = crop("pillow", GOOD[name], Box(0, 0, 119, 157), (119, 157), "bilinear")
        assert np.array_equal(out[:, :, 1], images.smooth()[:, :, 0])
