"""Volumes in S3 are the same voxels as on disk, however they are fetched."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile

from stoker.core.errors import UserError
from stoker.io import outage
from stoker.io.cache import cache_place
from stoker.io.prefetch import Prefetcher
from stoker.io.stores import ReadFailure, StoreDown
from stoker.loader.loader import LoaderOptions
from stoker.tasks.demo import write_scrolls
from stoker.tasks.volumes.cases.cases import CaseList, open_cases
from stoker.tasks.volumes.cases.survey import survey
from stoker.tasks.volumes.data import PatchLoader, PatchRule, plan_training
from stoker.tasks.volumes.formats import byte_source as sources
from stoker.tasks.volumes.formats import zarr_volume
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef, open_volume
from stoker.tasks.volumes.formats.volume import ReadingOptions, Region, whole
from stoker.tasks.volumes.patches import patch_collate as making
from stoker.tasks.volumes.patches.label_index import build_label_index
from stoker.tasks.volumes.patches.labels import LabelRules
from stoker.tasks.volumes.patches.patch_collate import PatchPlan
from stoker.tasks.volumes.patches.patches import TransformRange, training_steps
from tests.io.test_cache import kept_files
from tests.support.proxy import Proxy, hold_until_in_flight
from tests.support.s3_server import BUCKET, S3Server
from tests.support.waiting import wait_until
from tests.tasks.volumes.test_formats import SHAPE, check_reads, voxels
from tests.tasks.volumes.test_loader import READING, stream
from tests.tasks.volumes.writing import FORMATS, PILLOW, npy, tiff, zarr_array


def remote(server: S3Server, folder: Path, ref: VolumeRef, prefix: str) -> VolumeRef:
    return VolumeRef(f"{server.put_folder(folder, prefix)}/{Path(ref.location).name}", ref.level)


@pytest.mark.parametrize("name", [*FORMATS, *PILLOW])
def test_a_region_in_s3_is_the_slice_of_the_array(name: str, s3: S3Server, tmp_path: Path) -> None:
    array = voxels("uint8" if name in PILLOW else "uint16")
    (tmp_path / "written").mkdir()
    ref = (FORMATS | PILLOW)[name](tmp_path / "written", array)
    there = remote(s3, tmp_path / "written", ref, f"formats/{name.replace(' ', '-')}")
    check_reads(there, array)
    kept = ReadingOptions(copy=cache_place(str(tmp_path / "kept")))
    check_reads(there, array, kept)
    if ".zarr" not in there.location:
        first = open_volume(there, kept)
        assert first.identity == open_volume(there).identity
        # From the folder; what was cut off there is fetched again.
        (file,) = kept_files(tmp_path / "kept")
        file.write_bytes(file.read_bytes()[:-1])
        check_reads(there, array, kept)


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
        check_reads(remote(s3, tmp_path / name, ref, f"scattered/{name[-3:]}"), array)


def test_a_full_folder_is_no_reason_to_stop(s3: S3Server, tmp_path: Path) -> None:
    (tmp_path / "written").mkdir()
    array = voxels("uint8")
    there = remote(s3, tmp_path / "written", npy(tmp_path / "written", array), "full")
    small = ReadingOptions(copy=cache_place(str(tmp_path / "kept"), 1000))
    check_reads(there, array, small)
    assert not kept_files(tmp_path / "kept")


@pytest.mark.parametrize("name", ["npy", "zarr v3"])
def test_a_store_that_goes_away_for_a_while_is_waited_for(
    name: str, s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outage, "SAID_AFTER_S", 0.2)
    array = voxels("uint8")
    there = remote(s3_server, tmp_path, FORMATS[name](tmp_path, array), f"outage/{name.replace(' ', '-')}")
    volume = open_volume(there, ReadingOptions(cache_bytes=0))
    volume.read(Region((0, 0, 0), (5, 5, 5)))
    s3_proxy.stop()
    said: list[str] = []

    def come_back_once_it_is_shown() -> None:
        wait_until(lambda: outage.text() is not None)
        said.append(str(outage.text()))
        s3_proxy.start()

    back = threading.Thread(target=come_back_once_it_is_shown)
    back.start()
    # Another opening of it, too: volumes to validate on are opened when their turn comes.
    later = threading.Thread(target=lambda: check_reads(there, array, ReadingOptions(cache_bytes=0)))
    later.start()
    assert np.array_equal(volume.read(whole(SHAPE)), array)
    later.join()
    back.join()
    assert "waiting for s3://" in said[0]


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


def described(found: CaseList, root: str) -> list[Any]:
    """The cases with their places relative to the root."""
    places = [[ref.location.removeprefix(root) for ref in case.refs] for case in found.cases]
    return [(case.id, case.group, place) for case, place in zip(found.cases, places, strict=True)]


def test_a_layout_in_s3_is_that_of_the_folder(s3: S3Server, tmp_path: Path) -> None:
    write_scrolls(folder := tmp_path / "data", volumes=3, shape=(16, 16, 16), scrolls=2)
    (folder / "deprecated_train_images").mkdir()
    (folder / "deprecated_train_images" / "9.tif").write_bytes(b"x")
    with (folder / "train.csv").open("a") as table:
        table.write("9,77\n")
    url = s3.put_folder(folder, "layouts")
    here, there = open_cases(folder), open_cases(url)
    assert described(there, url) == described(here, str(folder))
    assert (there.rules, there.notes) == (here.rules, here.notes)
    local, remote = survey(here.cases, OpenVolumes()), survey(there.cases, OpenVolumes())
    assert remote.facts == local.facts
    rules = LabelRules(3)
    indexes = [build_label_index(found.cases, OpenVolumes(), rules) for found in (here, there)]
    for number in range(len(here.cases)):
        assert np.array_equal(*(index.counts[number] for index in indexes))
        assert all(map(np.array_equal, *(index[number].places for index in indexes)))


def test_names_may_have_any_characters(s3: S3Server, tmp_path: Path) -> None:
    name = "odd names/a #1 + 100% é?.npy"
    (tmp_path / "odd names").mkdir()
    np.save(tmp_path / name, voxels("uint8"))
    zarr_array(2)(tmp_path / "odd names", voxels("uint8"))
    (tmp_path / "lists").mkdir()
    listed = f"- {{image: '../{name}', label: ../odd names/volume.zarr}}\n"
    (tmp_path / "lists" / "cases.yaml").write_text(listed, "utf-8")
    (case,) = open_cases(f"{s3.put_folder(tmp_path, 'any 1')}/lists/cases.yaml".replace(" ", "%20")).cases
    assert case.id == "a #1 + 100% é?"
    for ref in (case.images[0], case.label):
        assert ref is not None
        check_reads(ref, voxels("uint8"))


def test_a_second_start_asks_for_no_volume(s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path) -> None:
    write_scrolls(tmp_path / "data", volumes=3, shape=(16, 16, 16), scrolls=2)
    url = s3_server.put_folder(tmp_path / "data", "twice")
    for _ in range(2):
        s3_proxy.reset()
        cases, volumes = open_cases(url).cases, OpenVolumes()
        assert len(survey(cases, volumes).cases) == 3
        build_label_index(cases, volumes, LabelRules(2, 2))
    assert not [line for line in s3_proxy.requests if ".tif" in line]
    s3_server.put(cases[0].images[0].location.removeprefix(f"s3://{BUCKET}/"), b"II*\0broken")
    assert survey(open_cases(url).cases, OpenVolumes()).bad.keys() == {cases[0].id}


def test_errors_name_what_is_wrong_with_a_url(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_scrolls(tmp_path / "data", volumes=3, shape=(16, 16, 16), scrolls=2)
    url = s3.put_folder(tmp_path / "data", "wrong")
    s3.put("wrong/cases.yaml", b"- {image: train_images/gone.tif}")
    s3.put("empty/note.txt", b"x")
    expected = {
        f"{url}/cases.yaml": "volumes-missing",
        f"{url}/lists.yaml": "file-unreadable",
        f"{url}/nowhere": "data-not-found",
        f"s3://{BUCKET}/empty": "layout-unknown",
        "s3://no-such-bucket/x": "bucket-missing",
        "ftp://bucket/x": "unknown-store",
    }
    for place, name in expected.items():
        with pytest.raises(UserError) as caught:
            open_cases(place)
        assert caught.value.name == name, place
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(StoreDown, match=url) as down:
        open_cases(url)
    assert down.value.name == "credentials-refused"


@pytest.fixture(scope="module")
def scrolls(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A few volumes as TIFF, and the URL of a copy of them in Zarr."""
    folder = tmp_path_factory.mktemp("ahead")
    write_scrolls(folder / "tiff", volumes=4, shape=(24, 32, 32), scrolls=2, seed=4)
    shutil.copytree(folder / "tiff", folder / "zarr")
    for path in sorted((folder / "zarr").rglob("*.tif")):
        zarr_array(3)(path.parent, tifffile.imread(path))
        (path.parent / "volume.zarr").rename(path.with_suffix(".zarr"))
        path.unlink()
    for kind in ("tiff", "zarr"):
        s3_server.put_folder(folder / kind, f"ahead/{kind}")
    return folder / "tiff", f"s3://{BUCKET}/ahead"


