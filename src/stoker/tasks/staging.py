"""`stage_to`: the local copy that fills while training runs, and the other files that belong in it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.config import Config
from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.core.redact import redact_text
from stoker.core.units import count
from stoker.io.cache import CopyPlace, OpenCopy
from stoker.io.stores import ReadFailure, SourceStore, is_url
from stoker.loader.filling import Files, Filler, Share, SplitFiles, WantedFile
from stoker.tasks.images.layouts.splits import list_entries
from stoker.train.ranks import Ranks

# Files with the labels, classes or cases of the files beside them, and the arrays of a pack's index.
BESIDE = (".csv", ".json", ".jsonl", ".npy", ".txt", ".yaml", ".yml")
# Time after a run; a copy that needs longer is filled by the next run, or by `stoker stage`.
SETTLING_S = 10.0


@dataclass(frozen=True)
class Staging:
    """The local copy of a run's data, which fills while the run trains."""

    place: CopyPlace
    copy: OpenCopy
    filler: Filler
    files: int
    say: Say

    def follow(self, epoch: int, position: int, waited: bool | None, is_over: bool) -> None:
        self.filler.training_at(epoch, position, waited, is_over=is_over)

    def make_way(self, _epoch: int, _position: int, waited: bool | None, _is_over: bool) -> None:
        self.filler.make_way(waited)

    def settle(self) -> None:
        """Training has ended; the last files, such as those of its last epoch, may still be on their way."""
        self.filler.settle(SETTLING_S)

    def close(self) -> None:
        """Ends the filling; what was fetched is kept."""
        self.filler.close()
        self.copy.flush()
        if not self.filler.is_complete and self.copy.stopped is None and not self.filler.failed:
            there = f"{min(self.copy.totals()[0], self.files):,} of {count(self.files, 'file')}"
            self.say(f"the local copy in {self.copy.folder} has {there}; the next run fetches the rest")
        self.copy.close()


def open_staging(
    place: CopyPlace,
    source: SourceStore,
    train: SplitFiles,
    val: SplitFiles | None,
    beside: Sequence[WantedFile],
    ranks: Ranks,
    say: Say,
    *,
    fetched_ahead: int = 0,
) -> Staging:
    """Opens the copy and begins to fill it."""
    order = Files(train, val, beside, Share(ranks.rank, ranks.local_world or ranks.world), fetched_ahead)
    copy = place.open()
    return Staging(place, copy, Filler(copy, source, order, say if ranks.is_first else None), order.files, say)


def copy_place(config: Config, root: str) -> CopyPlace:
    """The copy's folder; refuses one inside the data, or around it."""
    folder = os.path.realpath(os.path.expanduser(config.stage_to or ""))  # noqa: PTH111
    if not is_url(root):
        data = os.path.realpath(root)
        if os.path.commonpath([folder, data]) in (folder, data):
            raise UserError(
                "folder-inside-data",
                f"stage_to is {folder}, and the data is in {data}",
                why="one is inside the other, and the copy would become a part of the data",
                hint="stage_to=FOLDER, outside of the data",
            )
    return CopyPlace(folder, root)


def files_beside(
    root: str, splits: Sequence[str], place: CopyPlace, lists: Iterable[str], source: SourceStore
) -> list[WantedFile]:
    """The files that describe the data: lists, tables, classes, the index of a pack; the index comes last."""
    folders = {""}
    for split in splits:
        parts = (place.below(split) or "").split("/")
        folders |= {"/".join(parts[:number]) for number in range(1, len(parts) + 1)}
    found: dict[str, WantedFile] = {}
    for folder in sorted(folders):
        if root.startswith("http"):
            break  # a web server does not list
        entries = list_entries(f"{root}/{folder}".rstrip("/"))
        for name in () if entries is None else entries.files:
            path = f"{folder}/{name}".lstrip("/")
            if name.lower().endswith(BESIDE) and path not in place.expected:
                found[path] = WantedFile(path)
    for name in lists:
        if not is_url(name) and not Path(name).is_absolute() and name not in found:
            try:
                source.about(name)
            except ReadFailure:
                continue  # relative to the current folder, and stays there
            found[name] = WantedFile(name)
    return sorted(found.values(), key=lambda one: one.path.endswith("index.json"))


def cannot_stage(config: Config, seen: str, why: str) -> UserError:
    """The error about data that can only be staged before training."""
    root, folder = redact_text(config.data_root or ""), config.stage_to
    return UserError(
        "cannot-stage-while-training",
        f"{root} cannot be staged while it is trained on: {seen}",
        why=why,
        hint=f"stoker stage {root} {folder}, then data_root={folder} without stage_to",
    )
