"""Packs that a search makes (`--pack DIR`), in each of the ways that the task has.

A pack is made when it is first tried, and removed at the end unless the result uses it. Several ways are tried in the
order of a short trial; one that was far slower there is left out. Packing does not count against the time of the
search: it takes as long as the data is large, whatever is searched.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.core.console import say
from stoker.core.errors import StokerError, UserError
from stoker.profile.host import HostConfig
from stoker.tasks.base import task_for
from stoker.tasks.packing import RECORDS, check_destination, claim_destination
from stoker.tune.journal import Journal
from stoker.tune.records import Settings

FAR_SLOWER = 1.5
"""A variant is left out if reading a sample takes this many times as long as with the fastest, in their trial. In a
whole loader reading is only a part, so closer ones are measured."""


class Packs:
    """The packs of one search, below a folder."""

    def __init__(self, folder: Path, config: HostConfig, journal: Journal) -> None:
        """Looks at the data; raises UserError if it cannot be packed there."""
        assert config.data_root is not None
        check_destination(config.data_root, folder)
        self._folder = folder.expanduser().absolute()
        self._journal = journal
        self._ours: set[str] = set(_noted_names(journal, "packs"))
        """Packs made by this search, before an interruption or after it."""
        self._ready: dict[str, str | None] = {}
        self._items = task_for(config).items
        self._variants = task_for(config).pack_variants(config)
        self._names = _noted_names(journal, "layouts") or self._worth_trying()

    @property
    def places(self) -> tuple[str, ...]:
        """The candidates for `data_root`, in the order in which they are tried."""
        return tuple(str(self._folder / name) for name in self._names)

    @property
    def mapped(self) -> frozenset[str]:
        """The packs that are read as they are, without decoding."""
        return frozenset(place for place in self.places if Path(place).name in self._variants.mapped)

    def ready(self, settings: Settings) -> str | None:
        """Makes the pack that these settings need; None, or why it cannot be made."""
        name = self._name_of(settings)
        if name is None:
            return None
        if name not in self._ready:
            self._ready[name] = self._make(name)
        return self._ready[name]

    def keep_only(self, best: Settings) -> None:
        """Removes the packs of this search that its result does not use."""
        for name in sorted(self._ours - {self._name_of(best)}):
            root = self._folder / name
            with claim_destination(root):
                self._variants.remove(root)
            _remove_empty(root)
        _remove_empty(self._folder)

    @property
    def made(self) -> bool:
        """Whether there is a pack that would have to be removed."""
        return bool(self._ours)

    def _name_of(self, settings: Settings) -> str | None:
        return next((name for name in self._names if settings.get("data_root") == str(self._folder / name)), None)

    def _make(self, name: str) -> str | None:
        root = self._folder / name
        if name not in self._ours:
            if root.exists():
                return None  # not ours to change; a trial shows whether it has the same pixels
            # Before the first byte: after a kill, the pack must be recognised as ours.
            self._ours.add(name)
            self._journal.note("packs", names=sorted(self._ours))
        try:
            say(f"packed in {root}: {self._variants.make(name, root)}")
        except StokerError as error:
            return error.seen
        return None

    def _worth_trying(self) -> list[str]:
        """The variants to try, the fastest in their trial first."""
        if len(self._variants.names) == 1:
            return list(self._variants.names)
        _make_folder(self._folder)
        try:
            times = self._variants.trial(self._folder / ".stoker-tune-trial")
        except StokerError as error:
            say(f"note: the {self._items} are not tried packed: {error.seen}")
            return []
        finally:
            _remove_empty(self._folder)  # the trial's files are gone, others stay
        ranked = sorted(times, key=times.__getitem__)
        names = [name for name in ranked if times[name] <= FAR_SLOWER * times[ranked[0]]]
        self._journal.note("layouts", names=names, seconds=times)
        each = [f"{name} {1e3 * times[name]:.2f} ms" + ("" if name in names else " (left out)") for name in ranked]
        say(f"{self._variants.timed}: {', '.join(each)}")
        return names


def _noted_names(journal: Journal, kind: str) -> list[str]:
    noted: dict[str, Any] = journal.noted(kind) or {}
    names = noted.get("names")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            "destination-not-writable", f"{folder} cannot be made: {error.strerror or error}",
            why="packs would be written there", hint=f"ls -ld {folder.parent}",
        ) from None  # fmt: skip


def _remove_empty(folder: Path) -> None:
    """Removes a folder in which nothing but our own empty records is left."""
    records = folder / RECORDS
    (records / "lock").unlink(missing_ok=True)
    below = [path for path in records.rglob("*") if path.is_dir()] if records.is_dir() else []
    for path in (*sorted(below, reverse=True), records, folder):
        with suppress(OSError):  # not empty, or not there
            path.rmdir()
