"""The folder of a pack: its names, who may write to it, and the index made from the records of its shards.

DST/.pack/lock                    one `stoker pack` at a time
DST/.pack/source-index/           the listing of the source; removed when everything is packed
DST/.pack/train/pack.json         what is packed, and how; written first
DST/.pack/train/shard-000000.json what a finished shard holds; written after the shard
DST/train/shard-000000.tar        the shards
DST/train/index.json, *.npy       the index; written last
DST/train/skipped.jsonl           files that are not images
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker.core.errors import UsageError, UserError
from stoker.core.files import write_text
from stoker.io.stores import is_url
from stoker.tasks.images.layouts.sample_index import META, SampleIndex, part_of, save_index
from stoker.tasks.images.layouts.splits import check_folder, find_split
from stoker.tasks.images.pack.tar_shards import END, read_record, sample_footprint
from stoker.tasks.packing import RECORDS, PackWords, check_options, claim_destination, options_of, read_about

SHARDS = PackWords("shard", "made", smaller="images: --longest 500 --quality 90")
USUAL_SPLITS = ("train", "val")
_SHARD = re.compile(r"\.?shard-\d{6,}\.tar(\.tmp)?")
# The last two are in packs of earlier versions.
_INDEX = re.compile(r"(labels|name_bytes|name_ends|sizes|shard_of|offsets|layout_bytes|layout_ends)\.npy")


@dataclass(frozen=True)
class PackFolder:
    """The pack of one split; split "" is the destination itself."""

    destination: Path
    split: str

    @property
    def folder(self) -> Path:
        return self.destination / self.split

    @property
    def records(self) -> Path:
        return self.destination / RECORDS / self.split

    @property
    def skipped(self) -> Path:
        return self.folder / "skipped.jsonl"

    @property
    def about(self) -> Path:
        return self.records / "pack.json"

    def shard(self, number: int) -> Path:
        return self.folder / f"shard-{number:06d}.tar"

    def temporary(self, number: int) -> Path:
        return self.folder / f".shard-{number:06d}.tar.tmp"

    def record(self, number: int) -> Path:
        return self.records / f"shard-{number:06d}.json"

    def named(self, number: int) -> str:
        return f"{self.split}/{self.shard(number).name}" if self.split else self.shard(number).name


def source_index_folder(destination: Path) -> Path:
    """Where the index of the source is kept while it is packed."""
    return destination / RECORDS / "source-index"


def find_splits(source: str, wanted: Sequence[str] | None) -> list[str]:
    """The wanted splits, checked; by default the usual ones that exist, or the source itself ("") if it has none."""
    if not wanted:
        if not is_url(source):
            check_folder(source, "")
        return [name for name in USUAL_SPLITS if find_split(source, name) is not None] or [""]
    splits = list(dict.fromkeys(name.strip("/") for name in wanted))
    if outside := next((name for name in splits if ".." in name.split("/")), None):
        raise UsageError("usage", f"--split {outside} points outside SRC", hint="--split train")
    if not is_url(source):
        for name in splits:
            if find_split(source, name) is None or name not in USUAL_SPLITS:
                check_folder(source, name)
    return splits


@contextmanager
def claim_packs(
    destination: Path, splits: Sequence[str], options: dict[str, Any], *, fresh: bool
) -> Iterator[list[PackFolder]]:
    """The folders of these splits, for this process alone; `fresh` removes earlier packs first.

    Refuses folders with files that are not ours, or with a pack made with other options."""
    packs = [PackFolder(destination.absolute(), split) for split in splits]
    with claim_destination(destination.absolute()):
        for pack in packs:
            if fresh:
                remove_pack(pack)
                remove_source_index(destination)
            check_options(pack.folder, options_of(pack.about), options, (pack.shard(0).name, META), SHARDS)
        yield packs
        remove_source_index(destination)


def check_source(pack: PackFolder, options: dict[str, Any], fingerprint: str) -> None:
    """Records what is being packed; refuses to continue the pack of another source."""
    about = read_about(pack.about)
    if about is None:
        pack.folder.mkdir(parents=True, exist_ok=True)
        content = {"options": options, "source_fingerprint": fingerprint}
        write_text(pack.about, json.dumps(content, indent=1) + "\n")
    elif about.get("source_fingerprint") != fingerprint:
        raise UserError(
            "pack-source-differs",
            f"{pack.folder} was packed from a source that has changed since",
            why="names, sizes or classes differ, so the finished shards would not match the rest",
            hint="choose another folder; or --fresh, which packs this one again from its source",
        )


def remove_pack(pack: PackFolder) -> None:
    """Removes the files of `stoker pack`, and nothing else; without its records nothing is known to be ours."""
    if read_about(pack.about) is None:
        return
    # The index first: leftovers of a crash must not look like a complete pack.
    (pack.folder / META).unlink(missing_ok=True)
    pack.skipped.unlink(missing_ok=True)
    for path in list(pack.folder.iterdir()) if pack.folder.is_dir() else []:
        if _SHARD.fullmatch(path.name) or _INDEX.fullmatch(path.name):
            path.unlink()
    for path in pack.records.glob("shard-*.json"):
        path.unlink()
    pack.about.unlink()  # last: until then the rest is known to be ours
    if pack.split:
        with suppress(OSError):
            pack.folder.rmdir()


def remove_temporaries(pack: PackFolder) -> None:
    """Removes unfinished shards; call with the destination locked."""
    for path in (*pack.folder.glob(".shard-*.tar.tmp"), *pack.records.glob(".shard-*.json.*.tmp")):
        path.unlink(missing_ok=True)


def remove_source_index(destination: Path) -> None:
    """Removes the index of the source, which a finished pack does not need."""
    shutil.rmtree(source_index_folder(destination), ignore_errors=True)


def finished_bytes(pack: PackFolder, number: int) -> int | None:
    """Size of a shard that looks finished (only its size is checked); None if it has to be made."""
    record = read_record(pack.record(number))
    try:
        if record is not None and pack.shard(number).stat().st_size == record.bytes:
            return record.bytes
    except OSError:
        pass
    return None


def write_pack_index(index: SampleIndex, pack: PackFolder, options: dict[str, Any], shards: int) -> SampleIndex:
    """The index of all shards; samples are in the order of the source's index, without the skipped ones."""
    shard_of = np.full(len(index), -1, np.int32)
    offsets, sizes = np.zeros(len(index), np.int64), np.zeros(len(index), np.int64)
    facts: list[dict[str, Any]] = []
    skipped = 0
    for number in range(shards):
        record = read_record(pack.record(number))
        assert record is not None, "a shard is finished when its record is written"
        samples = np.array(record.samples, np.int64)
        assert (shard_of[samples] == -1).all(), "a sample is in one shard"
        shard_of[samples], offsets[samples], sizes[samples] = number, record.offsets, record.sizes
        skipped += len(record.skipped)
        facts.append({"name": record.name, "bytes": record.bytes, "samples": len(record.samples), "xxh3": record.xxh3})
    packed = np.flatnonzero(shard_of >= 0)
    assert len(packed) + skipped == len(index), "every sample is packed or listed as skipped"
    about = {
        "packed_with": options,
        "source_fingerprint": json.loads(pack.about.read_text())["source_fingerprint"],
        "skipped": skipped,
        "shards": facts,
    }
    packed_index = replace(
        part_of(index, packed),
        root=".",  # this folder: a pack may be moved, and is the same wherever it is made
        sizes=sizes[packed],
        shards=tuple(fact["name"] for fact in facts),
        shard_of=shard_of[packed],
        offsets=offsets[packed],
        facts=about,
    )
    saved = save_index(packed_index, pack.folder)
    _check_sums(saved, pack)
    return replace(saved, root=str(pack.folder))


def _check_sums(saved: SampleIndex, pack: PackFolder) -> None:
    """Checks the index, read back, against the sizes of the files; raises UserError."""
    assert saved.shard_of is not None
    assert saved.offsets is not None
    assert saved.sizes is not None
    shards = len(saved.shards)
    samples = np.bincount(saved.shard_of, minlength=shards)
    used = np.bincount(saved.shard_of, weights=sample_footprint(saved.sizes), minlength=shards).astype(np.int64)
    last_end = np.zeros(shards, np.int64)
    np.maximum.at(last_end, saved.shard_of, saved.offsets + saved.sizes)
    for number, fact in enumerate(saved.facts["shards"]):
        on_disk = pack.shard(number).stat().st_size
        sums = (int(samples[number]), int(used[number]) + len(END))
        if sums != (fact["samples"], on_disk) or on_disk != fact["bytes"] or last_end[number] > on_disk:
            raise UserError(
                "pack-damaged",
                f"{pack.named(number)} has {on_disk} bytes, but its {sums[0]} samples take up {sums[1]}",
                why="something changed it while it was being packed",
                hint="run the same command again to make it anew",
            )
