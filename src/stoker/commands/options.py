"""Arguments and options that several commands share."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from stoker.core.errors import UsageError

if TYPE_CHECKING:
    from stoker.tasks.base import Task

Parsed = TypeVar("Parsed")

Argument = partial(typer.Argument, show_default=False)
Option = partial(typer.Option, show_default=False)
"""Their help says what the default means, where that is not obvious."""

# The config reader has a better error for files that cannot be read.
CONFIG = Argument(metavar="CONFIG", readable=False, help="Config file, e.g. configs/demo.yaml.")
ConfigArgument = Annotated[Path, CONFIG]
OverridesArgument = Annotated[
    list[str] | None, Argument(metavar="KEY=VALUE", help="Override keys of the config: lr=0.1 epochs=2.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout, and nothing else.")]
CheckpointArgument = Annotated[
    Path,
    # The checkpoint reader has a better error for files that cannot be read.
    Argument(
        metavar="CKPT",
        readable=False,
        help="Checkpoint or run folder of `stoker train`, or a file of Lightning, timm, torchvision or safetensors.",
    ),
]
RawOption = Annotated[
    bool, typer.Option("--raw", help="Use the raw weights, even if the checkpoint also has their moving average (EMA).")
]
FromOption = Annotated[
    Path | None,
    Option(
        "--from",
        metavar="CKPT",
        readable=False,
        help="Begin with the weights of this checkpoint: ours, a run folder, or one of Lightning, timm or torchvision.",
    ),
]
AverageOption = Annotated[
    bool | None,
    Option("--ema/--raw", help="With --from: the moving average, or the raw weights. [default: EMA if there]"),
]


class WithScript(TyperCommand):
    """A command with everything after `--` in `context.obj`: the command line of a script, unchanged."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            place = args.index("--")
            args, ctx.obj = args[:place], args[place + 1 :]
        return super().parse_args(ctx, args)


_KEY_VALUE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


def config_and_overrides(config: Path, overrides: Sequence[str] | None) -> tuple[Path, list[str]]:
    """The config file and its KEY=VALUE, in whatever order they were typed; the parser takes the first for CONFIG."""
    words = [str(config), *(overrides or ())]
    file = next((word for word in words if not _KEY_VALUE.match(word) or Path(word).is_file()), None)
    if file is None:
        raise UsageError("no-config", f"{' '.join(words)}: no config file given", hint="ls configs/*.yaml")
    words.remove(file)
    return Path(file), words


def without_settings(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files and folders, and the KEY=VALUE among them."""
    settings = [word for word in words if _KEY_VALUE.match(word) and not Path(word).exists()]
    return [word for word in words if word not in settings], settings


def flags_for(
    task: Task, context: typer.Context, flags: dict[str, Any], subject: str, error: str = "usage"
) -> dict[str, Any]:
    """The flags that this task takes; raises UsageError if one was typed that only another task takes.

    `subject` completes '... images': 'FOLDER has'."""
    from stoker.tasks.base import built_in_tasks

    spelled = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    for other in built_in_tasks():
        strange = [name for name in flags if other is not task and name in other.flags[str(context.info_name)]]
        typed = [
            spelled[name]
            for name in strange
            if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"
        ]
        if typed:
            seen = f"{', '.join(typed)} is for {other.items}; {subject} {task.items}"
            raise UsageError(error, seen, hint="leave it out")
        flags = {name: value for name, value in flags.items() if name not in strange}
    return flags


def refuse_given(options: Mapping[str, object], why: str, hint: str) -> None:
    """Raises UsageError for the first of these options that was given; `why` follows its name."""
    given = next((name for name, value in options.items() if value), None)
    if given is not None:
        raise UsageError("usage", f"{given} {why}", hint=hint)


def check_picture(option: str, path: Path, example: str) -> None:
    """Before the work whose result is drawn there, not after."""
    if path.suffix.lower() != ".png" or not path.absolute().parent.is_dir():
        seen = f"{option} {path} is not a .png file in an existing folder"
        raise UsageError("usage", seen, hint=f"{option} {example}")


def parsed(option: str, text: str, parse: Callable[[str], Parsed], example: str) -> Parsed:
    """The value of an option that has a unit; raises UsageError if it has none, or one that we do not know."""
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError("usage", f"{option}: {error}", hint=f"{option} {example}") from None


def own_command() -> list[str]:
    """How other ranks start what this process does: `stoker` itself, or the script that calls it."""
    is_program = Path(sys.argv[0]).name in ("stoker", "__main__.py")
    return ["-m", "stoker", *sys.argv[1:]] if is_program else sys.argv


def let_threads_sleep() -> None:
    """Makes OpenMP threads sleep while they wait, unless the user chose otherwise; call it before importing torch.

    By default they spin, and take cores away from the loader: on two shared cores, the same training took 142 s with
    spinning threads and 20 s with sleeping ones.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
