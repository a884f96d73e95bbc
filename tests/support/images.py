"""Tiny images of every kind, valid and broken, generated on the fly."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

Pixels = NDArray[np.uint8]
RED, GREEN, BLUE, YELLOW = (230, 20, 20), (20, 200, 40), (30, 40, 220), (240, 220, 30)
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
_CV2_SAMPLING = {"444": 0x111111, "422": 0x211111, "420": 0x221111, "440": 0x121111, "411": 0x411111}


def quadrants(width: int = 96, height: int = 64) -> Pixels:
    """Red | green over blue | yellow: reveals any wrong rotation and any shifted crop."""
    pixels = np.empty((height, width, 3), np.uint8)
    pixels[: height // 2, : width // 2] = RED
    pixels[: height // 2, width // 2 :] = GREEN
    pixels[height // 2 :, : width // 2] = BLUE
    pixels[height // 2 :, width // 2 :] = YELLOW
    return pixels


def smooth(width: int = 157, height: int = 119) -> Pixels:
    """Slow waves in every channel: insensitive to resampling, sensitive to a shift. No side is a multiple of eight."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 23 + 1) + np.cos(y / 31), np.sin(y / 19) + np.cos(x / 37 + 2), np.sin((x + y) / 29) * 2]
    return np.stack([128 + 60 * wave for wave in waves], axis=2).clip(0, 255).astype(np.uint8)


