"""`stoker watch` shows a run in a terminal, a pipe and a browser; for a live run see tests/end_to_end/test_watch.py."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from stoker.cli import main
from tests.support.browser import browser_page
from tests.support.recorded_run import write_run
from tests.support.terminal import on_a_terminal
from tests.support.waiting import DEADLINE_S


@contextmanager
def web(folder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """`stoker watch --web` in a separate process, and its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", "watch", str(folder), "--web"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process
    finally:
        process.kill()
        process.communicate()


def ask(url: str, path: str, host: str | None = None, method: str = "GET") -> tuple[int, bytes]:
    """Status and body; the path is sent unmodified."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=DEADLINE_S)
    connection.putrequest(method, path, skip_host=True)
    if host != "":
        connection.putheader("Host", host or parts.netloc)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_once_shows_one_frame(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(write_run(tmp_path / "run")), "--once"]) == 0
    shown = capsys.readouterr().out
    for expected in (
        "run  finished",
        "100%",
        "3 of 3 epochs",
        "640 images/s",
        "waiting for data",
        "30.0%",
        "what to do",
    ):
        assert expected in shown


def test_watching_ends_when_the_run_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(write_run(tmp_path / "run"))]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("run finished: epoch 3 of 3, step 120, 640 images/s, wait 30%")


def test_names_cannot_send_escape_codes_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run \x1b[2J[red]")
    assert main(["watch", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "[red]" in shown


def test_json_is_what_is_known_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(write_run(tmp_path / "run")), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["state"] == "finished"


def test_on_a_terminal_the_screen_is_redrawn_in_place(tmp_path: Path) -> None:
    code, shown = on_a_terminal(sys.executable, "-m", "stoker", "watch", write_run(tmp_path / "run"))
    assert code == 0, shown
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    assert "where a step's time goes" in text
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_the_page_is_only_served_to_browsers_on_this_machine(tmp_path: Path) -> None:
    with web(write_run(tmp_path / "run")) as (url, process):
        assert re.fullmatch(r"http://127\.0\.0\.1:[0-9]+/", url)
        port = urlsplit(url).port
        assert ask(url, "/")[0] == 200
        status, body = ask(url, "/data.json")
        assert (status, json.loads(body)["runs"][0]["name"]) == (200, "run")
        assert ask(url, "/", host=f"localhost:{port}")[0] == 200
        assert ask(url, "/", method="HEAD") == (200, b"")
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1.evil.example:{port}", ""):
            assert ask(url, "/data.json", host=host)[0] == 403, host
        for path in (
            "/../config.yaml",
            "/config.yaml",
            "/%2e%2e/config.yaml",
            "//etc/passwd",
            "/data.json/../x",
            "/?x",
        ):
            assert ask(url, path)[0] == 404, path
        assert ask(url, "/", method="POST")[0] == 501
        sockets = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
        listening = [line.split()[1] for line in sockets.splitlines() if f":{port:04X} " in line and " 0A " in line]
        assert listening == [f"0100007F:{port:04X}"]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0
        assert "Traceback" not in said


def test_a_port_that_is_taken_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    with web(folder) as (url, _):
        assert main(["watch", str(folder), "--web", "--port", str(urlsplit(url).port)]) == 1
    assert "port-taken" in capsys.readouterr().err


def test_the_page_follows_the_run_and_keeps_what_its_reader_chose(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=2)
    with web(folder) as (url, process), browser_page(tmp_path) as page:
        page.resize(1280)
        page.open(url)
        page.click("[data-chart=timeline-0] .legend button")
        page.click("[data-chart=loss] summary")
        assert "80 steps" in page.evaluate("document.querySelector('.kicker').textContent")
        write_run(folder, epochs=3)
        page.wait_for("document.querySelector('.kicker').textContent.includes('120 steps')")
        pressed = "document.querySelector('[data-chart=timeline-0] .legend button').getAttribute('aria-pressed')"
        assert page.evaluate(pressed) == "false"
        assert page.evaluate("document.querySelector('[data-chart=loss] details').open")
        assert page.evaluate("document.querySelectorAll('[data-chart=loss] tbody tr').length") == 12
        assert page.problems == []
        assert {urlsplit(request).netloc for request in page.requests} == {urlsplit(url).netloc}
        process.send_signal(signal.SIGINT)
        page.wait_for("document.documentElement.dataset.stale === 'yes'")
        assert "has ended" in page.evaluate("document.getElementById('foot').textContent")


def test_watching_a_long_run_reads_only_what_is_new(tmp_path: Path) -> None:
    from stoker.doctor.diagnosis import Diagnosis
    from stoker.profile.observed import Observed
    from stoker.report.document import RunReader

    def judge(observed: Observed) -> Diagnosis:
        return Diagnosis(verdict="fine", line="fine", findings=(), observed=observed)

    folder = write_run(tmp_path / "run", epochs=300, lines=10)
    reader = RunReader(folder, judge)
    before = bytes_read()
    first = reader.document()
    whole = bytes_read() - before
    assert whole > (folder / "metrics.jsonl").stat().st_size
    assert reader.document() is first
    assert bytes_read() - before - whole < whole / 5


def bytes_read() -> int:
    """By this process so far, wherever they came from."""
    return int(Path("/proc/self/io").read_text().split()[1])
