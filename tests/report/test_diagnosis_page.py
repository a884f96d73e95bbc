"""The page about a script that the doctor watched: the same page, without what only a run folder has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from stoker.core.finding import Estimate
from stoker.doctor.checks.verdict import judge
from stoker.doctor.diagnosis import Confirmation, Diagnosis, Prediction
from stoker.profile.observed import LoaderShape, LoopTimes, Observed, SlowSample
from stoker.report.document import diagnosis_document
from stoker.report.page import report_document, report_page
from tests.doctor.checks.observations import healthy, starved
from tests.support.browser import Page

MORE = Prediction(
    "workers", "num_workers 2 -> 4", Estimate(1.6, 1.8, 2.0), Estimate(640, 720, 800), (("num_workers", 4),)
)
EVIL = "</script><script>window.hacked=1</script>"


def seen() -> Diagnosis:
    slow = (SlowSample(f"class0/{EVIL}.jpg", 0.4, 0.005),)
    diagnosis = judge(starved(cpu=0.04, slow_samples=slow, epoch_starts_s=(2.0, 1.0)), (MORE,))
    return replace(diagnosis, confirmation=Confirmation(MORE, 700.0, 1.75))


def test_the_document_says_what_was_observed() -> None:
    document = diagnosis_document(seen(), "python train.py")
    assert (document["name"], document["state"]) == ("python train.py", "watched")
    assert document["verdict"]["id"] == "too-few-workers"
    # A batch of 8 every 20 ms, 5 of which are the loop's.
    assert document["figures"]["images_per_second"] == pytest.approx(400)
    assert document["figures"]["wait_share"] == pytest.approx(0.75)
    assert document["figures"]["step_ms"] == pytest.approx(20)
    assert document["parts"] == {"wait": pytest.approx(1.5), "compute": pytest.approx(0.5)}
    assert document["besides"] == {"epoch_starts": 3}
    assert document["timeline"]["step"][-1] == 100
    assert document["timeline"]["wait_ms"] == [pytest.approx(15)] * 100
    (stage,) = document["stages"]
    assert (stage["wall_us"], stage["cpu_us"]) == (pytest.approx(5000), pytest.approx(5000))
    assert document["environment"]["facts"]["workers"] == "2 processes"
    (prediction,) = document["predictions"]
    assert (prediction["expected"], prediction["measured"]) == (1.8, 1.75)


def test_parts_that_could_not_be_distinguished_stay_together() -> None:
    document = diagnosis_document(judge(healthy(compute_s=None, other_s=None)), "x")
    assert document["parts"] == {"wait": pytest.approx(0.05), "rest": pytest.approx(9.95)}


def test_a_script_without_records_has_a_page_too(page: Page, tmp_path: Path) -> None:
    nothing = Observed("script", 0, 0, LoopTimes(), missing=("no batch was taken",))
    show(page, tmp_path, judge(nothing))
    assert page.problems == []
    assert "no batch was taken" in page.evaluate("document.body.innerText")


@pytest.mark.parametrize("width", [1280, 360])
def test_the_browser_shows_it_without_errors(page: Page, tmp_path: Path, width: int) -> None:
    page.resize(width)
    show(page, tmp_path, seen())
    assert page.problems == []
    text = page.evaluate("document.body.innerText")
    assert "Too few workers." in text
    assert "100 steps" in text
    assert "epochs," not in text
    assert "num_workers 2 -> 4" in text
    assert "what the doctor measured" in text
    assert "config.yaml" not in text
    assert page.evaluate("document.querySelectorAll('svg path, canvas').length") > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth") is True
    assert page.evaluate("window.hacked === undefined") is True


def test_two_watched_scripts_are_shown_side_by_side(page: Page, tmp_path: Path) -> None:
    faster = judge(starved(cpu=0.02, loader=LoaderShape(workers=4, prefetch=2, batch_size=8)))
    show(page, tmp_path, seen(), faster)
    assert page.problems == []
    assert "Differences" in page.evaluate("document.body.innerText")


def show(page: Page, folder: Path, *diagnoses: Diagnosis) -> None:
    documents = [diagnosis_document(one, f"script {number}") for number, one in enumerate(diagnoses)]
    file = folder / "report.html"
    file.write_text(report_page(report_document(documents)), encoding="utf-8")
    page.open(file.as_uri())
