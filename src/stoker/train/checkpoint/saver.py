"""What a checkpoint of a run holds, when it is saved, and saving in the background while training continues.

Weights, momenta and averages do not change between two updates: a thread copies them while the next step computes its
gradients, and the loop waits only before it changes them (`wait_for_copy`). The buffers of batch norm, which a forward
pass already changes, are copied at once. The thread then writes the copy to the disk. A loop that
waited for the whole copy would pause for 0.13 of the time of torch.save (0.07 to 0.23, results/checkpoint).

The copy goes into one buffer that is allocated once and reused: the kernel hands out fresh memory page by page, which
takes many times as long as the copy itself. It takes as much memory as the state's tensors.

One save runs at a time. A second one waits for it instead of replacing it: no save is dropped, and the disk is never
more than one interval behind. The wait is reported.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from stoker.core.console import Say
from stoker.train.checkpoint.folder import Checkpoints, SaveOutcome, State
from stoker.train.checkpoint.format import FlatState, contiguous_strides, flatten, is_dense
from stoker.train.observer import Observer

if TYPE_CHECKING:
    from stoker.train.loop import Run

ALIGNMENT = 64


def run_state(run: Run, sums: dict[str, Any]) -> dict[str, Any]:
    """Everything a run needs to continue as if it had never stopped; `restore.resume` reads it back."""
    return {
        "model": run.model.state_dict(),
        "ema": None if run.ema is None else run.ema.state_dict(),
        "optimizer": run.step.optimizer.state_dict(),
        "scaler": run.step.precision.scaler.state_dict(),
        "progress": asdict(run.progress),
        "horizon": asdict(run.schedule.horizon),
        "sums": sums,
        "config": run.record.config,
        "classes": run.record.classes,
        "decoder": run.record.decoder,
        "data": run.record.data,
        "branched_from": run.record.branched_from,
    }


@dataclass
class Saver:
    """Decides when a run is saved, and saves it on the rank that writes."""

    run: Run
    checkpoints: Checkpoints | None
    """None on ranks that do not write."""
    observer: Observer = field(default_factory=Observer)
    every_steps: int | None = None
    every_s: float | None = None
    say: Say = lambda _text: None
    _writer: BackgroundWriter | None = field(default=None, init=False)
    _last_s: float = field(default_factory=time.monotonic, init=False)
    _last_step: int = field(default=-1, init=False)
    _pauses: dict[str, float] = field(default_factory=dict, init=False)

    def is_due_by_steps(self) -> bool:
        """Whether the run is at a step that is saved; every rank knows."""
        return self.every_steps is not None and self.run.progress.step % self.every_steps == 0

    def is_due_by_time(self) -> bool:
        """Whether this rank thinks it is time to save; the ranks have to agree before they do."""
        return self.every_s is not None and time.monotonic() - self._last_s >= self.every_s

    def get_ready(self) -> None:
        """After the first update, when the optimizer has its state: allocates the buffer in the background."""
        if self._writer is None and self.checkpoints is not None:
            self._writer = BackgroundWriter(self.checkpoints, self.observer.sync)
            self._writer.prepare(run_state(self.run, {}))

    def save(self, sums: dict[str, Any], *, best: tuple[int, float] | None = None, now: bool = False) -> bool:
        """Saves the run as last and, given `best` (epoch, value), as one of the best; with `now`, before it returns.

        False if the last checkpoint was not written; only `now` can know.
        """
        step = self.run.progress.step
        self._last_s = time.monotonic()
        if self.checkpoints is None or (step == self._last_step and best is None and not now):
            return True
        self._last_step = step
        self._writer = self._writer or BackgroundWriter(self.checkpoints, self.observer.sync)
        # A forward pass changes the buffers; everything else stays the same until the next update.
        handed = self._writer.save(run_state(self.run, sums), best=best, changing=self.run.model.buffers())
        self._report(handed.finished)
        self._pauses = {"pause_s": handed.pause_s, "waited_s": handed.waited_s}
        if not now:
            return True
        self.wait_for_copy()
        outcomes = self._writer.wait()
        self._report(outcomes)
        return all(outcome.failure is None for outcome in outcomes if outcome.path == self.checkpoints.last)

    def wait_for_copy(self) -> None:
        """Must be called before weights, optimizer or average change; returns at once if no save is being copied."""
        if self._writer is not None and (held_s := self._writer.wait_for_copy()) is not None:
            self._event("checkpoint", {**self._pauses, "pause_s": self._pauses["pause_s"] + held_s})

    def close(self) -> None:
        """Waits for the save in progress."""
        if self._writer is not None:
            self._report(self._writer.close())
            self._writer = None

    def _report(self, outcomes: tuple[SaveOutcome, ...]) -> None:
        for outcome in outcomes:
            if outcome.failure is not None:
                self.say(f"warning: {outcome.failure}; training continues, and the next save tries again")
                self._event("save_failed", {"why": outcome.failure})

    def _event(self, name: str, details: dict[str, Any]) -> None:
        self.observer.event(name, self.run.progress.step, details)


@dataclass(frozen=True)
class HandedOver:
    """A save that the thread now works on."""

    pause_s: float
    """How long the loop waited for what was copied at once."""
    waited_s: float
    """How long it waited before that for the previous save; 0 if that was done."""
    finished: tuple[SaveOutcome, ...]
    """Outcomes of earlier saves, each reported once."""


class BackgroundWriter:
    """Saves states to `checkpoints` in a thread; `close` waits for the last save."""

    def __init__(self, checkpoints: Checkpoints, before_write: Callable[[], None] = lambda: None) -> None:
        self._checkpoints = checkpoints
        # Called in the thread: files that a checkpoint relies on must reach the disk before it.
        self._before_write = before_write
        self._buffer = SnapshotBuffer()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._under_way: Future[list[SaveOutcome]] | None = None
        self._finished: list[SaveOutcome] = []
        self._copying: threading.Event | None = None

    def prepare(self, state: State) -> None:
        self._settle()
        flat = flatten(state)
        self._under_way = self._thread.submit(self._reserve, _places_for(flat)[1], _on_cuda(flat))

    def save(
        self,
        state: State,
        *,
        best: tuple[int, float] | None = None,
        changing: Iterable[torch.Tensor] | None = None,
    ) -> HandedOver:
        """Copies the state and returns; the thread writes it as last and, given `best` (epoch, value), as a best one.

        Given the tensors that are `changing` before the next update, only those are copied at once, and the caller
        has to call `wait_for_copy` before it changes any other.

        Raises what went wrong in an earlier save, except errors of the disk: those are outcomes.
        """
        began = time.perf_counter()
        self._settle()
        settled = time.perf_counter()
        snapshot = self._buffer.take(flatten(state), changing)
        self._copying = snapshot.copied
        self._under_way = self._thread.submit(self._write, snapshot, best)
        return HandedOver(time.perf_counter() - settled, settled - began, self._take_finished())

    def wait_for_copy(self) -> float | None:
        """Returns once the state of the last save may change: the seconds waited; None if there was no new save."""
        copying, self._copying = self._copying, None
        if copying is None:
            return None
        began = time.perf_counter()
        copying.wait()
        return time.perf_counter() - began

    def wait(self) -> tuple[SaveOutcome, ...]:
        """Waits for the save in progress; the outcomes that were not yet reported."""
        self._settle()
        return self._take_finished()

    def close(self) -> tuple[SaveOutcome, ...]:
        """Like `wait`, and ends the thread."""
        try:
            return self.wait()
        finally:
            self._thread.shutdown()

    def _settle(self) -> None:
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            self._finished += under_way.result()

    def _take_finished(self) -> tuple[SaveOutcome, ...]:
        finished, self._finished = self._finished, []
        return tuple(finished)

    def _reserve(self, size_bytes: int, pinned: bool) -> list[SaveOutcome]:
        self._buffer.reserve(size_bytes, pinned=pinned)
        return []

    def _write(self, snapshot: Snapshot, best: tuple[int, float] | None) -> list[SaveOutcome]:
        snapshot.copy_rest()
        self._before_write()
        state = snapshot.state()
        # The best first: after a crash between the two, validation is repeated and its checkpoint is not lost.
        kept = None if best is None else self._checkpoints.save_best(state, *best)
        return [*([] if kept is None else [kept]), self._checkpoints.save_last(state)]


class PendingCopy(NamedTuple):
    """A stretch of memory that is still to be copied."""

    target: int
    source: torch.Tensor
    size_bytes: int


class TensorPlace(NamedTuple):
    """The place of one tensor in the buffer, and how to view it there; the tensor itself changes from now on."""

    start: int
    size_bytes: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Snapshot:
    """A copy of a state in a buffer."""

    text: str
    places: dict[str, TensorPlace]
    memory: torch.Tensor
    event: torch.cuda.Event | None
    """Reached once the copies from a GPU have arrived; None if there are none."""
    later: tuple[PendingCopy, ...] = ()
    """What `copy_rest` still has to copy."""
    copied: threading.Event = field(default_factory=threading.Event)
    """Set once the state may change again."""

    def copy_rest(self) -> None:
        """For the writer thread; the loop continues meanwhile, up to its next update."""
        try:
            for copy in self.later:
                ctypes.memmove(copy.target, copy.source.data_ptr(), copy.size_bytes)  # releases the GIL
        finally:
            self.copied.set()

    def state(self) -> FlatState:
        """The copied state, for the writer thread: waits for copies that are still on their way."""
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
    """Memory for a copy of all tensors of a state; grows if it must, and is reused otherwise."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Allocates memory of this size and touches it, so that the kernel hands it out now."""
        if self._memory.numel() >= size_bytes and self._memory.is_pinned() >= pinned:
            return
        self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old one first
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
        later: list[PendingCopy] = []
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
                    later.append(PendingCopy(base + place.start, source, place.size_bytes))
            else:
                there = self._memory[place.start : place.start + place.size_bytes].view(place.dtype)
                there.as_strided(place.shape, place.strides).copy_(source.detach(), non_blocking=on_cuda)
        event = None
        if on_cuda:
            # The loop does not wait: later updates queue behind the copies in the same stream.
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return Snapshot(flat.text, places, self._memory, event, tuple(later))


def _places_for(flat: FlatState) -> tuple[dict[str, TensorPlace], int]:
    places, position = {}, 0
    for name, tensor in flat.tensors.items():
        shape, strides, size_bytes = tensor.shape, tensor.stride(), tensor.nbytes
        if not is_dense(shape, strides):
            strides = contiguous_strides(shape)
        places[name] = TensorPlace(position, size_bytes, tensor.dtype, shape, strides)
        position += -(-size_bytes // ALIGNMENT) * ALIGNMENT
    return places, position


def _on_cuda(flat: FlatState) -> bool:
    return any(tensor.is_cuda for tensor in flat.tensors.values())
