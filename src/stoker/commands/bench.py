"""`stoker bench`: how fast this host makes batches (`data`), and how fast storage is (`storage`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stoker.commands.options import Argument, JsonOption, OverridesArgument

group = typer.Typer(help="Measure this host: the loader alone, or storage alone.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    app.add_typer(group, name="bench")


@group.command(epilog="Example: stoker bench data /data/imagenet --workers 8 --gpu a100-80")
def data(
    source: Annotated[
        str,
        Argument(
            metavar="CONFIG_OR_FOLDER",
            help="A config file, or a folder or URL with train/ or class folders or packed shards.",
        ),
    ],
    overrides: OverridesArgument = None,
    workers: Annotated[
        list[int] | None, typer.Option("--workers", min=0, help="Measure this number of workers; may be repeated.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.2, help="How long each measurement runs.")] = 5.0,
    gpu: Annotated[
        str | None, typer.Option(help="Say how much of this accelerator the host can feed, e.g. a100-80.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE.png", help="Where the picture goes; none when not given.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Measure the loader's images per second by number of workers and by stage, next to the decoding limit."""
    from stoker.core.console import Answer, print_answer, say
    from stoker.tasks.data_bench import bench_data, bench_data_text, plot_bench_data

    report = bench_data(source, overrides or (), workers or [], seconds, gpu)
    if plot is not None:
        plot_bench_data(report, plot)
        say(f"picture: {plot}")
    return print_answer(Answer(bench_data_text(report), report.as_dict()), as_json=json)


@group.command(epilog="Example: stoker bench storage s3://bucket/imagenet --gpu a100-80")
def storage(
    source: Annotated[
        str,
        Argument(metavar="PATH_OR_URL", help="A folder of any files, one file, or a URL such as s3://bucket/folder."),
    ],
    seconds: Annotated[float, typer.Option(min=1.0, help="How long all measurements together may take.")] = 20.0,
    gpu: Annotated[
        str | None, typer.Option(help="Say how much of this accelerator it feeds; a100-80 and h100 when not given.")
    ] = None,
    json: JsonOption = False,
) -> int:
    """Measure storage: latency, small reads by how many at once, and large reads, cold and warm.

    Reads some of the files that are there, and writes nothing.
    """
    from stoker.core.console import Answer, print_answer, progress_bar
    from stoker.io.storage_profile import profile_storage
    from stoker.plan.break_even import ANY_DISK, appetites, storage_document, storage_text
    from stoker.profile.mounts import find_local_disk

    wanted = appetites(gpu)  # raises on a typo before anything is measured
    with progress_bar("measuring", None) as advance:
        profile = profile_storage(source, seconds, advance)
    disk = find_local_disk()
    text = storage_text(profile, wanted, ANY_DISK if disk is None else disk.folder)
    return print_answer(Answer(text, storage_document(profile, wanted)), as_json=json)
