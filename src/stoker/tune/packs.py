"""Packs that a search makes (`--pack DIR`): images in shards, volumes in blocks of several sizes.

A pack is made when it is first tried, and removed at the end unless the result uses it. Packs of volumes are tried in
the order of a short trial with one volume; a layout that was far slower there is left out. Packing does not count
against the time of the search: it takes as long as the data is large, whatever is searched.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.core.console import say
from stoker.core.errors import StokerError, UserError
from stoker.core.units import count
from stoker.profile.host import HostConfig, usable_cpus
from stoker.tasks.images.layouts.opening import RECORDS
from stoker.tasks.images.pack.pack_folder import (
    PackFolder,
    check_destination,
    claim_destination,
    remove_source_index,
    remove_temporaries,
)
from stoker.tasks.images.pack.pack_folder import remove_pack as remove_shards
from stoker.tasks.images.pack.packing import PackOptions
from stoker.tasks.images.pack.splits_packing import pack_splits
from stoker.tasks.volumes.pack.cases_packing import VolumeSource, open_source
from stoker.tasks.volumes.pack.layout_trial import USUAL_PATCH, TrialResult
from stoker.tasks.volumes.pack.packing import remove_pack as remove_volumes
from stoker.tasks.volumes.pack.preprocessing import VoxelChanges
from stoker.tune.journal import Journal
from stoker.tune.records import Settings

SHARDS = "shards"
FAR_SLOWER = 1.5
"""A layout is left out if a patch takes this many times as long as with the fastest, in the trial with one volume. In
a whole loader reading is only a part, so closer ones are measured."""


@dataclass(frozen=True)
class _Kind:
    names: tuple[str, ...]
    """Folders below DIR, in the order in which they are tried."""
    make: Callable[[Path, str], str]
    """Makes one of them, and describes it in a few words."""
    remove: Callable[[Path], None]


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
        self._kind = _volumes(config, self._folder, journal) if config.task == "segment3d" else _images(config)

    @property
    def places(self) -> tuple[str, ...]:
        """The candidates for `data_root`, in the order in which they are tried."""
        return tuple(str(self._folder / name) for name in self._kind.names)

    @property
    def mapped(self) -> frozenset[str]:
        """The packs that are read as they are, without decoding."""
        return frozenset(place for place in self.places if Path(place).name not in (SHARDS, "zarr"))

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
                self._kind.remove(root)
            _remove_empty(root)
        _remove_empty(self._folder)

    @property
    def made(self) -> bool:
        """Whether there is a pack that would have to be removed."""
        return bool(self._ours)

    def _name_of(self, settings: Settings) -> str | None:
        return next((name for name in self._kind.names if settings.get("data_root") == str(self._folder / name)), None)

    def _make(self, name: str) -> str | None:
        root = self._folder / name
        if name not in self._ours:
            if root.exists():
                return None  # not ours to change; a trial shows whether it has the same pixels
            # Before the first byte: after a kill, the pack must be recognised as ours.
            self._ours.add(name)
            self._journal.note("packs", names=sorted(self._ours))
        try:
            say(f"packed in {root}: {self._kind.make(root, name)}")
        except StokerError as error:
            return error.seen
        return None


def _images(config: HostConfig) -> _Kind:
    def make(root: Path, _name: str) -> str:
        strict = config.model_copy(update={"max_bad_fraction": 0.0})
        results = pack_splits(strict, root, None, PackOptions(), usable_cpus(), fresh=False)
        _check_all(sum(one.skipped for one in results.values()), "image")
        images, size = sum(one.samples for one in results.values()), sum(one.bytes for one in results.values())
        return f"{count(images, 'image')}, {size / 1e6:,.0f} MB, byte for byte as they are"

    def remove(root: Path) -> None:
        for split in ["", *(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))]:
            pack = PackFolder(root, split)
            remove_temporaries(pack)
            remove_shards(pack)
        remove_source_index(root)

    return _Kind((SHARDS,), make, remove)


def _volumes(config: HostConfig, folder: Path, journal: Journal) -> _Kind:
    found: list[VolumeSource] = []

    def source() -> VolumeSource:
        if not found:
            found.append(open_source(config, VoxelChanges()))
        return found[0]

    def make(root: Path, name: str) -> str:
        with claim_destination(root):
            result = source().pack(root, name, workers=usable_cpus())
        _check_all(len(result.index.skipped), "volume")
        return f"{count(len(result.index.cases), 'volume')}, {result.bytes / 1e6:,.0f} MB, {_WORDS[name]}"

    names = _noted_names(journal, "layouts")
    if not names:
        _make_folder(folder)
        try:
            tried = source().try_layouts(folder / ".stoker-tune-trial", config.patch_size or USUAL_PATCH)
        except StokerError as error:
            say(f"note: the volumes are not tried packed: {error.seen}")
            return _Kind((), make, remove_volumes)
        finally:
            _remove_empty(folder)  # the trial's files are gone, others stay
        names = _worth_it(tried, journal)
    return _Kind(tuple(names), make, remove_volumes)


def _worth_it(tried: TrialResult, journal: Journal) -> list[str]:
    """The layouts to try, the fastest first."""
    warm = tried.fits_in_memory
    times = {one.layout.name: one.warm_s if warm or one.cold_s is None else one.cold_s for one in tried.tried}
    ranked = sorted(times, key=times.__getitem__)
    names = [name for name in ranked if times[name] <= FAR_SLOWER * times[ranked[0]]]
    journal.note("layouts", names=names, seconds=times)
    each = [f"{name} {1e3 * times[name]:.2f} ms" + ("" if name in names else " (left out)") for name in ranked]
    say("a patch with its label, in the trial with one volume: " + ", ".join(each))
    return names


def _check_all(skipped: int, kind: str) -> None:
    if skipped:
        raise UserError(
            "pack-incomplete", f"{count(skipped, kind)} cannot be packed, and without it this is another training"
        )


_WORDS = {
    "raw": "in rows, as they are",
    "blocks32": "in blocks of 32",
    "blocks64": "in blocks of 64",
    "zarr": "in compressed chunks of 32",
}


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
