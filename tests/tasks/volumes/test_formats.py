"""A region of a volume is the same slice of the array, whatever the format; errors name the file."""

from __future__ import annotations

import gc
import gzip
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import tifffile
import zarr

from stoker.core.errors import UserError
from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef, open_volume
from stoker.tasks.volumes.formats.volume import (
    CroppedVolume,
    LruCache,
    ReadingOptions,
    Region,
    as_shape,
    check_finite,
    read_padded,
    whole,
)
from tests.support.s3_server import BUCKET, S3Server, use_environment
from tests.tasks.volumes.writing import FORMATS, PILLOW, tiff, zarr_array

SHAPE = (37, 41, 53)  # primes: no chunk, tile or page divides them


def voxels(kind: str, seed: int = 0) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(seed)
    if kind == "float32":
        return random.normal(size=SHAPE).astype(np.float32)
    return random.integers(0, np.iinfo(kind).max, SHAPE, dtype=kind)


def some_regions(shape: tuple[int, ...] = SHAPE, count: int = 12) -> Iterator[Region]:
    random = np.random.default_rng(1)
    for _ in range(count):
        low = random.integers(0, shape)
        yield Region(as_shape(low.tolist()), as_shape(random.integers(low + 1, np.array(shape) + 1).tolist()))
    yield whole(as_shape(shape))


def check_reads(ref: VolumeRef, array: np.ndarray[Any, Any], options: ReadingOptions | None = None) -> None:
    volume = open_volume(ref, options)
    assert (volume.shape, volume.dtype) == (SHAPE, array.dtype)
    assert volume.dtype.isnative
    for region in some_regions():
        assert np.array_equal(volume.read(region), array[region.slices])
        out = np.full(region.shape, 99, array.dtype)
        assert volume.read(region, out) is out
        assert np.array_equal(out, array[region.slices])


@pytest.mark.parametrize("name", [*FORMATS, *PILLOW])
def test_a_region_is_the_slice_of_the_array(name: str, tmp_path: Path) -> None:
    for kind in ("uint8",) if name in PILLOW else ("uint16", "float32"):
        array = voxels(kind)
        (tmp_path / kind).mkdir()
        check_reads((FORMATS | PILLOW)[name](tmp_path / kind, array), array)


def test_a_box_of_a_volume_shows_nothing_outside_of_it(tmp_path: Path) -> None:
    array = voxels("uint8")
    box = Region((5, 6, 7), (25, 36, 47))
    volume = OpenVolumes().get(tiff(compression="zlib")(tmp_path, array), box)
    assert volume.shape == (20, 30, 40)
    assert np.array_equal(volume.read(whole(volume.shape)), array[box.slices])
    padded = np.empty((40, 50, 60), np.uint8)
    read_padded(volume, Region((-10, -10, -10), (30, 40, 50)), padded, 7)
    expected = np.full((40, 50, 60), 7, np.uint8)
    expected[10:30, 10:40, 10:50] = array[box.slices]
    assert np.array_equal(padded, expected)
    assert isinstance(volume, CroppedVolume)
    with pytest.raises(AssertionError):
        volume.read(Region((0, 0, 0), (21, 1, 1)))


def test_a_scaled_nifti_volume_has_the_scaled_values(tmp_path: Path) -> None:
    stored = voxels("uint8")
    image = nibabel.Nifti1Image(stored.astype(np.int16).transpose(2, 1, 0), np.eye(4))
    image.header.set_slope_inter(0.5, -1024)
    for name in ("a.nii", "a.nii.gz"):
        nibabel.save(image, tmp_path / name)
        volume = open_volume(VolumeRef(str(tmp_path / name)))
        saved = nibabel.load(tmp_path / name).dataobj
        assert volume.dtype == np.float32
        assert np.allclose(volume.read(whole(SHAPE)), np.asarray(saved).transpose(2, 1, 0))


