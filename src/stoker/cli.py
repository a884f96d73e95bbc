"""The command line: arguments in, exit code out; the one place that handles errors.

`stoker --help` is answered from the table below, because importing typer takes ten times as long as starting Python. A
command's module is imported when the command is called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

from stoker import __version__
from stoker.core.errors import (
    EXIT_BUG,
    EXIT_INTERRUPTED,
    EXIT_OK,
    Interrupted,
    StokerError,
    UsageError,
    as_out_of_memory,
    nearest,
    refuse_few_addresses,
)
from stoker.core.signals import Notice, listening_from_the_start

if TYPE_CHECKING:
    import typer
    from typer.core import TyperGroup

COMPLETION_VARIABLE = "_STOKER_COMPLETE"


COMMANDS = {
    "train": "Train what a config describes, or resume.",
    "doctor": "Find out what slows down a config, a run or any PyTorch script.",
    "tune": "Find the settings that train fastest, one measured change at a time.",
    "verify": "Check a config, its data, labels, model and machine before a run starts.",
    "plan": "Estimate memory, time and cost before anything runs.",
    "preview": "Write a picture of the samples that the network gets, with their classes.",
    "report": "Write report.html: where a run's time went, or two runs side by side.",
    "watch": "Follow a run in the terminal or the browser.",
    "lr-find": "Find a learning rate with a range test.",
    "eval": "Evaluate a checkpoint, class by class or volume by volume.",
    "predict": "Classify images or segment volumes with a checkpoint.",
    "export": "Export a checkpoint's model for other programs, and check the result.",
    "stage": "Copy the data, or the part that a config needs, to a local disk; verified, and resumable.",
    "pack": "Pack images into tar shards, or volumes into blocks, for fast reading.",
    "bench": "Measure how fast this host makes batches, or how fast storage is, and what that feeds.",
    "config": "Show a resolved config or the key reference; import another program's config.",
    "demo": "Train a small network on handwritten digits or a made-up volume, in minutes on a CPU.",
}
"""Every command, with its line of help. `lr-find` is in stoker/commands/lr_find.py; typer gets the line from here."""


NOW_KEYS = {
    "--set": "KEY=VALUE", "--gpus": "devices=8", "--nodes": "num_nodes=2", "--patch": "patch_size=[72,136,136]",
    "--max-bad-fraction": "max_bad_fraction=0.01", "--tolerance": "surface_tolerance=2", "--ignore-label":
    "ignore_label=2", "--overlap": "predict_overlap=0.5", "--flips": "predict_flips=zyx", "--batch": "val_batch_size=4",
    "--threshold": "predict_threshold=0.5", "--post": "predict_postprocess=remove_small=100,fill_holes",
}  # fmt: skip
"""Options of earlier versions, and the config key to type instead."""


WITHOUT_TORCH = ("config", "report", "watch")


def run() -> None:
    """The `stoker` program."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; users never see a traceback."""
    try:
        # Before anything is imported that takes time.
        with listening_from_the_start():
            return _run(arguments)
    except Notice as notice:  # which had been waiting for somebody to listen
        return _end_with(notice.as_error(), arguments)


def _run(arguments: Sequence[str]) -> int:
    try:
        return _dispatch(list(arguments))
    except Notice as notice:
        return _end_with(notice.as_error(), arguments)
    except StokerError as error:
        return _end_with(error, arguments)
    except KeyboardInterrupt:
        return _end_with(Interrupted("interrupted", "stopped by Ctrl-C"), arguments)
    except BrokenPipeError:
        # The reader is gone (`stoker config keys | head`), which is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        no_memory = as_out_of_memory(error)
        return _end_with_bug(error) if no_memory is None else _end_with(no_memory, arguments)


