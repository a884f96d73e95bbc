"""What a checkpoint of a run holds, when it is written, and how a run goes on from one."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from stoker.errors import UserError
from stoker.training.async_saving import AsyncSaver
from stoker.training.checkpoint_file import read_checkpoint
from stoker.training.checkpoint_match import CheckpointOther, differences
from stoker.training.checkpoints import Checkpoints, Outcome, SaveFailed
from stoker.training.ema import WeightAverage
from stoker.training.progress import Progress
from stoker.training.schedule import Horizon
from stoker.training.step import TrainStep


@dataclass
class Parts:
    """What is saved: the live objects."""

    model: nn.Module
    """The bare model: not compiled, not wrapped for several ranks."""
    step: TrainStep
    ema: WeightAverage | None
    horizon: Horizon
    config: dict[str, Any]
    classes: tuple[str, ...]
    """What the model's outputs stand for, in their order."""

    def state(self, progress: Progress, sums: dict[str, Any]) -> dict[str, Any]:
        """Everything that the run needs to go on as if it had never stopped."""
        return {
            "model": self.model.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "optimizer": self.step.optimizer.state_dict(),
            "scaler": self.step.precision.scaler.state_dict(),
            "progress": progress.as_dict(),
            "horizon": asdict(self.horizon),
            "sums": sums,
            "config": self.config,
            "classes": self.classes,
        }

    def restore(self, state: dict[str, Any], path: Path) -> Progress:
        """Puts a saved state into the live objects; raises CheckpointOther where it does not fit them."""
        ours = {"model": self.model.state_dict(), "ema": self.ema is not None}
        theirs = {"model": state["model"], "ema": state["ema"] is not None}
        differ = differences(theirs, ours)
        for key in ("model", "optimizer", "num_classes"):
            if state["config"].get(key) != self.config.get(key):
                differ.insert(
                    0, f"{key}: {state['config'].get(key)} in the checkpoint, {self.config.get(key)} in this run"
                )
        if (line := _other_classes(state.get("classes"), self.classes)) is not None:
            differ.insert(0, line)
        if differ:
            raise CheckpointOther(path, differ)
        self.model.load_state_dict(state["model"])
        self.step.optimizer.load_state_dict(state["optimizer"])
        self.step.precision.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        return Progress(**state["progress"])


@dataclass
class Saver:
    """Writes the checkpoints of a run, on the rank that writes; on the others it does nothing."""

    parts: Parts
    checkpoints: Checkpoints | None
    """None on ranks that do not write."""
    every_steps: int | None = None
    every_s: float | None = None
    say: Callable[[str], None] = lambda _text: None
    told: Callable[[str, dict[str, Any]], None] = lambda _name, _details: None
    before_write: Callable[[], None] = lambda: None
    """Called in the thread that writes: what a checkpoint counts on has to be on the disk before it."""
    _writer: AsyncSaver | None = field(default=None, init=False)
    _last_s: float = field(default_factory=time.monotonic, init=False)
    _last_step: int = field(default=-1, init=False)
    _pauses: dict[str, float] = field(default_factory=dict, init=False)

    def is_due(self, step: int) -> bool:
        """Whether this rank thinks that it is time; the ranks have to agree before they save."""
        if self.every_steps is not None and step % self.every_steps == 0:
            return True
        return self.every_s is not None and time.monotonic() - self._last_s >= self.every_s

    def get_ready(self, progress: Progress) -> None:
        """After the first update, when the optimizer has its state: makes room for the copies, in the background."""
        if self._writer is None and self.checkpoints is not None:
            self._writer = AsyncSaver(self.checkpoints, self.before_write)
            self._writer.prepare(self.parts.state(progress, {}))

    def save(
        self, progress: Progress, sums: dict[str, Any], *, best: tuple[int, float] | None = None, now: bool = False
    ) -> bool:
        """Saves as last, and as one of the best; in the background unless it has to be done `now`.

        Whether that went well, as far as it is known: with `now` it is.
        """
        self._last_s = time.monotonic()
        if self.checkpoints is None or (progress.step == self._last_step and best is None and not now):
            return True
        self._last_step = progress.step
        self._writer = self._writer or AsyncSaver(self.checkpoints, self.before_write)
        state = self.parts.state(progress, sums)
        # A forward pass changes the buffers; everything else stands still until the next update.
        handed = self._writer.save(state, best=best, changing=self.parts.model.buffers())
        self._tell(handed.finished)
        self._pauses = {"pause_s": handed.pause_s, "waited_s": handed.waited_s}
        if not now:
            return True
        self.wait_for_copy()
        outcomes = self._writer.wait()
        self._tell(outcomes)
        return not any(isinstance(outcome, SaveFailed) for outcome in outcomes if outcome.path == self.checkpoints.last)

    def wait_for_copy(self) -> None:
        """To be called before weights, optimizer or average change; costs nothing where no save is under way."""
        if self._writer is not None and (held_s := self._writer.wait_for_copy()) is not None:
            self.told("checkpoint", {**self._pauses, "pause_s": self._pauses["pause_s"] + held_s})

    def close(self) -> None:
        """Waits for what is under way."""
        if self._writer is not None:
            self._tell(self._writer.close())
            self._writer = None

    def _tell(self, outcomes: tuple[Outcome, ...]) -> None:
        for outcome in outcomes:
            if isinstance(outcome, SaveFailed):
                self.say(f"warning: {outcome.why}; training goes on, the next save tries again")
                self.told("save_failed", {"why": outcome.why})


