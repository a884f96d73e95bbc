"""The steps of `stoker stage`, with what is under way on the terminal: what to copy, the copy, its check, hydrating."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.core.console import progress_bar, say, transfer_bar
from stoker.core.errors import ConfigError, Interrupted, UserError
from stoker.core.units import count, size_text
from stoker.io.local_copy import LocalCopy, keep_subset, open_copy
from stoker.io.stores import is_url
from stoker.stage.copying import (
    Verification,
    check_apart,
    check_room,
    copy_all,
    find_work,
    measure_payback,
    verify_copy,
)
from stoker.stage.hydrate import Hydrated, HydrateOptions, hydrate, list_files
from stoker.stage.sources import open_source
from stoker.stage.transfer import StageOptions, Summary
from stoker.tasks.base import Selection, task_for

if TYPE_CHECKING:
    from stoker.config import Config
    from stoker.plan.break_even import Payback

MEASURED_FROM = 1_000_000_000
"""Bytes: below it nobody waits long enough to decide, and measuring would take a good part of the copying."""


def classes_in(path: Path) -> tuple[str, ...]:
    """The classes that a file names, one a line."""
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("list-not-readable", f"{path}: {error}", hint="a text file with a class on each line") from None
    names = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not names:
        raise UserError("list-empty", f"{path} names no class", hint="a text file with a class on each line")
    return names


def select(source: str | Config, classes: tuple[str, ...] | None) -> tuple[str, Selection]:
    """Where the data is, and the part of it that a config needs; without a config, all of it."""
    if isinstance(source, str):
        return source, Selection()
    if source.data_root is None:
        raise ConfigError("data_root is not set", name="no-data", hint="data_root=/folder/with/train/and/val")
    with progress_bar("listing", unit="folders") as advance:
        return task_for(source).needed_files(source, classes, advance, lambda line: say(f"note: {line}"))


def stage(
    root: str, target: Path, selection: Selection, options: StageOptions, *, measure: bool
) -> tuple[Summary, Payback | None]:
    """Copies what is missing; returns what was copied and, if it was measured, whether the copy pays off."""
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
            from stoker.plan.break_even import payback_text  # numpy takes a twentieth of a second to import

            say(payback_text(payback))
        with transfer_bar("staging") as transfer:

            def show(summary: Summary, of_bytes: int) -> None:
                transfer(summary.copied_files, len(work.files), summary.copied_bytes, of_bytes)

            return copy_all(source, copy, selection, work, options, show), payback


def hydrate_all(path: str, options: StageOptions) -> Hydrated:
    """Makes the file system fetch every file below the path."""
    how = HydrateOptions(options.limit_rate, readers=options.concurrency or HydrateOptions.readers)
    with progress_bar("listing", unit="files") as advance:
        files = list_files(path, advance)
    stays = "what was fetched is there, and restores that were asked for go on"
    with transfer_bar("fetching") as transfer, _interruptible(stays):
        return hydrate(path, files, how, progress=transfer, say=say)


def verify(folder: Path) -> Verification:
    """Reads the whole copy again."""
    with closing(open_copy(folder)) as copy, progress_bar("verifying", unit="files") as advance:
        return verify_copy(copy, advance)


@contextmanager
def _interruptible(stays: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        hint = "run the same command again: it continues"
        raise Interrupted("interrupted", "stopped by Ctrl-C", why=stays, hint=hint) from None
