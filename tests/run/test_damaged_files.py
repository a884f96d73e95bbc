"""Whatever the files of a run hold, whoever reads them ends in time, with bounded memory, and not with our bug."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.config import load_config
from stoker.core.errors import UserError
from stoker.core.files import parse_json, read_json
from stoker.profile.clock_reading import read_observed
from stoker.report.document import read_document
from stoker.run.folder import open_run
from stoker.run.json_lines import JsonLines, KeptRecords, finite, number
from stoker.run.metrics import truncate_after
from tests.conftest import Run
from tests.support.damaged_runs import (
    DOCUMENTS,
    LINES,
    damaged_folders,
    odd_kinds,
    peak_bytes,
    quick_predictions,
    read_everything,
    replace_by,
    whole_run,
)

FOLDERS = 40
"""`make attack` reads thousands."""
EACH_S = 20
MOST_BYTES = 300_000_000
"""More than before."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return whole_run(tmp_path / "whole")


@pytest.fixture(autouse=True)
def short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_predictions(monkeypatch.setattr)


def within(seconds: int) -> None:
    """Fails if the test takes longer: a hang is what these tests look for."""

    def hang(*_: object) -> None:
        raise AssertionError("it hangs")

    signal.signal(signal.SIGALRM, hang)
    signal.alarm(seconds)


def test_damaged_files_are_read_without_a_bug_a_hang_or_much_memory(run_folder: Path, tmp_path: Path) -> None:
    before = peak_bytes()
    (tmp_path / "scratch").mkdir()
    try:
        for what, folder in damaged_folders(run_folder, tmp_path / "scratch", FOLDERS, seed=os.getpid()):
            within(EACH_S)
            try:
                read_everything(folder)
            except BaseException as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        signal.alarm(0)
    assert peak_bytes() - before < MOST_BYTES


def test_pipes_devices_folders_and_endless_lines_in_place_of_files_are_told(run_folder: Path) -> None:
    before = peak_bytes()
    try:
        for name in (*LINES, *DOCUMENTS):
            file = run_folder / name
            content = file.read_bytes()
            for kind, make in odd_kinds(file, large=False):
                within(EACH_S)
                replace_by(file, make)
                try:
                    read_everything(run_folder)
                except UserError:
                    assert name == "config.yaml", kind
                except BaseException as error:
                    raise AssertionError(f"{name} as {kind}: {type(error).__name__}: {error}") from error
            replace_by(file, lambda file=file, content=content: file.write_bytes(content))  # type: ignore[misc]
    finally:
        signal.alarm(0)
    assert peak_bytes() - before < MOST_BYTES
    replace_by(run_folder / "metrics.jsonl", lambda: os.mkfifo(run_folder / "metrics.jsonl"))
    assert "metrics.jsonl was not read: it is not a regular file." in read_document(run_folder)[1]["missing"]


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(line=st.dictionaries(st.sampled_from(["kind", "event", "step", "epoch", "steps", "wait_s", "elapsed_s",
                                             "loader", "cpus", "format", "host", "stages", "batches", "slowest",
                                             "world", "storage", "accelerator"]), JSON))  # fmt: skip
def test_any_json_object_is_a_line_that_can_be_read(line: dict[str, object], run_folder: Path) -> None:
    file = run_folder / "clock.jsonl"
    first = file.read_bytes().splitlines(keepends=True)[0]
    for kind in ({}, {"kind": "step"}, {"kind": "event", "event": "clock", "format": 1}):
        file.write_bytes(first + json.dumps(line | kind).encode() + b"\n")
        with suppress(UserError):
            read_observed(run_folder)


def test_damaged_lines_are_counted_and_told(run_folder: Path) -> None:
    for name in ("metrics.jsonl", "clock.jsonl"):
        with (run_folder / name).open("ab") as stream:
            stream.write(b'{"kind": "step", "step": "x"}\n{"kind": \n\xff\xff\n[1]\n')
    said: list[str] = []
    assert "3 damaged lines of clock.jsonl, which were skipped" in read_observed(run_folder).missing
    assert any("metrics.jsonl: 3 lines are not JSON" in line for line in read_document(run_folder)[1]["missing"])
    assert truncate_after(run_folder / "metrics.jsonl", 10**6, say=said.append) == 4
    assert said == [f"warning: {run_folder / 'metrics.jsonl'}: 4 damaged lines were dropped"]
    assert truncate_after(run_folder / "metrics.jsonl", 10**6, say=said.append) == 0


def test_deep_huge_and_odd_json_is_refused(tmp_path: Path) -> None:
    for text in ("[" * 100_000, "[" * 60 + "]" * 60, '{"a":' * 60 + "1" + "}" * 60, "9" * 5000, "{", "\ud800"):
        with pytest.raises(ValueError):
            parse_json(text.encode("utf-8", "surrogatepass"))
    assert parse_json("[" * 30 + "]" * 30)
    (tmp_path / "large.json").write_bytes(b'"' + b"x" * 100 + b'"')
    with pytest.raises(OSError, match="more than 50 bytes"):
        read_json(tmp_path / "large.json", most_bytes=50)
    assert [finite(value) for value in (1, 2.5, True, "1", 1e300, 10**400, float("nan"))] == [1.0, 2.5, *[None] * 5]
    assert number({"a": 3}, "b") is None
    many = JsonLines(tmp_path / "many.jsonl", KeptRecords)
    (tmp_path / "many.jsonl").write_bytes(b'{"text": "' + b"x" * 600_000 + b'"}\n' + b'{"a": 1}\n')
    many.refresh()
    assert many.records == [{"a": 1}]
    assert many.records.left_out == 1


@pytest.mark.parametrize(("name", "kind"), [("logs", "file"), ("checkpoints", "file"), ("metrics.jsonl", "pipe"),
                                            ("lease.json", "pipe"), ("clock.jsonl", "folder")])  # fmt: skip
def test_a_run_folder_with_something_else_under_its_names_is_refused(tmp_path: Path, name: str, kind: str) -> None:
    config = load_config(None, [f"runs_dir={tmp_path}", "run_name=odd"]).config
    place = tmp_path / "odd" / name
    place.parent.mkdir()
    {"file": place.touch, "pipe": lambda: os.mkfifo(place), "folder": place.mkdir}[kind]()
    with pytest.raises(UserError) as caught:
        open_run(config, None)
    assert caught.value.name == "run-folder-odd"
    assert str(place) in caught.value.seen
    assert f"mv {place}" in str(caught.value.hint)


def test_real_commands_end_with_a_report_or_an_error_for_users(run_folder: Path, stoker: Run) -> None:
    for name, content in (
        ("clock.jsonl", b'{"kind": "event", "event": "clock", "format": 1, "loader": [], "cpus": "x"}\n'),
        ("metrics.jsonl", b'{"kind": "step", "step": "x", "epoch": [], "time": "y"}\n'),
        ("lease.json", b'{"host": "elsewhere", "renewed": "soon"}'),
    ):
        (run_folder / name).write_bytes(content)
    (run_folder / "environment.json").unlink()
    (run_folder / "environment.json").symlink_to("/dev/zero")
    os.mkfifo(run_folder / "quarantine.jsonl.tmp")
    for words, codes in (
        (("report", run_folder, "--json"), {0}), (("watch", run_folder, "--once"), {0}), (("doctor", run_folder), {1}),
    ):  # fmt: skip
        ended = stoker(*words)
        assert ended.code in codes, ended.err
        assert "Traceback" not in ended.err
