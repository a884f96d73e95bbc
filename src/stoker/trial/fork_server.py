"""Runs functions in throw-away processes, forked from one that has imported everything and does nothing else.

Importing torch and timm takes seconds, a fork a hundredth of one; and a fork is as fresh as a new process, because the
server never runs a trial itself. Server and forks end when we end, even after `kill -9`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from stoker.core.cgroups import PROC
from stoker.core.child import Child, ChildFailed, Parent, end_with, error_as_dict, error_from_dict, kill_all
from stoker.core.errors import ConfigError, StokerError, as_out_of_memory
from stoker.profile.memory import read_counters, read_memory, tree_memory, tree_pids

START_S = 300.0
"""How long importing may take on a slow disk."""
NO_MEMORY = frozenset({"out-of-device-memory", "out-of-memory"})
"""Names of errors that mean a lack of memory."""
KILLED = frozenset({"worker-died"})
DETAIL_LETTERS = 400

How = Literal["measured", "out-of-memory", "killed", "hung", "crashed", "refused"]
"""`refused`: an error that a user can act on. `crashed`: any other."""
Tell = Callable[[Any], None]


@dataclass(frozen=True)
class Ended:
    """How a function ended in its process."""

    how: How
    result: Any = None
    """What it returned, if it was measured."""
    detail: str = ""
    """Why it failed, in words."""
    error: StokerError | None = None
    """What it raised, if a user can act on it."""
    bug: str | None = None
    """What it raised otherwise; the first line is a summary, a traceback follows."""
    took_s: float = 0.0
    """Without the imports, which only the first one waits for."""
    peak_bytes: int | None = None
    """Peak memory of its processes together."""

    def reraise(self, but_for: Collection[str] = ()) -> None:
        """Raises the function's error, if there was one; errors with these names are left to the caller."""
        if self.bug is not None:
            raise ChildFailed(self.bug)
        if self.error is not None and self.error.name not in but_for:
            raise self.error


class ForkServer:
    """Runs functions in forks, one at a time; `module:function` gets (argument, tell), both plain data."""

    def __init__(self, *imports: str) -> None:
        self._imports = list(imports)
        self._server: Child | None = None
        self.import_s = 0.0
        """Time that a process would also need to start, if it were not a fork."""

    def call(
        self,
        function: str,
        argument: dict[str, Any],
        *,
        timeout_s: float | None = None,
        memory_bytes: int | None = None,
        on_message: Tell = lambda _message: None,
    ) -> Ended:
        """How the function ended; whatever it does, this does not raise.

        It may take `memory_bytes`, or the available memory if that is less."""
        # As `stoker train` does: torch threads that spin while they wait would take the cores from the loader.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        try:
            server = self._started()
            began_s = time.monotonic()
            with MemoryWatch(memory_left(memory_bytes)) as watch:
                server.send({"function": function, "argument": argument})
                parts = _follow(server, timeout_s, on_message, watch)
            took_s = time.monotonic() - began_s
        except ChildFailed as failed:
            self.close()
            why = f"the process that trials are forked from failed: {str(failed).partition(chr(10))[0]}"
            return Ended("crashed", detail=why, bug=why)
        except BaseException:
            self.close()  # with the fork
            raise
        error = None if "error" not in parts else error_from_dict(parts["error"])
        how, detail = _how_it_ended(parts, error, watch, timeout_s)
        result = parts["result"] if how == "measured" else None
        return Ended(how, result, detail[:DETAIL_LETTERS], error, parts.get("bug"), took_s, watch.peak_bytes)

    def close(self) -> None:
        """Ends everything; the next call starts anew."""
        if self._server is not None:
            self._server.end(at_once=True)
            self._server = None

    def _started(self) -> Child:
        if self._server is None:
            self._server = Child(_serve, self._imports, grace_s=0.0)
            if not select.select([self._server], [], [], START_S)[0]:
                raise ChildFailed(f"its imports took more than {START_S:.0f} s")
            _, self.import_s = self._server.receive()
        return self._server


def _follow(server: Child, timeout_s: float | None, on_message: Tell, watch: MemoryWatch) -> dict[str, Any]:
    """Messages of a fork until it ends: `result`, `error` or `bug`; its exit `status`; `late` if it was ended."""
    found: dict[str, Any] = {}
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        if not select.select([server], [], [], left_s)[0]:
            # The fork's end is still awaited: its last messages must not be taken for the next one's.
            found["late"], deadline_s = True, None
            if "pid" in found:
                kill_all(found["pid"], running=True)
            continue
        kind, value = server.receive()
        if kind == "answer":
            return found | {"status": value}
        if "message" in value:
            on_message(value["message"])
            continue
        found |= value
        if "pid" in value:
            watch.begin(value["pid"], server.pid)


def _how_it_ended(
    parts: dict[str, Any], error: StokerError | None, watch: MemoryWatch, timeout_s: float | None
) -> tuple[How, str]:
    """And why, in words."""
    if watch.exceeded_bytes is not None:
        return "out-of-memory", watch.words()
    if "late" in parts:
        return "hung", f"not finished after {timeout_s:.0f} s"
    if error is not None:
        problems = [problem.seen for problem in error.problems] if isinstance(error, ConfigError) else []
        how: How = "out-of-memory" if error.name in NO_MEMORY else "killed" if error.name in KILLED else "refused"
        return how, "; ".join([error.seen, *problems])
    if "bug" in parts:
        return "crashed", parts["bug"].partition("\n")[0]
    if "result" in parts:
        return "measured", ""
    status = parts["status"]
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else str(-status)
        return "killed", f"the process was killed by {name}"
    return "crashed", f"the process exited with code {status}"


