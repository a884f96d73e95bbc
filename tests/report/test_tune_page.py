"""The page and the screen of a search agree with its journal, and nothing in a journal is run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.core.errors import UserError
from stoker.report.live_view import WatchServer
from stoker.report.page import report_document, report_page
from stoker.report.tune_document import TuneReader
from stoker.tune.journal import Journal
from tests.support.browser import browser_page
from tests.support.tuned_journal import EVIL, START, write_journal
from tests.support.waiting import wait_until


def test_the_page_shows_what_was_tried_and_why_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = write_journal(tmp_path / "tune.jsonl")
    assert outcome.best == START | {"num_workers": 4}
    assert main(["report", str(tmp_path)]) == 0
    (file,) = capsys.readouterr().out.splitlines()
    assert file == str(tmp_path / "tune.html")
    with browser_page(tmp_path) as page:
        for width in (1280, 360):
            page.resize(width)
            page.open(Path(file).as_uri())
            assert (page.problems, len(page.requests)) == ([], 1)
            assert page.evaluate("window.hacked") is None
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth") is True
            assert page.evaluate("document.querySelector('h1').textContent") == "2× as fast as before."
            # A bar for each that has a speed: the original, four workers, the other decoder, the confirmation.
            assert page.evaluate("document.querySelectorAll('#search rect').length") == 4
        text = page.evaluate("document.body.textContent").replace("\u00a0", " ")
        for expected in (
            "num_workers 4", "90 % of a step", "2× (1.8–2.2)", "kept: +100 %", "out of memory", "the last line",
            "skipped: predicted to gain nothing", "confirmed", EVIL[:-4],
        ):  # fmt: skip
            assert expected in text, expected
        rows = page.evaluate("[...document.querySelectorAll('#changes tbody tr')].map((row) => row.innerText)")
        assert [row.split("\t")[:3] for row in rows] == [["num_workers", "1", "4"]]


def test_the_document_has_the_figures_of_the_outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = write_journal(tmp_path / "tune.jsonl")
    assert main(["report", str(tmp_path / "tune.jsonl"), "--json"]) == 0
    tune = json.loads(capsys.readouterr().out)["tune"]
    assert (tune["state"], tune["ending"]) == ("finished", "nothing left to try")
    figures = tune["figures"]
    assert (figures["before"], figures["after"], figures["speedup"]) == (outcome.before, outcome.after, 2)
    assert (figures["trials"], figures["unit"], figures["ceiling"]) == (outcome.trials, "images", 250)
    decisions = [step["decision"] for step in tune["steps"]]
    assert decisions == ["baseline", "kept", "not kept", "skipped", "not kept", "confirmed"]
    assert [step["result"] for step in tune["steps"]][2] == "out-of-memory"
    assert not (tmp_path / "tune.html").exists()
    assert main(["report", str(tmp_path), str(tmp_path)]) == 2
    assert "not compared" in capsys.readouterr().err


HOLDS_A_JOURNAL = """
import sys
from pathlib import Path
from stoker.tune.journal import Journal
journal = Journal(Path(sys.argv[1]))
journal.begin({"same": {"host": ["box", 2]}})
print("begun", flush=True)
for line in sys.stdin:
    journal.note("ceiling", samples_per_second=float(line))
    print("noted", flush=True)
"""


def test_a_search_is_shown_live_until_its_process_is_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tune.jsonl"
    write_journal(path, end=False)
    writer = subprocess.Popen(
        [sys.executable, "-c", HOLDS_A_JOURNAL, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdin is not None
    assert writer.stdout.readline() == "begun\n"
    with WatchServer(TuneReader(path).document) as live:
        first = live.document()["tune"]
        assert (first["state"], first["figures"]["after"]) == ("running", 200)
        page = report_page(live.document(), live=True)
        assert "connect-src &#x27;self&#x27;" in page
        writer.stdin.write("500\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "noted\n"
        wait_until(lambda: live.document()["tune"]["figures"]["ceiling"] == 500)
        with pytest.raises(UserError, match="another `stoker tune` is writing"):
            Journal(path).begin({"same": {}})
        writer.kill()
        writer.communicate()
        wait_until(lambda: live.document()["tune"]["state"] == "stopped")
    assert main(["watch", str(path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "stopped" in shown.splitlines()[0]
    assert "\x1b" not in shown
    for expected in ("num_workers 4", "200 images/s  kept", "what to change"):
        assert expected in shown
    assert main(["watch", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "200 images/s, 2.00×" in line


def test_a_damaged_journal_has_a_page_that_says_so(tmp_path: Path) -> None:
    path = tmp_path / "tune.jsonl"
    odd = {"kind": "step", "measured": [{"windows": "x"}, 3], "change": [1], "settings": 5, "number": "one", "why": {}}
    end = {"kind": "end", "facts": [], "best": 3, "before": "fast", "other_training": {"a": 1}, "stopped": ["x"]}
    path.write_text("".join(json.dumps(line) + "\n" for line in (odd, end, ["no record"])) + "half a li")
    document = TuneReader(path).document()
    assert "1 line not in JSON" in " ".join(document["missing"])
    report_page(report_document([document]))
    assert main(["report", str(path)]) == 1, "it does not begin as a journal does"
