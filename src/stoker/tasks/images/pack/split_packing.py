"""`stoker pack` for images: each split of a config's data into shards, made by several processes; the same bytes for
any number of them, in any order.

Which samples go into which shard is planned from the sizes of the source's files before anything is read, so every
shard can be made on its own. Samples are distributed in a permuted order, so that reading the shards one after the
other mixes all classes. The index keeps the source's order, so that a seed draws the same samples, in the same order,
from the pack as from the original files.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from stoker.config import Config
from stoker.config.fields import parse_bytes
from stoker.core.console import Advance, Answer, format_table, progress_bar, say_notes, say_warnings
from stoker.core.errors import UsageError, UserError
from stoker.core.files import write_text
from stoker.core.units import count, size_text
from stoker.io import outage
from stoker.loader.batch import allowed_bad
from stoker.loader.sampler import permute
from stoker.profile.host import HostConfig, usable_cpus
from stoker.tasks.images.data import open_split
from stoker.tasks.images.layouts.parquet_files import is_parquet, row_groups, sizes_of_images
from stoker.tasks.images.layouts.sample_index import SampleIndex, digest_of, part_of
from stoker.tasks.images.layouts.sample_lists import list_splits
from stoker.tasks.images.pack.make_shard import (
    PackOptions,
    ShardDone,
    ShardSource,
    ShardTask,
    make_shards,
    sampled_ratio,
)
from stoker.tasks.images.pack.pack_folder import (
    SHARDS,
    PackFolder,
    check_source,
    claim_packs,
    find_splits,
    finished_bytes,
    remove_pack,
    remove_source_index,
    remove_temporaries,
    source_index_folder,
    write_pack_index,
)
from stoker.tasks.images.pack.tar_shards import END, sample_footprint
from stoker.tasks.packing import check_destination, check_space, list_bad, make_parts

# Part of the format: another value gives different shards.
ORDER_KEY = 20240229
STAT_THREADS = 16


@dataclass(frozen=True)
class ImagePackResult:
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


def pack(
    config: Config,
    destination: Path,
    *,
    workers: int,
    fresh: bool,
    split: Sequence[str] | None,
    shard_size: str | None,
    longest: int | None,
    shortest: int | None,
    quality: int | None,
) -> Answer:
    """Packs the wanted splits of a config's data, or all of them; each is a pack of its own."""
    options = _options(shard_size, longest, shortest, quality)
    results = pack_splits(config, destination, split, options, workers, fresh)
    return Answer(_table(results), {"splits": {name: _of_split(result) for name, result in results.items()}})


def _options(shard_size: str | None, longest: int | None, shortest: int | None, quality: int | None) -> PackOptions:
    try:
        shard_bytes = PackOptions.shard_bytes if shard_size is None else parse_bytes(shard_size)
    except ValueError as error:
        raise _usage(f"--shard-size: {error}", "--shard-size 256MB") from None
    if shard_bytes < 1:
        raise _usage(f"--shard-size {shard_size} is too small", "--shard-size 256MB")
    if longest is not None and shortest is not None:
        raise _usage(f"--longest {longest} and --shortest {shortest} exclude each other", "use one of them")
    for name, pixels in (("longest", longest), ("shortest", shortest)):
        if pixels is not None and pixels < 1:
            raise _usage(f"--{name} {pixels} must be at least 1", f"--{name} 256")
    if quality is not None and not 1 <= quality <= 100:
        raise _usage(f"--quality {quality} is not in 1..100", "--quality 90")
    return PackOptions(shard_bytes, longest, shortest, quality)


def _usage(seen: str, hint: str) -> UsageError:
    return UsageError("usage", seen, hint=hint)


def pack_splits(
    config: Config, destination: Path, wanted: Sequence[str] | None, options: PackOptions, workers: int, fresh: bool
) -> dict[str, ImagePackResult]:
    """The result of each split by its name."""
    assert config.data_root is not None
    check_destination(config.data_root, destination)
    splits = _splits(config, wanted)
    results: dict[str, ImagePackResult] = {}
    with claim_packs(destination, splits, options.as_dict(), fresh=fresh) as packs:
        for pack in packs:
            name = pack.split or "."
            notes: list[str] = []
            with progress_bar(f"listing {name}") as advance:
                kept = source_index_folder(destination)
                index, among = open_split(config, pack.split, index_dir=kept, progress=advance, say=notes.append)
                index = index if among is None else part_of(index, among)
            say_notes(notes)
            if among is not None and not len(index):
                raise UserError(
                    "nothing-to-pack",
                    f"{name} of {config.data_root} has no images",
                    why=f"each class has a single image, which is for training (val_fraction={config.val_fraction})",
                    hint="leave val_fraction out, or pack with --split train",
                )
            with progress_bar(f"packing {name}", len(index), unit="images") as advance:
                result = pack_split(
                    index, pack, options, workers=workers, max_bad_fraction=config.max_bad_fraction, progress=advance
                )
            if result.skipped:
                say_warnings([f"{result.skipped} of {len(index)} files are not images: see {pack.skipped}"])
            results[name] = result
    return results


