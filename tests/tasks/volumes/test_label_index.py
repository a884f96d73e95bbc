"""Where labels are: counts are exact, places have their label, and spread evenly over all its voxels."""

from __future__ import annotations

import ast
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.tasks.demo import scroll_volume
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.formats.opening import OpenVolumes, VolumeRef
from stoker.tasks.volumes.formats.volume import ArrayVolume, Region, Shape
from stoker.tasks.volumes.patches import label_index
from stoker.tasks.volumes.patches.label_index import LabelMap, build_label_index, map_labels, most_places
from stoker.tasks.volumes.patches.labels import BadLabels, LabelRules
from tests.tasks.volumes.writing import zarr_array

RULES = LabelRules(2, ignore=2)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def saved(folder: Path, name: str, label: Any) -> Case:
    path = folder / f"{name}.npy"
    np.save(path, label)
    return Case(name, name, (VolumeRef(str(path)),), VolumeRef(str(path)))


def check(found: LabelMap, label: Any, classes: int) -> None:
    assert found.counts.tolist() == [int((label == number).sum()) for number in range(classes)]
    for number in range(classes):
        places = found.places[number]
        assert len(np.unique(places)) == len(places) == min(found.counts[number], most_places(label.shape, classes))
        assert (label.reshape(-1)[places] == number).all()


def test_counts_are_exact_and_places_have_their_label(monkeypatch: pytest.MonkeyPatch) -> None:
    label = scroll_volume((40, 50, 60), seed=1)[1]
    check(map_labels("c", ArrayVolume("x", label), RULES), label, 2)
    many = np.random.default_rng(0).integers(0, 120, (30, 40, 50), dtype=np.int16)
    check(map_labels("c", ArrayVolume("x", many), LabelRules(120)), many, 120)
    # Cut into slabs of one plane, the sample is another, and as good.
    monkeypatch.setattr(label_index, "SLAB_VOXELS", 1)
    check(map_labels("c", ArrayVolume("x", label), RULES), label, 2)


def test_places_spread_evenly_over_all_voxels_of_a_class() -> None:
    label = np.zeros((64, 64, 64), np.uint8)
    found = map_labels("c", ArrayVolume("x", label), LabelRules(1))
    assert len(found.places[0]) == 4096
    for axis in np.unravel_index(found.places[0], label.shape):
        counts = np.bincount(axis, minlength=64)
        # Each plane has a 64th: 64 places, and by chance alone 8 more or less.
        assert abs(counts.mean() - 64) < 1e-9
        assert counts.std() < 12


def test_the_pass_needs_memory_for_a_slab_and_not_for_the_volume() -> None:
    class Endless:
        """Labels that are made as they are read: 1 Gi voxels would not fit."""

        name, identity, affine = "x", "x", None
        shape: Shape = (512, 256, 256)
        dtype = np.dtype(np.uint8)

        def read(self, region: Region, out: Any = None) -> Any:
            made = np.full(region.shape, 2, np.uint8)
            made[:, ::2] = region.start[0] % 2
            return made

    tracemalloc.start()
    found = map_labels("c", Endless(), RULES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.counts.sum() == 512 * 128 * 256
    assert peak < 16 * label_index.SLAB_VOXELS


def test_an_index_is_built_once_and_again_if_the_file_changes(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [saved(tmp_path, name, scroll_volume((20, 30, 40), seed)[1]) for seed, name in enumerate("abc")]
    seen: list[tuple[int, int | None]] = []
    first = build_label_index(cases, OpenVolumes(), RULES, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    built: list[str] = []

    def counted(case: str, *more: Any) -> LabelMap:
        built.append(case)
        return map_labels(case, *more)

    monkeypatch.setattr(label_index, "map_labels", counted)
    again = build_label_index(cases, OpenVolumes(), RULES)
    assert built == []
    assert np.array_equal(again.counts, first.counts)
    assert np.array_equal(again[1].places[1], first[1].places[1])
    saved(tmp_path, "b", np.ones((20, 30, 40), np.uint8))
    assert build_label_index(cases, OpenVolumes(), RULES).counts[1].tolist() == [0, 24_000]
    assert built == ["b"]
    for file in own_cache.rglob("*.npy"):
        file.write_bytes(file.read_bytes()[:-100])
    assert np.array_equal(build_label_index(cases[:1], OpenVolumes(), RULES).counts, first.counts[:1])
    assert built == ["b", "a"]
    assert not list(own_cache.rglob("*.tmp"))
    # One place of one class was changed: the file looks whole, and would draw patches without that class.
    kept = first[0].places[1].copy()
    assert kept.size
    for file in own_cache.rglob("*.npy"):
        if (array := np.load(file, mmap_mode="r+"))[-1] == kept[-1]:
            array[-1] -= 1
            array.flush()
    said: list[str] = []
    mended = build_label_index(cases[:1], OpenVolumes(), RULES, say=said.append)
    assert np.array_equal(mended[0].places[1], kept)
    assert built == ["b", "a", "a"]
    assert len(said) == 1
    assert "the label index of a " in said[0]


def test_a_kept_map_is_opened_without_pythons_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads open maps side by side, and those of Python 3.11 disturb one another in the parser."""
    label = scroll_volume((20, 30, 40), seed=1)[1]
    made = map_labels("c", ArrayVolume("x", label), RULES)
    file = tmp_path / "map.npy"
    np.save(file, label_index._packed(made))

    def parse(*_: Any) -> Any:
        raise SystemError("AST constructor recursion depth mismatch")

    monkeypatch.setattr(ast, "literal_eval", parse)
    found = label_index._load(file)
    assert found is not None
    assert found.shape == made.shape
    check(found, label, 2)
    whole = file.read_bytes()
    for damaged in (b"", whole[:100], whole[:-3], whole[:-8], b"x" + whole[1:], whole.replace(b"<i8", b"<f8")):
        file.write_bytes(damaged)
        assert label_index._load(file) is None


def test_a_box_has_only_its_own_labels_with_and_without_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    label = scroll_volume((20, 30, 40), 0)[1]
    case, box = saved(tmp_path, "a", label), Region((5, 0, 0), (12, 30, 40))
    for cache in ("cache", "file"):  # a file is no folder to write to: that costs only the pass
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / cache))
        index = build_label_index([case, replace(case, box=box)], OpenVolumes(), RULES)
        check(index[0], label, 2)
        check(index[1], label[box.slices], 2)


def test_bad_labels_are_refused_with_the_id_and_bad_files_set_aside(tmp_path: Path) -> None:
    good = scroll_volume((20, 30, 40), 0)[1]
    for wrong, name in (
        (good.astype(np.float32), "float-labels"), (good + 1, "label-out-of-range"),
        (np.where(good == 2, -1, good.astype(np.int16)), "label-out-of-range"),
    ):  # fmt: skip
        with pytest.raises(BadLabels, match="case b") as caught:
            build_label_index([saved(tmp_path, "a", good), saved(tmp_path, "b", wrong)], OpenVolumes(), RULES)
        assert caught.value.name == name
    ref = zarr_array(3)(tmp_path, good)
    (Path(ref.location) / "c/0/0/0").unlink()
    cases = [saved(tmp_path, "a", good), Case("z", "z", (ref,), ref)]
    index = build_label_index(cases, OpenVolumes(), RULES)
    assert [(name, "missing chunk" in reason) for name, reason in index.bad.items()] == [("z", True)]
    assert index.counts[1].sum() == 0
