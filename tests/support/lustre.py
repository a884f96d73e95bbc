"""A stand-in for Lustre's `lfs` that keeps real state: which files are released, and a server that restores them later.

`FakeLustre(folder)` puts a program named `lfs` into a folder for PATH. Its calls share a side file; the content of a
released file arrives some time after `hsm_restore`, or when somebody reads the file (its access time says so).
Messages, order and exit codes are those of the real program.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DAYS_AGO = 1_000_000_000
"""Access time of a released file: a read changes it, even on a file system that mostly leaves it alone."""


class FakeLustre:
    """The server's side: what is released, and how it behaves."""

    def __init__(self, folder: Path, **behaviour: Any) -> None:
        """Behaviour: restored_per_second; stalls_after (restored files); wakes_on_request (of the same file again);
        refuses; hangs; not_lustre; most_files (of one request)."""
        self.folder = folder
        folder.mkdir(parents=True)
        self.side_file = folder / "state.json"
        state = {"released": {}, "queue": [], "served": 0, "at": 0.0, "calls": [], "most_queued": 0, "asked": {}}
        self.side_file.write_text(json.dumps(state | {"restored_per_second": 1e9} | behaviour))
        program = folder / "lfs"
        # Without site packages it starts in 15 ms.
        program.write_text(
            f"#!{sys.executable} -IS\n" + Path(__file__).read_text() + f"\nserve({str(self.side_file)!r})\n"
        )
        program.chmod(0o755)

    def release(self, paths: Iterable[Path], *, lost: bool = False) -> None:
        def change(state: dict[str, Any]) -> None:
            for path in paths:
                os.utime(path, (DAYS_AGO, path.stat().st_mtime))
                state["released"][os.fsencode(path).hex()] = "lost" if lost else "released"

        _changed(str(self.side_file), change)

    def behave(self, **behaviour: Any) -> None:
        _changed(str(self.side_file), lambda state: state.update(behaviour))

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.side_file.read_text())
        return found

    def released(self) -> list[Path]:
        state = _changed(str(self.side_file), _serve_queue)
        return [Path(os.fsdecode(bytes.fromhex(name))) for name in state["released"]]


def serve(side_file: str) -> None:
    """What `lfs ACTION FILE...` does."""
    action, *paths = sys.argv[1:]

    def count(state: dict[str, Any]) -> None:
        state["calls"].append([action, len(paths)])
        _serve_queue(state)

    state = _changed(side_file, count)
    if state.get("hangs"):
        time.sleep(1000)
    if action == "hsm_state":
        sys.exit(_hsm_state(state, paths))
    assert action == "hsm_restore"
    sys.exit(_hsm_restore(side_file, state, paths))


def _hsm_state(state: dict[str, Any], paths: list[str]) -> int:
    for path in paths:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            fault = errno.ENOTTY if state.get("not_lustre") else 0
        except OSError as error:
            fault = error.errno or errno.EIO
        if fault:
            sys.stdout.flush()
            _complain(f"can't get hsm state for {path}: {os.strerror(fault)}")
            return fault
        how = state["released"].get(os.fsencode(path).hex())
        flags, words = (0x9, "exists archived") if how is None else (0xD, "released exists archived")
        if how == "lost":
            flags, words = flags | 0x40, words + " lost_from_hsm"
        sys.stdout.buffer.write(os.fsencode(f"{path}: (0x{flags:08x}) {words}, archive_id:1\n"))
    return 0


def _hsm_restore(side_file: str, state: dict[str, Any], paths: list[str]) -> int:
    for path in paths:
        if path.startswith("-"):
            _complain(f"hsm_restore: unrecognized option '{path}'")
            return 1
        try:
            os.lstat(path)
        except OSError as error:
            _complain(f"Cannot stat {path}: {error.strerror}")
            return error.errno or 1
    fault = 0
    if len(paths) > state.get("most_files", 52):
        fault = errno.E2BIG
    elif state.get("refuses"):
        fault = errno.EPERM
    if fault:
        _complain(f"Cannot send HSM request (use of {paths[0]}): {os.strerror(fault)}")
        return fault

    def enqueue(state: dict[str, Any]) -> None:
        for path in paths:
            name = os.fsencode(path).hex()
            state["asked"][name] = state["asked"].get(name, 0) + 1
            if state["asked"][name] > 1 and state.get("wakes_on_request"):
                state.pop("stalls_after", None)
            if name in state["released"] and name not in state["queue"]:
                state["queue"].append(name)
        state["most_queued"] = max(state["most_queued"], len(state["queue"]))

    _changed(side_file, enqueue)
    return 0


def _serve_queue(state: dict[str, Any]) -> None:
    for name, how in list(state["released"].items()):
        if how != "lost" and _was_read(bytes.fromhex(name)):
            del state["released"][name]
    state["queue"] = [name for name in state["queue"] if name in state["released"]]
    now = time.time()
    may = int((now - state["at"]) * state["restored_per_second"]) if state["at"] else 0
    may = min(may, state.get("stalls_after", 1 << 60) - state["served"])
    if may > 0 or not state["at"] or not state["queue"]:
        state["at"] = now
    for name in state["queue"][: max(0, may)]:
        state["released"].pop(name)
        state["served"] += 1
    del state["queue"][: max(0, may)]


def _was_read(path: bytes) -> bool:
    """Also true of a file that is gone."""
    try:
        return os.stat(path).st_atime > DAYS_AGO + 1  # noqa: PTH116
    except OSError:
        return True


def _complain(text: str) -> None:
    sys.stderr.buffer.write(os.fsencode(text + "\n"))


def _changed(side_file: str, change: Any) -> dict[str, Any]:
    with open(side_file, "r+") as stream:  # noqa: PTH123 - pathlib is slow to import
        fcntl.flock(stream, fcntl.LOCK_EX)
        state: dict[str, Any] = json.load(stream)
        change(state)
        stream.seek(0)
        json.dump(state, stream)
        stream.truncate()
    return state
