"""Trials of somebody's script: whatever it does to itself or the machine is a result, and nothing of it stays."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.core import child as child_process
from stoker.profile.observed import LoopTimes, Observed
from stoker.tune.records import Settings
from stoker.tune.script import ScriptTrier, Template, read_template, windows_of
from tests.doctor.script.conftest import SCRIPTS
from tests.support.waiting import is_running, wait_until

START: Settings = {"num_workers": 0}


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


def test_a_script_that_takes_too_much_or_too_long_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    child = "import subprocess, sys, os, time; p = subprocess.Popen(['sleep', '600'], start_new_session=True);"
    noted = f"{child} open({str(pids)!r}, 'a').write(f'{{os.getpid()}} {{p.pid}} ');"

    with monkeypatch.context() as patched:

        def no_more_patience(_seconds: float) -> None:
            """Half an hour passes once the script has started, however long that takes."""
            now = time.monotonic
            wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
            patched.setattr(child_process.time, "monotonic", lambda: now() + 1800)

        sleeps = program(f"{noted} time.sleep(600)")
        hung = ScriptTrier(sleeps, patience_s=900, report=no_more_patience).run(START, 1)
    assert (hung.result, hung.detail) == ("hung", "not finished after 900 s")
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
        "import sys; from stoker.tune.script import ScriptTrier, read_template;"
        f"ScriptTrier(read_template([sys.executable, '-c', {text!r}, '{{num_workers}}'])).run({START}, 1)"
    )
    process = subprocess.Popen([sys.executable, "-c", run], env={**os.environ, "TMPDIR": str(tmp_path)})
    wait_until(lambda: note.exists() and note.read_text())
    script = int(note.read_text())
    assert is_running(script)
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not is_running(script))


@pytest.mark.parametrize("seconds", [1.5, pytest.param(0.25, marks=pytest.mark.release)])
def test_a_training_is_measured_in_parts_also_where_its_steps_are_long(seconds: float) -> None:
    words = ["--workers", "{num_workers}", "--samples", "4000", "--epochs", "9", "--sleep-ms", "20", "--spin-ms", "0"]
    trier = ScriptTrier(read_template([sys.executable, str(SCRIPTS / "plain.py"), *words]))
    # A batch of four takes 80 ms in the training process, so there are too few of them in a quarter of a second.
    measured = trier.run(START, seconds)
    assert measured.result == "measured"
    assert len(measured.windows) >= 2
    assert measured.samples_per_second is not None
    assert 0 < measured.samples_per_second < 50
    assert measured.wait_share is not None
    assert measured.wait_share > 0.5
    assert measured.epoch_samples == 4000
    assert measured.observed is not None
    assert measured.observed.loader is not None
    assert measured.observed.loader.workers == 0


def test_a_command_that_does_not_train_is_an_error_with_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import sys; open('mine', 'w').close(); sys.exit('argument -j: 0 is too few')"
    assert main(["tune", "--", sys.executable, "-c", text, "{num_workers}"]) == 1
    told = capsys.readouterr().err
    assert "script-not-measured" in told
    assert "argument -j: 0 is too few" in told
    assert "starting from 0, DataLoader's default" in told
    # It ran where the user is, and keeps its files.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "tune.jsonl"]
    assert main(["tune", "--pace", "800", "--", "python", "x.py", "{num_workers}"]) == 2
    assert "--pace needs a config" in capsys.readouterr().err
    assert main(["tune", "--", "python", "x.py", "-j", "8"]) == 2
    assert "hint: stoker tune -- python x.py -j {num_workers=8}" in capsys.readouterr().err


@pytest.mark.release
def test_a_search_finds_the_workers_that_a_script_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--samples", "4000", "--epochs", "99", "--sleep-ms", "8", "--spin-ms", "0"]
    script = [sys.executable, str(SCRIPTS / "plain.py"), "--workers", "{num_workers=0|2}", *words]
    assert main(["tune", "--trial-seconds", "1", "--budget", "60s", "--json", "--", *script]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["best"] == {"num_workers": 2}
    assert found["command"] == [*script[:3], "2", *script[4:]]
    assert found["after"] > 1.3 * found["before"]
    assert found["steps"][1]["predicted"] is not None
    assert main(["report", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)["tune"]
    assert "--workers 2" in shown["command"]
    assert [change["to"] for change in shown["changes"]] == ["2"]


def test_a_stall_counts_with_all_of_its_time() -> None:
    """49 steps of 10 ms and one of 1.51 s, twice: 50 steps in 2 s, not 100 a second in four parts of five."""
    times = (0.01,) * 29 + (1.51,) + (0.01,) * 20
    observed = Observed("script", 100, 400, LoopTimes(elapsed_s=4.0, waits_s=(0.0,) * 100, steps_s=2 * times))
    rates = windows_of(observed)
    assert len(rates) == 5
    assert statistics.fmean(rates) == pytest.approx(4 * 98 / 3.98)
