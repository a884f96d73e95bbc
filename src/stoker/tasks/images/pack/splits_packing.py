"""`stoker pack` for images: from a config to its splits, each of them in a pack of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from stoker.config import Config
from stoker.core.console import format_table, progress_bar, say_notes, say_warnings
from stoker.core.errors import UserError
from stoker.core.units import size_text
from stoker.tasks.images.data import open_split
from stoker.tasks.images.layouts.layouts import list_splits
from stoker.tasks.images.layouts.sample_index import part_of
from stoker.tasks.images.pack.pack_folder import check_destination, claim_packs, find_splits, source_index_folder
from stoker.tasks.images.pack.packing import ImagePackResult, PackOptions, pack_split


def pack_splits(
    config: Config,
    destination: Path,
    wanted: Sequence[str] | None,
    options: PackOptions,
    workers: int,
    fresh: bool,
) -> dict[str, ImagePackResult]:
    """Packs the wanted splits of a config's data, or all of them; the result of each by its name."""
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
                raise _nothing_left(config, name)
            with progress_bar(f"packing {name}", len(index), unit="images") as advance:
                result = pack_split(
                    index, pack, options, workers=workers, max_bad_fraction=config.max_bad_fraction, progress=advance
                )
            if result.skipped:
                say_warnings([f"{result.skipped} of {len(index)} files are not images: see {pack.skipped}"])
            results[name] = result
    return results


def _nothing_left(config: Config, split: str) -> UserError:
    return UserError(
        "nothing-to-pack", f"{split} of {config.data_root} has no images",
        why=f"each class has a single image, which is for training (val_fraction={config.val_fraction})",
        hint="leave val_fraction out, or pack with --split train",
    )  # fmt: skip


def _splits(config: Config, wanted: Sequence[str] | None) -> list[str]:
    assert config.data_root is not None
    has_val = config.val_csv is not None or config.val_fraction is not None
    if not wanted and config.samples_csv is not None and not has_val:
        return list_splits(config.samples_csv, config.data_root)
    if not wanted and (has_val or config.train_csv is not None):
        return ["train", *(["val"] if has_val else [])]
    listed = (config.samples_csv, config.train_csv, config.val_csv, config.val_fraction)
    return list(wanted) if wanted and any(listed) else find_splits(config.data_root, wanted)


def as_document(results: Mapping[str, ImagePackResult]) -> dict[str, object]:
    """The document that `--json` prints."""
    return {"splits": {name: _of_split(result) for name, result in results.items()}}


def _of_split(result: ImagePackResult) -> dict[str, object]:
    return {
        "samples": result.samples,
        "classes": result.classes,
        "shards": result.shards,
        "kept_shards": result.kept_shards,
        "bytes": result.bytes,
        "skipped": result.skipped,
        "seconds": round(result.seconds, 3),
        "images_per_second": None if result.images_per_second is None else round(result.images_per_second, 1),
        "folder": str(result.folder),
    }


def summary(results: Mapping[str, ImagePackResult]) -> str:
    """A table with a row for each split."""
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
