"""Warm processes are what new interpreters would be, to themselves and to everybody who looks at them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import write_config, write_images
from tests.support.warm_start import cold

LOOK = """# warm
import json, os, resource, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "parent": os.getppid(), "variable": os.environ.get("VARIABLE"),
    "home": os.environ["HOME"], "leads": os.getsid(0) == os.getpid(), "group": os.getpgrp() == os.getpid(),
    "files": resource.getrlimit(resource.RLIMIT_NOFILE), "cores": sorted(os.sched_getaffinity(0)),
    "interrupt": repr(signal.getsignal(signal.SIGINT)), "terminate": repr(signal.getsignal(signal.SIGTERM)),
    "threads": threading.active_count(), "name": __name__, "read": os.read(int(sys.argv[1]), 9).decode(),
    "shown": open("/proc/self/cmdline").read().rstrip(chr(0)).split(chr(0))[1:][-2:],
    "environ": "VARIABLE=set" in open("/proc/self/environ").read(), "cgroup": open("/proc/self/cgroup").read(),
}))
sys.exit(7)
"""


def look(folder: Path, **options: Any) -> dict[str, Any]:
    reading, writing = os.pipe()
    os.write(writing, b"told")
    command = [sys.executable, "-c", LOOK, str(reading), "words with spaces"]
    variables = os.environ | {"VARIABLE": "set"}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
    try:
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, pass_fds=[reading], **options
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        os.close(reading)
        os.close(writing)
    assert done.returncode == 7, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["read"] == "told"
    del found["argv"][1]  # the descriptor's number
    return found


@pytest.mark.parametrize("options", [{}, {"start_new_session": True}, {"process_group": 0}])
def test_a_warm_process_has_all_that_a_new_interpreter_has(tmp_path: Path, options: dict[str, Any]) -> None:
    warm = look(tmp_path, **options)
    with cold():
        assert warm == look(tmp_path, **options)
    assert warm["parent"] == os.getpid()


@pytest.mark.parametrize("is_cold", [False, True])
def test_its_end_is_its_own(is_cold: bool) -> None:
    with cold() if is_cold else nullcontext():
        for end, code, said in (
            ("os.kill(os.getpid(), 9)", -9, ""),
            ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
            ("raise ValueError('wrong')", 1, "ValueError: wrong"),
            ("sys.exit('no')", 1, "no"),
            ("threading.Timer(0.01, print, ['later']).start()", 0, ""),
            ("atexit.register(print, 'at the end')", 0, ""),
        ):
            program = f"# warm\nimport atexit, os, sys, threading\n{end}\n"
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
            assert (done.returncode, said in done.stderr) == (code, True), done.stderr
            assert done.stdout == {"t": "later\n", "a": "at the end\n"}.get(end[0], "") * (code == 0)


def test_what_a_warm_process_starts_is_warm_too_and_ends_with_it() -> None:
    inner = "# warm\nimport os, sys, time; print('torch' in sys.modules, os.getppid(), flush=True); time.sleep(600)"
    outer = f"# warm\nimport subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {inner!r}]).returncode)"
    process = subprocess.Popen([sys.executable, "-c", outer], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    imported, parent = process.stdout.readline().split()
    assert (imported, int(parent)) == ("True", process.pid)
    below = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    assert len(below) == 2  # it, and the one that it was forked from
    for pid in below:
        os.kill(pid, signal.SIGKILL)
    assert process.wait() == 247  # -9, as an exit code
    process.stdout.close()


def test_a_command_imports_hardly_anything_in_a_warm_process(ready: ReadyProcess, tmp_path: Path) -> None:
    config = write_config(tmp_path, write_images(tmp_path / "data", train=4, val=1), epochs=1)
    done = ready.run("train", config, cwd=tmp_path, before="tests.support.imported:show_imports")
    (line,) = [line for line in done.err.splitlines() if line.startswith("imported:")]
    assert not [name for name in line.split() if name.startswith(("stoker", "torch", "timm", "numpy", "monai"))]