def _splits(config: Config, wanted: Sequence[str] | None) -> list[str]:
    assert config.data_root is not None
    has_val = config.val_csv is not None or config.val_fraction is not None
    if not wanted and config.samples_csv is not None and not has_val:
        return list_splits(config.samples_csv, config.data_root)
    if not wanted and (has_val or config.train_csv is not None):
        return ["train", *(["val"] if has_val else [])]
    listed = (config.samples_csv, config.train_csv, config.val_csv, config.val_fraction)
    return list(wanted) if wanted and any(listed) else find_splits(config.data_root, wanted)


def _of_split(result: ImagePackResult) -> dict[str, object]:
    speed = result.images_per_second
    return asdict(result) | {
        "seconds": round(result.seconds, 3),
        "images_per_second": None if speed is None else round(speed, 1),
        "folder": str(result.folder),
    }


def _table(results: Mapping[str, ImagePackResult]) -> str:
    rows = [
        [
            name,
            f"{result.samples:,}",
            f"{result.classes:,}",
            f"{result.shards:,}" + (f" ({result.kept_shards:,} kept)" if result.kept_shards else ""),
            size_text(result.bytes),
            f"{result.skipped:,}",
            "–" if result.images_per_second is None else f"{result.images_per_second:,.0f}",
            str(result.folder),
        ]
        for name, result in results.items()
    ]
    return format_table(rows, ["split", "samples", "classes", "shards", "size", "skipped", "images/s", "folder"])


class ImageVariants:
    """For a search: one way to pack images, in shards with their bytes as they are."""

    names = ("shards",)
    mapped: frozenset[str] = frozenset()
    timed = ""

    def __init__(self, config: HostConfig) -> None:
        self._config = config.model_copy(update={"max_bad_fraction": 0.0})

    def trial(self, folder: Path) -> dict[str, float]:
        raise AssertionError(f"there is nothing to choose from in {folder}")

    def make(self, name: str, root: Path) -> str:
        assert name in self.names
        results = pack_splits(self._config, root, None, PackOptions(), usable_cpus(), fresh=False).values()
        images, size = sum(one.samples for one in results), sum(one.bytes for one in results)
        return f"{count(images, 'image')}, {size / 1e6:,.0f} MB, byte for byte as they are"

    def remove(self, root: Path) -> None:
        for split in ["", *(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))]:
            pack = PackFolder(root, split)
            remove_temporaries(pack)
            remove_pack(pack)
        remove_source_index(root)


def pack_split(
    index: SampleIndex,
    pack: PackFolder,
    options: PackOptions,
    *,
    workers: int,
    max_bad_fraction: float,
    progress: Advance = lambda _done, _total: None,
) -> ImagePackResult:
    """Packs every sample of the index, or what an earlier run left; call it within `claim_packs`."""
    began = time.monotonic()
    if len(index) == 0:
        raise UserError(
            "nothing-to-pack", f"{index.root} has no images", hint="choose a folder with class folders of images"
        )
    sizes = source_sizes(index)
    # The same for the same names, classes and sizes, wherever they are stored.
    fingerprint = xxhash.xxh3_128_hexdigest(digest_of(replace(index, sizes=sizes)).encode())
    check_source(pack, options.as_dict(), fingerprint)
    tasks, source = plan_shards(sizes, options.shard_bytes, row_groups(index)), ShardSource(index, pack, options)
    remove_temporaries(pack)
    unfinished = [task for task in tasks if finished_bytes(pack, task.number) is None]
    planned_bytes = sum(task.planned_bytes for task in unfinished)
    check_space(pack.folder, planned_bytes * sampled_ratio(source, unfinished), SHARDS)
    made = _make_shards(source, tasks, workers, max_bad_fraction, progress)
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
    if is_parquet(index):
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


def _make_shards(
    source: ShardSource, tasks: list[ShardTask], workers: int, max_bad_fraction: float, progress: Advance
) -> list[ShardDone]:
    total = sum(len(task.samples) for task in tasks)
    made: list[ShardDone] = []

    def on_answer(answer: dict[str, Any]) -> None:
        made.append(ShardDone(**answer))
        _check_skipped(source.pack, made, len(tasks), total, max_bad_fraction)

    outage.share_with_children()
    messages = [task.as_message() for task in tasks]
    try:
        # The source travels lightly: an index knows how to be mapped from its folder in another process.
        make_parts(
            make_shards, source, messages, source.pack.named, SHARDS, workers=workers, on_answer=on_answer,
            progress=lambda images: progress(images, total),
        )  # fmt: skip
    finally:
        remove_temporaries(source.pack)
    return made


def _check_skipped(pack: PackFolder, made: list[ShardDone], shards: int, total: int, allowed: float) -> None:
    """Raises as soon as too many samples are bad; the shards so far are kept."""
    skipped = sorted((bad for shard in made for bad in shard.skipped), key=lambda bad: bad["sample"])
    too_many = len(skipped) > allowed_bad(allowed, total, total)
    if len(made) == shards or too_many:
        write_text(pack.skipped, "".join(json.dumps(bad) + "\n" for bad in skipped))
    if not too_many:
        return
    listed = list_bad([(bad["name"], bad["reason"]) for bad in skipped])
    so_far = "" if len(made) == shards else f" in the first {len(made)} of {shards} shards"
    raise UserError(
        "too-many-bad-images",
        f"{len(skipped)} of {total} files cannot be read as images{so_far}\n{listed}",
        why=f"max_bad_fraction allows {allowed:g}; all of them are listed in {pack.skipped}",
        hint="repair these files, or raise max_bad_fraction to leave them out",
    )
