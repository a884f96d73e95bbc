"""What a checkpoint of a run holds and when it is written; saving while training goes on."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from stoker.errors import UserError
from stoker.train.checkpoint.folder import Checkpoints, Outcome, SaveFailed, State
from stoker.train.checkpoint.format import FlatState, contiguous_strides, flatten, is_dense, read_checkpoint
from stoker.train.checkpoint.restore import CheckpointOther, differences
from stoker.train.ema import WeightAverage
from stoker.train.schedule import Horizon, Progress
from stoker.train.step import TrainStep

# Saving while training goes on: a thread copies the state in memory, then writes the copy to the disk.
#
# Weights, momenta and averages stand still from one update to the next: they are copied while the next step computes
# its
# gradients, and the loop waits only before it changes them (`wait_for_copy`). What a forward pass already changes, the
# buffers of batch norm, is copied at once.
#
# The copy goes into one buffer that is allocated once and reused: the kernel gives fresh memory page by page, which
# takes
# many times as long as the copy itself. It costs as much memory as the state's tensors have.
#
# One save is under way at a time. A second one waits for it instead of replacing it: nothing that was asked for is
# dropped, and what the disk holds is never older than one interval. How long it waited is told.

ALIGNMENT = 64


@dataclass(frozen=True)
class HandedOver:
    """A save that is under way."""

    pause_s: float
    """How long the loop stood still for what was copied at once."""
    waited_s: float
    """How long it stood still before that, for the save before; 0 where that was done."""
    finished: tuple[Outcome, ...]
    """What became of earlier saves, each told once."""


class Copy(NamedTuple):
    """A stretch of memory that is still to be copied."""

    target: int
    source: torch.Tensor
    size_bytes: int


class Place(NamedTuple):
    """Where one tensor lies in a buffer, and how to see it there; the tensor itself changes from now on."""

    start: int
    size_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state in a buffer."""

    text: str
    places: dict[str, Place]
    memory: torch.Tensor
    event: torch.cuda.Event | None
    """Reached once the copies from a GPU have arrived; None where there are none."""
    later: tuple[Copy, ...] = ()
    """What `copy_rest` has yet to copy."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set once the state may change again."""

    def copy_rest(self) -> None:
        """For the thread that writes; the loop goes on meanwhile, up to its next update."""
        try:
            for copy in self.later:
                ctypes.memmove(copy.target, copy.source.data_ptr(), copy.size_bytes)  # lets go of Python's lock
        finally:
            self.copied.set()

    def state(self) -> FlatState:
        """Its content, for the thread that writes: waits for what is still on its way."""
        if self.event is not None:
            self.event.synchronize()
        tensors = {
            name: self.memory[place.start : place.start + place.size_bytes]
            .view(place.dtype)
            .as_strided(place.shape, place.strides)
            for name, place in self.places.items()
        }
        return FlatState(self.text, tensors)


class SnapshotBuffer:
    """Memory for a copy of all tensors of a state; grows when it must, and is otherwise reused."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Memory of this size that the kernel has already given."""
        if self._memory.numel() >= size_bytes and self._memory.is_pinned() >= pinned:
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # The old one goes first.
        if pinned:
            self._memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            # By numpy, which asks for huge pages.
            self._memory = torch.from_numpy(np.empty(size_bytes, dtype=np.uint8))
        self._memory.numpy().fill(0)

    def take(self, flat: FlatState, changing: Iterable[torch.Tensor] | None = None) -> Snapshot:
        """A copy of the state as it is now: CPU tensors are copied on return, those of a GPU in its stream.

        Given the tensors that are `changing` before the next update, all others are left to `copy_rest`.
        """
        at_once = None if changing is None else {tensor.data_ptr() for tensor in changing}
        later: list[Copy] = []
        places, size_bytes = _places_for(flat)
        on_cuda = _on_cuda(flat)
        self.reserve(size_bytes, pinned=on_cuda)
        base = self._memory.data_ptr()
        for tensor, place in zip(flat.tensors.values(), places.values(), strict=True):
            source = tensor if tensor.stride() == place.strides else tensor.detach().contiguous()
            if source.is_cpu:
                # In physical order, whatever the strides. Not by torch's copy_: its team of threads waits for its
                # slowest member at every tensor, which on cores busy with decoding took twenty times as long.
                if at_once is None or source.data_ptr() in at_once:
                    ctypes.memmove(base + place.start, source.data_ptr(), place.size_bytes)
                else:
                    later.append(Copy(base + place.start, source, place.size_bytes))
            else:
                there = self._memory[place.start : place.start + place.size_bytes].view(place.dtype)
                there.as_strided(place.shape, place.strides).copy_(source.detach(), non_blocking=on_cuda)
        event = None
        if on_cuda:
            # The loop does not wait: later updates stand behind the copies in the same stream.
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Snapshot(flat.text, places, self._memory, event, tuple(later))


