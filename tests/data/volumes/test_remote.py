"""Volumes in S3 are the same voxels as on disk, however they are fetched."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.data.store.stores import ReadFailure, StoreDown
from stoker.data.volumes import sources, zarr_volume
from stoker.data.volumes.opening import OpenVolumes, VolumeRef, open_volume
from stoker.data.volumes.volume import ReadingOptions, Region, Volume, whole
from tests.data.volumes.test_formats import SHAPE, some_regions, voxels
from tests.data.volumes.writing import FORMATS, PILLOW, npy, tiff, zarr_array
from tests.support.proxy import Proxy
from tests.support.s3_server import BUCKET, S3Server


def upload(server: S3Server, folder: Path, prefix: str) -> str:
    """All files below a folder; returns the URL of what was the folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            server.put(f"{prefix}/{path.relative_to(folder)}", path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


def remote(server: S3Server, folder: Path, ref: VolumeRef, prefix: str) -> VolumeRef:
    return VolumeRef(f"{upload(server, folder, prefix)}/{Path(ref.location).name}", ref.level)


def check_reads(volume: Volume, array: np.ndarray[Any, Any]) -> None:
    assert (volume.shape, volume.dtype) == (array.shape, array.dtype)
    for region in some_regions(8):
        assert np.array_equal(volume.read(region), array[region.slices])
        out = np.full(region.shape, 99, array.dtype)
        assert volume.read(region, out) is out
        assert np.array_equal(out, array[region.slices])


@pytest.mark.parametrize("name", [*FORMATS, *PILLOW])
def test_a_region_in_s3_is_the_slice_of_the_array(name: str, s3: S3Server, tmp_path: Path) -> None:
    array = voxels("uint8" if name in PILLOW else "uint16")
    (tmp_path / "written").mkdir()
    ref = (FORMATS | PILLOW)[name](tmp_path / "written", array)
    there = remote(s3, tmp_path / "written", ref, f"formats/{name.replace(' ', '-')}")
    check_reads(open_volume(there), array)
    kept = ReadingOptions(object_dir=tmp_path / "kept")
    check_reads(open_volume(there, kept), array)
    if ".zarr" not in there.location:
        first = open_volume(there, kept)
        assert first.identity == open_volume(there).identity
        # From the folder, and checked: what was damaged there is fetched again.
        (file,) = [path for path in (tmp_path / "kept").glob("??/*") if path.is_file()]
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        check_reads(open_volume(there, kept), array)


def test_a_patch_fetches_its_planes_and_not_the_whole_file(
    s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path
) -> None:
    array = np.random.default_rng(0).integers(0, 255, (64, 256, 256), dtype=np.uint8)
    region = Region((10, 100, 100), (20, 140, 140))
    for name, write in {"npy": npy, "tiff": tiff()}.items():
        (tmp_path / name).mkdir()
        there = remote(s3_server, tmp_path / name, write(tmp_path / name, array), f"ranges/{name}")
        volume = open_volume(there)
        s3_proxy.reset()
        assert np.array_equal(volume.read(region), array[region.slices])
        (line,) = s3_proxy.requests
        start, stop = line.rpartition("bytes=")[2].split("-")
        assert int(stop) - int(start) < 10 * 256 * 256
        # An open file is one version of it: no patch is made of two.
        np.save(tmp_path / "other.npy", array + 1)
        s3_server.put(there.location.removeprefix(f"s3://{BUCKET}/"), (tmp_path / "other.npy").read_bytes())
        with pytest.raises(ReadFailure, match="replaced") as caught:
            volume.read(region)
        assert (caught.value.path, caught.value.reason) == (there.location, "changed")


def test_pages_whose_headers_lie_all_over_the_file_are_read(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "HEADER_BYTES", 1000)
    for name in ("tiff by Pillow", "tiff by Pillow, lzw"):
        array = voxels("uint8")
        (tmp_path / name).mkdir()
        ref = PILLOW[name](tmp_path / name, array)
        check_reads(open_volume(remote(s3, tmp_path / name, ref, f"scattered/{name[-3:]}")), array)


def test_several_threads_fetch_a_file_into_the_folder_once(
    s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path
) -> None:
    (tmp_path / "written").mkdir()
    there = remote(s3_server, tmp_path / "written", npy(tmp_path / "written", voxels("uint8")), "once")
    volumes = OpenVolumes(ReadingOptions(object_dir=tmp_path / "kept"))
    threads = [threading.Thread(target=lambda: volumes.get(there).read(whole(SHAPE))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([line for line in s3_proxy.requests if line.startswith("GET") and "volume.npy" in line]) == 1


def test_a_full_folder_is_no_reason_to_stop(s3: S3Server, tmp_path: Path) -> None:
    (tmp_path / "written").mkdir()
    array = voxels("uint8")
    there = remote(s3, tmp_path / "written", npy(tmp_path / "written", array), "full")
    small = ReadingOptions(object_dir=tmp_path / "kept", object_bytes=1000)
    check_reads(open_volume(there, small), array)
    assert not [path for path in (tmp_path / "kept").glob("*/*") if path.is_file()]


@pytest.mark.parametrize("name", ["npy", "zarr v3"])
def test_a_store_that_goes_away_for_a_while_is_waited_for(
    name: str, s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path
) -> None:
    array = voxels("uint8")
    there = remote(s3_server, tmp_path, FORMATS[name](tmp_path, array), f"outage/{name.replace(' ', '-')}")
    volume = open_volume(there, ReadingOptions(cache_bytes=0))
    volume.read(Region((0, 0, 0), (5, 5, 5)))
    s3_proxy.stop()
    back = threading.Timer(2.5, s3_proxy.start)
    back.start()
    assert np.array_equal(volume.read(whole(SHAPE)), array)
    back.join()


def test_a_store_that_stays_away_is_named(
    s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = remote(s3_server, tmp_path, zarr_array(3)(tmp_path, voxels("uint8")), "gone")
    volume = open_volume(there, ReadingOptions(cache_bytes=0))
    monkeypatch.setattr(zarr_volume, "PATIENCE", zarr_volume.Patience(retry_s=1))
    s3_proxy.stop()
    with pytest.raises(StoreDown, match="does not respond") as caught:
        volume.read(whole(SHAPE))
    assert caught.value.name == "store-unreachable"
