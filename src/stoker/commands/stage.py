"""`stoker stage`: brings the data, or the part that a config needs, to a local disk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.commands.options import Argument, JsonOption, Option, config_and_overrides, parsed, without_settings
from stoker.core.errors import Interrupted, UsageError, UserError

if TYPE_CHECKING:
    from stoker.config import Config
    from stoker.plan.break_even import Payback
    from stoker.stage.copying import Verification
    from stoker.stage.transfer import StageOptions, Summary
    from stoker.tasks.base import Selection

MEASURED_FROM = 1_000_000_000
"""Bytes: below it nobody waits long enough to decide, and measuring would take a good part of the copying."""

ImagesOption = partial(Option, rich_help_panel="Part of a data set of images")


def register(app: typer.Typer) -> None:
    app.command(epilog="Example: stoker stage s3://bucket/imagenet /nvme/imagenet --classes 100 --train-per-class 500")(
        stage
    )


def stage(
    words: Annotated[
        list[str],
        Argument(
            metavar="SRC DST",
            help="Folder, mount or URL (s3:// gs:// az://), and the folder for its copy. With --to: a config and "
            "KEY=VALUE. With --verify alone: the copy. With --hydrate: a path.",
        ),
    ],
    to: Annotated[
        Path | None, Option("--to", metavar="DIR", help="Stage what a config needs into this folder.")
    ] = None,
    output: Annotated[
        Path | None,
        Option(
            "--output", "-o", metavar="FILE.yaml", help="With --to: the config that uses the copy. [default: in DIR]"
        ),
    ] = None,
    classes: Annotated[
        int | None, ImagesOption(min=1, metavar="N", help="This many classes, chosen by --seed.")
    ] = None,
    seed: Annotated[int | None, ImagesOption(help="Seed of the choice. [default: 42]")] = None,
    train_per_class: Annotated[
        int | None, ImagesOption(min=1, metavar="N", help="At most N training images a class.")
    ] = None,
    val_per_class: Annotated[
        int | None, ImagesOption(min=1, metavar="N", help="At most N validation images a class.")
    ] = None,
    class_list: Annotated[Path | None, ImagesOption(metavar="FILE", help="Classes by name, one a line.")] = None,
    limit_rate: Annotated[str | None, Option(metavar="RATE", help="Bytes per second, such as 50MB/s.")] = None,
    concurrency: Annotated[
        int | None, Option(min=1, max=4096, metavar="N", help="Requests in flight. [default: found while running]")
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
    from stoker.core.console import Answer, print_answer

    if hydrate:
        if to is not None or verify or classes is not None or class_list is not None or len(words) != 1:
            raise UsageError(
                "usage", "--hydrate takes one path, and copies nothing", hint="stoker stage --hydrate PATH"
            )
        return _hydrate(words[0], _options(limit_rate, concurrency), json=json)

    from stoker.stage.copying import verification_text
    from stoker.stage.transfer import summary_text

    if verify and to is None and len(words) == 1:
        result = _verify(Path(words[0]))
        return print_answer(Answer(verification_text(result), result.as_dict(), result.whole), as_json=json)
    choice = {
        "subset_classes": classes, "subset_seed": seed, "subset_train_per_class": train_per_class,
        "subset_val_per_class": val_per_class,
    }  # fmt: skip
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
    lines, complete = [summary_text(summary)], summary.complete
    if file is not None and config is not None and complete:
        from stoker.stage.copying import write_config_of_copy

        written = write_config_of_copy(file, config, [*words[1:], *chosen], summary.target, output)
        document["config"] = str(written)
        lines.append(f"the config that uses it: {written}\nnext: stoker train {written}")
    if verify:
        result = _verify(Path(summary.target))
        document["verification"] = result.as_dict()
        lines.append(verification_text(result))
        complete = complete and result.whole
    return print_answer(Answer("\n".join(lines), document, complete), as_json=json)


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

    rate = parsed("--limit-rate", limit_rate.strip().removesuffix("/s"), parse_bytes, "50MB/s")
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
    from stoker.core.errors import ConfigError
    from stoker.tasks.base import Selection, task_for

    if isinstance(source, str):
        return source, Selection()
    if source.data_root is None:
        raise ConfigError("data_root is not set", name="no-data", hint="data_root=/folder/with/train/and/val")
    with progress_bar("listing", unit="folders") as advance:
        return task_for(source).needed_files(source, names, advance, lambda line: say(f"note: {line}"))


def _stage(
    root: str, target: Path, selection: Selection, options: StageOptions, *, measure: bool
) -> tuple[Summary, Payback | None]:
    from stoker.core.console import progress_bar, say, transfer_bar
    from stoker.core.units import count, size_text
    from stoker.io.local_copy import LocalCopy, keep_subset
    from stoker.io.stores import is_url
    from stoker.stage.copying import check_apart, check_room, copy_all, find_work, measure_payback
    from stoker.stage.sources import open_source

    source = open_source(root)
    if not is_url(source.url):
        check_apart(source.url, str(target))
    with closing(LocalCopy(target, source.url)) as copy, _interruptible("what was copied so far is whole and stays"):
        with progress_bar("listing", unit="files") as advance:
            work = find_work(source, copy, selection, advance)
        check_room(work, copy.folder)
        keep_subset(copy, selection.record)
        say(
            f"staging {count(len(work.files), 'file')}, {size_text(work.bytes)} from {source.url} to {copy.folder} "
            f"({count(work.present_files, 'file')} already there)"
        )
        payback = None
        if measure and work.bytes >= MEASURED_FROM:
            payback = measure_payback(source, work.files, copy.folder)
        if payback is not None:
            from stoker.plan.break_even import payback_text

            say(payback_text(payback))
        with transfer_bar("staging") as transfer:

            def show(summary: Summary, of_bytes: int) -> None:
                transfer(summary.copied_files, len(work.files), summary.copied_bytes, of_bytes)

            return copy_all(source, copy, selection, work, options, show), payback


def _hydrate(path: str, options: StageOptions, *, json: bool) -> int:
    from stoker.core.console import Answer, print_answer, progress_bar, say, transfer_bar
    from stoker.stage.hydrate import HydrateOptions, hydrate, hydrated_text, list_files

    how = HydrateOptions(options.limit_rate, readers=options.concurrency or HydrateOptions.readers)
    with progress_bar("listing", unit="files") as advance:
        files = list_files(path, advance)
    stays = "what was fetched is there, and restores that were asked for go on"
    with transfer_bar("fetching") as transfer, _interruptible(stays):
        done = hydrate(path, files, how, progress=transfer, say=say)
    return print_answer(Answer(hydrated_text(done), done.as_dict(), not done.failed), as_json=json)


@contextmanager
def _interruptible(stays: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        hint = "run the same command again: it continues"
        raise Interrupted("interrupted", "stopped by Ctrl-C", why=stays, hint=hint) from None


def _verify(folder: Path) -> Verification:
    from stoker.core.console import progress_bar
    from stoker.io.local_copy import open_copy
    from stoker.stage.copying import verify_copy

    with closing(open_copy(folder)) as copy, progress_bar("verifying", unit="files") as advance:
        return verify_copy(copy, advance)
