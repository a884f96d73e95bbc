"""The node's cache of decoded voxels is divided so that all processes together keep to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.config import load_config
from stoker.io.cache import cache_place
from stoker.tasks.volumes.cases.cases import Case
from stoker.tasks.volumes.data import reading_options
from stoker.tasks.volumes.formats.opening import VolumeRef


def case(image: str, label: str) -> Case:
    return Case("c", "c", (VolumeRef(image),), VolumeRef(label))


@pytest.mark.parametrize(
    ("loader", "image", "label", "share"),
    [
        ("auto", "a.zarr", "b.zarr", 300),
        ("thread", "a.tif", "b.nii.gz", 300),
        ("process", "a.zarr", "b.zarr", 300 / 17),
        ("auto", "a.zarr", "b.tif", 150),
        ("auto", "a.tif", "b.npy", 300),
    ],
)
def test_processes_of_a_node_keep_to_the_volume_cache(loader: str, image: str, label: str, share: float) -> None:
    settings = ["task=segment3d", "volume_cache=600MB", f"loader={loader}", "data_root=x", "patch_size=[8, 8, 8]"]
    config, said = load_config(None, settings).config, list[str]()
    found = reading_options(config, [case(image, label)], ranks=2, workers=8, say=said.append)
    assert found.cache_bytes == int(share * 1e6)
    assert (len(said) == 1) == (loader == "process")


def test_chunks_and_fetched_files_are_as_the_config_says(tmp_path: Path) -> None:
    words = ["task=segment3d", "data_root=x", "patch_size=[8, 8, 8]"]
    plain = reading_options(load_config(None, words).config)
    assert (plain.missing_chunks, plain.copy) == ("error", None)
    words += ["missing_chunks=fill", f"cache_dir={tmp_path}", "cache_size=5GB"]
    found = reading_options(load_config(None, words).config)
    assert found.missing_chunks == "fill"
    assert found.copy == cache_place(str(tmp_path), 5_000_000_000)
