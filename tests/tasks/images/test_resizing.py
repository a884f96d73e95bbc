"""Training crops have the pixels that everybody trains on: a tenth of a grey level from torchvision's, no aliasing.
Validation, and `decode_mode: faithful`, equal torchvision."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest
import torch
import torchvision.transforms.functional as F  # noqa: N812 - as everybody writes it
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize

from stoker.tasks.images.decode.crops import DecodeMode, Decoding, Interpolation, antialias_into, resized_size
from stoker.tasks.images.decode.decoders import available_decoders
from stoker.tasks.images.decode.headers import Box
from tests.support import images

HERE = available_decoders()
every_decoder = pytest.mark.parametrize("decoder", HERE)
both_interpolations = pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
# Grey levels: over many crops, and in a single one, where the order of the passes over rows and columns decides how
# intermediate values are rounded.
MEAN_LIMIT, CROP_LIMIT = 0.1, 0.35
ENERGY_LIMIT = 0.03
SIZE = 64
LUMA = np.array([0.299, 0.587, 0.114])
# Rows and columns of crops by how much they are reduced to 64 px.
REDUCTIONS = {
    "enlarged": [(40, 33), (50, 61), (17, 24), (63, 48), (33, 60), (12, 9)],
    "reduced 1-2x": [(70, 90), (127, 97), (100, 100), (99, 126), (90, 66), (83, 119)],
    "enlarged one way, reduced the other": [(40, 110), (100, 50), (60, 90), (75, 58)],
    "reduced 2-8x": [(130, 200), (300, 222), (390, 510), (480, 350), (260, 260)],
}


def stripes(width: int, height: int) -> NDArray[np.uint8]:
    """Rings whose frequency rises towards the border: whatever aliases shows in them."""
    y, x = np.mgrid[:height, :width]
    rings = np.cos(((x - width / 2) ** 2 + (y - height / 2) ** 2) * np.pi / (2 * max(width, height)))
    return np.repeat((127.5 + 120 * rings).astype(np.uint8)[:, :, None], 3, axis=2)


def photo(width: int, height: int) -> NDArray[np.uint8]:
    """Noise with the spectrum of photographs: amplitude falls with frequency."""
    rng = np.random.default_rng(7)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)[None, :])
    spectrum = np.fft.fft2(rng.normal(size=(height, width, 3)), axes=(0, 1)) / np.maximum(frequency, 1e-3)[:, :, None]
    values = np.fft.ifft2(spectrum, axes=(0, 1)).real
    return (np.clip((values / values.std() + 2.5) / 5, 0, 1) * 255).astype(np.uint8)


@cache
def contents() -> dict[str, bytes]:
    """Lossless, so that only the resizing can differ."""
    size = (620, 540)
    return {
        "noise": images.encode(images.noise(*size), "PNG"),
        "gradient": images.encode(images.smooth(*size), "PNG"),
        "edges": images.encode(images.quadrants(*size), "PNG"),
        "stripes": images.encode(stripes(*size), "PNG"),
        "photo": images.encode(photo(*size), "PNG"),
    }


@cache
def large_jpegs() -> dict[str, bytes]:
    """One of each kind of JPEG and of every orientation, and two kinds that only Pillow decodes."""
    pixels = photo(620, 540)
    kinds = {f"jpeg-{subsampling}": images.jpeg(pixels, subsampling) for subsampling in ("444", "422", "420")}
    kinds["progressive"] = images.jpeg(pixels, "420", progressive=True)
    kinds["grey"] = images.encode(pixels, "JPEG", "L", quality=92)
    kinds["cmyk"] = images.encode(pixels, "JPEG", "CMYK", quality=92)
    kinds["png-palette"] = images.encode(pixels, "PNG", "P")
    for orientation in range(1, 9):
        kinds[f"exif-{orientation}"] = images.oriented(pixels, orientation, "JPEG", quality=92)
    return kinds


def boxes(reduction: str, width: int = 620, height: int = 540) -> list[Box]:
    rng = np.random.default_rng(len(reduction))
    return [
        Box(int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1)), rows, columns)
        for rows, columns in REDUCTIONS[reduction]
    ]


@cache
def ours(
    data: bytes, box: Box, interpolation: Interpolation, decoder: str = "pillow", mode: DecodeMode = "fast"
) -> NDArray[np.uint8]:
    decoding, out = Decoding(decoder), np.full((SIZE, SIZE, 3), 77, np.uint8)
    decoding.crop_into(data, decoding.read_header(data), box, out, interpolation, mode)
    return out


@cache
def torchvisions(data: bytes, box: Box, interpolation: Interpolation) -> NDArray[np.uint8]:
    return np.asarray(F.resized_crop(seen(data), *box, [SIZE, SIZE], InterpolationMode(interpolation)))


def difference(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    return float(np.abs(a.astype(int) - b).mean())


def high_frequency_energy(pixels: NDArray[np.uint8]) -> float:
    """Spectral energy of the luma above half the Nyquist frequency in either direction."""
    spectrum = np.abs(np.fft.fft2(pixels @ LUMA)) ** 2
    frequency = np.abs(np.fft.fftfreq(len(pixels)))
    return float(spectrum[np.maximum(frequency[:, None], frequency[None, :]) > 0.25].sum())


@both_interpolations
def test_a_training_crop_is_torchvisions_but_for_rounding(interpolation: Interpolation) -> None:
    found = []
    for name, data in contents().items():
        for reduction in REDUCTIONS:
            pairs = [
                (ours(data, box, interpolation), torchvisions(data, box, interpolation)) for box in boxes(reduction)
            ]
            differences = [difference(a, b) for a, b in pairs]
            assert max(differences) <= CROP_LIMIT, (name, reduction)
            found += differences
            mine, theirs = (sum(map(high_frequency_energy, column)) for column in zip(*pairs, strict=True))
            # What rounding alone puts there: a smooth picture has nothing else above half the Nyquist frequency.
            floor = len(pairs) * SIZE**4 / 12
            assert abs(mine - theirs) <= ENERGY_LIMIT * theirs + floor, (name, reduction)
    assert np.mean(found) <= MEAN_LIMIT


BOXES = (Box(31, 17, 401, 322), Box(5, 44, 90, 120), Box(260, 201, 40, 37), Box(11, 7, 470, 530))


@both_interpolations
def test_every_kind_and_orientation_is_torchvisions(interpolation: Interpolation) -> None:
    found = []
    for name, data in large_jpegs().items():
        for box in BOXES:
            found.append(difference(ours(data, box, interpolation), torchvisions(data, box, interpolation)))
            assert found[-1] <= CROP_LIMIT, (name, box)
    assert np.mean(found) <= MEAN_LIMIT + 0.05  # four boxes are few: the order of the passes has its effect on one


@every_decoder
def test_every_decoder_gives_the_same_training_crop(decoder: str) -> None:
    for name, data in large_jpegs().items():
        for box in BOXES:
            assert np.array_equal(ours(data, box, "bilinear", decoder), ours(data, box, "bilinear")), (name, box)


def test_a_draft_aliases_where_a_training_crop_does_not() -> None:
    data, excess = contents()["stripes"], {}
    modes: list[DecodeMode] = ["fast", "draft"]
    for mode in modes:
        energies = [
            (high_frequency_energy(ours(data, box, "bilinear", mode=mode)),
             high_frequency_energy(torchvisions(data, box, "bilinear")))
            for box in boxes("reduced 1-2x")
        ]  # fmt: skip
        mine, theirs = (sum(column) for column in zip(*energies, strict=True))
        excess[mode] = mine / theirs
    assert excess["fast"] == pytest.approx(1, abs=ENERGY_LIMIT)
    assert excess["draft"] > 1.3


def test_the_result_does_not_depend_on_torchs_threads_and_hardly_on_vector_instructions() -> None:
    program = (
        "import sys, numpy as np; from stoker.tasks.images.decode.crops import antialias_into; "
        "pixels = np.frombuffer(sys.stdin.buffer.read(), np.uint8).reshape(150, 200, 3); "
        "out = np.empty((64, 64, 3), np.uint8); antialias_into(pixels[3:, 5:], out, 'bilinear'); "
        "sys.stdout.buffer.write(out.tobytes())"
    )
    pixels, expected = photo(200, 150), np.empty((SIZE, SIZE, 3), np.uint8)
    antialias_into(pixels[3:, 5:], expected, "bilinear")
    again, threads = np.empty_like(expected), torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 4)
    antialias_into(pixels[3:, 5:], again, "bilinear")
    torch.set_num_threads(threads)
    assert np.array_equal(again, expected)
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, input=pixels.tobytes(), stdout=subprocess.PIPE, check=True
    )
    found = np.frombuffer(done.stdout, np.uint8).reshape(expected.shape)
    assert np.abs(found.astype(int) - expected).max() <= 1


# Faithful: equal to torchvision on Pillow images, to the last grey level


INTERPOLATIONS: list[Interpolation] = ["bilinear", "bicubic"]
FILES = images.jpegs() | images.other_kinds() | {"noise": images.jpeg(images.noise(), "420")}
# Not comparable with torchvision: Pillow clips 16 bit to 8.
SEEN = sorted(name for name in FILES if "16-bit" not in name)


@cache
def seen(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data)) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


def faithful_crop(
    decoder: str, data: bytes, box: Box, size: tuple[int, int], interpolation: Interpolation
) -> NDArray[np.uint8]:
    decoding, out = Decoding(decoder), np.full((*size, 3), 77, np.uint8)
    decoding.crop_into(data, decoding.read_header(data), box, out, interpolation, "faithful")
    return out


def faithful_centre(
    decoder: str, data: bytes, resize: int, size: tuple[int, int], interpolation: Interpolation
) -> NDArray[np.uint8]:
    decoding, out = Decoding(decoder), np.full((*size, 3), 77, np.uint8)
    decoding.faithful_centre_into(data, decoding.read_header(data), resize, out, interpolation)
    return out


def largest_difference(a: NDArray[np.uint8], b: Image.Image) -> int:
    return int(np.abs(a.astype(int) - np.asarray(b)).max())


@every_decoder
@both_interpolations
def test_faithful_crops_and_centres_equal_torchvisions(decoder: str, interpolation: Interpolation) -> None:
    mode = InterpolationMode(interpolation)
    for name in SEEN:
        if name in images.other_kinds() and decoder != "pillow":
            continue
        data = FILES[name]
        for box in (Box(0, 0, 119, 157), Box(13, 21, 90, 70), Box(40, 50, 9, 100), Box(118, 0, 1, 1)):
            for size in ((48, 48), (119, 157), (200, 31)):
                expected = F.resized_crop(seen(data), *box, list(size), mode, antialias=True)
                assert largest_difference(faithful_crop(decoder, data, box, size, interpolation), expected) == 0, name
        for resize, size in ((64, (56, 56)), (119, (100, 101)), (40, (64, 48)), (33, (33, 80)), (150, (17, 220))):
            expected = Compose([Resize(resize, mode, antialias=True), CenterCrop(size)])(seen(data))
            assert largest_difference(faithful_centre(decoder, data, resize, size, interpolation), expected) == 0, name


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
    found = largest_difference(faithful_centre("pillow", data, resize, (rows, columns), interpolation), expected)
    assert found <= 1 or (wasteful and found <= 20)


def test_a_strip_does_not_become_gigabytes() -> None:
    # Resized as torchvision would, this is 256 x 10 240 000 pixels.
    data = images.encode(images.smooth(40_000, 1), "PNG")
    out = faithful_centre("pillow", data, 256, (224, 224), "bicubic")
    assert np.abs(out.astype(int) - images.smooth(40_000, 1)[0, 20_000]).max() < 4


def test_sixteen_bits_keep_their_range() -> None:
    # Pillow's own conversion would turn almost all of it white.
    for name in ("png-16-bit-grey", "tiff-16-bit-grey"):
        out = faithful_crop("pillow", FILES[name], Box(0, 0, 119, 157), (119, 157), "bilinear")
        assert np.array_equal(out[:, :, 1], images.smooth()[:, :, 0])
