"""Every decoder compared with Pillow on every kind of file."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageOps

from stoker.core.errors import UserError
from stoker.tasks.images.decode.calibration import choose_decoder
from stoker.tasks.images.decode.crops import DecodeMode, Decoding, Interpolation
from stoker.tasks.images.decode.decoders import available_decoders
from stoker.tasks.images.decode.headers import BadImage, Box
from tests.support import images
from tests.support.waiting import DEADLINE_S

GOOD = images.jpegs() | images.other_kinds()
HERE = available_decoders()
MODES: list[DecodeMode] = ["fast", "faithful", "draft"]
every_decoder = pytest.mark.parametrize("decoder", HERE)

SEEN_BOXES = {
    1: Box(8, 16, 104, 104),
    2: Box(8, 157 - 16 - 104, 104, 104),
    3: Box(119 - 8 - 104, 157 - 16 - 104, 104, 104),
    4: Box(119 - 8 - 104, 16, 104, 104),
    5: Box(8, 16, 104, 104),
    6: Box(8, 157 - 16 - 104, 104, 104),
    7: Box(119 - 8 - 104, 157 - 16 - 104, 104, 104),
    8: Box(119 - 8 - 104, 16, 104, 104),
}


def kinds_for(decoder: str) -> list[str]:
    """Anything but JPEG is decoded by Pillow, whichever decoder was chosen; two of them are enough to show it."""
    return [name for name in GOOD if name in images.jpegs() or decoder in ("pillow", "simplejpeg")]


def reference(data: bytes) -> NDArray[np.uint8]:
    """The whole image as displayed, decoded by Pillow; of 16-bit images the upper 8 bits."""
    with Image.open(io.BytesIO(data)) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):
            return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[:, :, None], 3, axis=2)
        return np.asarray(image.convert("RGB"))


def crop(decoder: str, data: bytes, box: Box, size: tuple[int, int], mode: DecodeMode = "fast") -> NDArray[np.uint8]:
    decoding, out = Decoding(decoder), np.full((*size, 3), 77, np.uint8)
    decoding.crop_into(data, decoding.read_header(data), box, out, mode=mode)
    return out


def difference(a: NDArray[np.uint8], b: NDArray[np.uint8]) -> float:
    return float(np.abs(a.astype(int) - b).mean())


def test_pillow_and_simplejpeg_are_always_available() -> None:
    assert {"pillow", "simplejpeg", "opencv"} <= set(HERE)


def test_no_decoding_library_is_imported_before_it_is_used() -> None:
    program = (
        "import sys, stoker.tasks.images.decode.decoders; "
        "assert not {'cv2', 'simplejpeg', 'nvidia.nvimgcodec'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S)


def test_a_missing_or_broken_library_is_merely_unavailable(tmp_path: Path) -> None:
    (tmp_path / "simplejpeg.py").write_text("raise OSError('libjpeg.so.8: wrong ELF class')")
    program = (
        "import sys; sys.modules['cv2'] = None; from stoker.tasks.images.decode.decoders import available_decoders; "
        "found = available_decoders(); assert 'pillow' in found and not {'opencv', 'simplejpeg'} & set(found), found"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=DEADLINE_S, env=environment)


@every_decoder
def test_a_crop_of_its_own_size_is_exactly_pillows(decoder: str) -> None:
    boxes = (Box(0, 0, 119, 157), Box(33, 17, 61, 90), Box(16, 32, 16, 16), Box(118, 156, 1, 1), Box(0, 1, 119, 2))
    for name in kinds_for(decoder):
        whole = reference(GOOD[name])
        for box in boxes:
            expected = whole[box.top : box.top + box.height, box.left : box.left + box.width]
            assert np.array_equal(crop(decoder, GOOD[name], box, (box.height, box.width)), expected), (name, box)


@every_decoder
def test_a_drafted_crop_is_roughly_pillows(decoder: str) -> None:
    for name in kinds_for(decoder):
        if name in ("png-1-bit", "png-palette", "gif", "gif-animated"):
            continue  # dithered: without antialiasing it cannot be close
        # Its stored edges are at multiples of eight from the top left, so a reduced-size decode rounds nothing.
        box = SEEN_BOXES[int(name[-1])] if "exif" in name and "tiff" not in name else Box(8, 16, 104, 104)
        part = reference(GOOD[name])[box.top : box.top + box.height, box.left : box.left + box.width]
        for size, allowed in ((200, 0.3), (60, 0.7), (52, 0.8), (26, 0.8), (13, 1.3)):
            expected = np.asarray(Image.fromarray(part).resize((size, size), Image.Resampling.BILINEAR))
            found = crop(decoder, GOOD[name], box, (size, size), "draft")
            assert difference(found, expected) < allowed, (name, size)


@every_decoder
def test_a_reduced_decode_shifts_a_crop_by_at_most_half_a_pixel(decoder: str) -> None:
    # An edge at column 400 must stay there, wherever the crop starts.
    pixels = np.zeros((640, 800, 3), np.uint8)
    pixels[:, 400:] = 255
    data = images.jpeg(pixels, "444")
    for left in range(190, 200):
        for size in (200, 100, 50):
            row = crop(decoder, data, Box(3, left, 500, 500), (size, size), "draft")[size // 2, :, 0].astype(float)
            edge = size - row.sum() / 255
            assert abs(edge - (400 - left) * size / 500) < 0.75


def boxes(width: int, height: int) -> st.SearchStrategy[Box]:
    return st.tuples(
        st.integers(0, height - 1), st.integers(0, width - 1), st.integers(1, height), st.integers(1, width)
    ).map(lambda b: Box(b[0], b[1], min(b[2], height - b[0]), min(b[3], width - b[1])))


@every_decoder
@settings(max_examples=25, deadline=None)
@given(box=boxes(157, 119), name=st.sampled_from(sorted(images.jpegs())))
@example(box=Box(118, 156, 1, 1), name="jpeg-420")
@example(box=Box(117, 0, 1, 1), name="jpeg-440")
def test_any_box_of_any_jpeg_is_exactly_pillows(decoder: str, box: Box, name: str) -> None:
    expected = reference(GOOD[name])[box.top : box.top + box.height, box.left : box.left + box.width]
    assert np.array_equal(crop(decoder, GOOD[name], box, (box.height, box.width)), expected)


@every_decoder
@settings(max_examples=20, deadline=None)
@given(
    box=boxes(157, 119),
    name=st.sampled_from(sorted(GOOD)),
    rows=st.integers(1, 70),
    columns=st.integers(1, 70),
    slot=st.integers(0, 2),
    mode=st.sampled_from(MODES),
    interpolation=st.sampled_from(["bilinear", "bicubic"]),
)
def test_nothing_is_written_outside_the_slot(
    decoder: str,
    box: Box,
    name: str,
    rows: int,
    columns: int,
    slot: int,
    mode: DecodeMode,
    interpolation: Interpolation,
) -> None:
    batch = np.full((3, rows, columns, 3), 77, np.uint8)
    decoding = Decoding(decoder)
    decoding.crop_into(GOOD[name], decoding.read_header(GOOD[name]), box, batch[slot], interpolation, mode)
    others = np.delete(batch, slot, axis=0)
    assert (others == 77).all()
    alone = np.full((rows, columns, 3), 78, np.uint8)
    decoding.crop_into(GOOD[name], decoding.read_header(GOOD[name]), box, alone, interpolation, mode)
    assert np.array_equal(batch[slot], alone)


@every_decoder
def test_any_buffer_type_works(decoder: str) -> None:
    box = Box(3, 5, 80, 90)
    for name in ("jpeg-420", "jpeg-cmyk", "png", "webp", "tiff"):
        data = GOOD[name]
        expected = crop(decoder, data, box, (40, 40))
        for buffer in (bytearray(data), memoryview(data), memoryview(b"x" + data + b"y")[1:-1]):
            assert np.array_equal(crop(decoder, buffer, box, (40, 40)), expected), name  # type: ignore[arg-type]


@every_decoder
def test_eight_threads_get_what_one_gets(decoder: str) -> None:
    decoding = Decoding(decoder)
    jobs = [(name, Box(k % 40, k % 50, 30 + k % 49, 40 + k % 60)) for k, name in enumerate(sorted(GOOD) * 12)]

    def decode(job: tuple[str, Box]) -> bytes:
        out = np.empty((32, 32, 3), np.uint8)
        decoding.crop_into(GOOD[job[0]], decoding.read_header(GOOD[job[0]]), job[1], out)
        return out.tobytes()

    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(decode, jobs))
    assert together == [decode(job) for job in jobs]


@every_decoder
def test_a_bad_file_is_a_bad_image_with_a_reason(decoder: str) -> None:
    decoding = Decoding(decoder)
    for name, data in images.bad_images().items():
        for mode in MODES:
            with pytest.raises(BadImage) as caught:
                header = decoding.read_header(data)
                # The crop is at the top, which a truncated file still contains.
                box, out = Box(0, 0, min(4, header.height), min(4, header.width)), np.empty((4, 4, 3), np.uint8)
                decoding.crop_into(data, header, box, out, mode=mode)
            assert 3 < len(caught.value.reason) < 200, name


@every_decoder
def test_after_a_bad_file_the_next_good_one_is_right(decoder: str) -> None:
    for name in ("jpeg-420 cut at 50 %", "text named .jpg", "jpeg cut to zeros"):
        with pytest.raises(BadImage):
            crop(decoder, images.bad_images()[name], Box(0, 0, 8, 8), (8, 8))
        assert np.array_equal(
            crop(decoder, GOOD["jpeg-420"], Box(0, 0, 119, 157), (119, 157)), reference(GOOD["jpeg-420"])
        )


def test_pillows_own_size_limit_does_not_apply(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 50)
    for name in ("png", "jpeg-420", "jpeg-cmyk", "bmp"):
        crop("pillow", GOOD[name], Box(1, 1, 60, 60), (20, 20))
    assert [str(warning.message) for warning in recwarn] == []


def test_a_decoder_by_name_is_not_measured_and_an_unavailable_one_is_refused() -> None:
    assert choose_decoder("opencv", list, 224, max_pixels=99) == (Decoding("opencv", 99), None)
    with pytest.raises(UserError, match="libjpeg9") as caught:
        choose_decoder("libjpeg9", list, 224)
    assert caught.value.name == "decoder-missing"
