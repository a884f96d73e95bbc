"""Arguments in, exit code out. The one place where errors end.

`stoker --help` is answered from the table below without importing typer, which alone takes ten times
as long as Python itself; a command's module is imported when the command is called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING

from stoker.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_OK, Interrupted, StokerError, UsageError, nearest
from stoker.version import __version__

if TYPE_CHECKING:
    import typer

COMPLETION_VARIABLE = "_STOKER_COMPLETE"


@dataclass(frozen=True)
class CommandEntry:
    """A command of the table: the module that holds it, and one line about it."""

    module: str
    summary: str


COMMANDS = {
    "demo": CommandEntry("stoker.commands.demo", "Train on handwritten digits that come along: a minute on a CPU."),
    "train": CommandEntry("stoker.commands.train", "Train what a config describes, or go on where it stopped."),
    "eval": CommandEntry("stoker.commands.eval", "Tell how good a checkpoint is, class by class."),
    "predict": CommandEntry("stoker.commands.predict", "Tell what a checkpoint takes images for."),
    "export": CommandEntry("stoker.commands.export", "Write a checkpoint's model for other programs, and check it."),
    "lr-find": CommandEntry("stoker.commands.lr_find", "Find a learning rate by a range test; nothing is kept."),
    "plan": CommandEntry(
        "stoker.commands.plan", "Tell what fits, how long it takes and what it costs, before it runs."
    ),
    "report": CommandEntry(
        "stoker.commands.report", "Write report.html: where a run's time went; two runs side by side."
    ),
    "watch": CommandEntry("stoker.commands.watch", "Show a run while it goes on, in the terminal or the browser."),
    "doctor": CommandEntry("stoker.commands.doctor", "Tell where every second goes, in a run, a config or any script."),
    "bench": CommandEntry("stoker.commands.bench", "Measure how fast this host makes batches, and what limits it."),
    "config": CommandEntry("stoker.commands.config", "Show a resolved config, the reference of its keys, a schema."),
    "pack": CommandEntry("stoker.commands.pack", "Pack images into tar shards with an index, smaller if you like."),
}


def run() -> None:
    """The `stoker` program."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code; nothing that happens in it leaves as a traceback."""
    try:
        return _dispatch(list(arguments))
    except StokerError as error:
        return _end_with(error, arguments)
    except KeyboardInterrupt:
        return _end_with(Interrupted("interrupted", "stopped by Ctrl-C"), arguments)
    except BrokenPipeError:
        # The reader went away (`stoker config keys | head`): nothing is wrong, and nobody listens.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except Exception as error:
        return _end_with_bug(error)


def _dispatch(arguments: list[str]) -> int:
    completing = COMPLETION_VARIABLE in os.environ
    first = arguments[0] if arguments else "--help"
    if not completing and first in ("--help", "-h", "help") and len(arguments) <= 1:
        _print(_help_text())
        return EXIT_OK
    if not completing and first == "--version":
        _print(f"stoker {__version__}")
        return EXIT_OK
    if completing or first in ("--install-completion", "--show-completion"):
        return _run_typer(arguments, list(COMMANDS))
    if first not in COMMANDS:
        what = "option" if first.startswith("-") else "command"
        similar = nearest(first, COMMANDS)
        hint = f"stoker {similar} --help" if similar else "stoker --help"
        raise UsageError(f"unknown-{what}", f"{first!r} is not a {what} of stoker", hint=hint)
    return _run_typer(arguments, [first])


def _run_typer(arguments: list[str], names: list[str]) -> int:
    import typer

    command = typer.main.get_command(_build_app(names))
    try:
        # Exit codes are what commands return; without standalone mode typer leaves errors to us.
        code = command.main(args=arguments, prog_name="stoker", standalone_mode=False)
    except typer.TyperException as error:
        _raise_usage_error(error, arguments)
    except typer.Abort:
        raise Interrupted("interrupted", "stopped by Ctrl-C") from None
    if code == EXIT_INTERRUPTED:  # typer turns a KeyboardInterrupt into this code
        raise Interrupted("interrupted", "stopped by Ctrl-C")
    return int(code or EXIT_OK)


def _build_app(names: Sequence[str]) -> typer.Typer:
    import typer

    # Plain help: it reads well everywhere, and rich would double the time of a `--help`.
    app = typer.Typer(help=__doc__, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # makes it a group even where it has one command
    for name in names:
        import_module(COMMANDS[name].module).register(app)
    return app


def _raise_usage_error(error: typer.TyperException, arguments: Sequence[str]) -> None:
    message = error.format_message()
    if not message or type(error).__name__ == "NoArgsIsHelpError":
        _print(message)
        raise UsageError("no-command", "a command is missing", hint="one of those above") from None
    named = [word for word in arguments[:2] if not word.startswith("-")]
    hint = " ".join(["stoker", *named[:1], "--help"])
    raise UsageError("usage", message.rstrip("."), hint=hint) from None


def _end_with(error: StokerError, arguments: Sequence[str]) -> int:
    from stoker.console import print_json_error, say, say_error

    rank = os.environ.get("RANK", "0")
    if rank != "0":
        # The first rank tells it at length; a config's mistake is the same on all of them.
        say(f"rank {rank}: {error.name}: {error.seen}")
        return error.exit_code
    if "--json" in arguments:
        print_json_error(error)
    say_error(error)
    return error.exit_code


def _end_with_bug(error: Exception) -> int:
    from stoker.console import say, say_bug
    from stoker.run.environment import write_crash_log

    log = write_crash_log(error)
    if log is None:
        import traceback

        say("".join(traceback.format_exception(error)))
    say_bug(error, log)
    return EXIT_BUG


def _help_text() -> str:
    width = max(len(name) for name in COMMANDS)
    commands = "\n".join(f"  {name.ljust(width)}  {entry.summary}" for name, entry in COMMANDS.items())
    return f"""Usage: stoker COMMAND [ARGUMENTS]...

Trains vision models without starving the accelerator.

Commands:
{commands}

Options:
  --version             Print the version.
  --install-completion  Make the shell complete stoker's commands and options.
  --show-completion     Print the script that does so.
  --help                This text; `stoker COMMAND --help` says more about a command.

Example: stoker config show configs/demo.yaml"""


def _print(text: str) -> None:
    from stoker.console import print_result

    print_result(text)