def _dispatch(arguments: list[str]) -> int:
    completing = COMPLETION_VARIABLE in os.environ
    first = arguments[0] if arguments else "--help"
    if not completing and first in ("--help", "-h", "help") and len(arguments) <= 1:
        _print(_help_text())
        return EXIT_OK
    if not completing and "--version" in arguments[:2] and set(arguments) <= {"--version", "--json"}:
        _print_version(json="--json" in arguments)
        return EXIT_OK
    if completing or first in ("--install-completion", "--show-completion"):
        return _run_typer(arguments, list(COMMANDS))
    if first not in COMMANDS:
        what, article = ("option", "an") if first.startswith("-") else ("command", "a")
        similar = nearest(first, COMMANDS)
        hint = f"stoker {similar} --help" if similar else "stoker --help"
        raise UsageError(f"unknown-{what}", f"{first!r} is not {article} {what} of stoker", hint=hint)
    if first not in WITHOUT_TORCH and "--help" not in arguments:
        refuse_few_addresses()
    return _run_typer(arguments, [first])


def _run_typer(arguments: list[str], names: list[str]) -> int:
    import typer

    command = build_parser(names)
    try:
        # Commands return their exit code; without standalone mode, typer leaves errors to us.
        code = command.main(args=arguments, prog_name="stoker", standalone_mode=False)
    except typer.TyperException as error:
        _raise_usage_error(error, arguments)
    except typer.Abort as abort:
        # typer turns any EOFError into this, even one that has nothing to do with a question at the terminal.
        if isinstance(abort.__cause__, EOFError):
            raise abort.__cause__ from None
        raise Interrupted("interrupted", "stopped by Ctrl-C") from None
    if code == EXIT_INTERRUPTED:  # typer turns a KeyboardInterrupt into this code
        raise Interrupted("interrupted", "stopped by Ctrl-C")
    return int(code or EXIT_OK)


def build_parser(names: Sequence[str]) -> TyperGroup:
    """The parser of these commands, which imports their modules."""
    import typer

    # Plain help reads well everywhere; with rich, `--help` would take twice as long.
    app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # makes it a group even if it has only one command
    for name in names:
        import_module(f"stoker.commands.{name.replace('-', '_')}").register(app)
    group = cast("TyperGroup", typer.main.get_command(app))  # a group, because it has a callback
    for name in names:
        group.commands[name].short_help = COMMANDS[name]
    return group


def _raise_usage_error(error: typer.TyperException, arguments: Sequence[str]) -> None:
    message = error.format_message()
    if not message or type(error).__name__ == "NoArgsIsHelpError":
        _print(message)
        raise UsageError("no-command", "a command is missing", hint="choose one of the commands above") from None
    named = [word for word in arguments[:2] if not word.startswith("-")]
    hint = NOW_KEYS.get(getattr(error, "option_name", ""), " ".join(["stoker", *named[:1], "--help"]))
    raise UsageError("usage", message.rstrip("."), hint=hint) from None


def _end_with(error: StokerError, arguments: Sequence[str]) -> int:
    from stoker.core.console import print_json_error, say, say_error

    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # The first rank prints it in full; a mistake in a config is the same on all ranks.
        say(f"rank {rank}: {error.name}: {error.seen}")
        return error.exit_code
    if "--json" in arguments:
        print_json_error(error)
    say_error(error)
    return error.exit_code


def _end_with_bug(error: Exception) -> int:
    from stoker.core.console import say, say_bug
    from stoker.run.environment import write_crash_log

    log = write_crash_log(error)
    if log is None:
        import traceback

        say("".join(traceback.format_exception(error)))
    say_bug(error, log)
    return EXIT_BUG


def _help_text() -> str:
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(f"  {name.ljust(width)}  {summary}" for name, summary in COMMANDS.items())
    return f"""Usage: stoker COMMAND [ARGUMENTS]...

Trains vision models without starving the accelerator.

Commands:
{commands}

Options:
  --version             Print the version.
  --install-completion  Install completion for your shell.
  --show-completion     Print the completion script.
  --help                Show this text; `stoker COMMAND --help` describes a command.

Example: stoker doctor -- python train.py"""


def _print_version(*, json: bool) -> None:
    from stoker.core.console import print_json

    if json:
        print_json({"version": __version__})
    else:
        _print(f"stoker {__version__}")


def _print(text: str) -> None:
    from stoker.core.console import print_result

    print_result(text)
