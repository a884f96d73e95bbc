"""Other layouts from the data to the result of a training, and data folders that stay as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.layouts import images_of, write_list, write_tars
from tests.support.ready_process import ReadyProcess
from tests.support.s3_server import BUCKET, S3Server
from tests.support.tiny_training import metrics, without_times, write_config, write_images

CLASSES = ["class0", "class1", "class2"]


def run(ready: ReadyProcess, folder: Path, *words: str, **variables: str) -> str:
    """Runs a command, which must succeed; returns what it printed."""
    ended = ready.run(*words, cwd=folder, XDG_CACHE_HOME=str(folder / "cache"), **variables)
    assert ended.code == 0, ended.err + ended.out
    return ended.err + ended.out


def tree(root: Path) -> dict[str, tuple[int, int]]:
    """Names, sizes and times of everything below a folder."""
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in [root, *root.rglob("*")]}


def test_after_our_commands_torchvision_timm_and_datasets_read_the_same_folder(
    tmp_path: Path, ready: ReadyProcess
) -> None:
    data = write_images(tmp_path / "data", train=12, val=3)
    config = write_config(tmp_path, data)
    before = tree(data)
    run(ready, tmp_path, "bench", "data", str(data), "--seconds", "0.2", "--workers", "1", "img_size=32")
    run(ready, tmp_path, "train", str(config))
    run(ready, tmp_path, "doctor", str(config), "--seconds", "1", "--pace", "t4", "epochs=20")  # plans, too
    run(ready, tmp_path, "pack", str(data), str(tmp_path / "packed"), "--workers", "1")
    assert tree(data) == before

    from timm.data import create_dataset
    from torchvision.datasets import ImageFolder

    assert len(ImageFolder(str(data / "train"))) == 36
    assert len(create_dataset("folder", str(data), split="val")) == 9
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset("imagefolder", data_dir=str(data), cache_dir=str(tmp_path / "hf"))
    assert {split: len(found[split]) for split in found} == {"train": 36, "validation": 9}
    assert found["train"].features["label"].names == CLASSES
    assert tree(data) == before


def parquet_files(source: Path, root: Path) -> list[str]:
    """Written by the package itself, with its own schema."""
    datasets = pytest.importorskip("datasets")
    found = datasets.load_dataset("imagefolder", data_dir=str(source), cache_dir=str(root.parent / "hf"))
    for split in found:
        # As push_to_hub does: without it the file has only paths.
        embedded = found[split].with_format("arrow").map(datasets.table.embed_table_storage, batched=True)
        embedded.to_parquet(root / "data" / f"{split}-00000-of-00001.parquet", batch_size=10)
    return []


def tars(source: Path, root: Path) -> list[str]:
    for split in ("train", "val"):
        write_tars(root / split, images_of(source, split), CLASSES, shards=1)
    (root / "labels.txt").write_text("\n".join(CLASSES))
    return []


def a_list(source: Path, root: Path) -> list[str]:
    shutil.copytree(source, root, dirs_exist_ok=True)
    rows = [(str(path.relative_to(source)), name, split) for split in ("train", "val")
            for path, name in images_of(source, split)]  # fmt: skip
    write_list(root / "list.tsv", rows[::-1], ("path", "label", "split"))
    return ["samples_csv=list.tsv"]


@pytest.fixture(scope="module")
def from_folders(images: Path, tmp_path_factory: pytest.TempPathFactory, ready: ReadyProcess) -> list[dict]:
    """The metrics of a training from plain class folders."""
    folder = tmp_path_factory.mktemp("folders")
    run(ready, folder, "train", str(write_config(folder, images)))
    return without_times(metrics(folder / "runs" / "tiny"))


def test_training_from_parquet_files_is_the_training_from_class_folders_and_so_is_that_from_their_pack(
    images: Path, tmp_path: Path, ready: ReadyProcess, from_folders: list[dict]
) -> None:
    root = tmp_path / "data"
    parquet_files(images, root)
    config = write_config(tmp_path, root)
    run(ready, tmp_path, "train", str(config))
    assert without_times(metrics(tmp_path / "runs" / "tiny")) == from_folders
    run(ready, tmp_path, "pack", str(root), str(tmp_path / "packed"), "--workers", "1")
    run(ready, tmp_path, "train", str(config), f"data_root={tmp_path}/packed", "run_name=packed")
    assert without_times(metrics(tmp_path / "runs" / "packed")) == from_folders


def test_training_from_a_list_is_the_training_from_class_folders(
    images: Path, tmp_path: Path, ready: ReadyProcess, from_folders: list[dict]
) -> None:
    root = tmp_path / "data"
    (override,) = a_list(images, root)
    run(ready, tmp_path, "train", str(write_config(tmp_path, root)), override)
    assert without_times(metrics(tmp_path / "runs" / "tiny")) == from_folders
    run(ready, tmp_path, "bench", "data", str(root), override, "--seconds", "0.2", "--workers", "1", "img_size=32")
    assert "15 images" in run(ready, tmp_path, "eval", "runs/tiny")


def test_a_fraction_is_set_aside_trained_without_and_packed(images: Path, tmp_path: Path, ready: ReadyProcess) -> None:
    shutil.copytree(images / "train", tmp_path / "photos")
    config = write_config(tmp_path, tmp_path / "photos")
    printed = run(ready, tmp_path, "train", str(config), "val_fraction=0.25")
    assert "validation: 12 of 48 images, 25% of each class" in printed
    run(ready, tmp_path, "pack", str(config), str(tmp_path / "packed"), "val_fraction=0.25", "--workers", "1")
    run(ready, tmp_path, "train", str(config), f"data_root={tmp_path}/packed", "run_name=packed")
    runs = [without_times(metrics(tmp_path / "runs" / name)) for name in ("tiny", "packed")]
    assert runs[0] == runs[1]


def test_layouts_at_a_url_are_those_of_a_folder(
    images: Path, tmp_path: Path, ready: ReadyProcess, from_folders: list[dict], s3_server: S3Server
) -> None:
    config = write_config(tmp_path, images)
    for make in (tars, a_list):
        root = tmp_path / make.__name__
        root.mkdir()
        overrides = make(images, root)
        for path in [path for path in root.rglob("*") if path.is_file()]:
            s3_server.put(f"layouts/{path.relative_to(tmp_path)}", path.read_bytes())
        if make is a_list:
            overrides = [f"samples_csv=s3://{BUCKET}/layouts/a_list/list.tsv"]
        url = f"data_root=s3://{BUCKET}/layouts/{root.name}"
        words = ("train", str(config), url, *overrides, f"run_name={root.name}")
        run(ready, tmp_path, *words, **s3_server.environment())
        assert without_times(metrics(tmp_path / "runs" / root.name)) == from_folders
