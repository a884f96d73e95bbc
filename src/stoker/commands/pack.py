"""`stoker pack`: images in any layout into tar shards with an index; volumes into files that are mapped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stoker.commands.options import Argument, JsonOption, Option, flags_for
from stoker.core.errors import UsageError

if TYPE_CHECKING:
    from stoker.config import Config

ImagesOption = partial(Option, rich_help_panel="Images")
VolumesOption = partial(Option, rich_help_panel="Volumes")


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker pack imagenet packed/imagenet --longest 500 --quality 90")(pack)


def pack(
    context: typer.Context,
    source: Annotated[
        str,
        Argument(
            metavar="SRC",
            help="Folder or URL with train/ and val/, or with class folders; volumes in any layout; or a config, whose "
            "data is packed whole.",
        ),
    ],
    destination: Annotated[Path, Argument(metavar="DST", help="Folder for the pack; must not be inside SRC.")],
    overrides: Annotated[
        list[str] | None,
        Argument(
            metavar="KEY=VALUE",
            help="Config keys that say what the data is, such as samples_csv=list.csv or max_bad_fraction=0.05.",
        ),
    ] = None,
    split: Annotated[
        list[str] | None,
        ImagesOption(metavar="NAME", help="Only this split; can be repeated. [default: train and val, if they exist]"),
    ] = None,
    shard_size: Annotated[
        str | None,
        ImagesOption(
            metavar="SIZE", help="Target size of a shard, counting images at their original size. [default: 256MB]"
        ),
    ] = None,
    longest: Annotated[
        int | None,
        ImagesOption(metavar="PIXELS", help="Shrink images so that the longer side has this many pixels."),
    ] = None,
    shortest: Annotated[
        int | None,
        ImagesOption(metavar="PIXELS", help="Shrink images so that the shorter side has this many pixels."),
    ] = None,
    quality: Annotated[
        int | None,
        ImagesOption(
            metavar="1..100",
            help="Re-encode every image as JPEG. Without it, images that need no shrinking are copied byte for byte.",
        ),
    ] = None,
    clip: Annotated[
        str | None,
        VolumesOption(
            metavar="LOW,HIGH",
            help="Limit voxels to this range: values, or percentiles of each volume such as 0.5%,99.5%.",
        ),
    ] = None,
    median: Annotated[
        int | None, VolumesOption(metavar="3|5|7", help="Replace voxels by the median of the box around them.")
    ] = None,
    scale: Annotated[
        str | None,
        VolumesOption(
            metavar="FACTOR", help="Resample: 0.5 halves every side; Z,Y,X for each. Labels keep their nearest voxels."
        ),
    ] = None,
    spacing: Annotated[
        str | None,
        VolumesOption(
            metavar="Z,Y,X", help="Resample to this distance of voxels, for formats that say what it is (NIfTI)."
        ),
    ] = None,
    dtype: Annotated[
        str,
        VolumesOption(
            metavar="keep|uint8",
            help="Kind of voxels; uint8 spreads the range of --clip over 0 to 255.",
            show_default=True,
        ),
    ] = "keep",
    layout: Annotated[
        str,
        VolumesOption(
            metavar="NAME",
            help="raw, blocks32, blocks64 or zarr; auto takes the fastest in a trial on your own volumes, with patches "
            "of the size patch_size.",
            show_default=True,
        ),
    ] = "auto",
    verify: Annotated[
        bool,
        VolumesOption("--verify", help="Read every finished volume again, and make those anew that are damaged."),
    ] = False,
    workers: Annotated[int | None, Option(metavar="N", help="Worker processes. [default: the available cores]")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Delete the pack in DST first, and nothing else.")] = False,
    json: JsonOption = False,
) -> int:
    """Pack images into tar shards with an index, readable by stoker and WebDataset; volumes into files that are read
    from memory, prepared once.

    If interrupted, run the same command again: finished shards and volumes are kept.
    """
    if workers is not None and workers < 1:
        raise UsageError("usage", f"--workers {workers} must be at least 1", hint="--workers 1")

    from stoker.core.console import print_answer
    from stoker.profile.host import usable_cpus
    from stoker.tasks.base import task_for

    config = _config(source, overrides or [])
    task = task_for(config)
    flags = {
        "split": split, "shard_size": shard_size, "longest": longest, "shortest": shortest, "quality": quality,
        "clip": clip, "median": median, "scale": scale, "spacing": spacing, "dtype": dtype, "layout": layout,
        "verify": verify,
    }  # fmt: skip
    flags = flags_for(task, context, flags, f"{source} has")
    answer = task.pack(config, destination, workers=workers or usable_cpus(), fresh=fresh, **flags)
    return print_answer(answer, as_json=json)


def _config(source: str, overrides: Sequence[str]) -> Config:
    """The config itself; or of data without one, a config with what its task cannot do without."""
    from stoker.config.reading import load_for_command
    from stoker.core.errors import ConfigError
    from stoker.tasks.base import built_in_tasks

    tasks = built_in_tasks()
    found = next((task for task in tasks if task.recognises(source)), None)
    if found is None and source.endswith((".yaml", ".yml")):
        config = load_for_command(Path(source), overrides).config
    else:
        found = next((task for task in tasks if f"task={task.name}" in overrides), found)
        usual = {} if found is None else {"task": found.name, **found.usual_keys}
        given = {one.partition("=")[0] for one in overrides}
        added = [f"{name}={value}" for name, value in usual.items() if name not in given]
        config = load_for_command(None, [f"data_root={source}", *added, *overrides]).config
    if config.data_root is None:
        raise ConfigError("data_root is not set", name="no-data", hint="data_root=/folder/with/train/and/val")
    return config
