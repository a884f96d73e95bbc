"""report.html agrees with the run's files, and a real browser shows it without errors."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from stoker.core.finding import Estimate, Finding
from stoker.doctor.diagnosis import Diagnosis, Need
from stoker.profile.observed import Observed
from stoker.report.document import Document, RunReader
from stoker.report.page import embedded_json, report_document, report_page
from stoker.run.lease import Lease, is_held
from tests.support.browser import Page
from tests.support.recorded_run import write_lines, write_run
from tests.support.waiting import wait_until

LARGEST_PAGE_BYTES = 2_000_000
EVIL = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>"


def judged(observed: Observed) -> Diagnosis:
    return Diagnosis(
        verdict="too-few-workers",
        line="too few workers: 30% of the time is spent waiting",
        findings=(
            Finding("both workers are always busy", "num_workers=6", Estimate(1.2, 1.4, 1.6), name="too-few-workers"),
            Finding(f"one file is slow: {EVIL}", name="slow-samples"),
        ),
        observed=replace(observed, missing=("the ceiling: not measured",)),
        needs=(Need("decoding", "images/s", 900.0, 600.0, "2 cores"),),
    )


def nothing_found(observed: Observed) -> Diagnosis:
    return Diagnosis(verdict="fine", line="fine", findings=(), observed=replace(observed, missing=()))


def read(folder: Path) -> Document:
    return RunReader(folder, nothing_found).document()


def write_page(file: Path, *runs: Document) -> str:
    file.write_text(report_page(report_document(runs)), encoding="utf-8")
    return file.as_uri()


@pytest.fixture
def shown(page: Page, tmp_path: Path) -> Page:
    """A run with everything that a page can show, in a window of normal size."""
    folder = write_run(tmp_path / "run")
    write_lines(folder / "quarantine.jsonl", [{"sample": 1, "name": EVIL, "reason": "truncated"}])
    write_lines(
        folder / "predictions.jsonl",
        [{"id": "workers", "label": "num_workers 2 -> 6", "speedup": {"low": 1.2, "expected": 1.4, "high": 1.6},
          "measured_speedup": 1.35, "measured_images_per_second": 860.0, "error": 0.037}],
    )  # fmt: skip
    page.resize(1280)
    page.dark(False)
    page.open(write_page(tmp_path / "report.html", RunReader(folder, judged).document()))
    return page


def test_the_parts_of_a_step_are_those_of_the_clock(tmp_path: Path) -> None:
    run = read(write_run(tmp_path / "run"))
    assert run["state"] == "finished"
    assert run["parts"] == {"wait": pytest.approx(3.6), "compute": pytest.approx(7.8), "other": pytest.approx(0.6)}
    assert run["figures"]["wait_share"] == pytest.approx(0.3)
    assert run["figures"]["images_per_second"] == pytest.approx(640)
    assert run["figures"]["step_ms"] == pytest.approx(100)
    assert run["besides"] == {"validation": 6}
    assert run["timeline"]["wait_ms"] == [pytest.approx(30)] * 12
    assert run["timeline"]["longest_ms"] == [200] * 12
    assert run["memory"]["process_bytes"][-1] == pytest.approx(1e9, rel=1e-4)
    fetch, decode = run["stages"]
    assert (fetch["name"], decode["name"]) == ("fetch", "decode")
    assert (decode["wall_us"], decode["cpu_us"], decode["runq_us"], decode["blocked_us"]) == (1000, 500, 250, 250)
    assert run["missing"] == []
    # Device work during a wait is counted once.
    folder = write_run(tmp_path / "short", epochs=1, lines=1)
    lines = [json.loads(line) for line in (folder / "clock.jsonl").read_text().splitlines()]
    lines[1] |= {"elapsed_s": 1.0, "wait_s": 0.8, "compute_s": 0.5, "other_s": 0.0}
    write_lines(folder / "clock.jsonl", lines)
    assert read(folder)["parts"] == {"wait": 0.8, "compute": pytest.approx(0.2), "other": 0}
    run = read(write_run(tmp_path / "without a clock", clock=False))
    assert (run["parts"], run["timeline"], run["verdict"], run["split"]) == ({}, {}, None, False)
    assert run["epochs"]["images_per_second"] == [pytest.approx(640)] * 3
    assert [text for text in run["missing"] if "clock.jsonl has no steps:" in text]


def test_broken_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = read(folder)
    for name in ("metrics.jsonl", "clock.jsonl"):
        with (folder / name).open("ab") as stream:
            stream.write(
                b'{"kind": "step", "st\xff\xfe\n[1, 2]\n\n' + b"[" * 100_000 + b'\n{"kind": "step", "step": NaN}\n'
            )
            stream.write(b'{"kind": "step", "step": 1e999, "steps": "many", "stages": [], "wait_s": {}}\n{"kind": "st')
    (folder / "environment.json").write_bytes(b"\xff\xfe{")
    (folder / "config.yaml").write_text("epochs: 3\nbatch_size: 64\nno_longer_a_key: 1\n")
    (folder / "quarantine.jsonl").write_text('{"name": "\\ud800 half a letter", "reason": null}\n"text"\n')
    run = read(folder)
    assert run["figures"] == whole["figures"]
    assert run["timeline"] == whole["timeline"]
    assert any("metrics.jsonl: 3 lines" in text for text in run["missing"])
    assert {"key": "no_longer_a_key", "value": 1, "default": None, "known": False} in run["config"]["changed"]
    assert run["quarantine"]["count"] == 1
    embedded_json(report_document([run])).encode()


@pytest.mark.parametrize("kept", [(), ("config.yaml",), ("metrics.jsonl",), ("clock.jsonl",)])
def test_an_almost_empty_folder_still_gives_a_page(tmp_path: Path, kept: tuple[str, ...]) -> None:
    folder = write_run(tmp_path / "run")
    for file in folder.glob("*.*"):
        if file.name not in kept:
            file.unlink()
    assert "<h1" not in report_page(report_document([read(folder)]))  # created by the script
    assert read(folder)["missing"]


def test_600_epochs_with_long_names_stay_below_two_megabytes_and_a_stall_stays_visible(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=600, lines=6)
    lines = [json.loads(line) for line in (folder / "clock.jsonl").read_text().splitlines()]
    lines[2001]["longest_s"] = 77.0
    write_lines(folder / "clock.jsonl", lines)
    bad = [{"sample": n, "name": f"{n}" + "ä" * 4000, "reason": "x" * 4000} for n in range(3000)]
    write_lines(folder / "quarantine.jsonl", bad)
    run = read(folder)
    assert len(run["timeline"]["step"]) <= 900
    assert max(run["timeline"]["longest_ms"]) == 77_000
    assert run["timeline"]["step"][-1] == 600 * 60
    assert run["quarantine"]["count"] == 3000
    both = report_page(report_document([run, run]))
    assert len(both.encode()) < LARGEST_PAGE_BYTES


def test_a_run_is_running_while_its_process_holds_the_lease(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", epochs=2)
    (folder / "config.yaml").write_text("epochs: 90\n")
    assert read(folder)["state"] == "stopped"
    program = "import sys, time\nfrom pathlib import Path\nfrom stoker.run.lease import Lease\n"
    program += "Lease(Path(sys.argv[1])).acquire()\nprint('held', flush=True)\ntime.sleep(60)"
    lease = folder / "lease.json"
    holder = subprocess.Popen([sys.executable, "-c", program, str(lease)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert is_held(lease)
        run = read(folder)
        assert run["state"] == "running"
        assert run["figures"]["left_s"] == pytest.approx(88 * 6.0)
    finally:
        holder.kill()
        holder.communicate()
    wait_until(lambda: not is_held(lease))
    assert read(folder)["state"] == "stopped"
    Lease(lease).acquire().release()  # reading it did not take the lease


def test_a_prediction_that_was_tried_is_shown_once(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    guess = {"id": "workers", "label": "num_workers 2 -> 6", "speedup": {"low": 1.2, "expected": 1.4, "high": 1.6}}
    other = guess | {"label": "num_workers 2 -> 8"}
    write_lines(folder / "predictions.jsonl", [guess, other, guess | {"measured_speedup": 1.35, "error": 0.04}])
    told = [(item["label"], item["measured"]) for item in read(folder)["predictions"]]
    assert told == [("num_workers 2 -> 8", None), ("num_workers 2 -> 6", 1.35)]


def test_what_the_adjusting_loader_decided_is_told_in_words(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    change = {"kind": "event", "event": "loader_adjusted", "knob": "workers", "from": 1, "to": 2, "why": "it waited"}
    rates = {"rate_before": 100.0, "rate_after": 150.0}
    with (folder / "metrics.jsonl").open("a") as file:
        for more in ({"decision": "tried"}, {"decision": "kept", **rates}, {"decision": "kept", "rate_after": "?"}):
            file.write(json.dumps(change | {"step": 7} | more) + "\n")
    told, damaged = [event["details"] for event in read(folder)["events"] if event["event"] == "loader_adjusted"]
    assert told == "loader: 2 workers instead of 1, 100 -> 150 images/s: it waited"
    assert "rate_after: ?" in damaged, "a line that does not fit is shown as it is"


def test_secrets_that_got_into_a_file_do_not_get_into_the_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_lines(
        folder / "quarantine.jsonl", [{"name": "s3://me:hunter22@host/a.jpg", "reason": "AKIAABCDEFGHIJKLMNOP"}]
    )
    page = report_page(report_document([read(folder)]))
    assert "hunter22" not in page
    assert "AKIAABCDEFGHIJKLMNOP" not in page


def test_the_browser_reports_no_errors_makes_no_requests_and_runs_no_names(shown: Page) -> None:
    assert shown.problems == []
    assert len(shown.requests) == 1  # the page itself
    assert shown.evaluate("document.querySelector('h1').textContent") == "Too few workers."
    assert shown.evaluate("document.querySelectorAll('section svg.plot').length") >= 7
    text = shown.evaluate("document.querySelector('main').textContent")
    for expected in (
        "30 %", "num_workers=6", "1.4×", "num_workers 2 -> 6", "1.35×", "+3.7 %", "slow.jpg", "truncated",
        "the ceiling", "waiting for a core", "images/s", "epoch=2-val_acc1=71.5000.ckpt",
    ):  # fmt: skip
        assert expected in text.replace("\u00a0", " "), expected
    assert shown.evaluate("window.hacked") is None
    assert shown.evaluate("document.images.length") == 0
    assert shown.evaluate("document.querySelector('#quarantine code').textContent") == EVIL
    assert EVIL in shown.evaluate("document.querySelectorAll('.what')[1].textContent")


def test_the_samples_that_a_run_kept_are_shown_in_the_page_and_not_in_its_data(page: Page, tmp_path: Path) -> None:
    with_picture, without = write_run(tmp_path / "with"), write_run(tmp_path / "without")
    stream = io.BytesIO()
    Image.new("RGB", (1230, 800), "white").save(stream, "JPEG")
    (with_picture / "preview.jpg").write_bytes(stream.getvalue())
    (without / "preview.jpg").write_bytes(b"<svg onload='window.hacked=1'/>")
    (with_picture / "worst.jpg").write_bytes(stream.getvalue())
    volumes = [{"id": EVIL, "dice": 61.25, "iou": 44.1}, {"id": "b", "dice": "no number", "competition": []}]
    scores = {"checkpoint": "a/last.ckpt", "volumes": volumes, "mean": {"dice": 70.5}}
    (with_picture / "evaluation.json").write_text(json.dumps(scores))
    (without / "evaluation.json").write_text('{"volumes": 3}')
    documents = read(with_picture), read(without)
    assert documents[0]["preview"] == {"file": str(with_picture / "preview.jpg"), "bytes": len(stream.getvalue())}
    assert documents[1]["preview"] is None, "not a picture"
    page.resize(1280)
    page.open(write_page(tmp_path / "report.html", *documents))
    assert page.evaluate("document.images.length") == 2
    rows = page.evaluate("[...document.querySelectorAll('#worst tbody tr')].map((row) => row.innerText)")
    assert [EVIL in rows[0], "61.25" in rows[0], "b" in rows[1], "70.50" in rows[2]] == [True] * 4
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.images[0].decode().then(() => document.images[0].naturalWidth)") == 1230
    assert page.evaluate("document.querySelector('#preview h3').textContent") == "with"
    assert page.place("#preview img")[2] <= 1152, "no wider than the page"
    assert (page.problems, len(page.requests)) == ([], 1)
    (with_picture / "preview.jpg").unlink()
    page.open(write_page(tmp_path / "report.html", documents[0]))
    assert page.evaluate("document.querySelector('#preview').childElementCount") == 0


def test_even_a_script_that_got_in_would_not_run(page: Page, tmp_path: Path) -> None:
    text = report_page(report_document([read(write_run(tmp_path / "run"))]))
    file = tmp_path / "report.html"
    file.write_text(text.replace("<main>", "<main><script>window.hacked = 1</script>"))
    page.open(file.as_uri())
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in problem for problem in page.problems)


def test_hovering_shows_the_values_of_a_step(shown: Page) -> None:
    x, y, width, height = shown.place("[data-chart=timeline-0] svg")
    shown.mouse("mouseMoved", x + width / 2, y + height / 2)
    shown.settle()
    tip = shown.evaluate("document.getElementById('tip').innerText").replace("\u00a0", " ")
    assert "waiting for data" in tip
    assert "30 ms" in tip
    assert "100 ms" in tip  # the total
    assert "200 ms" in tip  # the longest
    shown.mouse("mouseMoved", 1, 1)
    shown.settle()
    assert shown.evaluate("document.getElementById('tip').hidden")


def test_a_legend_switches_a_part_off_and_on(shown: Page) -> None:
    paths = "document.querySelectorAll('[data-chart=timeline-0] path[data-series]').length"
    button = "[data-chart=timeline-0] .legend button"
    assert shown.evaluate(paths) == 3
    shown.click(button)
    assert shown.evaluate(paths) == 2
    assert shown.evaluate(f"document.querySelector('{button}').getAttribute('aria-pressed')") == "false"
    shown.click(button)
    assert shown.evaluate(paths) == 3


def test_dragging_zooms_every_chart_over_steps_and_back(shown: Page) -> None:
    labels = "[...document.querySelectorAll('[data-chart={}] text')].map(t => t.textContent).join(' ')"
    before = shown.evaluate(labels.format("loss"))
    shown.drag("[data-chart=timeline-0] svg", 0.3, 0.6)
    zoomed = shown.evaluate(labels.format("loss"))
    assert zoomed != before
    assert not shown.evaluate("document.querySelector('[data-chart=loss] .reset').hidden")
    shown.click("[data-chart=timeline-0] .reset")
    assert shown.evaluate(labels.format("loss")) == before
    assert shown.problems == []


def test_the_keyboard_and_a_table_give_the_same_numbers(shown: Page) -> None:
    shown.place("[data-chart=throughput] svg")
    shown.evaluate("document.querySelector('[data-chart=throughput] svg').focus()")
    shown.key("ArrowRight")
    shown.settle()
    assert "640" in shown.evaluate("document.getElementById('tip').innerText")
    shown.click("[data-chart=throughput] summary")
    rows = shown.evaluate("document.querySelectorAll('[data-chart=throughput] tbody tr').length")
    assert rows == 3
    label = shown.evaluate("document.querySelector('[data-chart=throughput] svg').getAttribute('aria-label')")
    assert "640" in label


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_needs_no_scrolling_sideways(shown: Page, dark: bool) -> None:
    shown.dark(dark)
    shown.resize(375, 700, phone=True)
    assert shown.evaluate("document.documentElement.scrollWidth") == 375
    light = sum(shown.evaluate("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"))
    assert (light < 200) is dark


def test_two_runs_are_shown_side_by_side(page: Page, tmp_path: Path) -> None:
    slow = read(write_run(tmp_path / "slow", num_workers=2))
    fast = read(write_run(tmp_path / "fast", num_workers=6, faster=2.0))
    document = report_document([slow, fast])
    assert document["differences"]["config"] == [
        {"key": "num_workers", "a": 2, "b": 6, "in_a": True, "in_b": True},
    ]
    rates = next(item for item in document["differences"]["figures"] if item["name"] == "images_per_second")
    assert (rates["a"], rates["b"], rates["ratio"]) == (pytest.approx(640), pytest.approx(1280), pytest.approx(2))
    for width in (1280, 375):
        page.resize(width, phone=width < 500)
        page.open(write_page(tmp_path / "report.html", slow, fast))
        assert page.problems == []
        assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("document.querySelector('h1').textContent") == "fast is 2× as fast as slow."
    assert page.evaluate("document.querySelectorAll('#timeline svg').length") == 2
    assert page.evaluate("document.querySelectorAll('[data-chart=loss] path[data-series]').length") == 2
    # Both on the same scale, so that heights can be compared.
    ends = "[...svg.querySelectorAll('text[text-anchor=end]')].map(text => text.textContent).join()"
    first, second = page.evaluate(f"[...document.querySelectorAll('#timeline svg')].map(svg => {ends})")
    assert first == second


def test_a_run_that_has_just_begun_is_shown_without_complaint(page: Page, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.yaml").write_text("epochs: 3\n")
    page.resize(1280)
    page.open(write_page(tmp_path / "report.html", read(folder)))
    assert page.problems == []
    assert "no measured steps" in page.evaluate("document.querySelector('h1').textContent")
