"""Images on their way into a shard: kept, shrunk, encoded, or refused with a reason."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageOps

from stoker.tasks.images.decode.headers import BadImage
from stoker.tasks.images.pack.make_shard import PackOptions, prepare

KEEP = PackOptions()
JPEG = PackOptions(quality=95)


def picture(width: int = 64, height: int = 48) -> Image.Image:
    """Red increases to the right, green downwards: every rotation looks different."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 255 // width, y * 255 // height, np.full_like(x, 64)], axis=2)
    return Image.fromarray(pixels.astype(np.uint8))


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **({"quality": 95} if kind == "JPEG" else {}) | options)
    return stream.getvalue()


def pixels_of(data: bytes) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def test_without_options_bytes_are_kept_and_named_by_content() -> None:
    names = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif"}
    for kind, extension in names.items():
        data = encoded(picture(), kind)
        assert prepare(data, KEEP) == (extension, data)


@pytest.mark.parametrize(
    ("how", "size"),
    [
        (PackOptions(longest=32), (32, 24)),
        (PackOptions(shortest=24), (32, 24)),
        (PackOptions(longest=1), (1, 1)),
    ],
)
def test_sides_shrink_in_proportion(how: PackOptions, size: tuple[int, int]) -> None:
    extension, data = prepare(encoded(picture(64, 48), "PNG"), how)
    assert extension == "jpg"
    assert Image.open(io.BytesIO(data)).size == size


@pytest.mark.parametrize("how", [PackOptions(longest=64), PackOptions(shortest=48), PackOptions(longest=500)])
def test_nothing_is_enlarged_and_images_that_need_no_resize_keep_their_bytes(how: PackOptions) -> None:
    data = encoded(picture(64, 48), "PNG")
    assert prepare(data, how) == ("png", data)


def test_shrinking_averages_instead_of_dropping_pixels() -> None:
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    shrunk = pixels_of(prepare(encoded(Image.fromarray(stripes), "PNG"), PackOptions(longest=16)).data)
    assert abs(shrunk - 127).max() <= 2


def test_quality_encodes_everything_with_420_and_less_means_fewer_bytes() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    high, low = (prepare(encoded(noise, subsampling=0), PackOptions(quality=quality)).data for quality in (90, 30))
    assert len(low) < len(high)
    assert simplejpeg.decode_jpeg_header(high)[3] == "420"


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_exif_orientation_is_applied_before_it_is_lost(kind: str) -> None:
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = encoded(picture(), kind, exif=exif)
        upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")).astype(int)
        packed = prepare(data, JPEG).data
        assert not Image.open(io.BytesIO(packed)).getexif()
        assert pixels_of(packed).shape == upright.shape
        assert abs(pixels_of(packed) - upright).max() < 24


def test_every_mode_becomes_the_picture_that_pillow_sees() -> None:
    for mode in ("L", "CMYK", "RGBA", "P", "1", "LA"):
        data = encoded(picture().convert(mode), "TIFF" if mode == "CMYK" else "PNG")
        seen = encoded(Image.open(io.BytesIO(data)).convert("RGB"), subsampling="4:2:0")
        assert abs(pixels_of(prepare(data, JPEG).data) - pixels_of(seen)).mean() < 2, mode  # two encoders
    data = encoded(picture().convert("CMYK"))
    assert abs(pixels_of(prepare(data, JPEG).data) - pixels_of(data)).max() < 24


def test_stray_bytes_after_a_jpeg_are_tolerated() -> None:
    data = encoded(picture()) + b"\0" * 100
    assert prepare(data, JPEG).extension == "jpg"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"<html>not found</html>", "begins with b'<html>no'"),
        (encoded(picture())[:100], "truncated"),
        (encoded(picture(), "PNG")[:20], "truncated"),
        (b"\xff\xd8\xff", "truncated"),
    ],
)
def test_a_file_that_is_not_an_image_is_refused_even_where_bytes_are_kept(data: bytes, reason: str) -> None:
    with pytest.raises(BadImage) as refused:
        prepare(data, KEEP)
    assert reason in str(refused.value)
    assert "0x" not in str(refused.value)  # a memory address would make two packs differ


def test_a_truncated_file_is_refused_when_it_is_decoded() -> None:
    whole = encoded(picture(400, 300))
    with pytest.raises(BadImage, match="truncated"):
        prepare(whole[: len(whole) // 2], JPEG)


def test_a_side_too_long_for_a_jpeg_is_refused_with_the_reason() -> None:
    with pytest.raises(BadImage, match="65500"):
        prepare(encoded(Image.new("RGB", (70_000, 2)), "PNG"), JPEG)
