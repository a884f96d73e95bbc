"""`stoker pack`: images in any layout, or an existing pack, into tar shards with an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.commands.options import JsonOption
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.config import Config
    from stoker.data.images.pack.packing import PackOptions, PackResult


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker pack imagenet packed/imagenet --longest 500 --quality 90")(pack)


def pack(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Folder or URL with train/ and val/, or with class folders; or a config, whose data is packed whole.",
            show_default=False,
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder for the shards; must not be inside SRC.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Config keys that say how the data is laid out, such as samples_csv=list.csv.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this split; can be repeated. [default: train and val, if they exist]",
            show_default=False,
        ),
    ] = None,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Target size of a shard, counting images at their original size.")
    ] = "256MB",
    longest: Annotated[
        int | None,
        typer.Option(
            metavar="PIXELS", help="Shrink images so that the longer side has this many pixels.", show_default=False
        ),
    ] = None,
    shortest: Annotated[
        int | None,
        typer.Option(
            metavar="PIXELS", help="Shrink images so that the shorter side has this many pixels.", show_default=False
        ),
    ] = None,
    quality: Annotated[
        int | None,
        typer.Option(
            metavar="1..100",
            help="Re-encode every image as JPEG. Without it, images that need no shrinking are copied byte for byte.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Worker processes. [default: the available cores]", show_default=False),
    ] = None,
    max_bad_fraction: Annotated[
        float, typer.Option(metavar="FRACTION", help="Stop if more than this share of the files are not images.")
    ] = 0.01,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the pack in DST first, and nothing else.")] = False,
    json: JsonOption = False,
) -> int:
    """Pack images into tar shards with an index, readable by stoker and WebDataset.

    If interrupted, run the same command again: finished shards are verified and kept.
    """
    options = _options(shard_size, longest, shortest, quality)
    _check_numbers(workers, max_bad_fraction)

    from stoker.console import print_json, print_result
    from stoker.machine.host import usable_cpus

    config = _config(source, overrides or [])
    results = _pack_splits(config, destination, split, options, workers or usable_cpus(), max_bad_fraction, fresh)
    if json:
        print_json({"splits": {name: _as_json(result) for name, result in results.items()}})
    else:
        print_result(_summary(results))
    return 0


def _config(source: str, overrides: Sequence[str]) -> Config:
    from stoker.config.reading import load_for_command
    from stoker.errors import ConfigError

    path = Path(source) if source.endswith((".yaml", ".yml")) else None
    config = load_for_command(path, overrides if path else [f"data_root={source}", *overrides], None).config
    if config.data_root is None:
        raise ConfigError("data_root is not set", name="no-data", hint="data_root=/folder/with/train/and/val")
    return config


def _splits(config: Config, wanted: Sequence[str] | None) -> list[str]:
    from stoker.data.images.pack.folder import find_splits

    assert config.data_root is not None
    has_val = config.val_csv is not None or config.val_fraction is not None
    if not wanted and config.samples_csv is not None and not has_val:
        from stoker.data.images.layouts import list_splits

        return list_splits(config.samples_csv, config.data_root)
    if not wanted and (has_val or config.train_csv is not None):
        return ["train", *(["val"] if has_val else [])]
    listed = (config.samples_csv, config.train_csv, config.val_csv, config.val_fraction)
    return list(wanted) if wanted and any(listed) else find_splits(config.data_root, wanted)


def _pack_splits(
    config: Config,
    destination: Path,
    wanted: Sequence[str] | None,
    options: PackOptions,
    workers: int,
    max_bad_fraction: float,
    fresh: bool,
) -> dict[str, PackResult]:
    from stoker.console import progress_bar, say_notes, say_warnings
    from stoker.data.images.pack.folder import check_destination, claim_packs, source_index_folder
    from stoker.data.images.pack.packing import pack_split
    from stoker.data.images.sample_index import part_of
    from stoker.tasks.image_data import open_split

    assert config.data_root is not None
    check_destination(config.data_root, destination)
    splits = _splits(config, wanted)
    results: dict[str, PackResult] = {}
    with claim_packs(destination, splits, options.as_dict(), fresh=fresh) as packs:
        for pack in packs:
            name = pack.split or "."
            notes: list[str] = []
            with progress_bar(f"listing {name}") as advance:
                kept = source_index_folder(destination)
                index, among = open_split(config, pack.split, index_dir=kept, progress=advance, say=notes.append)
                index = index if among is None else part_of(index, among)
            say_notes(notes)
            with progress_bar(f"packing {name}", len(index), unit="images") as advance:
                result = pack_split(
                    index, pack, options, workers=workers, max_bad_fraction=max_bad_fraction, progress=advance
                )
            if result.skipped:
                say_warnings([f"{result.skipped} of {len(index)} files are not images: see {pack.skipped}"])
            results[name] = result
    return results


def _options(shard_size: str, longest: int | None, shortest: int | None, quality: int | None) -> PackOptions:
    from stoker.config.fields import parse_bytes
    from stoker.data.images.pack.packing import PackOptions

    try:
        shard_bytes = parse_bytes(shard_size)
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


def _check_numbers(workers: int | None, max_bad_fraction: float) -> None:
    if workers is not None and workers < 1:
        raise _usage(f"--workers {workers} must be at least 1", "--workers 1")
    if not 0 <= max_bad_fraction <= 1:
        raise _usage(f"--max-bad-fraction {max_bad_fraction:g} is not in 0..1", "--max-bad-fraction 0.01")


def _usage(seen: str, hint: str) -> UsageError:
    return UsageError("usage", seen, hint=hint)


def _as_json(result: PackResult) -> dict[str, object]:
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


def _summary(results: dict[str, PackResult]) -> str:
    from stoker.console import format_table

    rows = [
        [
            name,
            f"{result.samples:,}",
            f"{result.classes:,}",
            f"{result.shards:,}" + (f" ({result.kept_shards:,} kept)" if result.kept_shards else ""),
            f"{result.bytes / 1e6:,.1f} MB",
            f"{result.skipped:,}",
            "–" if result.images_per_second is None else f"{result.images_per_second:,.0f}",
            str(result.folder),
        ]
        for name, result in results.items()
    ]
    return format_table(rows, ["split", "samples", "classes", "shards", "size", "skipped", "images/s", "folder"])
