"""Which files of a source a config needs, as each task knows them; `stage/` copies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from stoker.config import Config
from stoker.core.errors import UserError

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
    record: dict[str, Any] | None = None
    """The content of `subset.json`; None if everything was taken."""
    below: tuple[str, ...] | None = None
    """In place of `paths`: files, and folders with everything below them, such as Zarr volumes."""

    def wanted(self, path: str) -> bool:
        """Whether a listed file is copied."""
        if path.startswith(self.left_out):
            return False
        if self.below is not None:
            return path in self.below or path.startswith(tuple(f"{folder}/" for folder in self.below))
        if self.paths is None or path in self.paths:
            return True
        folder, _, name = path.rpartition("/")
        return folder in self.support_in and name.lower().endswith(SUPPORT)


def refuse_classes(config: Config, class_list: tuple[str, ...] | None, items: str) -> None:
    """Raises UserError for a choice of classes where the data has none."""
    if class_list is not None or config.subset_classes is not None:
        raise UserError("no-classes", f"{items} have no class folders to choose from", hint="leave out the classes")