def load_for_resume(
    checkpoints: Checkpoints, explicit: Path | None
) -> tuple[dict[str, Any], Path, tuple[str, ...]] | None:
    """The state to go on from: the one that was named, or the newest whole one; None for a new run.

    A scheduler that starts a job again gives it the same words: what was named is where the run began, and
    from the second time on the run goes on where it stands.
    """
    if explicit is None:
        latest = checkpoints.latest()
        return None if latest is None else (latest.state, latest.path, latest.notes)
    origin = _identity(explicit)
    with suppress(UserError):
        latest = checkpoints.latest()
        if latest is not None and latest.state["progress"].get("origin") == origin:
            note = f"this run began from {explicit} before and goes on where it stands; --fresh goes back to it"
            return latest.state, latest.path, (*latest.notes, note)
    state = read_checkpoint(explicit)
    lacking = [part for part in ("model", "optimizer", "progress", "horizon", "config") if part not in state]
    if lacking:
        raise UserError(
            "checkpoint-not-of-a-run",
            f"{explicit} holds no {', '.join(lacking)}",
            why="a run needs more than weights to go on",
            hint=f"weights={explicit} starts a new run from its weights",
        )
    state["progress"]["origin"] = origin
    return state, explicit, ()


def _identity(path: Path) -> str:
    """The same for the same file, another after it was written anew."""
    try:
        status = path.stat()
    except OSError as error:
        others = sorted(other.name for other in path.parent.glob("*.ckpt")) if path.parent.is_dir() else []
        raise UserError(
            "checkpoint-not-found",
            f"{path} cannot be read: {error.strerror or error}",
            hint=f"there: {', '.join(others[:6])}" if others else "without --resume the run's own last one is taken",
        ) from None
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"


def _other_classes(saved: tuple[str, ...] | None, ours: tuple[str, ...]) -> str | None:
    """The first class that is another one: as many classes in another order fit every tensor, and are all wrong."""
    if saved is None or tuple(saved) == ours:
        return None
    if len(saved) != len(ours):
        return f"classes: {len(saved)} in the checkpoint, {len(ours)} in this run"
    number = next(number for number, pair in enumerate(zip(saved, ours, strict=True)) if pair[0] != pair[1])
    return f"class {number}: {saved[number]} in the checkpoint, {ours[number]} in this run"
