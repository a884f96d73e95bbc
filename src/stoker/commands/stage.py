"""`stoker stage`: brings the data, or the part that a config needs, to a local disk."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stoker.commands.options import Argument, JsonOption, Option, config_and_overrides, parsed, without_settings
from stoker.core.errors import UsageError

if TYPE_CHECKING:
    from stoker.config import Config
    from stoker.stage.transfer import StageOptions

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
    from stoker.stage import staging

    if hydrate:
        if to is not None or verify or classes is not None or class_list is not None or len(words) != 1:
            raise UsageError(
                "usage", "--hydrate takes one path, and copies nothing", hint="stoker stage --hydrate PATH"
            )
        from stoker.stage.hydrate import hydrated_text

        done = staging.hydrate_all(words[0], _options(limit_rate, concurrency))
        return print_answer(Answer(hydrated_text(done), done.as_dict(), not done.failed), as_json=json)

    from stoker.stage.copying import verification_text
    from stoker.stage.transfer import summary_text

    if verify and to is None and len(words) == 1:
        result = staging.verify(Path(words[0]))
        return print_answer(Answer(verification_text(result), result.as_dict(), result.whole), as_json=json)
    choice = {
        "subset_classes": classes, "subset_seed": seed, "subset_train_per_class": train_per_class,
        "subset_val_per_class": val_per_class,
    }  # fmt: skip
    chosen = [f"{key}={value}" for key, value in choice.items() if value is not None]
    names = None if class_list is None else staging.classes_in(class_list)
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
    root, selection = staging.select(source if config is None else config, names)
    summary, payback = staging.stage(root, target, selection, options, measure=not no_measure)
    document: dict[str, Any] = summary.as_dict() | {"break_even": None if payback is None else payback.as_dict()}
    lines, complete = [summary_text(summary)], summary.complete
    if file is not None and config is not None and complete:
        from stoker.stage.copying import write_config_of_copy

        written = write_config_of_copy(file, config, [*words[1:], *chosen], summary.target, output)
        document["config"] = str(written)
        lines.append(f"the config that uses it: {written}\nnext: stoker train {written}")
    if verify:
        result = staging.verify(Path(summary.target))
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
