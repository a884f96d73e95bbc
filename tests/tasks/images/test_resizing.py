"""Training crops have the pixels that everybody trains on: a tenth of a grey level from torchvision's, no aliasing."""

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
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode

from stoker.tasks.images.decode.decoders import DECODERS, available_decoders
from stoker.tasks.images.decode.decoding import DecodeMode, Decoding, Interpolation, antialias_into
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
both_interpolations = pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
MODES = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}
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
    with Image.open(io.BytesIO(data)) as image:
        seen = ImageOps.exif_transpose(image).convert("RGB")
    return np.asarray(F.resized_crop(seen, *box, [SIZE, SIZE], MODES[interpolation]))


def difference(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    return float(np.abs(a.astype(int) - b).mean())


def high_frequency_energy(pixels: NDArray[np.uint8]) -> float:
    """Spectral energy of the luma above half the Nyquist frequency in either direction."""
    spectrum = np.abs(np.fft.fft2(pixels @ LUMA)) ** 2
    frequency = np.abs(np.fft.fftfreq(len(pixels)))
    return float(spectrum[np.maximum(frequency[:, None], frequency[None, :]) > 0.25].sum())


@both_interpolations
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("content", ["noise", "gradient", "edges", "stripes", "photo"])
def test_a_training_crop_is_torchvisions_but_for_rounding(
    content: str, reduction: str, interpolation: Interpolation
) -> None:
    data = contents()[content]
    pairs = [(ours(data, box, interpolation), torchvisions(data, box, interpolation)) for box in boxes(reduction)]
    differences = [difference(a, b) for a, b in pairs]
    assert max(differences) <= CROP_LIMIT
    energies = [(high_frequency_energy(a), high_frequency_energy(b)) for a, b in pairs]
    mine, theirs = (sum(column) for column in zip(*energies, strict=True))
    # What rounding alone puts there: a smooth picture has nothing else above half the Nyquist frequency.
    floor = len(pairs) * SIZE**4 / 12
    assert abs(mine - theirs) <= ENERGY_LIMIT * theirs + floor


@both_interpolations
def test_crops_differ_from_torchvisions_by_less_than_a_tenth_of_a_grey_level_on_average(
    interpolation: Interpolation,
) -> None:
    found = []
    for data in contents().values():
        for reduction in REDUCTIONS:
            found += [
                difference(ours(data, box, interpolation), torchvisions(data, box, interpolation))
                for box in boxes(reduction)
            ]
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


def test_pixels_with_gaps_between_rows_and_read_only_pixels_are_resized_alike() -> None:
    whole = photo(200, 150)
    part = whole[10:140, 7:180]
    packed, gaps, frozen = (np.empty((SIZE, SIZE, 3), np.uint8) for _ in range(3))
    antialias_into(np.ascontiguousarray(part), packed, "bilinear")
    antialias_into(part, gaps, "bilinear")
    unwritable = np.ascontiguousarray(part)
    unwritable.flags.writeable = False
    antialias_into(unwritable, frozen, "bilinear")
    assert np.array_equal(packed, gaps)
    assert np.array_equal(packed, frozen)


def test_the_result_does_not_depend_on_torchs_threads_and_hardly_on_vector_instructions() -> None:
    program = (
        "import sys, numpy as np; from stoker.tasks.images.decode.decoding import antialias_into; "
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