def noise(width: int = 157, height: int = 119, seed: int = 0) -> Pixels:
    """Coloured blocks of five pixels: hard edges that do not align with JPEG blocks."""
    blocks = np.random.default_rng(seed).integers(0, 256, (-(-height // 5), -(-width // 5), 3), np.uint8)
    return np.ascontiguousarray(np.kron(blocks, np.ones((5, 5, 1), np.uint8))[:height, :width])


def encode(pixels: Pixels, kind: str, mode: str = "RGB", **options: Any) -> bytes:
    """The pixels encoded by Pillow in that format."""
    stream = io.BytesIO()
    image = Image.fromarray(pixels)
    (image if mode == "RGB" else image.convert(mode)).save(stream, kind, **options)
    return stream.getvalue()


def jpeg(pixels: Pixels, subsampling: str = "420", *, progressive: bool = False, quality: int = 92) -> bytes:
    """A JPEG with any subsampling; Pillow cannot write 4:4:0 and 4:1:1."""
    options = [
        cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_PROGRESSIVE, int(progressive),
        cv2.IMWRITE_JPEG_SAMPLING_FACTOR, _CV2_SAMPLING[subsampling],
    ]  # fmt: skip
    done, data = cv2.imencode(".jpg", pixels[:, :, ::-1], options)
    assert done
    return data.tobytes()


def oriented(pixels: Pixels, orientation: int, kind: str = "JPEG", **options: Any) -> bytes:
    """A file that displays as `pixels` but is stored rotated."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(pixels)
    if orientation != 1:
        image = image.transpose(_TURNS[orientation])
    return encode(np.asarray(image), kind, exif=exif.tobytes(), **options)


@cache
def jpegs() -> dict[str, bytes]:
    """A smooth picture in every JPEG layout."""
    picture = smooth()
    found = {f"jpeg-{name}": jpeg(picture, name) for name in _CV2_SAMPLING}
    found |= {f"jpeg-progressive-{name}": jpeg(picture, name, progressive=True) for name in _CV2_SAMPLING}
    found["jpeg-grey"] = encode(picture, "JPEG", "L", quality=92)
    found["jpeg-progressive-grey"] = encode(picture, "JPEG", "L", quality=92, progressive=True)
    found["jpeg-cmyk"] = encode(picture, "JPEG", "CMYK", quality=92)
    found["jpeg-ycck"] = _with_adobe_transform(found["jpeg-cmyk"], 2)
    found["jpeg-rgb"] = encode(picture, "JPEG", quality=92, keep_rgb=True)
    found["jpeg-restarts"] = encode(picture, "JPEG", quality=92, restart_marker_rows=1)
    found["jpeg-trailing-zeros"] = found["jpeg-420"] + b"\0" * 100
    found["jpeg-trailing-garbage"] = found["jpeg-420"] + b"camera notes " * 20
    found |= {f"jpeg-exif-{number}": oriented(picture, number, quality=92) for number in range(1, 9)}
    return found


@cache
def other_kinds() -> dict[str, bytes]:
    """The same picture in every other file format."""
    picture = smooth()
    transparent = np.dstack([picture, np.full(picture.shape[:2], 128, np.uint8)])
    deep = picture[:, :, 0].astype(np.uint16) * 257
    return {
        "png": encode(picture, "PNG"),
        "png-rgba": encode(transparent, "PNG", "RGBA"),
        "png-palette": encode(picture, "PNG", "P"),
        "png-grey": encode(picture, "PNG", "L"),
        "png-grey-alpha": encode(picture, "PNG", "LA"),
        "png-1-bit": encode(picture, "PNG", "1"),
        "png-16-bit-grey": _save(Image.fromarray(deep), "PNG"),
        "png-exif-6": oriented(picture, 6, "PNG"),
        "webp": encode(picture, "WEBP", quality=90),
        "webp-lossless": encode(picture, "WEBP", lossless=True),
        "webp-alpha": encode(transparent, "WEBP", "RGBA", lossless=True),
        "webp-animated": _animated(picture, "WEBP", lossless=True),
        "webp-exif-8": oriented(picture, 8, "WEBP", lossless=True),
        "gif": encode(picture, "GIF", "P"),
        "gif-animated": _animated(picture, "GIF"),
        "bmp": encode(picture, "BMP"),
        "bmp-grey": encode(picture, "BMP", "L"),
        "tiff": encode(picture, "TIFF"),
        "tiff-16-bit-grey": _save(Image.fromarray(deep), "TIFF"),
        "tiff-exif-6": oriented(picture, 6, "TIFF"),
    }


@cache
def bad_images() -> dict[str, bytes]:
    """Files that are not images, are damaged, or are far too large."""
    whole = jpegs()["jpeg-420"]
    found = {
        "empty": b"",
        "one byte": b"\xff",
        "text named .jpg": b"This is not the picture that you were looking for.\n" * 20,
        "html": b"<!DOCTYPE html><html><body>404</body></html>",
        "zeros": bytes(5000),
        "jpeg without end marker": whole.removesuffix(b"\xff\xd9"),
        "jpeg cut to zeros": whole[: len(whole) // 2] + bytes(len(whole) // 2),
        "jpeg marker only": b"\xff\xd8\xff",
        "jpeg without frame": b"\xff\xd8\xff\xd9",
        "jpeg of 65500x65500": resized_in_header(whole, 65500, 65500),
        "jpeg of 12000x12000 in a few bytes": resized_in_header(whole, 12000, 12000),
        "jpeg without height": resized_in_header(whole, 157, 0),
        "png bomb": png_bomb(),
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
        "gif of 0x0": b"GIF89a" + bytes(20),
    }
    for name in ("jpeg-420", "jpeg-444", "jpeg-440", "jpeg-411", "jpeg-progressive-420", "jpeg-grey", "jpeg-cmyk"):
        data = jpegs()[name]
        found |= {f"{name} cut at {percent} %": data[: len(data) * percent // 100] for percent in (5, 50, 95)}
    for name in ("png", "webp", "webp-lossless", "gif", "bmp", "tiff", "png-16-bit-grey"):
        data = other_kinds()[name]
        found |= {f"{name} cut at {percent} %": data[: len(data) * percent // 100] for percent in (2, 50, 90)}
    return found


def resized_in_header(data: bytes, width: int, height: int) -> bytes:
    """The same JPEG with a different size in its frame header."""
    at = next(at for at in range(len(data)) if data[at : at + 2] in (b"\xff\xc0", b"\xff\xc2"))
    return data[: at + 5] + struct.pack(">HH", height, width) + data[at + 9 :]


def png_bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A PNG of a few kilobytes that would decode to ten gigabytes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b"")]
    body = [struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def _with_adobe_transform(data: bytes, transform: int) -> bytes:
    at = data.index(b"Adobe")
    return data[: at + 11] + bytes([transform]) + data[at + 12 :]


def _save(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def _animated(first: Pixels, kind: str, **options: Any) -> bytes:
    second = Image.fromarray(255 - first)
    return encode(first, kind, save_all=True, append_images=[second], duration=50, **options)