def test_zarr_is_read_from_s3_with_a_profile(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = voxels("uint8")
    zarr_array(2)(tmp_path, array)
    s3_server.put_folder(tmp_path, "profile")
    known = s3_server.environment()
    (tmp_path / "credentials").write_text(
        f"[lab]\naws_access_key_id={known['AWS_ACCESS_KEY_ID']}\naws_secret_access_key={known['AWS_SECRET_ACCESS_KEY']}\n"
    )
    (tmp_path / "config").write_text(f"[profile lab]\nregion=us-east-1\nendpoint_url={s3_server.endpoint}\n")
    use_environment(monkeypatch, {
        "AWS_PROFILE": "lab", "AWS_CONFIG_FILE": str(tmp_path / "config"),
        "AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials"),
    })  # fmt: skip
    check_reads(VolumeRef(f"s3://{BUCKET}/profile/volume.zarr"), array)
    with pytest.raises(ReadFailure, match="missing"):
        open_volume(VolumeRef(f"s3://{BUCKET}/profile/other.zarr"))


@pytest.mark.parametrize("name", ["tiff", "tiff lzw", "tiff by Pillow", "npy", "nii", "nii.gz", "tiff tiles"])
def test_a_truncated_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    ref = (FORMATS | PILLOW)[name](tmp_path, voxels("uint8"))
    data = Path(ref.location).read_bytes()
    for share in (0.97, 0.4, 0.05):
        Path(ref.location).write_bytes(data[: int(len(data) * share)])
        with pytest.raises(ReadFailure) as caught:
            open_volume(ref).read(whole(SHAPE))
        assert caught.value.path == ref.location
        assert caught.value.reason in ("short", "unreadable")


