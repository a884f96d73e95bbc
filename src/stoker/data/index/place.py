"""Where a split is, and saying so when it is not there."""

from __future__ import annotations

import os
import shlex
import stat
from pathlib import Path
from urllib.parse import unquote, urlsplit

from stoker.data.store.stores import is_url
from stoker.errors import UserError, did_you_mean

NAMED_AT_ONCE = 5


def split_place(root: str, split: str) -> str:
    """The folder or URL of a split; `split=""` is the root itself."""
    if root.startswith("file://"):
        root = unquote(urlsplit(root).path)
    if is_url(root):
        return f"{root.rstrip('/')}/{split}".rstrip("/")
    # Absolute: a worker may stand in another folder.
    return os.path.abspath(os.path.join(os.path.expanduser(root), split))  # noqa: PTH100, PTH118, PTH111


def check_folder(root: str, split: str) -> None:
    """Refuses a split that is not there, naming what is."""
    place = split_place(root, split)
    try:
        if stat.S_ISDIR(os.stat(place).st_mode):  # noqa: PTH116 - Path.is_dir hides what went wrong
            return
        raise UserError("data-not-found", f"{shown(place)} is a file, not a folder", hint="data_root=FOLDER")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise not_readable(place, error) from None
    base = Path(split_place(root, ""))
    if base.is_dir():
        there = _entries(base)
        raise UserError(
            "split-not-found",
            f"{shown(str(base))} has no folder {shown(split)}",
            why=f"it holds {some(there)}" if there else "it is empty",
            hint=did_you_mean(split, there) or f"data_root must hold {split}/CLASS/IMAGE.jpg",
        )
    existing = base
    while not existing.is_dir() and existing != existing.parent:
        existing = existing.parent
    missing = base.relative_to(existing).parts[0]
    there = _entries(existing)
    raise UserError(
        "data-not-found",
        f"{shown(str(base))} does not exist",
        why=f"{existing} does, and holds {some(there)}" if there else f"{existing} does, and is empty",
        hint=did_you_mean(missing, there) or "data_root=FOLDER",
    )


def not_readable(path: str, error: OSError) -> UserError:
    """A folder that is there and does not let us in, or broke while it was read."""
    return UserError(
        "data-not-readable",
        f"{shown(path)} cannot be listed: {error.strerror or error}",
        why="every sample must be known before the first one is drawn",
        hint=f"ls -ld {shlex.quote(path)}" if path.isprintable() else None,
    )


def _entries(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError:
        return []


def some(names: list[str]) -> str:
    """The first few of many names, and how many more there are."""
    more = len(names) - NAMED_AT_ONCE
    return ", ".join(map(shown, names[:NAMED_AT_ONCE])) + (f" and {more} more" if more > 0 else "")


def shown(name: str) -> str:
    """A name that a terminal can print, whatever bytes the file system holds."""
    return name if name.isprintable() else repr(name)


def count(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
