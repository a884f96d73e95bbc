"""What packs of all kinds of data share: who may write to a folder, the worker processes, and what a search may try.

A pack keeps its records in DST/.pack: a lock, how it was begun, and what every finished part of it holds. A part is
made on its own by one process, so a killed pack loses only what was in flight, and resumes with the rest.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from stoker.core.child import ChildDied, Parent, share_out
from stoker.core.errors import UsageError, UserError
from stoker.core.units import size_text
from stoker.io.stores import is_url
from stoker.run.lease import Lease, LeaseHeld
from stoker.tasks.checks import first_lines

RECORDS = ".pack"
"""Where a pack keeps its records, until and after it is complete."""
SHOWN = 20


@dataclass(frozen=True)
class PackWords:
    """How messages about one kind of pack call things."""

    part: str
    """What one task of a worker makes: 'shard', 'volume'."""
    done: str
    """What is done to it: 'made', 'packed'."""
    smaller: str
    """What would need less of the disk."""


def check_destination(source: str, destination: Path) -> None:
    if ":/" in str(destination):  # Path collapses the two slashes into one
        seen = f"{destination} is a URL; a pack needs a local folder"
        raise UsageError("usage", seen, hint="pack to a folder, then upload it")
    if is_url(source):
        return
    inside, outside = destination.resolve(), Path(source).expanduser().resolve()
    if inside == outside or outside in inside.parents:
        raise UserError(
            "destination-inside-source",
            f"{destination} is inside {source}",
            why="the next listing of the source would find the pack in it",
            hint=f"stoker pack {source} {source.rstrip('/')}-packed",
        )
    if destination.exists() and not destination.is_dir():
        raise UserError("destination-not-writable", f"{destination} is a file", hint="choose another folder")


@contextmanager
def claim_destination(destination: Path) -> Iterator[None]:
    """Creates the destination, and locks it for this process."""
    records = destination / RECORDS
    try:
        records.mkdir(parents=True, exist_ok=True)
        if not os.access(destination, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied", str(destination))
        lease = Lease(records / "lock").acquire()
    except LeaseHeld as error:
        raise UserError(
            "pack-busy",
            f"another process is packing into {destination}",
            why=error.seen,
            hint="wait for it to finish, or choose another folder",
        ) from None
    except OSError as error:
        raise UserError(
            "destination-not-writable",
            f"{destination} cannot be written to: {error.strerror}",
            why="the pack would be written there",
            hint=f"ls -ld {destination} {destination.parent}",
        ) from None
    try:
        yield
    finally:
        lease.release()


def read_about(path: Path) -> dict[str, Any] | None:
    """How a pack was begun, from the first of its records; None if there is no pack."""
    try:
        about = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) else None


def options_of(path: Path) -> dict[str, Any] | None:
    """The options that a pack was begun with; None if there is no pack."""
    options = (read_about(path) or {}).get("options")
    return options if isinstance(options, dict) else None


def spelled(options: Mapping[str, Any]) -> str:
    """Options as a user would type them."""
    given = []
    for name, value in options.items():
        if value is not None and value is not False:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            given.append(f"--{name.replace('_', '-')}" + ("" if value is True else f" {text}"))
    return " ".join(given)


def check_options(
    folder: Path,
    before: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    names: Sequence[str],
    words: PackWords,
    spell: Callable[[Mapping[str, Any]], str] = spelled,
) -> None:
    """Refuses a folder with a pack made with other options, or with files of these names that are not ours."""
    if before is None:
        foreign = next((name for name in names if (folder / name).exists()), None)
        if foreign is not None:
            raise UserError(
                "destination-not-empty",
                f"{folder} contains {foreign}, which stoker pack did not write",
                why="it would be overwritten",
                hint="choose another folder",
            )
    elif before != options:
        raise UserError(
            "pack-options-differ",
            f"{folder} was packed with {spell(before)}; this command has {spell(options)}",
            why=f"a pack cannot mix {words.part}s of both kinds",
            hint="choose another folder; or --fresh, which packs this one again from its source",
        )


def check_space(folder: Path, needed_bytes: float, words: PackWords) -> None:
    """Refuses to begin what the disk cannot hold."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise UserError(
            "disk-too-small",
            f"{folder} has {size_text(free)} free; the {words.part}s need about {size_text(needed_bytes)}",
            why="the disk would be full before the pack is complete",
            hint=f"use another disk, or smaller {words.smaller}",
        )


def make_parts(
    make: Callable[[bytes, Parent], None],
    source: object,
    parts: Sequence[Mapping[str, Any]],
    named: Callable[[int], str],
    words: PackWords,
    *,
    workers: int,
    on_answer: Callable[[dict[str, Any]], None],
    progress: Callable[[int], None],
) -> None:
    """Has the parts made by `make` in worker processes, each of which gets the source, pickled.

    A part has its `number`, and its answer an `error` if it could not be made; `named` is what messages call it.
    `progress` gets the sum of all that the workers have reported.
    """
    made = done = 0

    def kept() -> str:
        return f"{made:,} of {len(parts):,} {words.part}s are"

    def add_report(amount: int) -> None:
        nonlocal done
        done += amount
        progress(done)

    def take_answer(answer: dict[str, Any]) -> None:
        nonlocal made
        if answer.get("error") is not None:
            raise UserError(
                "pack-failed",
                f"{named(answer['number'])} could not be {words.done}: {answer['error']}",
                why=f"{kept()} finished and kept",
                hint="fix the cause, then run the same command again to continue",
            )
        made += 1
        on_answer(answer)

    try:
        share_out(make, pickle.dumps(source), parts, workers=workers, on_message=add_report, on_answer=take_answer)
    except ChildDied as died:
        raise UserError(
            "pack-worker-died",
            f"the process that {words.done} {named(died.task['number'])} {died.how}",
            why=f"the kernel kills processes when memory runs out; {kept()} kept",
            hint="run the same command again to continue, with fewer --workers to need less memory",
        ) from None


def list_bad(bad: Sequence[tuple[str, str]]) -> str:
    """The first of the samples that cannot be packed, a line for each: its name, and the reason."""
    return "\n".join(first_lines([f"{name}: {reason}" for name, reason in bad], SHOWN))


class PackVariants(Protocol):
    """The ways to pack a config's data without changing a sample, for a search that tries them."""

    names: tuple[str, ...]
    """Each of them is also the name of a folder."""
    mapped: frozenset[str]
    """Those that are read as they are, without decoding."""
    timed: str
    """What `trial` measures, in words."""

    def trial(self, folder: Path) -> dict[str, float]:
        """Seconds to read a sample from each of several variants, in a short trial; `folder` is for its files, and is
        removed."""
        ...

    def make(self, name: str, root: Path) -> str:
        """Packs everything into a folder, and describes the result in a few words; raises UserError if a sample would
        have to be left out."""
        ...

    def remove(self, root: Path) -> None:
        """Removes the files of a pack, and nothing else; call it with the folder claimed."""
        ...
