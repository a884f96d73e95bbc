"""The checkpoints of one run: the last, the one before it, and the best by validation.

    last.ckpt                       where training goes on
    previous.ckpt                   the last one before that, should `last.ckpt` be damaged
    epoch=12-val_acc1=0.7654.ckpt   one of the best `keep_best`

Nothing is ever deleted or replaced before its successor is whole on the disk.
"""

from __future__ import annotations

import errno
import math
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stoker.errors import UserError
from stoker.files import atomic_file, sync_folder
from stoker.train.checkpoint.format import (
    CheckpointCorrupt,
    FlatState,
    Stop,
    flatten,
    no_stop,
    read_checkpoint,
    write_checkpoint,
    write_to,
)

BEST_NAME = re.compile(r"epoch=(\d+)-val_acc1=(-?\d+\.\d{4})\.ckpt")
LEFTOVERS = ".*.ckpt.*.tmp"
# What a file system answers that has no hard links.
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}

State = Mapping[Any, Any] | FlatState


@dataclass(frozen=True)
class Saved:
    """A checkpoint that is safe on the disk."""

    path: Path
    size_bytes: int
    seconds: float
    removed: tuple[Path, ...] = ()
    """Best ones that it pushed out."""


@dataclass(frozen=True)
class SaveFailed:
    """A save that came to nothing; what was there before is untouched, and the next save tries again."""

    path: Path
    why: str


Outcome = Saved | SaveFailed


class Latest(NamedTuple):
    """Where training goes on."""

    state: dict[Any, Any]
    path: Path
    notes: tuple[str, ...]
    """What was found wrong with newer checkpoints; empty when all is well."""


class Checkpoints:
    """Saves to, and resumes from, one folder; one process at a time may save (the run's lease sees to it)."""

    def __init__(self, folder: Path, keep_best: int = 5, *, stop: Stop = no_stop) -> None:
        self.folder = folder
        self.keep_best = keep_best
        self._stop = stop
        self._leftovers_gone = False
        self._damaged: set[Path] = set()

    @property
    def last(self) -> Path:
        return self.folder / "last.ckpt"

    @property
    def previous(self) -> Path:
        return self.folder / "previous.ckpt"

    def best(self) -> list[Path]:
        """The best checkpoints, best first; of equal ones the newer first."""
        ranked = [(float(found[2]), int(found[1]), path) for path, found in self._named_as_best()]
        return [path for _, _, path in sorted(ranked, reverse=True)]

    def save_last(self, state: State) -> Outcome:
        """`last.ckpt` becomes this state, and `previous.ckpt` what it was."""
        began = time.monotonic()
        flat = flatten(state)
        try:
            self.remove_leftovers()
            self._stop("before temp")
            with atomic_file(self.last, "wb") as stream:
                size = write_to(stream, flat, stop=self._stop)
                kept = self._keep_old_last()
                self._stop("before rename")
            self._stop("after rename")
            if kept is not None:
                kept.replace(self.previous)
                self._stop("after rotation")
                sync_folder(self.folder)
        except OSError as error:
            return self._failed(self.last, error)
        self._damaged.discard(self.last)
        return Saved(self.last, size, time.monotonic() - began)

    def save_best(self, state: State, epoch: int, value: float) -> Outcome | None:
        """Keeps this state if it is among the best by `value`; None where it is not, and nothing is written."""
        assert math.isfinite(value), f"val_acc1 of epoch {epoch} is {value}"
        path = self.folder / f"epoch={epoch}-val_acc1={value:.4f}.ckpt"
        # Names hold four decimals, and they are all that the next process knows: the same digits rank here.
        rank = (float(f"{value:.4f}"), epoch)
        others = [_rank(other) for other in self.best() if other != path]
        if sum(other > rank for other in others) >= self.keep_best:
            return None
        began = time.monotonic()
        try:
            self.remove_leftovers()
            size = write_checkpoint(path, state, stop=self._stop)
            self._stop("before prune")
        except OSError as error:
            return self._failed(path, error)
        removed = []
        for old in self.best()[self.keep_best :]:
            # A file that somebody else owns stays: one too many is no reason to call this save failed.
            with suppress(OSError):
                old.unlink()
                removed.append(old)
                self._stop("during prune")
        return Saved(path, size, time.monotonic() - began, tuple(removed))

    def latest(self, map_location: str = "cpu") -> Latest | None:
        """The newest whole checkpoint: the last, else the previous, else the newest of the best; None without any.

        Raises CheckpointCorrupt where there are some and none is whole: starting anew would hide that.
        """
        by_epoch = sorted(self.best(), key=lambda path: _rank(path)[1], reverse=True)
        notes: list[str] = []
        for path in (self.last, self.previous, *by_epoch):
            if not path.exists():
                if path == self.last:
                    notes.append(f"{path.name} is not there")
                continue
            try:
                state = read_checkpoint(path, map_location)
            except UserError as error:
                notes.append(error.seen)
                self._damaged.add(path)
                continue
            if notes:
                notes.append(f"going on from {path.name} instead")
            return Latest(state, path, tuple(notes))
        if self._damaged:
            raise CheckpointCorrupt(self.folder, f"holds no whole checkpoint: {'; '.join(notes)}")
        return None

    def remove_leftovers(self) -> list[Path]:
        """Deletes what a crash left half written; only the first call of the process that saves does anything."""
        if self._leftovers_gone:
            return []
        found = sorted(self.folder.glob(LEFTOVERS))
        for path in found:
            path.unlink(missing_ok=True)
        self._leftovers_gone = True
        return found

    def _keep_old_last(self) -> Path | None:
        """A second name for the old last, which becomes `previous.ckpt` once the new one has its place.

        A damaged one is not worth a whole previous one.
        """
        if not self.last.exists() or self.last in self._damaged:
            return None
        kept = self.folder / ".previous.ckpt.kept.tmp"
        kept.unlink(missing_ok=True)
        try:
            os.link(self.last, kept)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # Without hard links: for a moment there is no last.ckpt, and previous.ckpt is the whole one.
            self.last.replace(self.previous)
            return None
        self._stop("during rotation")
        return kept

    def _failed(self, path: Path, error: OSError) -> SaveFailed:
        with suppress(OSError):
            (self.folder / ".previous.ckpt.kept.tmp").unlink(missing_ok=True)
        return SaveFailed(path, f"{path} was not saved: {error.strerror or error}")

    def _named_as_best(self) -> list[tuple[Path, re.Match[str]]]:
        if not self.folder.is_dir():
            return []
        matches = ((path, BEST_NAME.fullmatch(path.name)) for path in self.folder.iterdir())
        return [(path, match) for path, match in matches if match is not None]


def _rank(path: Path) -> tuple[float, int]:
    match = BEST_NAME.fullmatch(path.name)
    assert match is not None
    return float(match[2]), int(match[1])
