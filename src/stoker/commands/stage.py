"""`stoker stage`: brings the data, or the part that a config needs, to a local disk."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.commands.options import JsonOption, config_and_overrides, without_settings
from stoker.core.errors import EXIT_FINDING, EXIT_OK, Interrupted, UsageError, UserError

if TYPE_CHECKING:
    from stoker.config import Config
    from stoker.stage.checking import Verification
    from stoker.stage.copying import Work
    from stoker.stage.payback import Payback
    from stoker.stage.selection import Selection
    from stoker.stage.sources import Source
    from stoker.stage.transfer import StageOptions, Summary

SUBSET = "Part of a data set of images"
MEASURED_FROM = 1_000_000_000
"""Bytes: below it nobody waits long enough to decide, and measuring would take a good part of the copying."""


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker stage s3://bucket/imagenet /nvme/imagenet --classes 100 --train-per-class 500")(
        stage
    )


def stage(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="SRC DST",
            help="Folder, mount or URL (s3:// gs:// az://), and the folder for its copy. With --to: a config and "
            "KEY=VALUE. With --verify alone: the copy. With --hydrate: a path.",
            show_default=False,
        ),
    ],
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="Stage what a config needs into this folder.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.yaml",
            help="With --to: the config that uses the copy. [default: in DIR]",
            show_default=False,
        ),
    ] = None,
    classes: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="This many classes, chosen by --seed.", show_default=False, rich_help_panel=SUBSET
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the choice. [default: 42]", show_default=False, rich_help_panel=SUBSET),
    ] = None,
    train_per_class: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="At most N training images a class.", show_default=False, rich_help_panel=SUBSET
        ),
    ] = None,
    val_per_class: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="At most N validation images a class.", show_default=False, rich_help_panel=SUBSET
        ),
    ] = None,
    class_list: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Classes by name, one a line.", show_default=False, rich_help_panel=SUBSET),
    ] = None,
    limit_rate: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Bytes per second, such as 50MB/s.", show_default=False),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=4096, metavar="N", help="Requests in flight. [default: found while running]", show_default=False
        ),
    ] = None,
    hydrate: Annotated[
        bool,
        typer.Option(
            "--hydrate",
            help="Copy nothing: make the file system that PATH is on fetch every file, as FSx for Lustre does lazily.",
        ),
    ] = False,
    no_measure: Annotated[
        bool, typer.Option("--no-measure", help="Start at once, without measuring whether the copy pays off.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read the whole copy again and compare every file with its hash.")
    ] = False,
    json: JsonOption = False,
) -> int:
    """Copy a data set, or the part of it that a config needs, to a local disk.

    Running it again copies only what is missing or has changed at the source."""
    from stoker.core.console import print_json, print_result

    if hydrate:
        if to is not None or verify or classes is not None or class_list is not None or len(words) != 1:
            raise UsageError(
                "usage", "--hydrate takes one path, and copies nothing", hint="stoker stage --hydrate PATH"
            )
        return _hydrate(words[0], _options(limit_rate, concurrency), json=json)
    if verify and to is None and len(words) == 1:
        result = _verify(Path(words[0]))
        print_json(result.as_dict()) if json else print_result(_words_of(result))
        return EXIT_OK if result.whole else EXIT_FINDING
    choice = {
        "subset_classes": classes,
        "subset_seed": seed,
        "subset_train_per_class": train_per_class,
        "subset_val_per_class": val_per_class,
    }
    chosen = [f"{key}={value}" for key, value in choice.items() if value is not None]
    names = None if class_list is None else _names_in(class_list)
    if names is not None and classes is not None:
        raise UsageError("usage", "--classes and --class-list both choose the classes", hint="give one of them")
    options = _options(limit_rate, concurrency)
    file: Path | None = None
    config: Config | None = None
    if to is not None:
        from stoker.config.reading import load_for_command

        file, overrides = config_and_overrides(Path(words[0]), words[1:])
        config = load_for_command(file, [*overrides, *chosen]).config
        target = to
    else:
        places, settings = without_settings(words)
        source, target = _two(places)
        if chosen or names is not None or settings:
            from stoker.config import load_config

            config = load_config(None, [f"data_root={source}", *chosen, *settings]).config
    root, selection = _select(source if config is None else config, names)
    summary, payback = _stage(root, target, selection, options, measure=not no_measure)
    document: dict[str, Any] = summary.as_dict() | {"break_even": None if payback is None else payback.as_dict()}
    lines = [_words_of(summary)]
    code = EXIT_OK if summary.complete else EXIT_FINDING
    if file is not None and config is not None and summary.complete:
        from stoker.stage.needs import write_config_of_copy

        written = write_config_of_copy(file, config, [*words[1:], *chosen], summary.target, output)
        document["config"] = str(written)
        lines.append(f"the config that uses it: {written}\nnext: stoker train {written}")
    if verify:
        result = _verify(Path(summary.target))
        document["verification"] = result.as_dict()
        lines.append(_words_of(result))
        code = code if result.whole else EXIT_FINDING
    print_json(document) if json else print_result("\n".join(lines))
    return code


def _two(words: list[str]) -> tuple[str, Path]:
    if len(words) != 2:
        raise UsageError(
            "usage",
            f"expected a source and a target, got {len(words)}: {' '.join(words)}",
            hint="stoker stage SRC DST, or stoker stage CONFIG --to DIR",
        )
    source, target = words
    if "://" in target:
        raise UsageError("usage", f"the target {target} is a URL", hint="DST is a folder of this machine")
    if source.endswith((".yaml", ".yml")) and os.path.isfile(source):  # noqa: PTH113
        raise UsageError("usage", f"{source} is a config", hint=f"stoker stage {source} --to {target}")
    return source, Path(target)


def _options(limit_rate: str | None, concurrency: int | None) -> StageOptions:
    from stoker.stage.transfer import StageOptions

    if limit_rate is None:
        return StageOptions(None, concurrency)
    from stoker.config.fields import parse_bytes

    try:
        rate = parse_bytes(limit_rate.strip().removesuffix("/s"))
    except ValueError as error:
        raise UsageError("usage", f"--limit-rate: {error}", hint="--limit-rate 50MB/s") from None
    if rate <= 0:
        raise UsageError("usage", f"--limit-rate {limit_rate} would copy nothing", hint="--limit-rate 50MB/s")
    return StageOptions(rate, concurrency)


def _names_in(path: Path) -> tuple[str, ...]:
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("list-not-readable", f"{path}: {error}", hint="a text file with a class on each line") from None
    names = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not names:
        raise UserError("list-empty", f"{path} names no class", hint="a text file with a class on each line")
    return names


def _select(source: str | Config, names: tuple[str, ...] | None) -> tuple[str, Selection]:
    from stoker.core.console import progress_bar, say
    from stoker.stage.selection import everything

    if isinstance(source, str):
        return source, everything()
    from stoker.stage.needs import select_for  # imports torch, which copying does not need

    with progress_bar("listing", unit="folders") as advance:
        return select_for(source, names, advance, lambda line: say(f"note: {line}"))


def _stage(
    root: str, target: Path, selection: Selection, options: StageOptions, *, measure: bool
) -> tuple[Summary, Payback | None]:
    from stoker.core.console import progress_bar, say, transfer_bar
    from stoker.core.units import count, size_text
    from stoker.io.local_copy import LocalCopy
    from stoker.io.stores import is_url
    from stoker.io.subset_file import keep_subset
    from stoker.stage.copying import check_apart, check_room, copy_all, find_work
    from stoker.stage.sources import open_source

    source = open_source(root)
    if not is_url(source.url):
        check_apart(source.url, str(target))
    copy = LocalCopy(target, source.url)
    try:
        with progress_bar("listing", unit="files") as advance:
            work = find_work(source, copy, selection, advance)
        check_room(work, copy.folder)
        keep_subset(copy, selection.record)
        say(
            f"staging {count(len(work.files), 'file')}, {size_text(work.bytes)} from {source.url} to {copy.folder} "
            f"({count(work.present_files, 'file')} already there)"
        )
        payback = _payback(source, work, copy.folder) if measure and work.bytes >= MEASURED_FROM else None
        with transfer_bar("staging") as transfer:

            def show(summary: Summary, of_bytes: int) -> None:
                transfer(summary.copied_files, len(work.files), summary.copied_bytes, of_bytes)

            return copy_all(source, copy, selection, work, options, show), payback
    except KeyboardInterrupt:
        raise Interrupted(
            "interrupted",
            "stopped by Ctrl-C",
            why="what was copied so far is whole and stays",
            hint="run the same command again: it continues",
        ) from None
    finally:
        copy.close()


def _payback(source: Source, work: Work, folder: str) -> Payback | None:
    # Imported here: it needs numpy, which copying does without.
    from stoker.core.console import say
    from stoker.stage.payback import measure_payback, payback_text

    payback = measure_payback(source, work.files, folder)
    if payback is not None:
        say(payback_text(payback))
    return payback


def _hydrate(path: str, options: StageOptions, *, json: bool) -> int:
    from stoker.core.console import print_json, print_result, progress_bar, say, transfer_bar
    from stoker.stage.hydrate import READERS, hydrate, list_files
    from stoker.stage.text import hydrated_text

    with progress_bar("listing", unit="files") as advance:
        files = list_files(path, advance)
    with transfer_bar("fetching") as transfer:
        try:
            done = hydrate(
                path,
                files,
                limit_bytes_per_second=options.limit_rate,
                readers=options.concurrency or READERS,
                progress=transfer,
                say=say,
            )
        except KeyboardInterrupt:
            raise Interrupted(
                "interrupted",
                "stopped by Ctrl-C",
                why="what was fetched is there, and restores that were asked for go on",
                hint="run the same command again: it continues",
            ) from None
    print_json(done.as_dict()) if json else print_result(hydrated_text(done))
    return EXIT_FINDING if done.failed else EXIT_OK


def _verify(folder: Path) -> Verification:
    from stoker.core.console import progress_bar
    from stoker.io.local_copy import open_copy
    from stoker.stage.checking import verify_copy

    with closing(open_copy(folder)) as copy, progress_bar("verifying", unit="files") as advance:
        return verify_copy(copy, advance)


def _words_of(result: Summary | Verification) -> str:
    from stoker.stage.text import summary_text, verification_text
    from stoker.stage.transfer import Summary

    return summary_text(result) if isinstance(result, Summary) else verification_text(result)
