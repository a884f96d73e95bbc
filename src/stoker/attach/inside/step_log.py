"""The steps of this training process, batch by batch, and the decision that enough has been recorded."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from typing import Any

from stoker.attach.inside import ring
from stoker.attach.inside.session import Session, leading_rank, rank_of_environment

# Events that wait for the device to reach them; more than this, and it lags so far behind that we let go of some.
MOST_PENDING_EVENTS = 64
MOST_OPTIMIZER_STEPS = 2**32 - 1


class StepLog:
    """Writes one record for each batch that is taken; a few microseconds each."""

    def __init__(self, session: Session) -> None:
        self._session = session
        path = os.path.join(session.folder, f"steps-{os.getpid()}.ring")  # noqa: PTH118
        self._ring = ring.Ring(path, ring.STEP, ring.STEP_CAPACITY)
        self._batches: dict[int, int] = {}
        self._votes: dict[int, int] = {}
        self._since_step: set[int] = set()
        self._optimizer_steps = 0
        self._optimizer_end = 0
        self._began = 0
        self._pending: deque[tuple[int, Any, Any]] = deque(maxlen=MOST_PENDING_EVENTS)
        self._described = False
        self._leads = rank_of_environment() in (None, leading_rank())

    def optimizer_stepped(self, optimizer: Any) -> None:
        """The loaders that were read since the step before have fed this one."""
        self._optimizer_end = time.perf_counter_ns()
        self._optimizer_steps += 1
        for loader in self._since_step:
            self._votes[loader] = self._votes.get(loader, 0) + 1
        self._since_step.clear()
        if not self._described:
            self._described = True
            self._describe(optimizer)

    def batch(
        self,
        loader: int,
        first: bool,
        ready: int,
        samples: int,
        started_us: int,
        enter: int,
        enter_cpu: int,
        entered: Any,
    ) -> None:
        """A batch was handed out."""
        leave = time.perf_counter_ns()
        flags = ring.FIRST if first else 0
        at = self._write(loader, flags, ready, samples, started_us if first else 0, enter, leave, enter_cpu)
        if entered is not None:
            self._pending.append((at, entered, self.device_event()))
        self._resolve_events()
        self._since_step.add(loader)
        taken = self._batches[loader] = self._batches.get(loader, 0) + 1
        if not self._began:
            self._began = leave
        training = not self._votes or loader == max(self._votes, key=self._votes.__getitem__)
        steps, seconds = self._session.steps, self._session.seconds
        # One batch more than was asked for: its arrival ends the last step.
        enough_steps = steps is not None and training and bool(self._votes) and taken > steps
        enough_seconds = seconds is not None and leave - self._began > seconds * 1e9
        enough = self._leads and (enough_steps or enough_seconds)
        if training:
            ring.STEP_MARKS.pack_into(self._ring.memory, ring.STEP_MARKS_AT, taken, int(enough), self._began)
        elif enough:
            ring.STEP_MARKS.pack_into(self._ring.memory, ring.STEP_MARKS_AT, 0, 1, self._began)
        if enough:
            self._session.recording = False

    def over(self, loader: int, enter: int, enter_cpu: int) -> None:
        """The epoch of this loader is over."""
        self._write(loader, ring.LAST, -1, 0, 0, enter, time.perf_counter_ns(), enter_cpu)

    def _write(
        self,
        loader: int,
        flags: int,
        ready: int,
        samples: int,
        started_us: int,
        enter: int,
        leave: int,
        enter_cpu: int,
    ) -> int:
        at = self._ring.append(
            loader, flags, ready, samples, min(self._optimizer_steps, MOST_OPTIMIZER_STEPS),
            min(started_us, 2**32 - 1), enter, leave, self._optimizer_end, -1,
            enter_cpu,
        )  # fmt: skip
        self._optimizer_steps = 0
        return at

    def device_event(self) -> Any:
        """A mark in the device's queue of work; None without a GPU, or before the script uses it."""
        cuda = sys.modules.get("torch.cuda")
        if cuda is None or not cuda.is_initialized():
            return None
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def _resolve_events(self) -> None:
        """Reads the marks that the device has passed; asks without waiting, never synchronises."""
        while self._pending and self._pending[0][2].query():
            at, entered, left = self._pending.popleft()
            # From the end of the work before to the arrival of the batch: the time in which the device stood idle.
            idle_ns = int(entered.elapsed_time(left) * 1e6)
            self._ring.memory[at + ring.DEVICE_IDLE_AT : at + ring.DEVICE_IDLE_AT + 8] = idle_ns.to_bytes(
                8, "little", signed=True
            )

    def _describe(self, optimizer: Any) -> None:
        """Once, at the first optimizer step: what is trained, on what."""
        weights = [weight for group in optimizer.param_groups for weight in group["params"]]
        facts: dict[str, Any] = {"convolves_3d": any(weight.ndim == 5 for weight in weights)}
        cuda, distributed = sys.modules.get("torch.cuda"), sys.modules.get("torch.distributed")
        if cuda is not None and cuda.is_initialized():
            facts |= {"device": cuda.get_device_name(), "devices": cuda.device_count()}
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            facts["in_group_rank"] = rank = distributed.get_rank()
            self._leads = rank == leading_rank()
        self._session.say(**facts)