# In the server, and in its forks.


def _serve(imports: list[str], parent: Parent) -> None:
    """Imports, waits, forks."""
    began_s = time.monotonic()
    for name in imports:
        import_module(name)
    parent.send(time.monotonic() - began_s)
    for job in parent.messages():
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _live(job, theirs, parent, ours)
        theirs.close()
        with ours:
            # Half a message of a killed fork ends this loop.
            for message in Parent(ours).messages():
                parent.send(message)
        _, status = os.waitpid(pid, 0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # workers that it left behind
        parent.answer(os.waitstatus_to_exitcode(status))


def _live(job: dict[str, Any], channel: socket.socket, server: Parent, other: socket.socket) -> None:
    """Runs a fork; never returns."""
    code = 1
    try:
        parent_pid = os.getppid()
        os.setsid()
        server.close()
        other.close()
        threading.Thread(target=end_with, args=(parent_pid, 0.0), name="parent-watch", daemon=True).start()
        be_killed_first()
        tell = Parent(channel)
        tell.send({"pid": os.getpid()})
        module, _, name = job["function"].partition(":")
        result = getattr(import_module(module), name)(job["argument"], lambda item: tell.send({"message": item}))
        tell.send({"result": result})
        code = 0
    except Exception as raised:
        error = raised if isinstance(raised, StokerError) else as_out_of_memory(raised)
        if error is not None:
            tell.send({"error": error_as_dict(error)})
        else:
            tell.send({"bug": f"{type(raised).__name__}: {raised}\n{traceback.format_exc()}"})
    finally:
        # Not sys.exit: the server's exit handlers must not run in a fork.
        os._exit(code)


# Limits: what exceeds them is ended, with everything below it.

LEAST_PATIENCE_S = 300.0
"""For the first trial: a step of a large model on a CPU takes a minute, a start from a slow disk another."""
RESERVE = 0.05
"""Share of the memory available when a trial starts that is left to everybody else."""
LOOK_EVERY_S = 0.2
EXACTLY_EVERY_S = 1.5
"""The exact measure takes milliseconds for each process that shares memory, on the cores that are being measured."""
NEAR = 0.8
"""Share of the limit above which memory is read exactly every time."""
PATIENT = 4.0
"""A run that takes this many times as long as the first one hangs."""
LEAST_WAIT_S = 30.0
"""A shorter run says little about how long starting many workers may take."""


def patience_after(first_took_s: float | None, seconds: float) -> float:
    """How long a trial may take, start included, given what the first one took."""
    if first_took_s is None:
        return max(LEAST_PATIENCE_S, 10 * seconds)
    return max(LEAST_WAIT_S, PATIENT * first_took_s) + 2 * seconds


def memory_left(limit_bytes: int | None) -> int | None:
    """Memory that a trial may take now: what is available, less a reserve, or the given limit if that is less."""
    state = read_memory()
    known = [] if state is None else [int((1 - RESERVE) * state.available_bytes)]
    return min([*known, *([] if limit_bytes is None else [limit_bytes])], default=None)


def be_killed_first() -> None:
    """If memory runs out after all, the OOM killer chooses this process or a descendant, and none of the user's."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


class MemoryWatch:
    """Ends a process, with its descendants, when they exceed a limit together; remembers their peak."""

    def __init__(self, limit_bytes: int | None) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes: int | None = None
        self.exceeded_bytes: int | None = None
        self._pid = self._whole = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trial-memory", daemon=True)

    def words(self) -> str:
        """What exceeded which limit."""
        limit = f"{(self.limit_bytes or 0) / 1e9:.2f} GB"
        return f"it took {(self.exceeded_bytes or 0) / 1e9:.2f} GB, and {limit} were left for it"

    def begin(self, pid: int, server: int) -> None:
        """Watches this process, which leads its own process group. Memory shared with the server that it was forked
        from counts as its own."""
        self._pid, self._whole = pid, server
        self._thread.start()

    def __enter__(self) -> MemoryWatch:
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        if self._pid:
            self._thread.join()

    def _watch(self) -> None:
        exactly_due_s = 0.0
        while not self._over.wait(LOOK_EVERY_S):
            about = _about(self._whole)
            near = self.limit_bytes is not None and about > NEAR * self.limit_bytes
            if not near and time.monotonic() < exactly_due_s:
                continue
            exactly_due_s = time.monotonic() + EXACTLY_EVERY_S
            memory = tree_memory(self._whole)
            # Pages of libraries are not counted: others map them as well, and the kernel reclaims them first.
            taken = memory.anonymous_bytes + memory.shared_bytes
            self.peak_bytes = max(taken, self.peak_bytes or 0)
            if self.limit_bytes is not None and taken > self.limit_bytes:
                self.exceeded_bytes = taken
                kill_all(self._pid, running=True)
                return


def _about(pid: int) -> int:
    """A quick upper bound of the processes' memory: shared pages are counted in each of them."""
    found = 0
    for process in tree_pids(pid):
        status = read_counters(PROC / str(process) / "status")
        found += status.get("RssAnon", 0) + status.get("RssShmem", 0)
    return found
