"""The checkpoints of one run: the last, the one before it, and the best by validation.

    last.ckpt                       where training resumes
    previous.ckpt                   the last one before that, in case `last.ckpt` is damaged
    epoch=12-val_acc1=76.5400.ckpt  one of the best `keep_best` by the metric of the run

Nothing is deleted or replaced before its successor is whole on the disk.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from stoker.core.console import Say
from stoker.core.errors import UserError
from stoker.core.files import sync_folder
from stoker.run.metrics import ACC1, Metric, checkpoint_name, read_checkpoint_name
from stoker.train.checkpoint.format import (
    CheckpointCorrupt,
    FlatState,
    Stop,
    no_stop,
    read_checkpoint,
    write_checkpoint,
)

EXAMPLE = "runs/NAME/checkpoints/last.ckpt, as `stoker train` writes it, or the run folder itself"
LEFTOVERS = ".*.ckpt.*.tmp"
# Errors of a file system without hard links.
NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV, errno.EINVAL}

State = Mapping[Any, Any] | FlatState


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended."""

    path: Path
    failure: str | None = None
    """Why nothing was saved; the files from before are untouched. None if the checkpoint is safe on the disk."""


class FoundCheckpoint(NamedTuple):
    """A whole checkpoint to resume from."""

    state: dict[Any, Any]
    path: Path
    notes: tuple[str, ...] = ()
    """What was wrong with newer checkpoints, and other things the user should know."""

    def begun_from(self, path: Path) -> FoundCheckpoint:
        """The same, with a note for a command that asks to begin from a file, and has already done so."""
        note = f"this run already began from {path}, and resumes where it stopped; --fresh begins from it again"
        return self._replace(notes=(*self.notes, note))


class Checkpoints:
    """Saves to, and resumes from, one folder; only one process may save at a time (the run's lease ensures it)."""

    def __init__(self, folder: Path, keep_best: int = 5, *, metric: Metric = ACC1, stop: Stop = no_stop) -> None:
        self.folder = folder
        self.last = folder / "last.ckpt"
        self.previous = folder / "previous.ckpt"
        self._kept = folder / ".previous.ckpt.kept.tmp"
        self._keep_best = keep_best
        self._metric = metric
        self._stop = stop
        self._leftovers_gone = False
        self._damaged: set[Path] = set()

    def best(self) -> list[Path]:
        """The best checkpoints, best first; ties are ordered newest first."""
        return [path for _, _, path in sorted(self._ranked(), reverse=True)]

    def save_last(self, state: State) -> SaveOutcome:
        try:
            self._remove_leftovers()
            write_checkpoint(self.last, state, stop=self._stop, before_rename=self._keep_old_last)
            if self._kept.exists():
                self._kept.replace(self.previous)
                self._stop("after rotation")
                sync_folder(self.folder)
        except OSError as error:
            with suppress(OSError):
                self._kept.unlink(missing_ok=True)
            return _failed(self.last, error)
        self._damaged.discard(self.last)
        return SaveOutcome(self.last)

    def save_best(self, state: State, epoch: int, value: float) -> SaveOutcome | None:
        """Keeps this state if it is among the best by `value`; otherwise writes nothing and returns None."""
        path = self.folder / checkpoint_name(epoch, self._metric, value)
        # The next process sees only the names, with four decimals: rank by the same digits here.
        rank = (self._metric.rank(float(f"{value:.4f}")), epoch)
        if sum(other[:2] > rank for other in self._ranked() if other[2] != path) >= self._keep_best:
            return None
        try:
            self._remove_leftovers()
            write_checkpoint(path, state, stop=self._stop)
            self._stop("before prune")
        except OSError as error:
            return _failed(path, error)
        for old in self.best()[self._keep_best :]:
            # A file we may not delete stays: one too many does not make this save a failure.
            with suppress(OSError):
                old.unlink()
                self._stop("during prune")
        return SaveOutcome(path)

    def latest(self) -> FoundCheckpoint | None:
        """The newest whole checkpoint: the last, else the previous, else the newest of the best; None without any.

        Raises CheckpointCorrupt if there are some and none is whole: starting over would hide that.
        """
        newest_best = [path for _, _, path in sorted(self._ranked(), key=lambda one: (one[1], one[0]), reverse=True)]
        notes: list[str] = []
        for path in (self.last, self.previous, *newest_best):
            if not path.exists():
                if path == self.last:
                    notes.append(f"{path.name} is missing")
                continue
            try:
                state = read_checkpoint(path)
            except UserError as error:
                notes.append(error.seen)
                self._damaged.add(path)
                continue
            if notes:
                notes.append(f"resuming from {path.name} instead")
            return FoundCheckpoint(state, path, tuple(notes))
        if self._damaged:
            raise CheckpointCorrupt(self.folder, f"holds no whole checkpoint: {'; '.join(notes)}")
        return None

    def _remove_leftovers(self) -> None:
        """Deletes the half-written files of a crash, once: only a process that saves may do so."""
        if not self._leftovers_gone:
            for path in self.folder.glob(LEFTOVERS):
                path.unlink(missing_ok=True)
            self._leftovers_gone = True

    def _keep_old_last(self) -> None:
        """Gives the old last a second name, which becomes `previous.ckpt` once the new one is in place."""
        self._kept.unlink(missing_ok=True)
        # A damaged last must not replace a whole previous one.
        if not self.last.exists() or self.last in self._damaged:
            return
        try:
            os.link(self.last, self._kept)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            # Without hard links there is no last.ckpt for a moment, and previous.ckpt is the whole one.
            self.last.replace(self.previous)
            return
        self._stop("during rotation")

    def _ranked(self) -> list[tuple[float, int, Path]]:
        """Score, epoch and path of every best checkpoint, from their names."""
        if not self.folder.is_dir():
            return []
        named = ((path, read_checkpoint_name(path.name)) for path in self.folder.iterdir())
        return [(said.metric.rank(said.value), said.epoch, path) for path, said in named if said is not None]


def checkpoint_in(path: Path, say: Say) -> Path:
    """The path itself, or the best checkpoint of a run folder, else its last."""
    if not path.is_dir():
        return path
    checkpoints = Checkpoints(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    found = next((file for file in (*checkpoints.best(), checkpoints.last) if file.is_file()), None)
    if found is None:
        raise UserError("no-checkpoint", f"{path} is a folder without checkpoints", hint=EXAMPLE)
    say(f"checkpoint: {found}")
    return found


def _failed(path: Path, error: OSError) -> SaveOutcome:
    return SaveOutcome(path, f"{path} was not saved: {error.strerror or error}")
