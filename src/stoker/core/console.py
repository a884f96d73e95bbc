"""The only module that writes to the terminal: results on stdout, everything else on stderr.

Text, tables, JSON documents and progress bars; everything reads well without colour.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.core.errors import EXIT_FINDING, EXIT_OK, ConfigError, StokerError
from stoker.core.finding import Finding
from stoker.core.units import clock, iterations_text, metric_text, number_text, size_text, speedup_text

Say = Callable[[str], None]
"""Takes one line of text for the user."""
Advance = Callable[[int, int | None], None]
"""advance(done, total): progress of long work; total is None if it is not known."""


NAMED_AT_ONCE = 5


def print_result(text: str) -> None:
    """Prints what the user asked for, on stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def say(text: str) -> None:
    """Prints what else the user should know, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def say_warnings(texts: Iterable[str]) -> None:
    for warning in texts:
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
            fix = f"; {problem.fix}" if problem.fix else ""
            say(f"  - {where}{problem.seen}{fix}")
    if error.hint:
        say(f"\nhint: {error.hint}")


def finding_lines(finding: Finding, mark: str = "  - ", width: int | None = None) -> list[str]:
    """What we saw after `mark`; below it, indented alike, the fix and the details. Wrapped if there is a `width`."""
    indent = " " * len(mark)
    gain = "" if finding.speedup is None else f"   {speedup_text(finding.speedup)}"
    parts = [(mark, f"{finding.seen}{gain}")]
    if finding.fix is not None:
        parts.append((indent + ("to check it: " if finding.status == "unknown" else "fix: "), finding.fix))
    lines = []
    for first, text in parts:
        wrap = textwrap.TextWrapper(
            width or sys.maxsize, initial_indent=first, subsequent_indent=" " * len(first),
            break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip
        lines += wrap.wrap(text) or [first.rstrip()]
    return lines + [f"{indent}{line}" for line in finding.details]


def say_bug(error: BaseException, log: Path | None) -> None:
    """A bug: one line, and where to find the details."""
    say(f"error: stoker-bug\n  {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    say(f"\nhint: the details are in {log}" if log else "\nhint: the log could not be written; the details are above")


def format_table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns aligned with spaces, without borders, so that it pastes well."""
    lines = [list(header), *[list(row) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def print_json(document: Any) -> None:
    """Prints one document on stdout; NaN and infinity are not valid JSON, and a bug of ours."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Answer:
    """What a command has found."""

    text: str
    """Empty if there is nothing to print."""
    document: dict[str, Any]
    """The same for `--json`."""
    complete: bool = True
    """Whether everything could be read and written; if not, the exit code is 1."""


def print_answer(answer: Answer, *, as_json: bool) -> int:
    if as_json:
        print_json(answer.document)
    elif answer.text:
        print_result(answer.text)
    return EXIT_OK if answer.complete else EXIT_FINDING


def print_json_error(error: StokerError) -> None:
    print_json({"error": error.as_dict()})


WIDTH = 10
EIGHTHS = " ▏▎▍▌▋▊▉"


def bar_line(
    label: str,
    done: int,
    total: int | None,
    elapsed_s: float,
    per_second: float | None,
    metrics: Mapping[str, Any] | None = None,
    *,
    blocks: bool = True,
) -> str:
    """`Epoch 0:   1%|▏| 33/3336 [00:30<50:00, 1.10it/s, train/loss=6.9, wait=3%]`; None: not known."""
    shown = [f"{short(name)}={metric_text(name, value)}" for name, value in (metrics or {}).items()]
    if not total:
        return f"{label}: {done}it [{', '.join([clock(elapsed_s), iterations_text(per_second), *shown])}]"
    left_s = (total - done) / per_second if per_second else None
    times = f"{clock(elapsed_s)}<{'?' if left_s is None else clock(left_s)}"
    # 100 % only when everything is done.
    percent = 100 if done >= total else min(99, round(100 * done / total))
    details = ", ".join([times, iterations_text(per_second), *shown])
    return f"{label}: {percent:3d}%|{_bar(done / total, blocks)}| {done}/{total} [{details}]"


def short(name: str) -> str:
    """`wait_share` is shown as `wait`, next to a percentage."""
    return name.removesuffix("_share")


def _bar(share: float, blocks: bool) -> str:
    # At least a sliver once something is done; no trailing spaces, to keep the line short.
    if not blocks:
        return "#" * max(int(share * WIDTH), share > 0)
    full, eighths = divmod(max(int(min(share, 1.0) * WIDTH * 8), int(share > 0)), 8)
    return ("█" * full + EIGHTHS[eighths]).rstrip()


LINE_EVERY_S = 5.0


@contextmanager
def progress_bar(what: str, total: int | None = None, *, unit: str = "") -> Iterator[Advance]:
    """Shows progress on stderr: a bar on a terminal, otherwise a line every few seconds."""
    if sys.stderr.isatty():
        # Importing rich takes longer than many commands run.
        from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Task as RichTask
        from rich.text import Text

        class RateColumn(ProgressColumn):
            def render(self, task: RichTask) -> Text:
                return Text(_rate(task.finished_speed or task.speed, unit))

        named = TextColumn("{task.description}")
        with _rich_bar(what, named, BarColumn(), MofNCompleteColumn(), RateColumn(), TimeRemainingColumn()) as update:
            update(total=total)
            yield lambda done, of: update(completed=done, total=of)
        return
    # The rate since the previous line: work that was already done at the start took no time.
    last_s, last_done = time.monotonic(), 0

    def advance(done: int, total: int | None) -> None:
        nonlocal last_s, last_done
        now_s = time.monotonic()
        if now_s - last_s < LINE_EVERY_S:
            return
        of = f" of {total:,} ({done / total:.0%})" if total else ""
        per_second = (done - last_done) / (now_s - last_s)
        left = f", {clock((total - done) / per_second)} left" if total and per_second > 0 else ""
        say(f"{what}: {done:,}{of} {_rate(per_second, unit)}{left}".rstrip())
        last_s, last_done = now_s, done

    yield advance


@contextmanager
def _rich_bar(what: str, *columns: Any) -> Iterator[Callable[..., None]]:
    from rich.console import Console
    from rich.progress import Progress

    # Transient: it disappears when the work is done.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda **values: progress.update(task, **values)


Transfer = Callable[[int, int, int, int], None]
"""transfer(files, of_files, bytes, of_bytes): progress of copying."""


@contextmanager
def transfer_bar(what: str) -> Iterator[Transfer]:
    """Shows the progress of copying on stderr: files, bytes, rate and the time left."""
    began_s = last_s = time.monotonic()
    first: int | None = None

    def text(files: int, of_files: int, done: int, total: int) -> str:
        nonlocal first
        first = done if first is None else first
        elapsed_s = time.monotonic() - began_s
        per_second = (done - first) / elapsed_s if elapsed_s > 0 else 0.0
        left = f", {clock((total - done) / per_second)} left" if per_second > 0 and done < total else ""
        share = f" ({done / total:.0%})" if total else ""
        return (
            f"{what}: {files:,} of {of_files:,} files, {size_text(done)} of {size_text(total)}{share}, "
            f"{size_text(per_second)}/s{left}"
        )

    if sys.stderr.isatty():
        from rich.progress import BarColumn, TextColumn

        with _rich_bar(what, TextColumn("{task.description}"), BarColumn()) as update:
            yield lambda *now: update(description=text(*now), completed=now[2], total=max(1, now[3]))
        return

    def line(*now: int) -> None:
        nonlocal last_s
        words = text(*now)
        if time.monotonic() - last_s >= LINE_EVERY_S:
            last_s = time.monotonic()
            say(words)

    yield line


def _rate(per_second: float | None, unit: str) -> str:
    return f"{number_text(per_second)}{f' {unit}' if unit else ''}/s" if per_second and per_second > 0 else ""


@contextmanager
def silent_libraries() -> Iterator[None]:
    """Hides warnings, and what libraries write to stderr themselves while they are imported; exceptions come through.

    nvImageCodec, which MONAI imports too, complains about every GPU library that it does not find.
    """
    os.environ.setdefault("PYNVIMGCODEC_VERBOSITY", "0")
    disabled = logging.root.manager.disable
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    logging.disable(max(disabled, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def some(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - NAMED_AT_ONCE
    return ", ".join(map(shown, names[:NAMED_AT_ONCE])) + (f" and {more} more" if more > 0 else "")


def shown(name: str) -> str:
    """A name that a terminal can print, whatever its bytes."""
    return name if name.isprintable() else repr(name)
