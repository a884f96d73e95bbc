"""`stoker report` writes a page where requested, or says why it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli import main
from stoker.report.page import page_path_for
from tests.support.recorded_run import write_run


def test_it_writes_report_html_into_the_run_folder_and_prints_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    place = folder / "report.html"
    assert capsys.readouterr().out == f"{place}\n"
    assert place.read_text().startswith("<!doctype html>")
    assert [file.name for file in folder.iterdir() if file.name.endswith(".tmp")] == []


def test_a_name_below_runs_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert main(["report", "mine", "--out", "page.html"]) == 0
    assert (tmp_path / "page.html").exists()
    assert not (tmp_path / "runs" / "mine" / "report.html").exists()
    assert main(["report", "yours"]) == 1
    said = capsys.readouterr().err
    assert "not-a-run-folder" in said
    assert "runs/mine" in said


def test_json_is_the_document_of_the_page_with_the_checks_findings(stoker: object, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    ended = stoker("report", folder, "--json")  # type: ignore[operator]
    assert ended.code == 0, ended.err
    (run,) = ended.json["runs"]
    assert run["figures"]["wait_share"] == pytest.approx(0.3)
    assert run["verdict"]["id"]
    assert run["findings"]
    assert not (folder / "report.html").exists()


def test_two_runs_get_a_separate_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", lr=0.5)
    assert main(["report", str(a), str(b)]) == 0
    assert capsys.readouterr().out == f"{a / 'report-beside-b.html'}\n"
    assert page_path_for([a]) == a / "report.html"


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    assert main(["report", str(folder), "--out", str(tmp_path / "file" / "page.html")]) == 1
    said = capsys.readouterr().err
    assert "report-not-writable" in said
    assert "--out" in said


def test_a_clock_of_another_version_is_reported_and_the_page_is_still_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run")
    clock = folder / "clock.jsonl"
    clock.write_text(clock.read_text().replace('"format": 1', '"format": 99'))
    assert main(["report", str(folder)]) == 0
    assert "format 99" in capsys.readouterr().err
