"""Trial processes without their start: copies of one process that has imported everything and done nothing else.

Importing torch and timm takes seconds, a copy a hundredth of one; and a copy is as fresh as a new process, because the
process that it was copied from never runs a trial. That one and its copies end when we end, even after `kill -9`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from stoker.child import Child, ChildFailed, Parent, end_with, error_as_dict, error_from_dict, kill_all
from stoker.errors import StokerError
from stoker.out_of_memory import as_out_of_memory

START_S = 300.0
"""How long importing may take on a slow disk."""


OnStart = Callable[[int, int], None]
"""Gets the numbers of the copy's process, which leads a group of its own, and of the one that it was copied from."""


@dataclass(frozen=True)
class Ended:
    """How a copy ended. Without a result or an error, it was killed or exited by itself."""

    result: Any = None
    error: StokerError | None = None
    """What it raised, if a user can act on it."""
    bug: str | None = None
    """What it raised otherwise; the first line says it all."""
    status: int = 0
    """Its exit code, or minus the signal that ended it."""
    too_slow: bool = False
    took_s: float = 0.0
    """Without the imports, which only the first one waits for."""

    @property
    def is_good(self) -> bool:
        return self.result is not None


class Copies:
    """Runs functions in copies, one at a time; `module:function` gets (argument, tell), both plain data."""

    def __init__(self, *imports: str) -> None:
        self._imports = list(imports)
        self._original: Child | None = None
        self.import_s = 0.0
        """What a process would need on top to start, if it were not a copy."""

    def call(
        self,
        function: str,
        argument: dict[str, Any],
        *,
        timeout_s: float,
        on_message: Callable[[Any], None] = lambda _message: None,
        on_start: OnStart = lambda _pid, _original: None,
    ) -> Ended:
        """How the function ended; whatever it does, this does not raise."""
        try:
            original = self._started()
            argument |= {"began": time.time()}
            began_s = time.monotonic()
            original.send({"function": function, "argument": argument})
            ended = self._follow(original, timeout_s, on_message, on_start)
            return replace(ended, took_s=time.monotonic() - began_s)
        except ChildFailed as error:
            self.close()
            return Ended(bug=f"the process that trials are copied from failed: {str(error).partition(chr(10))[0]}")
        except BaseException:
            self.close()  # with the copy
            raise

    def close(self) -> None:
        """Ends everything; the next call starts anew."""
        if self._original is not None:
            self._original.end(at_once=True)
            self._original = None

    def _started(self) -> Child:
        if self._original is None:
            self._original = Child(_original, self._imports, grace_s=0.0)
            if not select.select([self._original], [], [], START_S)[0]:
                raise ChildFailed(f"its imports took more than {START_S:.0f} s")
            _, self.import_s = self._original.receive()
        return self._original

    def _follow(self, original: Child, timeout_s: float, on_message: Callable[[Any], None], on_start: OnStart) -> Ended:
        found: dict[str, Any] = {}
        pid: int | None = None
        deadline_s: float | None = time.monotonic() + timeout_s
        too_slow = False
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not select.select([original], [], [], left_s)[0]:
                # The copy's end is still awaited: what it has written by then must not be taken for the next one's.
                too_slow, deadline_s = True, None
                if pid is not None:
                    kill_all(pid, running=True)
                continue
            kind, value = original.receive()
            if kind == "answer":
                error = None if "error" not in found else error_from_dict(found["error"])
                result = None if too_slow else found.get("result")
                return Ended(result, error, found.get("bug"), int(value), too_slow)
            if "pid" in value:
                pid = value["pid"]
                on_start(value["pid"], original.pid)
            elif "message" in value:
                on_message(value["message"])
            else:
                found |= value


def _original(imports: list[str], parent: Parent) -> None:
    """The process that is copied: imports, and waits."""
    began_s = time.monotonic()
    for name in imports:
        import_module(name)
    parent.send(time.monotonic() - began_s)
    for job in parent.messages():
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            _copy(job, theirs, parent, ours)
        theirs.close()
        with ours:
            # Half a message of a copy that was killed ends here.
            for message in Parent(ours).messages():
                parent.send(message)
        _, status = os.waitpid(pid, 0)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)  # workers that it left behind
        parent.answer(os.waitstatus_to_exitcode(status))


def _copy(job: dict[str, Any], channel: socket.socket, original: Parent, other: socket.socket) -> None:
    """The life of a copy; never returns."""
    code = 1
    try:
        parent_pid = os.getppid()
        os.setsid()
        original.close()
        other.close()
        threading.Thread(target=end_with, args=(parent_pid, 0.0), name="parent-watch", daemon=True).start()
        tell = Parent(channel)
        tell.send({"pid": os.getpid()})
        module, _, name = job["function"].partition(":")
        result = getattr(import_module(module), name)(job["argument"], lambda item: tell.send({"message": item}))
        tell.send({"result": result})
        code = 0
    except StokerError as error:
        tell.send({"error": error_as_dict(error)})
    except Exception as error:
        no_memory = as_out_of_memory(error)
        if no_memory is not None:
            tell.send({"error": error_as_dict(no_memory)})
        else:
            tell.send({"bug": f"{type(error).__name__}: {error}\n{traceback.format_exc()}"})
    finally:
        # Not sys.exit: what the original registered for its own end is not ours to do.
        os._exit(code)
