"""Training progress for people: one line in place on a terminal, a line every few seconds elsewhere, and a log file."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from stoker.core.console import bar_line
from stoker.core.redact import redact_text
from stoker.core.units import metric_text
from stoker.run.metrics import ACC1

SHOW_EVERY_S = 0.1
LINE_EVERY_S = 10.0
WATCH_EVERY_S = 1.0
RATE_OVER_S = 60.0
"""The rate is that of the last minute: a first step that compiled for five minutes would distort it for hours."""


class TrainLog:
    """logs/train_<time>.log: everything training said, as plain lines with the time in front.

    A line is in the file when `write` returns; a full disk does not stop training.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stem = f"train_{time.strftime('%Y%m%d-%H%M%S')}"
        for number in count(1):
            self.path = folder / (f"{stem}.log" if number == 1 else f"{stem}-{number}.log")
            with suppress(FileExistsError):
                self._stream = self.path.open("x", encoding="utf-8", buffering=1)
                return

    def write(self, text: str) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S")
        try:
            for line in redact_text(text).splitlines():
                self._stream.write(f"{when} {line}\n" if line else "\n")
        except (OSError, ValueError):
            return

    def close(self) -> None:
        try:
            self._stream.close()
        except OSError:
            return


class TrainProgress:
    """Call `step` at every step: it only looks at the clock until a line is due.

    `metric` is shown beside the loss, as the last validation gave it. `waiting` says in words what does not respond, if
    anything.
    """

    def __init__(
        self,
        log: TrainLog,
        stream: TextIO | None = None,
        *,
        metric: str = ACC1.key,
        line_every_s: float = LINE_EVERY_S,
        waiting: Callable[[], str | None] | None = None,
    ) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._in_place = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._blocks = _can_show("█", self._stream)
        self._log = log
        self._line_every_s = line_every_s
        self._every_s = SHOW_EVERY_S if self._in_place else line_every_s
        self._stream_gone = False
        # Trackers call `say` from their own threads.
        self._lock = threading.Lock()
        self._shown = ""
        self._metric = metric
        self._last_value: float | None = None
        self._epoch = 0
        self._begin("Epoch", 0, 0)
        self._closed = threading.Event()
        if waiting is not None:
            # Not by the loop: it is the thread that waits.
            threading.Thread(target=self._watch, args=(waiting,), name="stoker-waiting", daemon=True).start()

    def epoch_begins(self, epoch: int, steps: int, done: int = 0) -> None:
        """Begins an epoch of that many steps; a resumed run has already done some."""
        self._begin(f"Epoch {epoch}", steps, done)
        self._epoch = epoch

    def step(self, step: int, loss: float, extra: Callable[[], Mapping[str, Any]] = dict) -> None:
        """One more step is done; `step` counts from the start of the run. `extra` is called only when a line is made,
        ten times a second on a terminal."""
        self._done += 1
        now_s = time.monotonic()
        if now_s < self._due_s and self._done != self._total:
            return
        metrics: dict[str, Any] = {"train/loss": loss}
        if self._last_value is not None:
            metrics[self._metric] = self._last_value
        metrics |= {name: item for name, item in extra().items() if item is not None}
        self._show(now_s, f"Train step {step}  ", metrics)

    def validation_begins(self, steps: int) -> None:
        self._begin("Validation", steps, 0)

    def validation_step(self) -> None:
        self._done += 1
        now_s = time.monotonic()
        if now_s >= self._due_s or self._done == self._total:
            self._show(now_s, "", {})

    def epoch_ends(self, metrics: Mapping[str, Any]) -> None:
        """Prints the epoch's metrics as a block; what was not measured is left out."""
        measured = {name: value for name, value in metrics.items() if value is not None}
        self._last_value = measured.get(self._metric, self._last_value)
        self._finish_line()
        lines = [f"  {name}: {metric_text(name, value)}" for name, value in measured.items()]
        self.say("\n".join(["", f"Epoch {self._epoch} metrics:", *lines]))

    def say(self, text: str) -> None:
        """Prints a message above the progress line, and logs it; any thread may call it."""
        with self._lock:
            shown = self._shown
            self._put(f"\r\x1b[K{text}\n{shown}" if shown else f"{text}\n")
            self._log.write(text)

    def close(self) -> None:
        self._closed.set()
        self._finish_line()
        self._log.close()

    def _begin(self, label: str, steps: int, done: int) -> None:
        self._finish_line()
        now_s = time.monotonic()
        self._label, self._total, self._done, self._done_before = label, steps, done, done
        self._begun_s = now_s
        self._due_s = now_s + self._every_s
        self._line_due_s = now_s + self._line_every_s
        self._marks: deque[tuple[float, int]] = deque([(now_s, done)])

    def _show(self, now_s: float, log_words: str, metrics: Mapping[str, Any]) -> None:
        last = self._done == self._total
        elapsed_s = now_s - self._begun_s
        rate = self._rate(now_s, whole=last)
        text = bar_line(self._label, self._done, self._total, elapsed_s, rate, metrics, blocks=self._blocks)
        self._due_s = now_s + self._every_s
        with self._lock:
            if self._in_place:
                self._shown = text[: self._columns()]
                self._put(f"\r{self._shown}\x1b[K")
            else:
                self._put(text + "\n")
            if last or now_s >= self._line_due_s:
                self._line_due_s = now_s + self._line_every_s
                self._log.write(f"{log_words}{text}")

    def _watch(self, waiting: Callable[[], str | None]) -> None:
        """Shows what is being waited for: in place on a terminal, and as a line when it begins, every few seconds, and
        when it is over."""
        said, due_s = "", 0.0
        while not self._closed.wait(WATCH_EVERY_S):
            text, now_s = waiting(), time.monotonic()
            if text is None:
                if said:
                    self.say(f"{said}: it responds again")
                said, due_s = "", 0.0
                continue
            if now_s >= due_s:
                due_s = now_s + self._line_every_s
                if self._in_place:
                    self._log.write(text)
                else:
                    self.say(text)
            said = text
            with self._lock:
                if self._in_place and not self._closed.is_set():
                    self._shown = f"{self._label}: {self._done}/{self._total}, {text}"[: self._columns()]
                    self._put(f"\r{self._shown}\x1b[K")

    def _rate(self, now_s: float, whole: bool) -> float | None:
        if whole:
            elapsed_s = now_s - self._begun_s
            return (self._done - self._done_before) / elapsed_s if elapsed_s > 0 else None
        marks = self._marks
        # Keeps at least two: with steps of minutes, the last one is all there is.
        while len(marks) > 1 and now_s - marks[1][0] > RATE_OVER_S:
            marks.popleft()
        then_s, done = marks[0]
        # One mark per second is enough for a minute's rate.
        if now_s - marks[-1][0] >= 1.0:
            marks.append((now_s, self._done))
        return (self._done - done) / (now_s - then_s) if now_s > then_s else None

    def _finish_line(self) -> None:
        with self._lock:
            if self._shown:
                self._shown = ""
                self._put("\n")

    def _columns(self) -> int:
        # A line that wraps cannot be updated in place.
        try:
            return (os.get_terminal_size(self._stream.fileno()).columns or 10_000) - 1
        except OSError:
            return 79

    def _put(self, text: str) -> None:
        if self._stream_gone:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            # The terminal or the reader of the pipe is gone: logging and training continue.
            self._stream_gone = True


def _can_show(text: str, stream: TextIO) -> bool:
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
