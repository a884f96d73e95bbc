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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.core.files import cache_folder, has_whole_seal, sealed, write_text
from stoker.core.redact import redact_text
from stoker.io.stores import is_url
from stoker.tasks.images.layouts.listing import THREADS, ClassListing, Seen, class_names
from stoker.tasks.images.layouts.sample_index import IndexUnreadable, SampleIndex, digest_of, load_index, save_index

FORMAT = 1
LISTING = "listing.json"
# Where earlier versions kept it, inside the data.
LEFT_IN_DATA = ".stoker-index"
_ABANDONED_AFTER_S = 24 * 3600
# Record locks never conflict within one process, so its threads take turns here.
_one_thread = threading.RLock()


class _OtherFormat(ValueError):
    """A listing of another version, not a damaged one."""


@dataclass(frozen=True)
class KeptIndex:
    """A saved index, with the state of what was listed."""

    index: SampleIndex
    seen: dict[str, Seen]
    """By class."""
    made_ns: int
    """When it was listed; 0 if just now."""


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


def cannot_be_saved(error: OSError) -> str:
    """The note if an index is not saved, and need not be."""
    return f"the index cannot be saved ({error}), so the next start lists all files again; set index_dir=FOLDER"


def read_kept(keep: Path, place: str | None, damage: list[str] | None = None) -> KeptIndex | None:
    """The index in a folder; None if there is none, none of this place, or none that this version can use. `damage`
    gets a note if it differs from what was saved."""
    try:
        document = _read_listing(keep)
        if not re.fullmatch("[0-9a-f]+", document["index"]):
            return None
        if place is not None and document["place"] != redact_text(place):
            return None
        index = _load(keep, document["index"])
        index = index if place is None else replace(index, root=place)
        seen = [Seen(record["folders"], record["left_out"]) for record in document["seen"]]
        return KeptIndex(index, dict(zip(index.classes, seen, strict=True)), int(document["made_ns"]))
    except (OSError, ValueError, KeyError, TypeError, IndexUnreadable) as error:
        _note_damage(keep, error, damage)
        return None


def _read_listing(keep: Path) -> dict[str, Any]:
    """The content of listing.json; raises ValueError if it is of another version, or was changed since."""
    document: dict[str, Any] = json.loads((keep / LISTING).read_text())
    if document["format"] != FORMAT:
        raise _OtherFormat
    if has_whole_seal(document) is False:
        raise ValueError(f"{LISTING} changed after it was written")
    return document


def _load(keep: Path, name: str) -> SampleIndex:
    index = load_index(keep / name)
    if index.digest != name:
        raise IndexUnreadable(keep / name, "it is the index of other samples", damaged=True)
    return index


def _note_damage(keep: Path, error: Exception, damage: list[str] | None) -> None:
    missing = isinstance(error, FileNotFoundError | NotADirectoryError | _OtherFormat)
    if damage is None or missing or (isinstance(error, IndexUnreadable) and not error.damaged):
        return
    reason = error.reason if isinstance(error, IndexUnreadable) else str(error)
    damage.append(f"the index kept in {keep} is damaged ({reason}): it is not used, and made anew from the data")


def write_kept(keep: Path, index: SampleIndex, listings: Sequence[ClassListing]) -> KeptIndex:
    """Saves an index; a reader sees either the old or the new one, complete. Call it within `building`."""
    seen = [{"folders": dict(one.seen.folders), "left_out": dict(one.seen.left_out)} for one in listings]
    return KeptIndex(_save(keep, index, {"seen": seen}), {one.name: one.seen for one in listings}, 0)


def keep_or_make(
    place: str,
    kind: str,
    state: Mapping[str, Any],
    make: Callable[[], SampleIndex],
    *,
    index_dir: Path | None,
    rebuild: bool = False,
    say: Say | None = None,
) -> SampleIndex:
    """The index saved for a place if it was made from files in this state, else a new one, which is saved.

    The state of a file is None if it cannot be distinguished from the next one: then the index is made again."""
    keep = keeping_folder(place, index_dir, kind)
    damage: list[str] = []
    if not rebuild and (kept := _made_from(keep, place, kind, state, damage)) is not None:
        return kept
    index: SampleIndex | None = None
    try:
        with building(keep, say):
            # Another process may have done the work while we waited for the lock.
            if not rebuild and (kept := _made_from(keep, place, kind, state)) is not None:
                return kept
            index = make()
            saved = _save(keep, index, {"kind": kind, "state": dict(state)}, place)
            return replace(saved, facts={**saved.facts, "notes": [*saved.facts.get("notes", []), *damage]})
    except OSError as error:
        if index_dir is not None:
            raise not_keepable(place, index_dir, error) from None
        trouble = error
    index = index or make()
    notes = [*index.facts.get("notes", []), *damage, cannot_be_saved(trouble)]
    return replace(index, digest=digest_of(index), facts={**index.facts, "notes": notes})


def _made_from(
    keep: Path, place: str, kind: str, state: Mapping[str, Any], damage: list[str] | None = None
) -> SampleIndex | None:
    try:
        document = _read_listing(keep)
        known = [document[name] for name in ("place", "kind", "state")]
        if known != [redact_text(place), kind, dict(state)] or None in state.values():
            return None
        return replace(_load(keep, Path(document["index"]).name), root=place)
    except (OSError, ValueError, KeyError, TypeError, IndexUnreadable) as error:
        _note_damage(keep, error, damage)
        return None


def _save(keep: Path, index: SampleIndex, about: dict[str, Any], place: str | None = None) -> SampleIndex:
    before = _current_name(keep)
    final = keep / digest_of(index)
    try:
        _load(keep, final.name)
    except IndexUnreadable:
        with whole_folder(final) as folder:
            save_index(replace(index, root=redact_text(index.root)), folder)
    document = {
        "format": FORMAT,
        "place": redact_text(place or index.root),
        "made_ns": time.time_ns(),
        "index": final.name,
        **about,
    }
    write_text(keep / LISTING, json.dumps(sealed(document)) + "\n")
    _remove_old(keep, {final.name, before})
    return replace(load_index(final), root=index.root)


def changed_classes(place: str, kept: KeptIndex) -> tuple[list[str], set[str]]:
    """The current class folders, and those of them that have to be listed (again)."""
    now = class_names(place)
    with ThreadPoolExecutor(THREADS) as pool:
        same = pool.map(lambda name: name in kept.seen and _unchanged(place, kept.seen[name]), now)
        return now, {name for name, is_same in zip(now, same, strict=True) if not is_same}


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


def _unchanged(place: str, seen: Seen) -> bool:
    if not seen.folders:
        return False
    try:
        return all(
            changed is not None and os.stat(f"{place}/{folder}").st_mtime_ns == changed  # noqa: PTH116 - hot, and '' joins
            for folder, changed in seen.folders.items()
        )
    except OSError:
        return False


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