class AsyncSaver:
    """Saves to `checkpoints` in a thread; use it as a context manager, whose end waits for what is under way.

    Before the process ends for a signal: `wait()`, then `checkpoints.save_last(state)`; `save_now` does both.
    """

    def __init__(self, checkpoints: Checkpoints, before_write: Callable[[], None] = lambda: None) -> None:
        self.checkpoints = checkpoints
        self._before_write = before_write
        self._buffer = SnapshotBuffer()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._under_way: Future[list[Outcome]] | None = None
        self._finished: list[Outcome] = []
        self._copying: threading.Event | None = None

    def prepare(self, state: State) -> None:
        """Allocates the buffer in the thread; after the first step, when the optimizer has its state, is the time."""
        self._settle()
        flat = flatten(state)
        self._under_way = self._writer.submit(self._reserve, _places_for(flat)[1], _on_cuda(flat))

    def save(
        self,
        state: State,
        *,
        best: tuple[int, float] | None = None,
        changing: Iterable[torch.Tensor] | None = None,
    ) -> HandedOver:
        """Copies the state and returns; the thread writes it as last and, given `best` (epoch, value), as a best one.

        Given the tensors that are `changing` before the next update, only those are copied at once, and the caller has
        to call `wait_for_copy` before it changes any other.

        Raises what went wrong with an earlier save, unless it is a disk that is full or the like: that is an outcome.
        """
        began = time.perf_counter()
        self._settle()
        settled = time.perf_counter()
        snapshot = self._buffer.take(flatten(state), changing)
        self._copying = snapshot.copied
        self._under_way = self._writer.submit(self._write, snapshot, best)
        return HandedOver(time.perf_counter() - settled, settled - began, self._told())

    def wait_for_copy(self) -> float | None:
        """Returns when the state of the last save may be changed: seconds that took; None where nothing was saved
        since it was last asked."""
        copying, self._copying = self._copying, None
        if copying is None:
            return None
        began = time.perf_counter()
        copying.wait()
        return time.perf_counter() - began

    def save_now(self, state: State) -> tuple[Outcome, ...]:
        """Waits for what is under way, then saves as last before it returns."""
        self._settle()
        self._finished.append(self.checkpoints.save_last(state))
        return self._told()

    def wait(self) -> tuple[Outcome, ...]:
        """Returns when nothing is under way any more; what became of the saves that were not told yet."""
        self._settle()
        return self._told()

    def close(self) -> tuple[Outcome, ...]:
        """The same, and ends the thread."""
        try:
            return self.wait()
        finally:
            self._writer.shutdown()

    def __enter__(self) -> AsyncSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _settle(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._finished += under_way.result()

    def _told(self) -> tuple[Outcome, ...]:
        finished, self._finished = self._finished, []
        return tuple(finished)

    def _reserve(self, size_bytes: int, pinned: bool) -> list[Outcome]:
        self._buffer.reserve(size_bytes, pinned=pinned)
        return []

    def _write(self, snapshot: Snapshot, best: tuple[int, float] | None) -> list[Outcome]:
        snapshot.copy_rest()
        self._before_write()
        state = snapshot.state()
        # The best first: a crash between the two then repeats the validation, and does not lose its checkpoint.
        kept = None if best is None else self.checkpoints.save_best(state, *best)
        return [*([] if kept is None else [kept]), self.checkpoints.save_last(state)]


def _places_for(flat: FlatState) -> tuple[dict[str, Place], int]:
    places, position = {}, 0
    for name, tensor in flat.tensors.items():
        shape, strides, size_bytes = tensor.shape, tensor.stride(), tensor.nbytes
        if not is_dense(shape, strides):
            strides = contiguous_strides(shape)
        places[name] = Place(position, size_bytes, tensor.dtype, shape, strides)
        position += -(-size_bytes // ALIGNMENT) * ALIGNMENT
    return places, position


def _on_cuda(flat: FlatState) -> bool:
    return any(tensor.is_cuda for tensor in flat.tensors.values())


# What a checkpoint of a run holds, when it is written, and how a run goes on from one.


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