@pytest.mark.parametrize("suffix", [".tif", ".npy", ".nii", ".nii.gz"])
def test_a_file_that_is_missing_or_no_volume_is_refused_by_name(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"x{suffix}"
    with pytest.raises(ReadFailure) as caught:
        open_volume(VolumeRef(str(path)))
    assert (caught.value.path, caught.value.reason) == (str(path), "missing")
    for content in (b"", b"II*\0", b"\x93NUMPY", b"hello world, this is no volume at all" * 20):
        path.write_bytes(content)
        with pytest.raises(ReadFailure) as caught:
            open_volume(VolumeRef(str(path))).read(Region((0, 0, 0), (1, 1, 1)))
        assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("file", "package", "reader"),
    [("a.tif", "tifffile", "tiff"), ("a.nii", "nibabel", "arrays"), ("a.zarr", "tensorstore", "zarr_volume")],
)
def test_the_package_that_a_format_needs_is_named(
    file: str, package: str, reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.zarr").mkdir()
    (tmp_path / "a.tif").write_bytes(b"II")
    (tmp_path / "a.nii").write_bytes(bytes(352))
    monkeypatch.setitem(sys.modules, package, None)
    if reader != "arrays":
        monkeypatch.delitem(sys.modules, f"stoker.tasks.volumes.formats.{reader}", raising=False)
    with pytest.raises(UserError, match=f"{package} is not installed"):
        open_volume(VolumeRef(str(tmp_path / file)))


SHRINKS = """
import os, sys
from pathlib import Path
import numpy as np
from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.formats.opening import VolumeRef, open_volume
from stoker.tasks.volumes.formats.volume import whole
volume = open_volume(VolumeRef(sys.argv[1]))
volume.read(whole(volume.shape))
os.truncate(sys.argv[1], 4096)
try:
    volume.read(whole(volume.shape))
except ReadFailure as failure:
    print(failure.reason, failure.detail)
"""


@pytest.mark.parametrize("name", ["tiff", "tiff deflate", "npy", "nii"])
def test_a_file_that_shrinks_while_it_is_mapped_is_refused_and_does_not_end_the_process(
    name: str, tmp_path: Path
) -> None:
    ref = FORMATS[name](tmp_path, voxels("uint16"))
    size = Path(ref.location).stat().st_size
    done = subprocess.run([sys.executable, "-c", SHRINKS, ref.location], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"short it had {size:,} bytes when it was opened, and has 4,096\n"


def test_damaged_pages_are_refused_when_they_are_read(tmp_path: Path) -> None:
    ref = tiff(compression="zlib")(tmp_path, voxels("uint8"))
    with tifffile.TiffFile(ref.location) as file:
        offset, size = file.pages[20].dataoffsets[0], file.pages[20].databytecounts[0]
    data = bytearray(Path(ref.location).read_bytes())
    data[offset : offset + size] = bytes(size)
    Path(ref.location).write_bytes(data)
    volume = open_volume(ref)
    volume.read(Region((0, 0, 0), (20, 41, 53)))
    with pytest.raises(ReadFailure, match="page 20"):
        volume.read(Region((0, 0, 0), (21, 41, 53)))


@pytest.mark.parametrize("name", ["tiff lzw", "tiff tiles", "tiff by Pillow", "npy", "nii.gz"])
def test_whatever_bytes_are_damaged_the_file_is_read_or_refused(name: str, tmp_path: Path) -> None:
    ref = (FORMATS | PILLOW)[name](tmp_path, np.arange(5 * 20 * 24, dtype=np.uint8).reshape(5, 20, 24))
    path, random = Path(ref.location), np.random.default_rng(3)
    data = path.read_bytes()
    small = ReadingOptions(max_voxels=10**7, max_decoded_bytes=10**7)
    refused = 0
    for attempt in range(40):
        damaged = bytearray(data)
        # Headers are at the beginning, those of most TIFF files at the end.
        for place in random.integers(0, 350, 5):
            place = int(place) if attempt % 2 else len(data) - 1 - int(place)
            damaged[place % len(data)] = int(random.choice([0, 1, 128, 255]))
        path.write_bytes(damaged)
        try:
            volume = open_volume(ref, small)
            volume.read(whole(volume.shape))
        except ReadFailure as failure:
            refused += failure.path == ref.location
    assert refused > 0


def test_a_compressed_bomb_is_refused_before_it_is_decompressed(tmp_path: Path) -> None:
    small = ReadingOptions(max_decoded_bytes=1_000_000)
    header = nibabel.Nifti1Header()
    header.set_data_shape((4000, 4000, 4000))
    header.set_data_dtype(np.uint8)
    header["magic"], header["vox_offset"] = b"n+1", 352
    (tmp_path / "bomb.nii.gz").write_bytes(gzip.compress(header.binaryblock + bytes(400_000)))
    tifffile.imwrite(tmp_path / "bomb.tif", np.zeros((2, 2000, 2000), np.uint8), compression="zlib")
    tifffile.imwrite(tmp_path / "tile.tif", np.zeros((2, 32, 32), np.uint8), compression="zlib", tile=(16, 16))
    with tifffile.TiffFile(tmp_path / "tile.tif", mode="r+") as file:
        for page in file.pages:
            page.tags["TileWidth"].overwrite(60_000)
            page.tags["TileLength"].overwrite(60_000)
    zarr.create_array(tmp_path / "bomb.zarr", shape=(2000,) * 3, chunks=(1000,) * 3, dtype="u1")
    for name in ("bomb.nii.gz", "bomb.tif", "tile.tif", "bomb.zarr"):
        with pytest.raises(ReadFailure) as caught:
            open_volume(VolumeRef(str(tmp_path / name)), small)
        assert (caught.value.path, caught.value.reason) == (str(tmp_path / name), "too large")
    np.save(tmp_path / "big.npy", np.zeros((20, 20, 20), np.uint8))
    with pytest.raises(ReadFailure, match="too large"):
        open_volume(VolumeRef(str(tmp_path / "big.npy")), ReadingOptions(max_voxels=7999))


def test_a_missing_chunk_is_an_error_unless_it_means_the_fill_value(tmp_path: Path) -> None:
    array = voxels("uint8")
    ref = zarr_array(3)(tmp_path, array)
    (Path(ref.location) / "c/1/1/1").unlink()
    volume = open_volume(ref)
    volume.read(Region((0, 0, 0), (16, 16, 16)))
    with pytest.raises(ReadFailure) as caught:
        volume.read(whole(SHAPE))
    assert (caught.value.path, caught.value.reason) == (ref.location, "missing chunk")
    array[16:32, 16:32, 16:32] = 0
    filled = open_volume(ref, ReadingOptions(missing_chunks="fill"))
    assert np.array_equal(filled.read(whole(SHAPE)), array)


def test_axes_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "colour.tif", np.zeros((30, 40, 3), np.uint8), photometric="rgb")
    tifffile.imwrite(tmp_path / "channels.tif", np.zeros((9, 3, 30, 40), np.uint8), imagej=True)
    np.save(tmp_path / "plane.npy", np.zeros((30, 40), np.uint8))
    np.save(tmp_path / "complex.npy", np.zeros((3, 3, 3), np.complex64))
    nibabel.save(nibabel.Nifti1Image(np.zeros((5, 6, 7, 8), np.uint8), np.eye(4)), tmp_path / "time.nii")
    zarr.create_array(tmp_path / "names.zarr", shape=(4, 4, 4), dtype="u1", dimension_names=["t", "y", "x"])
    with tifffile.TiffWriter(tmp_path / "uneven.tif") as file:
        for size in (30, 31):
            file.write(np.zeros((size, 30), np.uint8), metadata=None)
    names = ["colour.tif", "channels.tif", "plane.npy", "complex.npy", "time.nii", "names.zarr", "uneven.tif"]
    for name in names:
        with pytest.raises(ReadFailure) as caught:
            open_volume(VolumeRef(str(tmp_path / name)))
        assert caught.value.reason in ("wrong axes", "not a volume"), name
        assert caught.value.path == str(tmp_path / name)
    ref = FORMATS["ome-zarr 0.4"](tmp_path, voxels("uint8"))
    with pytest.raises(ReadFailure, match="levels 0 to 1"):
        open_volume(VolumeRef(ref.location, level=2))


def test_an_open_stack_keeps_no_object_for_each_page(tmp_path: Path) -> None:
    gc.collect()
    volume = open_volume(tiff(compression="lzw")(tmp_path, voxels("uint8")))
    assert volume.shape == SHAPE
    gc.collect()
    # Hundreds of volumes with hundreds of pages are open at once.
    kinds = (tifffile.TiffPage, tifffile.TiffFrame)
    assert sum(type(one) in kinds for one in gc.get_objects()) <= 2


def test_voxels_that_are_not_finite_are_found() -> None:
    array = voxels("float32")
    check_finite(array, "x.npy")
    for bad in (np.nan, np.inf, -np.inf):
        array[3, 4, 5] = bad
        with pytest.raises(ReadFailure) as caught:
            check_finite(array, "x.npy")
        assert (caught.value.path, caught.value.reason) == ("x.npy", "not finite")


def test_the_cache_keeps_to_its_bytes_and_decodes_once_for_all_threads() -> None:
    decoded: list[int] = []

    def make(number: int) -> Any:
        decoded.append(number)
        return np.full(1000, number, np.uint8)

    cache: LruCache[int, Any] = LruCache(3500, lambda array: array.nbytes)
    threads = [threading.Thread(target=lambda: cache.get(0, lambda: make(0))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert decoded == [0]
    for number in range(1, 6):
        assert cache.get(number, lambda number=number: make(number))[0] == number  # type: ignore[misc]
        assert cache.held <= 3500
    cache.get(0, lambda: make(0))
    assert decoded == [0, 1, 2, 3, 4, 5, 0]


def test_reading_volumes_prints_nothing(tmp_path: Path) -> None:
    refs = [FORMATS[name](tmp_path, voxels("uint8")).location for name in ("tiff lzw", "nii.gz", "zarr v3")]
    program = (
        "import sys\nfrom stoker.tasks.volumes.formats.opening import VolumeRef, open_volume\n"
        "from stoker.tasks.volumes.formats.volume import whole\n"
        "for name in sys.argv[1:]:\n    v = open_volume(VolumeRef(name)); v.read(whole(v.shape))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *refs], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
