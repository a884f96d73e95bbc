"""The index of a finished pack: put together from the records of its shards, and checked against the disk."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np

from stoker.data.index.sample_index import SampleIndex, save_index
from stoker.data.pack.folder import PackFolder
from stoker.data.pack.tar_shards import END, read_record, sample_footprint
from stoker.errors import UserError


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
