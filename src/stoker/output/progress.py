"""How far a long piece of work is, on stderr: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from stoker.output.text import say

Advance = Callable[[int, int | None], None]
"""advance(done, total): how much is done of how much; None where nobody knows how much."""

LINE_EVERY_S = 5.0


@contextmanager
def progress_bar(what: str, total: int | None = None, *, unit: str = "") -> Iterator[Advance]:
    """A function to call with (done, total) as often as one likes."""
    if sys.stderr.isatty():
        with _bar(what, total, unit) as advance:
            yield advance
    else:
        yield _line_writer(what, unit)


@contextmanager
def _bar(what: str, total: int | None, unit: str) -> Iterator[Advance]:
    # rich takes longer to import than many commands run.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Task as RichTask
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: RichTask) -> Text:
            return Text(_rate(task.finished_speed or task.speed, unit))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), Rate(), TimeRemainingColumn())
    # It goes when the work is done: the result says the rest.
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)

        def advance(done: int, of: int | None) -> None:
            progress.update(task, completed=done, total=of)

        yield advance


def _line_writer(what: str, unit: str) -> Advance:
    # The rate is that since the line before: what was done already when we began takes no time.
    last_s, last_done = time.monotonic(), 0

    def advance(done: int, total: int | None) -> None:
        nonlocal last_s, last_done
        now_s = time.monotonic()
        if now_s - last_s < LINE_EVERY_S:
            return
        of = f" of {total:,} ({done / total:.0%})" if total else ""
        say(f"{what}: {done:,}{of} {_rate((done - last_done) / (now_s - last_s), unit)}".rstrip())
        last_s, last_done = now_s, done

    return advance


def _rate(per_second: float | None, unit: str) -> str:
    if per_second is None or per_second <= 0:
        return ""
    number = f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.1f}"
    return f"{number} {unit}/s" if unit else f"{number}/s"
