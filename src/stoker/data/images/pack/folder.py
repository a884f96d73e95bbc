"""The folder of a pack: names, owner, and the index put together from the records of its shards."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker.data.images.pack.tar_shards import END, read_record, sample_footprint
from stoker.data.images.sample_index import META, SampleIndex, save_index
from stoker.errors import UserError
from stoker.files import write_text
from stoker.run.lease import Lease, LeaseHeld

# The names of every file of a pack, and whose they are: a pack is taken up again only as the same pack.
#
# DST/.pack/lock                    one `stoker pack` at a time
# DST/.pack/source-index/           the listing of the source; gone when everything is packed
# DST/.pack/train/pack.json         what is being packed, and how; written first
# DST/.pack/train/shard-000000.json what a finished shard holds; written after the shard
# DST/train/shard-000000.tar        the shards
# DST/train/index.json, *.npy       the index; written last
# DST/train/skipped.jsonl           what was no image

_BOOKS = ".pack"
_SHARD = re.compile(r"\.?shard-\d{6,}\.tar(\.tmp)?")
_INDEX = re.compile(r"(labels|name_bytes|name_ends|sizes|shard_of|offsets)\.npy")


@dataclass(frozen=True)
class PackFolder:
    """Where the pack of one split is made; split "" is the destination itself."""

    destination: Path
    split: str

    @property
    def folder(self) -> Path:
        return self.destination / self.split

    @property
    def books(self) -> Path:
        return self.destination / _BOOKS / self.split

    @property
    def skipped(self) -> Path:
        return self.folder / "skipped.jsonl"

    @property
    def about(self) -> Path:
        return self.books / "pack.json"

    def shard(self, number: int) -> Path:
        return self.folder / f"shard-{number:06d}.tar"

    def temporary(self, number: int) -> Path:
        return self.folder / f".shard-{number:06d}.tar.tmp"

    def record(self, number: int) -> Path:
        return self.books / f"shard-{number:06d}.json"

    def named(self, number: int) -> str:
        """The shard as messages name it."""
        return f"{self.split}/{self.shard(number).name}" if self.split else self.shard(number).name


def source_index_folder(destination: Path) -> Path:
    """Where the listing of the source is kept while it is packed."""
    return destination / _BOOKS / "source-index"


@contextmanager
def claim_destination(destination: Path) -> Iterator[None]:
    """The right to write into the destination, for this process alone; makes the folder."""
    books = destination / _BOOKS
    try:
        books.mkdir(parents=True, exist_ok=True)
        if not os.access(destination, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", str(destination))
        lease = Lease(books / "lock").acquire()
    except LeaseHeld as error:
        raise UserError(
            "pack-busy",
            f"another process is packing into {destination}",
            why=error.seen,
            hint="wait for it, or name another folder",
        ) from None
    except OSError as error:
        raise UserError(
            "destination-not-writable",
            f"{destination}: {error.strerror}",
            why="the shards are written there",
            hint=f"ls -ld {destination} {destination.parent}",
        ) from None
    try:
        yield
    finally:
        lease.release()


def check_options(pack: PackFolder, options: dict[str, Any]) -> None:
    """Refuses a folder that holds another pack, or files that are not ours."""
    about = read_about(pack)
    if about is None:
        foreign = [path.name for path in (pack.shard(0), pack.folder / META) if path.exists()]
        if foreign:
            raise UserError(
                "destination-not-empty",
                f"{pack.folder} holds {foreign[0]}, which this command did not write",
                why="it would be overwritten",
                hint="name another folder",
            )
        return
    before = about.get("options")
    if before != options:
        raise UserError(
            "pack-options-differ",
            f"{pack.folder} was packed with {_spell(before)}; now it is {_spell(options)}",
            why="one pack cannot hold shards of both kinds",
            hint="another folder, or --fresh to remove that pack first",
        )


def check_source(pack: PackFolder, options: dict[str, Any], fingerprint: str) -> None:
    """Notes what is being packed; refuses to go on with a pack of another source."""
    about = read_about(pack)
    if about is None:
        pack.folder.mkdir(parents=True, exist_ok=True)
        content = {"options": options, "source_fingerprint": fingerprint}
        write_text(pack.about, json.dumps(content, indent=1) + "\n")
    elif about.get("source_fingerprint") != fingerprint:
        raise UserError(
            "pack-source-differs",
            f"{pack.folder} was packed from other files than the source has now",
            why="names, sizes or classes have changed, and the shards that are finished do not fit the rest",
            hint="another folder, or --fresh to remove that pack first",
        )


def read_about(pack: PackFolder) -> dict[str, Any] | None:
    """What the folder is a pack of; None where it is none."""
    try:
        about = json.loads(pack.about.read_text())
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) else None


def remove_pack(pack: PackFolder) -> None:
    """Removes what `stoker pack` wrote, and nothing else; without its books nothing is known to be ours."""
    if read_about(pack) is None:
        return
    # The index first: what is left after a crash in the middle must not look like a whole pack.
    (pack.folder / META).unlink(missing_ok=True)
    pack.skipped.unlink(missing_ok=True)
    for path in list(pack.folder.iterdir()) if pack.folder.is_dir() else []:
        if _SHARD.fullmatch(path.name) or _INDEX.fullmatch(path.name):
            path.unlink()
    for path in pack.books.glob("shard-*.json"):
        path.unlink()
    pack.about.unlink()  # last: until then the rest is known to be ours
    if pack.split:
        with suppress(OSError):
            pack.folder.rmdir()


def remove_temporaries(pack: PackFolder) -> None:
    """Removes half-written shards; only for who holds the destination."""
    for path in pack.folder.glob(".shard-*.tar.tmp"):
        path.unlink(missing_ok=True)


def remove_source_index(destination: Path) -> None:
    """Removes the listing of the source: a cache, which nobody needs in a finished pack."""
    shutil.rmtree(source_index_folder(destination), ignore_errors=True)


def finished_bytes(pack: PackFolder, number: int) -> int | None:
    """Size of a shard that looks finished, by its size alone; None where it must be made."""
    record = read_record(pack.record(number))
    try:
        if record is not None and pack.shard(number).stat().st_size == record.bytes:
            return record.bytes
    except OSError:
        pass
    return None


def _spell(options: Any) -> str:
    """Options as they would be typed."""
    if not isinstance(options, dict):
        return "unknown options"
    given = [f"--{name.replace('_', '-')} {value}" for name, value in options.items() if value is not None]
    return " ".join(given)


# The index of a finished pack: put together from the records of its shards, and checked against the disk.


def write_pack_index(index: SampleIndex, pack: PackFolder, options: dict[str, Any], shards: int) -> SampleIndex:
    """The index of all shards; samples keep the order, but for skipped ones the numbers, of the source's index."""
    shard_of = np.full(len(index), -1, np.int32)
    offsets, sizes = np.zeros(len(index), np.int64), np.zeros(len(index), np.int64)
    facts: list[dict[str, Any]] = []
    skipped = 0
    for number in range(shards):
        record = read_record(pack.record(number))
        assert record is not None, "a shard is finished when its record is written"
        samples = np.array(record.samples, np.int64)
        assert (shard_of[samples] == -1).all(), "a sample stands in one shard"
        shard_of[samples], offsets[samples], sizes[samples] = number, record.offsets, record.sizes
        skipped += len(record.skipped)
        facts.append({"name": record.name, "bytes": record.bytes, "samples": len(record.samples), "xxh3": record.xxh3})
    packed = np.flatnonzero(shard_of >= 0)
    assert len(packed) + skipped == len(index), "every sample is packed or named as skipped"
    lengths = np.diff(index.name_ends, prepend=0)
    saved = save_index(
        SampleIndex(
            root=".",  # of this very folder: a pack may be moved, and is the same wherever it is made
            classes=index.classes,
            labels=np.asarray(index.labels)[packed],
            name_bytes=np.asarray(index.name_bytes)[np.repeat(shard_of >= 0, lengths)],
            name_ends=np.cumsum(lengths[packed]),
            sizes=sizes[packed],
            shards=tuple(fact["name"] for fact in facts),
            shard_of=shard_of[packed],
            offsets=offsets[packed],
            facts={
                "packed_with": options,
                "source_fingerprint": json.loads(pack.about.read_text())["source_fingerprint"],
                "skipped": skipped,
                "shards": facts,
            },
        ),
        pack.folder,
    )
    _check_sums(saved, pack)
    return replace(saved, root=str(pack.folder))


def _check_sums(saved: SampleIndex, pack: PackFolder) -> None:
    """Whether the index, read back, adds up to the files: a last look before we call it done."""
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
                f"{pack.named(number)} has {on_disk} bytes; its {sums[0]} samples take up {sums[1]}",
                why="something changed it while it was being packed",
                hint="the same command again makes it anew",
            )