def planned(root: str | Path) -> PatchPlan:
    cases = open_cases(root).cases
    transforms = TransformRange(flips=(0.5, 0.5, 0.5), turns=0.5, rotation=0.4, scaling=0.4)
    rule = PatchRule((10, 12, 14), seed=3, transforms=transforms)
    return plan_training(cases, survey(cases, OpenVolumes()), LabelRules(2, 2), rule, training_steps(8, 2))


def test_the_stream_from_s3_is_that_of_the_disk(scrolls: tuple[Path, str], s3: S3Server) -> None:
    expected = stream(planned(scrolls[0]))
    assert stream(planned(f"{scrolls[1]}/tiff"), engine="thread", workers=3) == expected
    there = planned(f"{scrolls[1]}/zarr")
    assert stream(there, engine="thread", workers=3) == expected
    # So little that hardly anything is read ahead.
    assert stream(there, engine="thread", workers=2, lookahead=3000) == expected
    assert stream(there, engine="process", workers=2) == expected
    assert [one.split()[1] for one in stream(there, start=6)] == [one.split()[1] for one in expected[3:]]


def test_announced_steps_are_fetched_while_others_are_waited_for(
    scrolls: tuple[Path, str], s3_proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else only a few regions would be under way while the first answers are held back.
    monkeypatch.setattr(making, "FIRST_IN_FLIGHT", making.MOST_IN_FLIGHT)
    plan = planned(f"{scrolls[1]}/zarr")
    s3_proxy.reset()
    hold_until_in_flight(s3_proxy, 31, "GET .*/c/")
    loader = PatchLoader(plan, ReadingOptions(cache_bytes=0), LoaderOptions(engine="thread", workers=1))
    assert len(list(loader.epoch(0))) == 8
    loader.close()
    # One worker alone would have the chunks of one region in flight.
    assert s3_proxy.most_in_flight > 30


def test_what_is_read_ahead_keeps_to_its_bytes(
    scrolls: tuple[Path, str], s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(f"{scrolls[1]}/tiff")
    most, readers, real = [0], set[Prefetcher[Any, Any]](), Prefetcher._next_read

    def watched(self: Prefetcher[Any, Any]) -> Any:
        found = real(self)
        if self._budget:  # else it has the requests of a region
            readers.add(self)
            most[0] = max(most[0], self.buffered_bytes)
        return found

    monkeypatch.setattr(Prefetcher, "_next_read", watched)
    loader = PatchLoader(plan, READING, LoaderOptions(engine="thread", workers=2, lookahead=20_000))
    assert max(batch.cost.ready_bytes for batch in loader.epoch(0)) <= 20_000
    # A consumer that leaves: nothing of what was announced for it is kept.
    next(iter(loader.epoch(1)))
    loader.close()
    assert 1680 < most[0] <= 20_000
    assert [(ahead.buffered_bytes, ahead.ready_bytes) for ahead in readers] == [(0, 0)]


def test_a_bad_volume_in_s3_is_quarantined_and_an_outage_is_not(
    scrolls: tuple[Path, str], s3_server: S3Server, s3_proxy: Proxy, tmp_path: Path
) -> None:
    shutil.copytree(scrolls[0], tmp_path / "data")
    bad = sorted((tmp_path / "data" / "train_images").iterdir())[1]
    tifffile.imwrite(bad, np.full((24, 32, 32), 7, np.uint8), compression="zlib")
    with tifffile.TiffFile(bad) as file:
        offset, size = file.pages[5].dataoffsets[0], file.pages[5].databytecounts[0]
    content = bytearray(bad.read_bytes())
    content[offset : offset + size] = bytes(size)
    bad.write_bytes(content)
    plan = planned(s3_server.put_folder(tmp_path / "data", "bad"))
    found = tmp_path / "quarantine.jsonl"
    loader = PatchLoader(plan, READING, LoaderOptions(engine="thread", workers=2, quarantine_file=found))
    batches = loader.epoch(0)
    next(batches)
    s3_proxy.stop()
    back = threading.Timer(1.5, s3_proxy.start)
    back.start()
    assert len(list(batches)) == 7
    back.join()
    loader.close()
    lines = [json.loads(line) for line in found.read_text().splitlines()]
    assert {line["name"] for line in lines} == {bad.stem}
    assert f"train_images/{bad.name}: unreadable (page 5" in lines[0]["reason"]
