"""Which files of a source are copied."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stoker.core.console import Advance, some
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.stage.sources import Source, SourceFile

MARKERS = ("index.json", "volumes.json")
"""The file that a pack writes last, and so does a copy of it: once it is there, the pack is complete."""
SUPPORT = (".csv", ".jsonl", ".json", ".txt", ".mat", ".npy", ".yaml", ".yml", ".md")
"""Lists, labels and indexes, which are copied beside the images that they describe."""


@dataclass(frozen=True)
class Selection:
    """The part of a source that is copied; without folders and paths, all of it."""

    folders: tuple[str, ...] = ("",)
    """Folders below which files are listed."""
    paths: frozenset[str] | None = None
    """The files that are wanted; None for all below the folders."""
    support_in: frozenset[str] = frozenset()
    """Folders whose lists, labels and indexes are wanted, too."""
    left_out: tuple[str, ...] = ()
    """Prefixes of paths that are not wanted."""
    empty_folders: tuple[str, ...] = ()
    """Class folders, which count even if they have no images."""
    record: dict[str, Any] | None = field(default=None)
    """The content of `subset.json`; None if everything was taken."""

    def wanted(self, file: SourceFile) -> bool:
        """Whether a listed file is copied."""
        path = file.path
        if path.startswith(self.left_out):
            return False
        if self.paths is None or path in self.paths:
            return True
        folder, _, name = path.rpartition("/")
        return folder in self.support_in and name.lower().endswith(SUPPORT)

    def files(self, source: Source, progress: Advance | None = None) -> Iterator[SourceFile]:
        """The files to copy, as the source lists them now; raises UserError if one that is wanted is not there."""
        missing = None if self.paths is None else set(self.paths)
        told: set[str] = set()
        for folder in sorted(self.support_in):
            for file in source.directly_in(folder):
                if self.wanted(file):
                    told.add(file.path)
                    yield file
        for file in source.files(_without_nested(self.folders), progress):
            if self.wanted(file) and file.path not in told:
                yield file
                if missing is not None:
                    missing.discard(file.path)
        if missing:
            missing -= told
        if missing:
            raise UserError(
                "data-changed",
                f"{count(len(missing), 'file')} of the index not at {redact_text(source.url)}: {some(sorted(missing))}",
                why="the data has changed since it was listed, and what was chosen of it may have, too",
                hint="run it again; an index of a URL is renewed if its folder below index_dir is removed",
            )


def _without_nested(folders: tuple[str, ...]) -> tuple[str, ...]:
    """The folders that are not inside another one, which lists them already."""
    known = set(folders)

    def is_nested(folder: str) -> bool:
        while folder:
            folder = folder.rpartition("/")[0]
            if folder in known:
                return True
        return False

    return tuple(folder for folder in dict.fromkeys(folders) if not is_nested(folder))


def everything() -> Selection:
    """All of a source."""
    return Selection()


@dataclass(frozen=True)
class VolumeSelection(Selection):
    """Files by their path, or by the folder of a Zarr volume that they are in."""

    wanted_paths: tuple[str, ...] = ()

    def wanted(self, file: SourceFile) -> bool:
        return file.path in self.wanted_paths or file.path.startswith(tuple(f"{path}/" for path in self.wanted_paths))
