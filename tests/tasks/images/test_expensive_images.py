"""Images that are cheap to store and dear to decode are refused by their headers, with the reason; and every decoder
turns images alike, or not at all."""

from __future__ import annotations

import io
import struct
import time
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder

from stoker.config import load_config
from stoker.tasks.images.decode.crops import Decoding
from stoker.tasks.images.decode.decoders import available_decoders
from stoker.tasks.images.decode.headers import MAX_DECODED_BYTES, MOST_SCANS, BadImage, Box, read_header
from stoker.tasks.images.image_prediction import load_image
from stoker.tasks.images.pack.make_shard import PackOptions, prepare
from tests.loader.test_loader import entries, loader_for
from tests.support import images

CAP = 178_956_970


def with_scans(scans: int, side: int = 64) -> bytes:
    """A progressive JPEG whose last scan is repeated until it has that many; decoders accept it."""
    flat = np.full((side, side, 3), 99, np.uint8)
    data = images.encode(flat, "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * (1 + scans - data.count(b"\xff\xda")) + data[-2:]


def one_bit_png(side: int) -> bytes:
    """A black square: a few hundred bytes for each million pixels."""
    row = bytes(1 + -(-side // 8))
    squeezed = zlib.compressobj(9)
    body = b"".join(squeezed.compress(row) for _ in range(side)) + squeezed.flush()
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)), (b"IDAT", body), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part)) for name, part in chunks
    )


def refused(data: bytes, **limits: int) -> str:
    with pytest.raises(BadImage) as caught:
        read_header(data, CAP, **limits)
    return caught.value.reason


def test_scans_are_counted_before_anything_is_decoded() -> None:
    usual = images.encode(images.smooth(), "JPEG", progressive=True)
    layout = read_header(usual, CAP).jpeg
    assert layout is not None
    assert layout.scans == usual.count(b"\xff\xda") == 10
    assert read_header(images.encode(images.smooth(), "JPEG"), CAP).jpeg.scans == 1  # type: ignore[union-attr]
    assert read_header(with_scans(MOST_SCANS), CAP)
    assert f"{MOST_SCANS + 1} scans" in refused(with_scans(MOST_SCANS + 1))
    # A large image may not have as many as a small one.
    assert "90 scans of 1600x1600" in refused(with_scans(90, side=1600))
    usual = bytearray(with_scans(20, side=1600))
    assert read_header(usual, CAP)
    frame = usual.index(b"\xff\xc2")
    usual[frame + 5 : frame + 9] = struct.pack(">HH", 10_000, 10_000)
    assert "20 scans of 10000x10000" in refused(bytes(usual))
    # A thumbnail in the EXIF part of a file has scans of its own.
    stream = io.BytesIO()
    exif = Image.Exif()
    exif[0x927C] = with_scans(200)[:30_000]
    Image.fromarray(images.smooth()).save(stream, "JPEG", progressive=True, exif=exif.tobytes())
    assert stream.getvalue().count(b"\xff\xda") > 100
    assert read_header(stream.getvalue(), CAP).jpeg.scans == 10  # type: ignore[union-attr]


def test_memory_is_bounded_by_what_the_headers_say() -> None:
    assert "takes about 1.4 GB to decode" in refused(one_bit_png(13_000))
    assert read_header(one_bit_png(10_000), CAP)
    assert "the limit is 10 kB" in refused(images.encode(images.smooth(), "PNG"), max_bytes=10_000)
    for kind in ("PNG", "GIF", "BMP", "WEBP", "TIFF"):
        needed = read_header(images.encode(images.smooth(400, 300), kind), CAP)
        assert needed.width == 400
        assert "bomb" in refused(images.encode(images.smooth(400, 300), kind), max_bytes=400 * 300 * 7)
    # Coefficients of all blocks are kept if there are several scans.
    progressive = images.encode(images.smooth(1024, 1024), "JPEG", progressive=True, subsampling="4:4:4")
    baseline = images.encode(images.smooth(1024, 1024), "JPEG", subsampling="4:4:4")
    assert read_header(baseline, CAP, 4_000_000)
    assert "bomb" in refused(progressive, max_bytes=4_000_000)
    assert load_config(None, []).config.max_decoded_bytes == MAX_DECODED_BYTES


