"""`stoker pack`: images in any layout into tar shards with an index; volumes into files that are mapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.commands.options import JsonOption
from stoker.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from stoker.config import Config
    from stoker.tasks.images.pack.packing import PackOptions
    from stoker.tasks.volumes.pack.preprocessing import VoxelChanges

IMAGES, VOLUMES = "Images", "Volumes"


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker pack imagenet packed/imagenet --longest 500 --quality 90")(pack)


def pack(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help="Folder or URL with train/ and val/, or with class folders; volumes in any layout; or a config, whose "
            "data is packed whole.",
            show_default=False,
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="Folder for the pack; must not be inside SRC.", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Config keys that say what the data is, such as samples_csv=list.csv or max_bad_fraction=0.05.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Only this split; can be repeated. [default: train and val, if they exist]",
            show_default=False,
            rich_help_panel=IMAGES,
        ),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Target size of a shard, counting images at their original size. [default: 256MB]",
            show_default=False,
            rich_help_panel=IMAGES,
        ),
    ] = None,
    longest: Annotated[
        int | None,
        typer.Option(
            metavar="PIXELS",
            help="Shrink images so that the longer side has this many pixels.",
            show_default=False,
            rich_help_panel=IMAGES,
        ),
    ] = None,
    shortest: Annotated[
        int | None,
        typer.Option(
            metavar="PIXELS",
            help="Shrink images so that the shorter side has this many pixels.",
            show_default=False,
            rich_help_panel=IMAGES,
        ),
    ] = None,
    quality: Annotated[
        int | None,
        typer.Option(
            metavar="1..100",
            help="Re-encode every image as JPEG. Without it, images that need no shrinking are copied byte for byte.",
            show_default=False,
            rich_help_panel=IMAGES,
        ),
    ] = None,
    clip: Annotated[
        str | None,
        typer.Option(
            metavar="LOW,HIGH",
            help="Limit voxels to this range: values, or percentiles of each volume such as 0.5%,99.5%.",
            show_default=False,
            rich_help_panel=VOLUMES,
        ),
    ] = None,
    median: Annotated[
        int | None,
        typer.Option(
            metavar="3|5|7",
            help="Replace voxels by the median of the box around them.",
            show_default=False,
            rich_help_panel=VOLUMES,
        ),
    ] = None,
    scale: Annotated[
        str | None,
        typer.Option(
            metavar="FACTOR",
            help="Resample: 0.5 halves every side; Z,Y,X for each. Labels keep their nearest voxels.",
            show_default=False,
            rich_help_panel=VOLUMES,
        ),
    ] = None,
    spacing: Annotated[
        str | None,
        typer.Option(
            metavar="Z,Y,X",
            help="Resample to this distance of voxels, for formats that say what it is (NIfTI).",
            show_default=False,
            rich_help_panel=VOLUMES,
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="keep|uint8",
            help="Kind of voxels; uint8 spreads the range of --clip over 0 to 255.",
            rich_help_panel=VOLUMES,
        ),
    ] = "keep",
    layout: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="raw, blocks32, blocks64 or zarr; auto takes the fastest in a trial on your own volumes, with patches "
            "of the size patch_size.",
            rich_help_panel=VOLUMES,
        ),
    ] = "auto",
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Read every finished volume again, and make those anew that are damaged.",
            rich_help_panel=VOLUMES,
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Worker processes. [default: the available cores]", show_default=False),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the pack in DST first, and nothing else.")] = False,
    json: JsonOption = False,
) -> int:
    """Pack images into tar shards with an index, readable by stoker and WebDataset; volumes into files that are read
    from memory, prepared once.

    If interrupted, run the same command again: finished shards and volumes are kept.
    """
    if workers is not None and workers < 1:
        raise _usage(f"--workers {workers} must be at least 1", "--workers 1")
    for_images = {
        "split": split, "shard-size": shard_size, "longest": longest, "shortest": shortest, "quality": quality
    }  # fmt: skip
    for_volumes = {
        "clip": clip, "median": median, "scale": scale, "spacing": spacing, "dtype": dtype if dtype != "keep" else None,
        "layout": layout if layout != "auto" else None, "verify": verify or None,
    }  # fmt: skip

    from stoker.core.console import print_json, print_result, say
    from stoker.profile.host import usable_cpus

    volumes = _has_volumes(source) or "task=segment3d" in (overrides or [])
    config = _config(source, overrides or [], volumes)
    if config.task == "segment3d":
        from stoker.tasks.volumes.pack.cases_packing import VolumePacking, as_document, run_volume_packing, summary

        _refuse(for_images, "images", source)
        asked = VolumePacking(
            _preparation(clip, median, scale, spacing, dtype), _layout(layout), workers or usable_cpus(), verify, fresh
        )
        packed, trial = run_volume_packing(config, destination, asked, say)
        if json:
            print_json(as_document(packed, trial, destination))
        else:
            print_result(summary(packed, destination))
        return 0
    _refuse(for_volumes, "volumes", source)
    options = _options(shard_size or "256MB", longest, shortest, quality)

    from stoker.tasks.images.pack import splits_packing as image_packing

    results = image_packing.pack_splits(config, destination, split, options, workers or usable_cpus(), fresh)
    if json:
        print_json(image_packing.as_document(results))
    else:
        print_result(image_packing.summary(results))
    return 0


def _has_volumes(source: str) -> bool:
    """Whether a folder or YAML file lists volumes, and not images; a config says so itself."""
    place = Path(source).expanduser()
    if place.suffix.lower() in (".yaml", ".yml") and place.is_file():
        return _lists_cases(place)
    files = ("volumes.json", "dataset.json")
    return any((place / name).is_file() for name in files) or (
        (place / "train.csv").is_file() and (place / "train_images").is_dir()
    )


def _lists_cases(path: Path) -> bool:
    """Whether a YAML file is a list of volumes; it is a config otherwise."""
    import yaml

    try:
        document = yaml.safe_load(path.read_text("utf-8-sig"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False
    return isinstance(document, list) or (isinstance(document, dict) and "cases" in document)


def _config(source: str, overrides: Sequence[str], volumes: bool) -> Config:
    from stoker.config.reading import load_for_command
    from stoker.core.errors import ConfigError

    is_config = source.endswith((".yaml", ".yml")) and not _lists_cases(Path(source))
    path = Path(source) if is_config else None
    if volumes and not is_config:
        from stoker.tasks.volumes.pack.layout_trial import USUAL_PATCH

        # A config of volumes must have a patch; here only the trial uses it.
        needed = {"task": "segment3d", "patch_size": list(USUAL_PATCH)}
        given = {one.partition("=")[0] for one in overrides}
        overrides = [*(f"{name}={value}" for name, value in needed.items() if name not in given), *overrides]
    config = load_for_command(path, overrides if path else [f"data_root={source}", *overrides]).config
    if config.data_root is None:
        raise ConfigError("data_root is not set", name="no-data", hint="data_root=/folder/with/train/and/val")
    return config


def _preparation(
    clip: str | None, median: int | None, scale: str | None, spacing: str | None, dtype: str
) -> VoxelChanges:
    from stoker.tasks.volumes.pack.preprocessing import VoxelChanges, check_preparation, parse_clip

    if dtype not in ("keep", "uint8"):
        raise _usage(f"--dtype {dtype} is neither keep nor uint8", "--dtype uint8")
    made = VoxelChanges(
        clip=None if clip is None else parse_clip(clip),
        median=median,
        scale=None if scale is None else _numbers("--scale", scale),
        spacing=None if spacing is None else _numbers("--spacing", spacing),
        dtype="uint8" if dtype == "uint8" else "keep",
    )
    check_preparation(made)
    return made


def _layout(name: str) -> str | None:
    from stoker.tasks.volumes.pack.writing import LAYOUTS

    if name != "auto" and name not in LAYOUTS:
        raise _usage(f"--layout {name} is not one of auto, {', '.join(LAYOUTS)}", did_you_mean(name, LAYOUTS) or "auto")
    return None if name == "auto" else name


def _numbers(option: str, text: str) -> tuple[float, float, float]:
    """One number for all axes, or three."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) == 1:
        found *= 3
    if len(found) != 3:
        raise _usage(f"{option} {text} is neither a number nor three of them", f"{option} 0.5 or {option} 1,0.5,0.5")
    return found[0], found[1], found[2]


def _refuse(options: Mapping[str, object], kind: str, source: str) -> None:
    """Refuses options that do nothing for this source."""
    given = [f"--{name}" for name, value in options.items() if value is not None]
    if given:
        other = "volumes" if kind == "images" else "images"
        raise _usage(f"{given[0]} is for {kind}; {source} has {other}", "stoker pack --help")


def _options(shard_size: str, longest: int | None, shortest: int | None, quality: int | None) -> PackOptions:
    from stoker.config.fields import parse_bytes
    from stoker.tasks.images.pack.packing import PackOptions

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


def _usage(seen: str, hint: str) -> UsageError:
    return UsageError("usage", seen, hint=hint)
