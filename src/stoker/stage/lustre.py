"""Lustre's own tool, `lfs`: which files are released to the archive behind the file system, and restoring them.

A released file has a name and a size, and its content is elsewhere (S3 behind FSx) until somebody restores or reads it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from typing import NamedTuple, Self

RELEASED, LOST = 0x04, 0x40
"""Flags of a file's state, as lustre_user.h numbers them."""
CALLS_AT_ONCE = 8
STATES_PER_CALL = 500
RESTORES_PER_CALL = 50
"""Older clients refuse a request above a third of 5 KB, and a file takes 32 bytes of it."""
ARGUMENT_BYTES = 100_000
"""Far below the kernel's limit on arguments, however large the environment."""
CALL_S = 60.0
"""Time limit for one call: it only asks the metadata server."""
MOST_FAILURES = 20
"""Consecutive single files that fail: then `lfs` is at fault, not the files."""
_STATE = re.compile(rb": \(0x([0-9a-fA-F]+)\)[^\n]*\n")
_REFUSED = re.compile(r"request.*(not permitted|Permission denied)", re.IGNORECASE)


class LfsFailed(Exception):
    """`lfs` does not work here; the text says why."""


class FileState(NamedTuple):
    """What `lfs hsm_state` says about one file."""

    released: bool
    problem: str | None = None
    """Why it cannot be restored, or its state is not known."""


class Lfs:
    """The program, with several calls at once; none outlives the `with` block."""

    def __init__(self, program: str, call_s: float = CALL_S) -> None:
        self._program, self._call_s = program, call_s
        self._running: set[subprocess.Popen[bytes]] = set()
        self._pool = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="lfs")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.kill()

    def states(self, paths: Sequence[bytes]) -> list[FileState]:
        """The state of each file, in order. Raises LfsFailed if it cannot be asked at all."""
        return list(chain.from_iterable(self._pool.map(self._states, in_calls(paths, STATES_PER_CALL))))

    def restore(self, paths: Sequence[bytes]) -> dict[bytes, str]:
        """Asks for the content of these files, which arrives later; returns those that were refused, with the reason.

        Raises LfsFailed if nothing may be restored.
        """
        refused = self._pool.map(self._restore, in_calls(paths, RESTORES_PER_CALL))
        return dict(chain.from_iterable(some.items() for some in refused))

    def _states(self, paths: Sequence[bytes]) -> list[FileState]:
        found: list[FileState] = []
        in_a_row = 0
        while len(found) < len(paths):
            asked = paths[len(found) :]
            code, out, said = self._call("hsm_state", asked)
            known = parse_states(out, asked)
            found += known
            if len(known) == len(asked):
                break
            # It stops at the first file that it cannot ask about.
            in_a_row = 1 if known else in_a_row + 1
            if code == 0:
                raise LfsFailed(f"the output of lfs hsm_state was not understood: {out[:80]!r}")
            if "ioctl" in said or in_a_row >= MOST_FAILURES:
                raise LfsFailed(f"lfs hsm_state: {said}")
            found.append(FileState(False, said))
        return found

    def _restore(self, paths: Sequence[bytes]) -> dict[bytes, str]:
        """One missing file makes the whole call fail: halving finds it, and the others are restored."""
        refused: dict[bytes, str] = {}
        waiting, in_a_row = [paths], 0
        while waiting:
            some = waiting.pop()
            code, _, said = self._call("hsm_restore", some)
            if code == 0:
                in_a_row = 0
            elif len(some) > 1 and not _REFUSED.search(said):
                waiting += [some[len(some) // 2 :], some[: len(some) // 2]]
            else:
                refused[some[0]] = said
                in_a_row += 1
                if _REFUSED.search(said) or in_a_row >= MOST_FAILURES:
                    raise LfsFailed(f"lfs hsm_restore: {said}")
        return refused

    def _call(self, action: str, paths: Sequence[bytes]) -> tuple[int, bytes, str]:
        """Exit code, output, and the last line of its errors."""
        try:
            process = subprocess.Popen(
                [self._program, action, *paths], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                stderr=subprocess.PIPE, env=os.environ | {"LC_ALL": "C"},
                # We handle Ctrl-C: a call that it ended would count as a failure of `lfs`.
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise LfsFailed(f"{self._program} cannot be run: {error.strerror or error}") from None
        self._running.add(process)
        try:
            out, complaints = process.communicate(timeout=self._call_s)
        except subprocess.TimeoutExpired:
            process.kill()
            # A process that hangs in the kernel does not end even when killed: leave it.
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=1.0)
            raise LfsFailed(f"lfs {action} did not answer in {self._call_s:.0f} s") from None
        finally:
            self._running.discard(process)
        lines = complaints.decode(errors="backslashreplace").strip().splitlines()
        return process.returncode, out, lines[-1] if lines else f"exit code {process.returncode}"


def parse_states(output: bytes, asked: Sequence[bytes]) -> list[FileState]:
    """The states in the output of `lfs hsm_state` for these files, as far as it goes.

    Names are matched in the order in which they were asked for, so a name may contain anything, even a line break.
    """
    found: list[FileState] = []
    at = 0
    for path in asked:
        match = _STATE.match(output, at + len(path)) if output.startswith(path, at) else None
        if match is None:
            break
        flags = int(match[1], 16)
        found.append(FileState(bool(flags & RELEASED), "lost from the archive, too" if flags & LOST else None))
        at = match.end()
    return found


def in_calls(paths: Sequence[bytes], most: int) -> Iterator[Sequence[bytes]]:
    """The files in groups that fit on a command line."""
    begin = size = 0
    for end, path in enumerate(paths):
        if end > begin and (end - begin == most or size + len(path) > ARGUMENT_BYTES):
            yield paths[begin:end]
            begin, size = end, 0
        size += len(path) + 1
    if begin < len(paths):
        yield paths[begin:]
