"""Runs a function of ours in a throw-away process: whatever it crashes, leaks or blocks ends with that process.

    def measure(argument: Any, parent: Parent) -> Any:       # a module-level function; runs in the child
        parent.send({"done": 1})
        return {"microseconds": 7.5}

    found = call(measure, {"size": 224, "image": b"..."}, on_message=show, timeout_s=60)

`call` waits for the result. A `Child` is the same in two steps, for a process that takes messages until it is told to
finish. `share_out` runs several of them, each working on one task at a time.

Each child is a fresh interpreter, not a fork: torch's threads, CUDA and obstore do not survive a fork. Arguments,
messages and results are plain data: what JSON can hold, plus bytes. Nothing from a child is unpickled: it may have run
a faulty decoder on untrusted files.

A child leads a session of its own, so Ctrl-C reaches only the parent, which then ends the child. Its stdout goes
nowhere, its last lines on stderr become part of `ChildDied`, and it ends itself and everything below it when its
parent is gone, even after `kill -9`.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

from stoker.core import errors
from stoker.core.errors import ConfigError, StokerError, config_problem

GRACE_S = 3.0
"""How long a child may take to close its files and workers before it is killed."""
STDERR_BYTES = 4096
"""How much of a child's stderr is kept for `ChildDied`."""
# Not `-m stoker.core.child`: that would load this module twice, and once more in every worker that the child spawns.
# -P: a folder named wandb or torch in the working directory must not hide the package.
_COMMAND = (sys.executable, "-P", "-c", "from stoker.core.child import _serve; _serve()")
_LENGTH = struct.Struct("!Q")
_BLOB = {"": "bytes"}


class ChildFailed(RuntimeError):
    """The function raised an error that is not a StokerError; the message ends with its traceback."""


class ChildTooSlow(ChildFailed):
    """There was no result in the time allowed."""


class ChildDied(ChildFailed):
    """The process ended without a result."""

    def __init__(self, exit_code: int, last_lines: Sequence[str], task: Any) -> None:
        self.exit_code = exit_code
        self.last_lines = last_lines
        """What it wrote to stderr at the end."""
        self.task = task
        """What it was working on, where `share_out` had given it a task."""
        super().__init__("\n".join([f"the process {self.how}", *last_lines]))

    @property
    def how(self) -> str:
        if self.exit_code >= 0:
            return f"exited with code {self.exit_code}"
        names = {int(number): number.name for number in signal.Signals}
        return f"was killed by signal {-self.exit_code} ({names.get(-self.exit_code, 'unknown')})"


# In the process that calls.


def call(
    function: Callable[[Any, Parent], Any],
    argument: Any = None,
    *,
    on_message: Callable[[Any], None] = lambda _message: None,
    timeout_s: float | None = None,
) -> Any:
    """The function's result from a process of its own, which is gone when this returns or raises.

    Raises the StokerError that the function raised, ChildDied, ChildTooSlow, or ChildFailed for any other error.
    """
    with Child(function, argument, timeout_s=timeout_s) as child:
        return child.wait(on_message)


def share_out(
    function: Callable[[Any, Parent], Any],
    argument: Any,
    tasks: Iterable[Any],
    *,
    workers: int,
    on_message: Callable[[Any], None],
    on_answer: Callable[[Any], None],
) -> None:
    """Gives every task to one of several children, each with one task at a time; returns after the last answer.

    The function loops over `parent.messages()`, which are its tasks, and calls `parent.answer` once for each.
    """
    waiting = list(tasks)[::-1]
    with ExitStack() as stack, selectors.DefaultSelector() as ready:
        for _ in range(min(workers, len(waiting))):
            # No grace: a worker has nothing to close, and must not write any more once its parent is gone.
            child = stack.enter_context(Child(function, argument, grace_s=0.0))
            ready.register(child, selectors.EVENT_READ)
            child.give(waiting.pop())
        while ready.get_map():
            for key, _ in ready.select():
                assert isinstance(key.fileobj, Child)
                child = key.fileobj
                kind, value = child.receive()
                if kind == "message":
                    on_message(value)
                    continue
                assert kind == "answer"
                on_answer(value)
                if waiting:
                    child.give(waiting.pop())
                else:
                    ready.unregister(child)


