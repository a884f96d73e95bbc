"""What the header says about an image before it is decoded."""

from __future__ import annotations

import io
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from stoker.tasks.images.decode.headers import BadImage, read_header, read_orientation
from tests.support import images

CAP = 178_956_970
GOOD = images.jpegs() | images.other_kinds()


def test_format_and_size_agree_with_pillow() -> None:
    for name, data in GOOD.items():
        header = read_header(data, CAP)
        with Image.open(io.BytesIO(data)) as image:
            assert header.kind == image.format.lower(), name
            assert (header.width, header.height) == ImageOps.exif_transpose(image).size == (157, 119), name


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_orientation_is_read_and_sides_are_swapped_by_it(kind: str) -> None:
    for orientation in range(1, 9):
        header = read_header(images.oriented(images.quadrants(), orientation, kind), CAP)
        assert header.orientation == orientation
        assert (header.width, header.height) == (96, 64)
        assert (header.stored_width, header.stored_height) == ((64, 96) if orientation >= 5 else (96, 64))


def test_the_layout_of_a_jpeg_is_known() -> None:
    for name in ("444", "422", "420", "440", "411"):
        for progressive in (False, True):
            layout = read_header(images.jpeg(images.smooth(), name, progressive=progressive), CAP).jpeg
            assert layout is not None
            seen = layout.subsampling, layout.progressive, layout.colour, layout.precision
            assert seen == (name, progressive, "ycc", 8)
    colours = {name: read_header(GOOD[f"jpeg-{name}"], CAP).jpeg.colour for name in ("grey", "cmyk", "ycck", "rgb")}
    assert colours == {"grey": "grey", "cmyk": "cmyk", "ycck": "cmyk", "rgb": "rgb"}


def test_the_size_limit_counts_pixels_and_is_set_by_the_caller() -> None:
    data = GOOD["png"]
    assert read_header(data, 157 * 119).width == 157
    with pytest.raises(BadImage, match="157x119"):
        read_header(data, 157 * 119 - 1)


def test_a_few_bytes_that_claim_millions_of_pixels_are_refused() -> None:
    with pytest.raises(BadImage, match="cannot hold 12000x12000"):
        read_header(images.bad_images()["jpeg of 12000x12000 in a few bytes"], CAP)


def test_a_single_colour_image_is_not_mistaken_for_an_empty_file() -> None:
    # The smallest possible file for a picture of this size.
    flat = images.smooth(900, 700) * 0
    for progressive in (False, True):
        assert read_header(images.encode(flat, "JPEG", quality=1, progressive=progressive, optimize=True), CAP)


@settings(max_examples=75)
@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF1234WEBP", b"BM", b"II*\0"]),
)
def test_any_bytes_give_a_header_or_a_bad_image(data: bytes, start: bytes) -> None:
    with suppress(BadImage):
        header = read_header(start + data, 10_000)
        assert 0 < header.width * header.height <= 10_000


@given(st.binary(max_size=100))
def test_any_exif_gives_an_orientation(data: bytes) -> None:
    assert 1 <= read_orientation(b"II*\0" + data) <= 8
