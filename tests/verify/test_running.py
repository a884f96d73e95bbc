"""Checks are run one after the other, whatever happens to one of them, and their results are counted and worded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.core.errors import Interrupted, UsageError, UserError
from stoker.core.finding import Finding
from stoker.tasks.checks import Check, Subject, failed, passed, unknown
from stoker.verify.machine import Forecast
from stoker.verify.run_checks import (
    Report,
    choose_checks,
    run_checks,
    verify_text,
    warnings_before_training,
)
from tests.support.subjects import HERE, subject_of
from tests.support.tiny_training import write_config


@pytest.fixture
def subject(tmp_path: Path) -> Subject:
    return subject_of(write_config(tmp_path, tmp_path / "no-data"))


def crash(_subject: Subject) -> Finding:
    raise ZeroDivisionError("division by zero")


def refuse(_subject: Subject) -> Finding:
    raise UserError("no-such-thing", "the thing is missing", hint="thing=here")


PLANTED = (
    Check("fine", "config", "a fine thing", lambda _subject: passed("all is well", "a table", loss=float("nan"))),
    Check("crashes", "model", "a check with a bug", crash),
    Check("cannot-open", "model", "a check of something that is missing", refuse),
    Check("absent", "machine", "something that is not here", lambda _subject: None),
    Check("wrong", "machine", "a wrong thing", lambda _subject: failed("it is wrong", "right=true"), cheap=True),
)


def test_a_check_that_crashes_or_cannot_look_is_unknown_and_the_rest_continue(subject: Subject) -> None:
    report = run_checks(PLANTED, subject)
    assert {result.check.name: result.finding.status for result in report.results} == {
        "fine": "passed", "crashes": "unknown", "cannot-open": "unknown", "wrong": "failed",
    }  # fmt: skip
    crashed, closed = report.results[1].finding, report.results[2].finding
    assert "ZeroDivisionError: division by zero" in crashed.seen
    assert "crash-" in str(crashed.fix), "names the log"
    assert (closed.seen, closed.fix) == ("the thing is missing", "thing=here")
    assert report.not_applicable == ("absent",)
    assert all(result.seconds >= 0 for result in report.results)


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), Interrupted("interrupted", "stopped by Ctrl-C")])
def test_ctrl_c_ends_all_checks(subject: Subject, ending: BaseException) -> None:
    def interrupted(_subject: Subject) -> Finding:
        raise ending

    with pytest.raises(type(ending)):
        run_checks((Check("slow", "model", "takes long", interrupted), *PLANTED), subject)


def test_the_document_counts_and_has_no_nan(subject: Subject) -> None:
    document = json.loads(json.dumps(run_checks(PLANTED, subject).as_dict(), allow_nan=False))
    assert (document["pass_count"], document["fail_count"], document["unknown_count"]) == (1, 1, 2)
    assert document["not_applicable"] == ["absent"]
    assert document["checks"][0]["facts"] == {"loss": None}
    assert document["checks"][3] | {"seconds": 0} == {
        "name": "wrong", "topic": "machine", "title": "a wrong thing", "status": "failed", "seen": "it is wrong",
        "fix": "right=true", "details": [], "facts": {}, "seconds": 0,
    }  # fmt: skip


def test_what_is_opened_is_opened_once_and_its_error_is_the_same_for_all(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def no_data(*_arguments: object) -> None:
        opened.append(1)
        raise UserError("no-data", "nothing there")

    monkeypatch.setattr("stoker.tasks.images.data.open_data", no_data)
    looks = [Check(name, "data", "looks", lambda subject: passed(str(subject.data))) for name in ("one", "two")]
    report = run_checks(looks, subject)
    assert [result.finding.seen for result in report.results] == ["nothing there"] * 2
    assert len(opened) == 1


def test_skipping_leaves_out_and_a_misspelt_name_is_refused_with_the_nearest() -> None:
    names = [check.name for check in choose_checks(PLANTED, ["fine", "wrong"])]
    assert names == ["crashes", "cannot-open", "absent"]
    with pytest.raises(UsageError, match="did you mean crashes") as refused:
        choose_checks(PLANTED, ["crashed"])
    assert refused.value.hint == "stoker verify --list"
    deep = Check("long", "model", "takes minutes", lambda _subject: None, deep=True)
    assert choose_checks((deep,)) == ()
    assert choose_checks((deep,), deep=True) == (deep,)


def test_training_warns_of_failed_cheap_checks_only(subject: Subject) -> None:
    costly = Check("costly", "data", "takes long", lambda _subject: failed("never seen", "nothing"))
    unsure = Check("unsure", "data", "cannot look", lambda _subject: unknown("not there"), cheap=True)
    found = warnings_before_training(subject.config, subject.path, (), HERE, None, (*PLANTED, costly, unsure))
    assert found == ["wrong: it is wrong; fix: right=true"]


def test_the_text_has_a_mark_a_reason_and_a_fix(subject: Subject) -> None:
    report = run_checks(PLANTED, subject)
    expected = Forecast(
        hours=21.8, images_per_second=4874.2, bound_by="loader", vram_bytes=14_300_000_000,
        ram_bytes=50_000_000, cost=26.4, milestones=((299, 79.8),), milestones_source="A2",
    )  # fmt: skip
    lines = verify_text(Report(report.results, report.not_applicable, 34.4), expected, "my.yaml epochs=2").splitlines()
    assert lines[0] == "my.yaml epochs=2"
    assert [line for line in lines if line and not line.startswith(" ")][1:4] == ["config", "model", "machine"]
    assert "  ✓ fine         all is well" in lines
    assert "                 a table" in lines
    assert "  ? cannot-open  the thing is missing" in lines
    assert "                 to check it: thing=here" in lines
    assert lines[lines.index("  ✗ wrong        it is wrong") + 1] == "                 fix: right=true"
    assert "  time    22 h at 4,874 images/s, bound by the loader (a plan, not a measurement)" in lines
    assert "  memory  14.3 GB of VRAM, 50 MB of RAM" in lines
    assert "  cost    26.40" in lines
    assert "  val     79.8 % after epoch 299 (A2)" in lines
    assert lines[-1] == "a check that does not fit your data: --skip NAME leaves it out"
    assert lines[-2] == "1 passed, 1 failed, 2 could not be checked, 1 do not apply here; 34 s"
