"""The same images in every layout that people have them in."""

from __future__ import annotations

import csv
import io
import json
import shutil
import tarfile
from pathlib import Path

WNIDS = ("n01440764", "n01443537", "n01484850")
"""ImageNet's first three classes, which the tests give to class0 .. class2."""


def as_wordnet(source: Path, target: Path) -> Path:
    """Class folders with ImageNet's names for classes and validation images."""
    for split in ("train", "val"):
        number = 0
        for label, wnid in enumerate(WNIDS):
            (target / split / wnid).mkdir(parents=True)
            for path in sorted((source / split / f"class{label}").iterdir()):
                number += 1
                name = f"{wnid}_{number}.JPEG" if split == "train" else f"ILSVRC2012_val_{number:08d}.JPEG"
                shutil.copyfile(path, target / split / wnid / name)
    return target


def flat_val(folders: Path, target: Path, below: str = "") -> dict[str, str]:
    """Training class folders, and validation images in one folder; returns the class of each."""
    base = target / below
    shutil.copytree(folders / "train", base / "train")
    (base / "val").mkdir()
    classes = {}
    for path in sorted((folders / "val").rglob("*.JPEG")):
        shutil.copyfile(path, base / "val" / path.name)
        classes[path.stem] = path.parent.name
    return classes


def write_solution(path: Path, classes: dict[str, str]) -> None:
    """Kaggle's file of labels, in no particular order; some images have two boxes."""
    rows = [f"{name},{wnid} 1 2 30 40 {wnid} 5 6 7 8 " for name, wnid in reversed(classes.items())]
    path.write_text("ImageId,PredictionString\n" + "\n".join(rows) + "\n")


def images_of(root: Path, split: str) -> list[tuple[Path, str]]:
    """Every image of class folders, with its class."""
    return [(path, path.parent.name) for path in sorted((root / split).rglob("*")) if path.is_file()]


def write_list(path: Path, rows: list[tuple[str, ...]], header: tuple[str, ...] = ("path", "label")) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([header, *rows])
    return path


def write_tars(folder: Path, samples: list[tuple[Path, str]], classes: list[str], *, shards: int = 2, how: str = "cls",
               prefix: str = "") -> None:  # fmt: skip
    """WebDataset tars as others make them; `how` is the kind of label: cls, json or names."""
    folder.mkdir(parents=True, exist_ok=True)
    for shard in range(shards):
        with tarfile.open(folder / f"{prefix}{shard:06d}.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            for number, (path, name) in list(enumerate(samples))[shard::shards]:
                key = f"sub.dir/{'long' * 30}/sample{number:05d}"
                label = classes.index(name)
                content = {"cls": ("cls", f"{label}\n"), "names": ("cls", name),
                           "json": ("json", json.dumps({"label": label, "caption": "of a thing"}))}[how]  # fmt: skip
                members = [("jpg", path.read_bytes()), (content[0], content[1].encode())]
                for suffix, data in members if number % 2 else reversed(members):
                    info = tarfile.TarInfo(f"{key}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def write_parquet(path: Path, samples: list[tuple[Path, str]], classes: list[str], *, with_bytes: bool = True,
                  shift: int = 0) -> None:  # fmt: skip
    """A parquet file with the schema of Hugging Face `datasets`; `shift` makes labels wrong."""
    import pyarrow
    from pyarrow import parquet

    features = {"image": {"_type": "Image"}, "label": {"names": classes, "_type": "ClassLabel"}}
    image = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema([("image", image), ("label", pyarrow.int64())])
    schema = schema.with_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    rows = [
        {
            "image": {"bytes": file.read_bytes() if with_bytes else None, "path": file.name},
            "label": WNIDS.index(name) + shift if shift else classes.index(name),
        }
        for file, name in samples
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path, row_group_size=7)
