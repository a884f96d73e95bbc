"""Packs a split into shards with several processes: the same bytes for any number of them, in any order.

Which samples go into which shard is planned from the sizes of the source's files before anything is read, so every
shard can be made on its own. Samples are distributed in a permuted order, so that reading the shards one after the
other mixes all classes. The index keeps the source's order, so that a seed draws the same samples, in the same order,
from the pack as from the original files.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.core.child import ChildDied, share_out
from stoker.core.console import Advance
from stoker.core.errors import UserError
from stoker.core.files import write_text
from stoker.core.units import size_text
from stoker.io import outage
from stoker.loader.sampler import permute
from stoker.tasks.images.layouts.parquet_files import LAYOUT, row_groups, sizes_of_images
from stoker.tasks.images.layouts.sample_index import SampleIndex, digest_of
from stoker.tasks.images.pack.pack_folder import (
    PackFolder,
    check_source,
    finished_bytes,
    remove_temporaries,
    write_pack_index,
)
from stoker.tasks.images.pack.shard import Reencoding, ShardDone, ShardSource, ShardTask, make_shards, sampled_ratio
from stoker.tasks.images.pack.tar_shards import END, sample_footprint

# Part of the format: another value gives different shards.
ORDER_KEY = 20240229
DEFAULT_SHARD_BYTES = 256_000_000
STAT_THREADS = 16
SHOWN = 20

PACKING_SPEEDUP = 1.5
"""Images a second from shards of 500 px and quality 90, beside the original files, where decoding limits: 1.51 (1.30 to
1.66) in results/loaders, 1.55 (1.39 to 1.57) in results/cures."""


@dataclass(frozen=True)
class PackOptions:
    """Everything that determines the content of the shards."""

    shard_bytes: int = DEFAULT_SHARD_BYTES
    """The maximum size of a shard. Images that are re-encoded count with the source's bytes, which are known
    beforehand: their shards turn out smaller."""
    longest: int | None = None
    shortest: int | None = None
    quality: int | None = None

    @property
    def reencoding(self) -> Reencoding:
        return Reencoding(self.longest, self.shortest, self.quality)

    def as_dict(self) -> dict[str, Any]:
        parts = {k: v for k, v in asdict(self).items() if k != "shard_bytes"}
        return {"shard_size": f"{self.shard_bytes}B"} | parts


@dataclass(frozen=True)
class ImagePackResult:
    """The result of packing a split."""

    samples: int
    classes: int
    shards: int
    kept_shards: int
    """Shards finished by an earlier run."""
    bytes: int
    skipped: int
    seconds: float
    images_per_second: float | None
    """None if nothing was left to do."""
    folder: Path


def pack_split(
    index: SampleIndex,
    pack: PackFolder,
    options: PackOptions,
    *,
    workers: int,
    max_bad_fraction: float,
    progress: Advance | None = None,
) -> ImagePackResult:
    """Packs every sample of the index, or what an earlier run left; call it within `claim_packs`."""
    began = time.monotonic()
    if len(index) == 0:
        raise UserError(
            "nothing-to-pack", f"{index.root} has no images", hint="choose a folder with class folders of images"
        )
    sizes = source_sizes(index)
    check_source(pack, options.as_dict(), _fingerprint(index, sizes))
    tasks = plan_shards(sizes, options.shard_bytes, row_groups(index))
    remove_temporaries(pack)
    _check_space(index, pack, options, tasks)
    made = _make_shards(ShardSource(index, pack, options.reencoding), tasks, workers, max_bad_fraction, progress)
    packed = write_pack_index(index, pack, options.as_dict(), len(tasks))
    new_images = sum(shard.images for shard in made if not shard.kept)
    seconds = time.monotonic() - began
    return ImagePackResult(
        samples=len(packed),
        classes=len(packed.classes),
        shards=len(tasks),
        kept_shards=sum(shard.kept for shard in made),
        bytes=sum(shard.bytes for shard in made),
        skipped=sum(len(shard.skipped) for shard in made),
        seconds=seconds,
        images_per_second=new_images / seconds if new_images else None,
        folder=pack.folder,
    )


def plan_shards(sizes: NDArray[np.int64], shard_bytes: int, groups: NDArray[np.int64] | None = None) -> list[ShardTask]:
    """Which samples go into which shard, and under which keys; each shard is filled up to its size.

    `groups` are samples that can only be read together: they stay together, and only their order is permuted."""
    if groups is None:
        order = permute(np.arange(len(sizes), dtype=np.int64), len(sizes), ORDER_KEY)
    else:
        most = int(groups.max()) + 1
        order = np.argsort(permute(np.arange(most, dtype=np.int64), most, ORDER_KEY)[groups], kind="stable")
    ends = np.cumsum(sample_footprint(sizes[order]))
    tasks: list[ShardTask] = []
    first = 0
    while first < len(order):
        before = int(ends[first - 1]) if first else 0
        fits = int(np.searchsorted(ends, before + shard_bytes - len(END), side="right"))
        end = max(first + 1, fits)  # an image larger than a shard gets its own
        samples = order[first:end]
        planned_bytes = int(ends[end - 1]) - before + len(END)
        tasks.append(ShardTask(len(tasks), first, samples, sizes[samples], planned_bytes))
        first = end
    return tasks


def source_sizes(index: SampleIndex) -> NDArray[np.int64]:
    """Bytes of each sample; 0 if it is not a file, which is reported when it is read."""
    if index.sizes is not None:
        return np.asarray(index.sizes, np.int64)
    if index.facts.get("layout") == LAYOUT:
        return sizes_of_images(index)

    def size_of(sample: int) -> int:
        try:
            state = os.stat(os.path.join(index.root, index.name(sample)))  # noqa: PTH116, PTH118 - hot
        except (OSError, ValueError):
            return 0
        return state.st_size if stat.S_ISREG(state.st_mode) else 0

    assert "://" not in index.root, "the listing of a store includes sizes"
    with ThreadPoolExecutor(STAT_THREADS) as pool:
        # In slices: a million futures would take a gigabyte.
        parts = [list(pool.map(size_of, range(at, min(at + 65536, len(index))))) for at in range(0, len(index), 65536)]
    return np.concatenate([np.array(part, np.int64) for part in parts])


def _fingerprint(index: SampleIndex, sizes: NDArray[np.int64]) -> str:
    """The same for the same names, classes and sizes, wherever they are stored."""
    content = digest_of(replace(index, sizes=sizes))
    return xxhash.xxh3_128_hexdigest(content.encode())


def _check_space(index: SampleIndex, pack: PackFolder, options: PackOptions, tasks: list[ShardTask]) -> None:
    unfinished = [task for task in tasks if finished_bytes(pack, task.number) is None]
    ratio = sampled_ratio(ShardSource(index, pack, options.reencoding), unfinished)
    needed = sum(task.planned_bytes for task in unfinished) * ratio
    free = shutil.disk_usage(pack.folder).free
    if needed > free:
        raise UserError(
            "disk-too-small",
            f"{pack.folder} has {size_text(free)} free; the shards need about {size_text(needed)}",
            why="the disk would be full before the pack is complete",
            hint="use another disk, or smaller images: --longest 500 --quality 90",
        )


def _make_shards(
    source: ShardSource, tasks: list[ShardTask], workers: int, max_bad_fraction: float, progress: Advance | None
) -> list[ShardDone]:
    total = sum(len(task.samples) for task in tasks)
    made: list[ShardDone] = []
    done = 0

    def on_report(images: int) -> None:
        nonlocal done
        done += images
        if progress is not None:
            progress(done, total)

    def on_answer(answer: dict[str, Any]) -> None:
        shard = ShardDone(**answer)
        if shard.error is not None:
            raise UserError(
                "pack-failed",
                f"{source.pack.named(shard.number)} could not be made: {shard.error}",
                why=f"{len(made)} of {len(tasks)} shards are finished and kept",
                hint="fix the cause, then run the same command again to continue",
            )
        made.append(shard)
        _check_skipped(source.pack, made, len(tasks), total, max_bad_fraction)

    outage.share_with_children()
    try:
        share_out(
            make_shards,
            # Pickled: the index knows how to be mapped from its folder in another process instead of being copied.
            pickle.dumps(source),
            [task.as_message() for task in tasks],
            workers=workers,
            on_message=on_report,
            on_answer=on_answer,
        )
    except ChildDied as died:
        raise UserError(
            "pack-worker-died",
            f"the process that made {source.pack.named(died.task['number'])} {died.how}",
            why=f"the kernel kills processes when memory runs out; {len(made)} of {len(tasks)} shards are kept",
            hint="run the same command again to continue, with fewer --workers to need less memory",
        ) from None
    finally:
        remove_temporaries(source.pack)
    return made


def _check_skipped(pack: PackFolder, made: list[ShardDone], shards: int, total: int, allowed: float) -> None:
    """Raises as soon as too many samples are bad; the shards so far are kept."""
    skipped = sorted((bad for shard in made for bad in shard.skipped), key=lambda bad: bad["sample"])
    if len(made) == shards or len(skipped) > allowed * total:
        write_text(pack.skipped, "".join(json.dumps(bad) + "\n" for bad in skipped))
    if len(skipped) <= allowed * total:
        return
    listed = [f"{bad['name']}: {bad['reason']}" for bad in skipped[:SHOWN]]
    if len(skipped) > SHOWN:
        listed.append(f"and {len(skipped) - SHOWN} more")
    so_far = "" if len(made) == shards else f" in the first {len(made)} of {shards} shards"
    raise UserError(
        "too-many-bad-images",
        f"{len(skipped)} of {total} files cannot be read as images{so_far}\n" + "\n".join(listed),
        why=f"max_bad_fraction allows {allowed:g}; all of them are listed in {pack.skipped}",
        hint="repair these files, or raise max_bad_fraction to leave them out",
    )
