"""Trials of somebody's script: whatever it does to itself or the machine is a result, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.tune.placeholders import Template, read_template
from stoker.tune.script import ScriptTrier
from tests.support.waiting import is_running, wait_until

START = {"num_workers": 0}


def program(text: str) -> Template:
    return read_template([sys.executable, "-c", text, "{num_workers}"])


def test_what_a_script_ends_with_is_a_result_with_its_last_words() -> None:
    said = "import sys; print('on stdout', flush=True); print('its own mistake', file=sys.stderr);"
    crashed = ScriptTrier(program(f"{said} sys.exit(3)")).run(START, 1)
    assert crashed.result == "crashed"
    assert crashed.detail.splitlines() == ["the script ended with exit code 3", "on stdout", "its own mistake"]
    killed = ScriptTrier(program("import os; os.kill(os.getpid(), 9)")).run(START, 1)
    assert (killed.result, killed.detail.splitlines()[0]) == ("killed", "the script ended with exit code 137")
    device = "raise RuntimeError('CUDA out of memory. Tried to allocate 20.00 GiB')"
    assert ScriptTrier(program(device)).run(START, 1).result == "out-of-memory"
    nothing = ScriptTrier(program("print('fine')")).run(START, 1)
    assert nothing.result == "crashed"
    assert "took no batch from a torch DataLoader" in nothing.detail
    absent = ScriptTrier(read_template(["no-such-program", "{num_workers}"])).run(START, 1)
    assert (absent.result, absent.detail.splitlines()[0]) == ("crashed", "no-such-program: command not found")


def test_a_script_that_takes_too_much_or_too_long_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    child = "import subprocess, sys, os, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True);"
    noted = f"{child} open({str(pids)!r}, 'a').write(f'{{os.getpid()}} {{p.pid}} ');"
    hung = ScriptTrier(program(f"{noted} time.sleep(600)"), patience_s=4).run(START, 1)
    assert (hung.result, hung.detail) == ("hung", "not finished after 4 s")
    greedy = f"{noted} data = bytearray(600_000_000); time.sleep(600)"
    full = ScriptTrier(program(greedy), memory_limit_bytes=300_000_000, patience_s=60).run(START, 1)
    assert full.result == "out-of-memory"
    assert "0.30 GB were left for it" in full.detail
    assert full.peak_bytes is not None
    assert full.peak_bytes > 300_000_000
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 4
    wait_until(lambda: not any(map(is_running, started)))


def test_a_script_ends_when_stoker_is_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    text = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    run = (
        "import sys; from stoker.tune.placeholders import read_template; from stoker.tune.script import ScriptTrier;"
        f"ScriptTrier(read_template([sys.executable, '-c', {text!r}, '{{num_workers}}'])).run({START}, 1)"
    )
    process = subprocess.Popen([sys.executable, "-c", run], env={**os.environ, "TMPDIR": str(tmp_path)})
    wait_until(lambda: note.exists() and note.read_text())
    script = int(note.read_text())
    assert is_running(script)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not is_running(script))


def test_the_script_runs_where_the_user_is_and_keeps_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ScriptTrier(program("open('mine', 'w').write('kept')")).run(START, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
