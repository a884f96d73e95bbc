"""Mean and deviation of volumes: right, measured once, and the same whatever is wrong with one of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.io.stores import ReadFailure
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.cases.survey import measure, statistics_of
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.volume import ArrayVolume, Region, Voxels


def case(path: Path, voxels: np.ndarray) -> Case:
    np.save(path, voxels)
    return Case(path.stem, path.stem, (VolumeRef(str(path)),), None)


def test_a_small_volume_is_measured_whole() -> None:
    voxels = np.random.default_rng(1).normal(30_000, 5, (40, 70, 33)).astype(np.float32)
    voxels[3, 4, 5] = np.nan
    mean, deviation = measure(ArrayVolume("a", voxels))
    assert mean == pytest.approx(np.nanmean(voxels.astype(np.float64)), rel=1e-12)
    assert deviation == pytest.approx(np.nanstd(voxels.astype(np.float64)), rel=1e-9)


def test_a_large_volume_is_measured_from_a_sample_that_does_not_grow() -> None:
    read: list[int] = []

    class Counting(ArrayVolume):
        def read(self, region: Region, out: Voxels | None = None) -> Voxels:
            read.append(region.voxels)
            return super().read(region, out)

    gradient = np.linspace(0, 200, 300, dtype=np.float32)[:, None, None]
    voxels = np.broadcast_to(gradient, (300, 300, 300))
    mean, deviation = measure(Counting("a", voxels))
    assert sum(read) == 64 * 32**3
    assert mean == pytest.approx(100, abs=1)
    assert deviation == pytest.approx(float(gradient.std()), rel=0.2)


def test_a_volume_without_variation_can_still_be_divided_by() -> None:
    for value, mean in ((7.0, 7.0), (np.nan, 0.0)):
        assert measure(ArrayVolume("a", np.full((4, 4, 4), value, np.float32))) == (mean, 1.0)


def test_volumes_are_measured_once_and_again_when_their_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(2)
    cases = [case(tmp_path / f"{n}.npy", random.integers(0, 50 * (n + 1), (8, 8, 8), np.uint8)) for n in range(3)]
    means, stds = statistics_of(cases, OpenVolumes(), "volume")
    assert means.shape == stds.shape == (3, 1)
    assert means.dtype == stds.dtype == np.float32
    np.testing.assert_allclose(means[:, 0], [np.load(c.images[0].location).mean() for c in cases], rtol=1e-6)
    np.testing.assert_allclose(stds[:, 0], [np.load(c.images[0].location).std() for c in cases], rtol=1e-6)
    measured: list[int] = []
    monkeypatch.setattr("stoker.tasks.volumes.cases.survey.measure", lambda volume: measured.append(1) or (5.0, 2.0))
    again, _ = statistics_of(cases, OpenVolumes(), "volume")
    assert (again == means).all()
    assert not measured
    case(tmp_path / "1.npy", random.integers(0, 9, (9, 9, 9), np.uint8))
    other, _ = statistics_of(cases, OpenVolumes(), "volume")
    assert other[:, 0].tolist() == [means[0, 0], 5.0, means[2, 0]]


def test_a_volume_that_cannot_be_read_is_left_to_whoever_reads_its_patches(tmp_path: Path) -> None:
    good, bad = case(tmp_path / "good.npy", np.full((4, 4, 4), 9, np.uint8)), tmp_path / "bad.npy"
    bad.write_bytes(b"nothing")
    cases = [good, Case("bad", "bad", (VolumeRef(str(bad)),), None)]
    for kind, expected in (("volume", [9, 0]), ("range", [0, 0])):
        means, stds = statistics_of(cases, OpenVolumes(), kind)  # type: ignore[arg-type]
        assert means[:, 0].tolist() == expected
        assert stds[1, 0] == 1
    with pytest.raises(ReadFailure):
        measure(OpenVolumes().get(cases[1].images[0]))


def test_a_range_divides_by_the_largest_value_of_the_type_and_patches_are_left_to_the_device(tmp_path: Path) -> None:
    cases = [case(tmp_path / f"{kind}.npy", np.zeros((4, 4, 4), kind)) for kind in ("uint8", "uint16", "float32")]
    means, stds = statistics_of(cases, OpenVolumes(), "range")
    assert (means == 0).all()
    assert stds[:, 0].tolist() == [255, 65_535, 1]
    means, stds = statistics_of(cases, OpenVolumes(), "patch")
    assert (means == 0).all()
    assert (stds == 1).all()
