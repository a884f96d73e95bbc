"""Parts that are cut out of a JPEG with restart markers have the pixels of the whole image."""

from __future__ import annotations

import io
import struct
from dataclasses import replace

import cv2
import numpy as np
import pytest
import simplejpeg
import torch
import torchvision
from PIL import Image

from stoker.data.draws import sample_keys
from stoker.data.images.crops import CentreCrop, CropDraws, CropRange, RandomCrop
from stoker.data.images.decoders import available_decoders
from stoker.data.images.decoding import MAX_PIXELS, DecodeMode, Decoding
from stoker.data.images.headers import BadImage, Box, read_header
from stoker.data.images.pack.shard import Reencoding, prepare
from stoker.data.images.resizing import Interpolation
from stoker.data.images.restart_rows import (
    UNIT,
    Part,
    RowLayout,
    Template,
    cut_out,
    encode_with_rows,
    read_layout,
    segment_units,
)
from tests.support.images import encode, noise, smooth

# Rows of one unit and of a prime number of units, segments of every length, images of one row, and single pixels.
SIZES = [(1, 1), (17, 300), (250, 16), (64, 64), (65, 97), (130, 33), (400, 210), (371, 129), (208, 401), (353, 45)]


class Chosen(CropDraws):
    """Crops where the test wants them."""

    def __init__(self, box: Box) -> None:
        self.__dict__["chosen"] = box

    def box(self, slot: int, width: int, height: int) -> Box:
        found: Box = self.__dict__["chosen"]
        return found


def rows_of(data: bytes, first: int, end: int) -> bytes:
    """The bytes of some rows."""
    template, layout = read_layout(data) or pytest.fail("no rows")
    start = template.header_bytes(layout.tables) + layout.bytes_of(0, first)
    return data[start : start + layout.bytes_of(first, end)]


