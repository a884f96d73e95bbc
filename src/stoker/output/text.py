"""Text for people: results on stdout, everything else on stderr; reads well without colour."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from stoker.errors import ConfigError, StokerError


def print_result(text: str) -> None:
    """What the user asked for."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """What the user should know besides the result."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def say_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        say(f"warning: {warning}")


def say_notes(notes: Iterable[str]) -> None:
    for note in notes:
        say(f"note: {note}")


def say_error(error: StokerError) -> None:
    """What we saw, why it matters, what to type next."""
    say(f"error: {error.name}")
    for part in (error.seen, error.why):
        if part:
            say(textwrap.indent(part, "  "))
    if isinstance(error, ConfigError) and error.problems:
        say("")
        for problem in error.problems:
            where = f"{problem.where}\n      " if problem.where else ""
            hint = f"; {problem.hint}" if problem.hint else ""
            say(f"  - {where}{problem.message}{hint}")
    if error.hint:
        say(f"\nhint: {error.hint}")


def say_bug(error: BaseException, log: Path | None) -> None:
    """Something broke that should not: one line, and where the details are."""
    say(f"error: stoker-bug\n  {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    say(f"\nhint: the details are in {log}" if log else "\nhint: no place to write a log; the details are above")


def format_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns aligned with spaces; nothing drawn around them, so that it pastes well."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