def test_every_way_to_an_image_names_the_reason(tmp_path: Path) -> None:
    """Training, validation, packing and prediction; `verify` and `preview` use the same views."""
    bombs = {"scans.jpg": with_scans(1000), "bits.png": one_bit_png(13_000)}
    for split in ("train", "val"):
        for number in range(60):
            file = tmp_path / "data" / split / "a" / f"{number}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(images.encode(images.noise(40, 30, number), "JPEG"))
        for name, data in bombs.items():
            (tmp_path / "data" / split / "a" / name).write_bytes(data)
        loader = loader_for(tmp_path / "data", "batch_size=62", "max_bad_fraction=0.1", "loader=thread", split=split)
        assert sum(len(entries(batch)) for batch in loader.epoch(0)) == 62
        reasons = {Path(bad.name).name: bad.reason for bad in loader.quarantine.bad}
        loader.close()
        assert "1000 scans" in reasons["scans.jpg"]
        assert "1.4 GB to decode" in reasons["bits.png"]
    config = load_config(None, ["img_size=32"]).config
    for name, data in bombs.items():
        with pytest.raises(BadImage, match="bomb"):
            prepare(data, PackOptions())
        with pytest.raises(BadImage, match="bomb"):
            load_image(tmp_path / "data" / "train" / "a" / name, config)


def test_hostile_headers_of_other_kinds_cost_neither_memory_nor_time() -> None:
    """A PNG with a gigabyte of text, a GIF and a WebP of 16,000², a TIFF with a strip of 4 GB."""
    png = images.encode(images.smooth(), "PNG")
    text = zlib.compress(bytes(1 << 26), 9)
    chunk = b"zTXt" + b"Comment\0\0" + text
    many = png[:33] + (struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))) * 16 + png[33:]
    gif = b"GIF89a" + struct.pack("<HH", 16_000, 16_000) + bytes(3)
    webp = b"RIFF\x12\0\0\0WEBPVP8L\5\0\0\0\x2f" + struct.pack("<I", 15_999 | 15_999 << 14) + b"\0"
    stream = io.BytesIO()
    Image.fromarray(images.smooth()).save(stream, "TIFF", tiffinfo={279: 4_000_000_000})
    before, began = _peak_bytes(), time.thread_time()
    for data in (many, gif, webp, stream.getvalue()):
        decoding, out = Decoding(), np.empty((8, 8, 3), np.uint8)
        with suppress(BadImage):
            decoding.faithful_centre_into(data, decoding.read_header(data), 8, out, "bilinear")
    assert _peak_bytes() - before < 400_000_000
    assert time.thread_time() - began < 10


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


ORIENTED = [("JPEG", orientation) for orientation in range(1, 9)] + [("PNG", 6), ("WEBP", 8)]


@pytest.mark.parametrize("decoder", available_decoders())
def test_images_are_turned_in_every_mode_or_in_none(decoder: str) -> None:
    for kind, orientation in ORIENTED:
        data = images.oriented(images.quadrants(96, 64), orientation, kind)
        with Image.open(io.BytesIO(data)) as image:
            stored = np.asarray(image.convert("RGB"))
        for upright, side in ((True, (64, 96)), (False, stored.shape[:2])):
            decoding = Decoding(decoder, upright=upright)
            header = decoding.read_header(data)
            assert (header.height, header.width) == side
            for mode in ("fast", "faithful", "draft"):
                out = np.empty((*side, 3), np.uint8)
                decoding.crop_into(data, header, Box(0, 0, *side), out, "bilinear", mode)  # type: ignore[arg-type]
                expected = images.quadrants(96, 64) if upright else stored
                assert np.abs(out.astype(int) - expected.astype(int)).mean() < 6, (kind, orientation, mode, upright)


def test_faithful_means_what_torchvision_does_with_an_orientation(tmp_path: Path) -> None:
    for number, (kind, orientation) in enumerate(ORIENTED):
        file = tmp_path / "val" / "a" / f"{number:02d}.{kind.lower()}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(images.oriented(images.noise(96, 64, number), orientation, kind))
    (tmp_path / "train").symlink_to(tmp_path / "val")
    options = ["batch_size=10", "val_img_size=32", "crop_ratio=0.5", "loader=thread"]
    theirs = ImageFolder(
        str(tmp_path / "val"),
        transforms.Compose([transforms.Resize(64, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(32)]),
    )
    expected = np.stack([np.asarray(image) for image, _ in theirs])
    for mode, same in (("faithful", True), ("fast", False)):
        loader = loader_for(tmp_path, *options, f"decode_mode={mode}", split="val")
        (batch,) = loader.epoch(0)
        loader.close()
        assert np.array_equal(batch.images.numpy(), expected) == same
        assert np.array_equal(batch.images.numpy()[:1], expected[:1])  # not turned at all