def part_of(data: bytes, needed: Box, more_rows: int = 0) -> Part:
    """The box of an image, cut out of the bytes of its rows alone, and of some rows more on each side."""
    template, layout = read_layout(data) or pytest.fail("no rows")
    first = max(0, needed.top // UNIT - more_rows)
    end = min(layout.rows, -(-(needed.top + needed.height) // UNIT) + more_rows)
    rows = rows_of(data, first, end)
    return cut_out(template, layout, first, end, rows, needed)


def boxes_in(width: int, height: int, count: int, random: np.random.Generator) -> list[Box]:
    """Random boxes, half of which begin or end at the border of a unit, and the whole image."""
    found = [Box(0, 0, height, width)]
    for number in range(count):
        sides = []
        for side in (height, width):
            low, high = sorted(random.integers(0, side + 1, 2).tolist())
            if number % 2:
                low, high = low - low % UNIT, min(side, high - high % UNIT)
            sides.append((low, max(high, low + 1)) if low < side else (side - 1, side))
        (top, bottom), (left, right) = sides
        found.append(Box(top, left, bottom - top, right - left))
    return found


@pytest.mark.parametrize("mode", ["fast", "faithful", "draft"])
@pytest.mark.parametrize("decoder", available_decoders())
def test_a_crop_of_a_part_is_the_crop_of_the_whole_image(decoder: str, mode: DecodeMode) -> None:
    random = np.random.default_rng(len(decoder))
    seen = 0
    for width, height in SIZES:
        data = encode_with_rows(noise(width, height, seed=width), 90)
        for box in boxes_in(width, height, 12, random):
            # Large reductions, too, which a draft decodes up to eight times smaller.
            view = RandomCrop(int(random.choice([8, 24, 48])), CropRange(), Decoding(decoder), mode)
            draws = Chosen(box)
            whole, cut = (np.zeros((view.size, view.size, 3), np.uint8) for _ in range(2))
            view.decode(data, draws, 0, whole)
            needed = view.needed(draws, 0, width, height)
            assert needed is not None
            part = part_of(data, needed, more_rows=int(random.integers(0, 2)))
            view.decode(part, draws, 0, cut)
            assert np.array_equal(whole, cut), (width, height, box)
            seen += (part.header.height, part.header.width) != (height, width)
    assert seen > 50


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_the_centre_of_a_part_is_the_centre_of_the_whole_image(interpolation: Interpolation) -> None:
    random, smaller = np.random.default_rng(8), 0
    for width, height in [*SIZES, *random.integers(1, 500, (30, 2)).tolist()]:
        data = encode_with_rows(noise(width, height, seed=width), 90)
        size = int(random.integers(8, 150))
        for resize in (size, size + 3, round(size * 8 / 7), 2 * size, size // 2 + 1):
            view = CentreCrop(size, resize, Decoding("simplejpeg"), interpolation)
            needed = view.needed(None, 0, width, height)
            if needed is None:
                assert max(width, height) > 8 * min(width, height)
                continue
            part = part_of(data, needed)
            whole, cut = (np.zeros((size, size, 3), np.uint8) for _ in range(2))
            view.decode(data, None, 0, whole)
            view.decode(part, None, 0, cut)
            assert np.array_equal(whole, cut), (width, height, size, resize)
            smaller += part.header.height * part.header.width < height * width
    assert smaller > 50


def test_a_part_is_a_valid_file_with_the_header_that_is_passed_on() -> None:
    data = encode_with_rows(noise(400, 300), 85)
    part = part_of(data, Box(70, 150, 60, 90))
    read = read_header(part.data, MAX_PIXELS)
    assert read.jpeg is not None
    assert part.header.jpeg is not None
    for name in ("subsampling", "colour", "precision", "progressive", "interleaved", "frame_offset", "huffman"):
        assert getattr(part.header.jpeg, name) == getattr(read.jpeg, name), name
    assert (read.width, read.height) == (part.header.width, part.header.height)
    with Image.open(io.BytesIO(part.data)) as image:
        image.load()
    simplejpeg.decode_jpeg(part.data, strict=True)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_other_reader_reads_the_same_pixels(width: int, height: int) -> None:
    pixels = smooth(width, height)
    data = encode_with_rows(pixels, 92)
    with Image.open(io.BytesIO(data)) as image:
        wanted = np.asarray(image)
    assert np.abs(wanted.astype(int) - pixels).mean() < 3
    assert np.array_equal(simplejpeg.decode_jpeg(data, strict=True), wanted)
    decoded = torchvision.io.decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    assert np.array_equal(decoded.permute(1, 2, 0).numpy(), wanted)
    bgr = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    assert bgr is not None
    assert np.array_equal(bgr[:, :, ::-1], wanted)


def test_every_row_begins_with_a_marker_and_markers_are_few() -> None:
    assert [segment_units(units) for units in (1, 2, 21, 22, 23, 24, 25, 32)] == [1, 2, 7, 11, 23, 8, 5, 8]
    pixels = noise(480, 320)
    data = encode_with_rows(pixels, 90)
    _, layout = read_layout(data) or pytest.fail("no rows")
    assert (layout.width, layout.height, layout.rows, layout.per_row) == (480, 320, 20, 5)
    plain = encode(pixels, "JPEG", quality=90, subsampling="4:2:0", optimize=True)
    assert len(data) < 1.02 * len(plain)


@pytest.mark.parametrize("source", ["exif", "grey", "cmyk", "png"])
def test_what_is_packed_has_rows_whatever_it_was(source: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = noise(300, 200)
    data = {
        "exif": lambda: encode(picture, "JPEG", exif=exif),
        "grey": lambda: encode(picture, "JPEG", "L"),
        "cmyk": lambda: encode(picture, "JPEG", "CMYK"),
        "png": lambda: encode(picture, "PNG"),
    }[source]()
    packed = prepare(data, Reencoding(longest=200, quality=90, restart_rows=True))
    _, layout = read_layout(packed.data) or pytest.fail("no rows")
    assert (layout.width, layout.height) == ((133, 200) if source == "exif" else (200, 133))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff\xd8", encode(noise(), "PNG"), encode(noise(), "JPEG"), encode(noise(), "JPEG", "L"),
        encode(noise(), "JPEG", progressive=True, restart_marker_rows=1),
        encode(noise(), "JPEG", subsampling="4:4:4", restart_marker_rows=1),
        encode(noise(), "JPEG", "L", restart_marker_rows=1),
        encode(noise(160, 90), "JPEG", subsampling="4:2:0", restart_marker_blocks=7),
        encode_with_rows(noise(), 90)[:-2],
        encode_with_rows(noise(), 90)[:200],
    ],
)  # fmt: skip
def test_no_rows_are_found_in_other_files(data: bytes) -> None:
    assert read_layout(data) is None


def test_a_layout_and_a_header_survive_being_written() -> None:
    template, layout = read_layout(encode_with_rows(noise(300, 70), 75)) or pytest.fail("no rows")
    assert RowLayout.of_record(layout.as_record()) == layout
    assert Template.of_text(template.as_text()) == template
    other, _ = read_layout(encode_with_rows(noise(120, 300, seed=4), 75)) or pytest.fail("no rows")
    assert other == template  # images of one quality share it
    for wrong in ("", "ff", "zz zz", template.as_text()[:40], "ffd8 ffda", "ffd8 ffc00003", "ffd8 ffc0000308"):
        with pytest.raises(ValueError):
            Template.of_text(wrong)


def test_a_damaged_record_is_refused_or_still_a_layout() -> None:
    _, layout = read_layout(encode_with_rows(noise(300, 170), 75)) or pytest.fail("no rows")
    record, random = layout.as_record(), np.random.default_rng(3)
    for _ in range(300):
        changed = bytearray(record[: int(random.integers(0, len(record) + 1))])
        for at in random.integers(0, len(changed), 2) if changed else ():
            changed[at] ^= int(random.integers(1, 256))
        try:
            found = RowLayout.of_record(bytes(changed))
        except ValueError:
            continue
        assert len(found.segment_bytes) == found.rows * found.per_row
        assert len(found.as_record()) == len(record)
    with pytest.raises(ValueError):
        RowLayout.of_record(struct.pack("<HHH", 0, 0, 0))
    empty = replace(layout, segment_bytes=(*layout.segment_bytes[:-2], sum(layout.segment_bytes[-2:]), 0))
    with pytest.raises(ValueError, match="without its marker"):
        RowLayout.of_record(empty.as_record())


@pytest.mark.parametrize("decoder", available_decoders())
def test_damaged_rows_are_a_bad_image_or_decode_and_never_crash(decoder: str) -> None:
    random = np.random.default_rng(11)
    data = encode_with_rows(noise(320, 200), 90)
    template, layout = read_layout(data) or pytest.fail("no rows")
    rows = rows_of(data, 3, 9)
    view = RandomCrop(32, CropRange(), Decoding(decoder))
    draws, out = Chosen(Box(50, 70, 80, 100)), np.zeros((32, 32, 3), np.uint8)
    needed = view.needed(draws, 0, 320, 200)
    assert needed is not None
    reasons = set()
    for number in range(60):
        changed = bytearray(rows)
        if number % 3 == 0:
            del changed[int(random.integers(0, len(rows))) :]
        for at in random.integers(0, max(1, len(changed)), 3) if changed else ():
            changed[at] = int(random.choice([0xFF, 0xD0, 0xD9, 0, int(random.integers(0, 256))]))
        try:
            view.decode(cut_out(template, layout, 3, 9, bytes(changed), needed), draws, 0, out)
        except BadImage as error:
            reasons.add(error.reason.split(":")[0])
    assert "damaged" in reasons


def test_an_image_above_the_limit_is_read_whole_and_so_refused() -> None:
    view = RandomCrop(32, CropRange(), Decoding(max_pixels=1000))
    draws = view.draw(sample_keys(0, 0, np.arange(1), np.zeros(1, np.int64)))
    assert view.needed(draws, 0, 100, 100) is None