class Child:
    """A function at work in a process of its own; use it in a `with` block, or call `end`."""

    def __init__(
        self,
        function: Callable[[Any, Parent], Any],
        argument: Any = None,
        *,
        grace_s: float = GRACE_S,
        timeout_s: float | None = None,
    ) -> None:
        name = f"{function.__module__}:{function.__qualname__}"
        assert function.__module__ != "__main__", f"the child cannot import {name}"
        assert "<" not in name, f"the child cannot import {name}"
        self.task: Any = None
        self._grace_s = grace_s
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._finished = False
        self._stderr = b""
        self._channel, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*_COMMAND, name, str(theirs.fileno()), str(os.getpid()), str(grace_s)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, bufsize=0,
                pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        # In a thread: a full pipe would block the child while we wait for its messages.
        self._listener = threading.Thread(target=self._keep_stderr, name="child-stderr", daemon=True)
        self._listener.start()
        try:
            self.send(argument)
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        """The number of the process, and of its group."""
        return self._process.pid

    def fileno(self) -> int:
        """Readable when `receive` has something."""
        return self._channel.fileno()

    def send(self, message: Any) -> None:
        """Hands over a message; waits while the child is slow to read, raises ChildDied when it is gone."""
        try:
            self._keep_to_deadline()
            _send(self._channel, "message", message)
        except TimeoutError:
            raise ChildTooSlow(f"no result after {self._timeout_s:g} s") from None
        except OSError:
            raise self._death() from None

    def give(self, task: Any) -> None:
        self.task = task
        with suppress(ChildDied):  # `receive` tells why
            self.send(task)

    def finish(self) -> None:
        """Ends the child's loop over `parent.messages()`; `wait` for its result afterwards."""
        # Not merely closed: a process that we forked would hold the channel open.
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_WR)

    def receive(self) -> tuple[str, Any]:
        """The next ("message" | "answer" | "result", value) from the child; raises as `call` does."""
        try:
            self._keep_to_deadline()
            kind, value = _receive(self._channel)
        except TimeoutError:
            raise ChildTooSlow(f"no result after {self._timeout_s:g} s") from None
        except (EOFError, OSError):
            raise self._death() from None
        self._finished = kind in ("result", "error", "bug")
        if kind == "error":
            raise error_from_dict(value)
        if kind == "bug":
            raise ChildFailed(value)
        return kind, value

    def wait(self, on_message: Callable[[Any], None] = lambda _message: None) -> Any:
        """The function's result; messages are handed on as they arrive."""
        while True:
            kind, value = self.receive()
            if kind == "result":
                return value
            on_message(value)

    def end(self, *, at_once: bool = False) -> None:
        """Ends the process and all below it: in order within the grace period, or by force. Safe from any thread."""
        try:
            if not at_once and self._grace_s:
                if not self._finished:
                    self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(self._grace_s)
        finally:
            kill_all(self._process.pid, running=self._process.poll() is None)
            self._process.wait()
            self._channel.close()

    def _keep_to_deadline(self) -> None:
        if self._deadline is not None:
            self._channel.settimeout(max(0.001, self._deadline - time.monotonic()))

    def _death(self) -> ChildDied:
        # The channel closes just before the exit; what holds up the exit now has no result to offer.
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self.end(at_once=True)
        self._listener.join(1.0)
        return ChildDied(self._process.wait(), self._stderr.decode(errors="replace").splitlines(), self.task)

    def _keep_stderr(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            while data := stream.read(65_536):
                self._stderr = (self._stderr + data)[-STDERR_BYTES:]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


# In the child.


class Parent:
    """The process that started this one, as the function that runs here sees it."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def send(self, message: Any) -> None:
        """Reports something before the result: progress, a note."""
        _send(self._channel, "message", message)

    def close(self) -> None:
        """For a copy of this process: whatever it does from here on, the parent does not hear of it."""
        self._channel.close()

    def answer(self, value: Any) -> None:
        """Hands over the result of one task of `share_out`, and is free for the next."""
        _send(self._channel, "answer", value)

    def messages(self) -> Iterator[Any]:
        """What the parent sends, until it calls `finish` or is gone."""
        with suppress(EOFError, ConnectionError):
            while True:
                _, message = _receive(self._channel)
                yield message


def _serve() -> None:
    """The whole life of a child: one function, one answer."""
    name, descriptor, parent, grace_s = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    channel = socket.socket(fileno=int(descriptor))
    channel.set_inheritable(False)
    threading.Thread(target=end_with, args=(int(parent), float(grace_s)), name="parent-watch", daemon=True).start()
    # Registered first, so it runs last. Where the parent still lives, its `end` does the same.
    atexit.register(lambda: None if os.getppid() == int(parent) else kill_all(os.getpid(), running=True))
    with suppress(EOFError, ConnectionError):  # the parent is gone
        _, argument = _receive(channel)
        try:
            module, _, path = name.partition(":")
            function = attrgetter(path)(import_module(module))
            _send(channel, "result", function(argument, Parent(channel)))
        except StokerError as error:
            _send(channel, "error", error_as_dict(error))
        except Exception as error:
            # The first line is what people see, the rest goes into the log.
            _send(channel, "bug", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)  # unwinds the stack: temporary folders and worker processes are cleaned up


def end_with(parent: int, grace_s: float) -> None:
    """Ends this process and all below it when the parent process ends, however that happens.

    PR_SET_PDEATHSIG would fire when the *thread* ends that started us, and the end of a pipe is not seen while a fork
    of the parent holds it open.
    """
    with suppress(OSError):  # an old kernel or a sandbox has no pidfd: the loop below looks four times a second
        descriptor = os.pidfd_open(parent)
        if os.getppid() == parent:
            select.select([descriptor], [], [])
    while os.getppid() == parent:
        time.sleep(0.25)
    if grace_s:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
    kill_all(os.getpid(), running=True)


# In both.


def kill_all(leader: int, *, running: bool) -> None:
    """Kills a child's process group, and while it runs also what has left the group, as W&B's service does."""
    below = [leader] if running else []
    for parent in below:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                below += [int(child) for child in children.read_text().split()]
    for process in below[1:]:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):  # last: the leader may be this process
        os.killpg(leader, signal.SIGKILL)


def _send(channel: socket.socket, kind: str, value: Any) -> None:
    """A message as JSON, preceded by its length; bytes follow in the order in which they appear in it."""
    blobs: list[bytes] = []

    def set_aside(item: Any) -> dict[str, str]:
        if not isinstance(item, bytes):
            raise TypeError(f"a {type(item).__name__} is not plain data: {item!r:.100}")
        blobs.append(item)
        return _BLOB

    text = json.dumps([kind, value], default=set_aside).encode()
    for part in (text, *blobs):
        channel.sendall(_LENGTH.pack(len(part)))
        channel.sendall(part)


def _receive(channel: socket.socket) -> tuple[str, Any]:
    def part() -> bytes:
        return _exactly(channel, *_LENGTH.unpack(_exactly(channel, _LENGTH.size)))

    kind, value = json.loads(part(), object_hook=lambda item: part() if item == _BLOB else item)
    return kind, value


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = bytearray(count)
    left = memoryview(data)
    while left:
        received = channel.recv_into(left)
        if not received:
            raise EOFError
        left = left[received:]
    return bytes(data)


def error_as_dict(error: StokerError) -> dict[str, Any]:
    known = next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    return error.as_dict() | {"kind": known.__name__}


def error_from_dict(parts: dict[str, Any]) -> StokerError:
    """The same error; a subclass from elsewhere arrives as its base in `stoker.core.errors`."""
    texts = {name: parts[name] for name in ("name", "why", "hint")}
    kind = getattr(errors, parts["kind"])
    if kind is ConfigError:
        problems = [config_problem(one["keys"], one["message"], one["where"], one["hint"]) for one in parts["problems"]]
        return ConfigError(parts["message"], problems, **texts)
    error: StokerError = kind(seen=parts["message"], **texts)
    return error
