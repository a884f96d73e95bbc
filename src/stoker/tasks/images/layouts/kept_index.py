"""Where an index is kept, so that a million files are listed only once, and how to tell that it is still valid.

<cache>/index/<name>-<hash>/  in the user's cache folder, or below index_dir; the hash is that of the whole place
    listing.json            which index is current, and the state of what it was made from
    <digest>/               an index, never changed afterwards: a run may have it mapped
    lock                    held by the process that lists
    told                    the user knows about the folder that an earlier version left in the data

Never in the data: other programs take every folder there for a class.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stoker.core.console import Say, shown
from stoker.core.errors import UserError
from stoker.core.files import cache_folder, has_whole_seal, sealed, write_text
from stoker.core.redact import redact_text
from stoker.io.stores import is_url
from stoker.tasks.images.layouts.sample_index import IndexUnreadable, SampleIndex, digest_of, load_index, save_index
from stoker.tasks.images.layouts.splits import Entries, list_entries

FORMAT = 1
LISTING = "listing.json"
# Where earlier versions kept it, inside the data.
LEFT_IN_DATA = ".stoker-index"
# A file or folder that changed just before it was looked at may change again without getting a new time: the coarsest
# clocks of file systems in use tick every two seconds.
CLOCK_TICK_NS = 2_000_000_000
_ABANDONED_AFTER_S = 24 * 3600
# Record locks never conflict within one process, so its threads take turns here.
_one_thread = threading.RLock()


@dataclass(frozen=True)
class Seen:
    """The state of a class when it was listed."""

    folders: Mapping[str, int | None] = field(default_factory=dict)
    """When each folder last changed, in ns; None if that was too recent to distinguish it from the next change."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """How many files were skipped, by suffix."""


@dataclass(frozen=True)
class KeptIndex:
    """An index, with the state of what it was made from."""

    index: SampleIndex
    seen: Mapping[str, Seen] = field(default_factory=dict)
    """The state of each class folder."""
    source: Mapping[str, Any] | None = None
    """The state of other files, if it was made from them."""
    made_ns: int = 0
    """When it was made; 0 if just now."""


def keeping_folder(place: str, index_dir: Path | None, kind: str = "") -> Path:
    """The folder in which the index of a place is saved; `kind` distinguishes indexes of parts of the same place."""
    # The last part of the place is for people; the hash of all of it makes the name unique.
    word = re.sub(r"[^A-Za-z0-9._-]", "-", place.rstrip("/").rpartition("/")[2])[:40].lstrip(".") or "data"
    key = f"{place}\n{kind}" if kind else place
    name = f"{word}-{hashlib.blake2b(key.encode('utf-8', 'surrogateescape'), digest_size=8).hexdigest()}"
    parent = cache_folder() / "index" if index_dir is None else index_dir.absolute()
    return parent / name


def index_left_in_data(place: str) -> KeptIndex | None:
    """The index that an earlier version saved inside the data, if it did; it is read, and never changed."""
    return None if is_url(place) else read_kept(Path(place) / LEFT_IN_DATA, None)


def note_of_left_index(place: str, keep: Path) -> str | None:
    """What the user should know about that folder, once."""
    left = Path(place) / LEFT_IN_DATA
    if is_url(place) or not left.is_dir() or (keep / "told").exists():
        return None
    with suppress(OSError):
        (keep / "told").touch()
    return (
        f"{left} is the index of an earlier version of stoker, and is no longer used; it makes torchvision's "
        f"ImageFolder fail (no image in that 'class'): rm -r {shlex.quote(str(left))}"
    )


def not_keepable(place: str, folder: Path, error: OSError) -> UserError:
    """The error if an index cannot be saved where it has to be."""
    return UserError(
        "index-not-writable",
        f"the index of {redact_text(place)} cannot be saved in {folder}: {error.strerror or error}",
        why="without it every start would list all files again",
        hint="set index_dir=FOLDER to a folder you can write to",
    )


def keep_or_make(
    place: str,
    make: Callable[[KeptIndex | None], tuple[KeptIndex, list[str]]],
    still_holds: Callable[[KeptIndex], bool],
    *,
    kind: str = "",
    index_dir: Path | None,
    say: Say | None = None,
) -> tuple[KeptIndex, list[str]]:
    """The index kept for a place if it still holds, else a new one, which is kept; and notes for the user.

    `make` gets the index that no longer holds, if there is one, and returns its own notes, too."""
    keep, damage = keeping_folder(place, index_dir, kind), list[str]()
    before = read_kept(keep, place, damage)
    if before is not None and still_holds(before):
        return before, []
    made: tuple[KeptIndex, list[str]] | None = None
    try:
        with building(keep, say):
            # Another process may have done the work while we waited for the lock.
            kept = read_kept(keep, place)
            if kept is not None and still_holds(kept):
                return kept, []
            made = make(kept or before)
            return write_kept(keep, made[0]), [*damage, *made[1]]
    except OSError as error:
        if index_dir is not None:
            raise not_keepable(place, index_dir, error) from None
        trouble = f"the index cannot be saved ({error}), so the next start lists all files again; set index_dir=FOLDER"
    new, news = made or make(before)
    return replace(new, index=replace(new.index, digest=digest_of(new.index))), [*damage, *news, trouble]


def index_of_files(
    place: str,
    kind: str,
    state: dict[str, Any],
    make: Callable[[], SampleIndex],
    index_dir: Path | None,
    say: Say | None,
) -> SampleIndex:
    """The index kept for files in this state, else a new one; `kind` distinguishes indexes of parts of a place."""
    source = {"kind": kind, "state": state}
    kept, notes = keep_or_make(
        place,
        lambda _before: (KeptIndex(make(), source=source), []),
        lambda kept: kept.source == source and None not in state.values(),
        kind=kind,
        index_dir=index_dir,
        say=say,
    )
    index = kept.index
    return replace(index, facts={**index.facts, "notes": [*index.facts["notes"], *notes]})


def states_of_files(place: str, names: Sequence[str], entries: Entries | None) -> dict[str, Any]:
    """What shows that a file has been replaced: its size and time, or its version in an object store; None if it is so
    recent that it could change again unnoticed."""
    states: dict[str, Any] = {}
    for name in names:
        if entries is not None and is_url(place) and name in ("", *entries.versions):
            everything = hashlib.blake2b("\n".join(entries.files).encode(), digest_size=8).hexdigest()
            states[name] = list(entries.versions[name]) if name else everything
            continue
        path = name if name.startswith("/") or is_url(name) or not place else f"{place}/{name}".rstrip("/")
        if is_url(path):
            folder, _, file = path.rpartition("/")
            siblings = list_entries(folder)
            states[name] = list(siblings.versions[file]) if siblings and file in siblings.versions else None
            continue
        try:
            found = os.stat(path)  # noqa: PTH116
        except OSError as error:
            raise UserError("data-not-readable", f"{shown(path)}: {error.strerror}", hint="ls -l the folder") from None
        recent = found.st_mtime_ns > time.time_ns() - CLOCK_TICK_NS
        states[name] = None if recent else [found.st_size, found.st_mtime_ns]
    return states


def read_kept(keep: Path, place: str | None, damage: list[str] | None = None) -> KeptIndex | None:
    """The index in a folder; None if there is none, none of this place, or none that this version can use. `damage`
    gets a note if it differs from what was saved."""
    try:
        document = json.loads((keep / LISTING).read_text())
        if document["format"] != FORMAT:
            return None
        if has_whole_seal(document) is False:
            raise ValueError(f"{LISTING} changed after it was written")
        if not re.fullmatch("[0-9a-f]+", document["index"]):
            return None
        if place is not None and document["place"] != redact_text(place):
            return None
        index, made_ns = _load(keep, document["index"]), int(document["made_ns"])
        index = index if place is None else replace(index, root=place)
        if "seen" not in document:
            return KeptIndex(index, source={name: document[name] for name in ("kind", "state")}, made_ns=made_ns)
        seen = [Seen(record["folders"], record["left_out"]) for record in document["seen"]]
        return KeptIndex(index, dict(zip(index.classes, seen, strict=True)), made_ns=made_ns)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, IndexUnreadable) as error:
        reason = error.reason if isinstance(error, IndexUnreadable) else str(error)
        if damage is not None and (not isinstance(error, IndexUnreadable) or error.damaged):
            damage.append(
                f"the index kept in {keep} is damaged ({reason}): it is not used, and made anew from the data"
            )
        return None


def _load(keep: Path, name: str) -> SampleIndex:
    index = load_index(keep / name)
    if index.digest != name:
        raise IndexUnreadable(keep / name, "it is the index of other samples", damaged=True)
    return index


def write_kept(keep: Path, made: KeptIndex) -> KeptIndex:
    """Saves an index; a reader sees either the old or the new one, complete. Call it within `building`."""
    index, before = made.index, _current_name(keep)
    final = keep / digest_of(index)
    try:
        _load(keep, final.name)
    except IndexUnreadable:
        with whole_folder(final) as folder:
            save_index(replace(index, root=redact_text(index.root)), folder)
    document = {
        "format": FORMAT,
        "place": redact_text(index.root),
        "made_ns": time.time_ns(),
        "index": final.name,
        **(made.source or {"seen": [vars(seen) for seen in made.seen.values()]}),
    }
    write_text(keep / LISTING, json.dumps(sealed(document)) + "\n")
    _remove_old(keep, {final.name, before})
    return replace(made, index=replace(load_index(final), root=index.root))


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """A folder that replaces `final` once the block ends without an error."""
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=final.parent))
    try:
        # mkdtemp makes folders private; data and its index are often shared by a team.
        temporary.chmod(final.parent.stat().st_mode & 0o777)
        yield temporary
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def building(keep: Path, say: Say | None = None) -> Iterator[None]:
    """Creates the folder of an index and locks it for writing; waits while another process has the lock."""
    with _one_thread:
        keep.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(keep / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            _lock(descriptor, keep, say)
            yield
        finally:
            os.close(descriptor)  # drops the lock


def _lock(descriptor: int, keep: Path, say: Say | None) -> None:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        if say is not None:
            say(f"another process is building the index in {keep}; waiting for it")
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
    except OSError:
        pass  # no locks on this file system: two processes may both do the work, and write the same


def _current_name(keep: Path) -> str | None:
    try:
        return str(json.loads((keep / LISTING).read_text())["index"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove_old(keep: Path, wanted: set[str | None]) -> None:
    """Removes old indexes, but not the previous one: a run that uses it may still start workers that map it."""
    with suppress(OSError):
        for entry in keep.iterdir():
            is_index = re.fullmatch("[0-9a-f]{32}", entry.name) is not None
            is_left = entry.name.startswith(".new-") and entry.stat().st_mtime < time.time() - _ABANDONED_AFTER_S
            if (is_index and entry.name not in wanted) or is_left:
                shutil.rmtree(entry, ignore_errors=True)
