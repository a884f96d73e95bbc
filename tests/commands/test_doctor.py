"""`stoker doctor` from outside: scripts run unchanged, gates fail, JSON is one document."""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stoker.cli import main
from stoker.core.finding import Estimate
from stoker.doctor.diagnosis import Diagnosis, Prediction
from stoker.doctor.predictions import keep_predictions, settle_predictions
from stoker.doctor.screen import doctor_text
from stoker.profile.clock_file import FORMAT
from stoker.profile.observed import LoaderShape, LoopRates, LoopTimes, Observed
from stoker.profile.step_clock import BATCH_COLUMNS
from tests.conftest import Run
from tests.doctor.checks.observations import starved
from tests.support.tiny_training import write_config, write_images

SCRIPT = """# warm
import sys, time
import torch
from torch.utils.data import DataLoader, Dataset

class Slow(Dataset):
    def __len__(self):
        return 96
    def __getitem__(self, number):
        time.sleep(0.01)
        return torch.zeros(4), number % 2

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("arguments", sys.argv[1:])
for x, y in DataLoader(Slow(), batch_size=8, num_workers=1):
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
sys.exit(7)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "their_train.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_keeps_its_arguments_its_output_and_its_exit_code(stoker: Run, script: Path) -> None:
    ended = stoker("doctor", "--fail-if", "wait_share>0.1", "--", sys.executable, script, "--json", "--", "x", "-h")
    assert ended.code == 7
    assert ended.out == "arguments ['--json', '--', 'x', '-h']\n"
    # Which one depends on the machine: other tests may be using its cores.
    assert "\nverdict: " in ended.err
    assert "preparing a batch " in ended.err
    assert "failed: wait_share is" in ended.err


def test_json_of_a_script_is_one_document_and_its_page_is_written_where_requested(
    stoker: Run, script: Path, tmp_path: Path
) -> None:
    ended = stoker("doctor", "--report", tmp_path / "page.html", "--json", "--", sys.executable, script)
    assert ended.code == 7
    assert ended.json["verdict"] == ended.json["findings"][0]["id"]
    assert ended.json["wait_share"] > 0.1
    assert ended.json["stages"]["other"]["blocked_s"] > 0.01 * 48
    assert "arguments []" in ended.err
    assert ended.err.splitlines()[-1] == f"page: {tmp_path / 'page.html'}"
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "their_train.py" in page


class _Late(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(0.03)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(bytes(20_000))

    def log_message(self, *_about: object) -> None:
        pass


def test_a_script_that_reads_over_a_network_gets_the_speed_up_of_a_local_copy(stoker: Run, script: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Late) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        reading = f"urllib.request.urlopen('http://127.0.0.1:{server.server_port}/').read()"
        text = (
            script.read_text()
            .replace("time.sleep(0.01)", reading)
            .replace("import sys,", "import urllib.request, sys,")
        )
        script.write_text(text)
        ended = stoker("doctor", "--json", "--", sys.executable, script)
        server.shutdown()
    assert ended.code == 7, ended.err
    staging = next(one for one in ended.json["what_if"] if one["id"] == "staging")
    assert staging["speedup"]["expected"] > 1.5
    # The verdict depends on the machine: other tests may be using its cores.
    bound = [finding for finding in ended.json["findings"] if finding["id"].startswith("storage-bound")]
    assert all(finding["speedup"]["expected"] >= staging["speedup"]["expected"] for finding in bound)


def test_a_page_that_cannot_be_written_is_refused_before_the_script_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "nowhere" / "page.html"):
        assert main(["doctor", "--report", str(place), "--", sys.executable, "-c", "print('it ran')"]) == 1
        said = capfd.readouterr()
        assert "report-not-writable" in said.err
        assert "it ran" not in said.out


def test_a_script_without_a_loader_has_no_verdict(stoker: Run) -> None:
    gate = ["--fail-if", "wait_share>0.1"]
    ended = stoker("doctor", "--json", *gate, "--", sys.executable, "-c", "print('hello')")
    assert ended.json["verdict"] == "unknown"
    assert ended.json["findings"] == []
    # A gate does not pass unmeasured.
    assert ended.code == 1
    assert "wait_share was not measured" in ended.err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["doctor"], "nothing to diagnose"),
        (["doctor", "--"], "no command given after `--`"),
        (["doctor", "x.yaml", "--", "python"], "expected one of them"),
        (["doctor", "--confirm", "--", "python"], "a script has none"),
        (["doctor", "--pace", "a100-8", "--", "python"], "a100-80"),
        (["doctor", "--pace", "0ms", "--", "python"], "a step must take some time"),
        (["doctor", "x.yaml", "--steps", "3"], "--steps needs a script"),
        (["doctor", "x.yaml", "--fail-if", "wait_shar>0.1"], "did you mean wait_share?"),
        (["doctor", "x.yaml", "--fail-if", "wait_share=0.1"], "operators: >= <= > <"),
        (["doctor", "x.yaml", "--fail-if", "wait_share>much"], "'much' is not a number"),
        (["doctor", "x.yaml", "--nope"], "No such option"),
    ],
)
def test_contradictory_arguments_are_refused(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.release
def test_a_config_is_tried_for_seconds(stoker: Run, tmp_path: Path) -> None:
    from stoker.tasks.demo import write_digits

    write_digits(tmp_path / "digits")
    config = tmp_path / "small.yaml"
    config.write_text(
        "model: test_resnet\nimg_size: 32\nbatch_size: 32\nnum_workers: 1\ndata_root: digits\nprecision: 32\n"
    )
    ended = stoker("doctor", config, "--json", "--seconds", "2")
    assert ended.code == 0, ended.err
    # In two seconds there is time for one trial, and the others are listed.
    assert ended.json["ceiling_images_per_second"] is None
    assert any("no time for it in 2 s" in text for text in ended.json["not_seen"]), ended.json["not_seen"]
    assert ended.json["images_per_second"] > 0
    assert set(ended.json["stages"]) >= {"fetch", "decode"}
    assert ended.json["verdict"] != "unknown"


def test_a_run_is_judged_by_its_clock_and_its_predictions_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = {"wall_s": 0.04, "cpu_s": 0.039, "runq_s": 0.0, "blocked_s": 0.001, "samples": 8, "worker": 0}
    batch |= {"fetch_s": 0.001, "bytes": 1000}
    header = {
        "kind": "event", "event": "clock", "format": FORMAT, "cpus": 8, "world": 1, "torch": "2.15.0", "device": "cpu",
        "loader": {"workers": 2, "prefetch": 2, "engine": "thread", "batch_size": 8}, "batch_columns": BATCH_COLUMNS,
    }  # fmt: skip
    line = {
        "kind": "step", "steps": 100, "samples": 800, "elapsed_s": 2.0, "wait_s": 1.5, "compute_s": 0.5,
        "waits_s": [0.015] * 100, "steps_s": [0.005] * 100,
        "batches": [[batch.get(name) for name in BATCH_COLUMNS]] * 100,
        "stages": {"decode": {"wall_s": 4.0, "cpu_s": 3.9, "runq_s": 0.0, "blocked_s": 0.1}},
    }  # fmt: skip
    (tmp_path / "clock.jsonl").write_text("".join(json.dumps(part) + "\n" for part in (header, line)))
    # The page predicts too, before the doctor has ever run.
    assert main(["report", str(tmp_path), "--json"]) == 0
    (page,) = json.loads(capsys.readouterr().out)["runs"]
    assert page["predictions"][0]["label"].startswith("num_workers 2 -> ")
    assert page["findings"][0]["speedup"]["expected"] > 2
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "too-few-workers"
    assert document["wait_share"] == 0.75
    assert document["findings"][0]["fix"].startswith("num_workers=")
    assert document["findings"][0]["speedup"]["expected"] > 2
    kept = [json.loads(text) for text in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert kept[0]["id"] == "workers"
    assert main(["doctor", str(tmp_path), "--fail-if", "wait_share>0.1"]) == 1
    assert main(["doctor", str(tmp_path), "--fail-if", "wait_share>0.8"]) == 0
    assert main(["doctor", str(tmp_path), "--confirm"]) == 2
    assert main(["doctor", str(tmp_path), "--pace", "800"]) == 2


@pytest.fixture(scope="module")
def large_pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose pictures take some time to decode, and are not decoded while the consumer is busy."""
    folder = tmp_path_factory.mktemp("large")
    data = write_images(folder / "data", train=16, side=900)
    return write_config(folder, data, num_workers=0, index_dir=str(folder / "index"), runs_dir=str(folder / "runs"))


def test_a_change_is_tried_and_its_prediction_kept_with_its_error(stoker: Run, large_pictures: Path) -> None:
    ended = stoker("doctor", large_pictures, "--pace", "100", "--confirm", "--json", "--seconds", "6")
    assert ended.code == 0, ended.err
    assert "a consumer of 100 images/s replaces the model (as given)" in ended.err
    document = ended.json
    assert document["ceiling_images_per_second"] == pytest.approx(100)
    assert document["not_seen"][0] == "the model: replaced by a consumer of 100 images/s"
    if "--confirm tried nothing" in ended.err:
        pytest.skip("other programs use the cores, so the doctor rightly says that more workers would not help")
    confirmed = document["confirmed"]
    # Making batches while the consumer is busy, instead of afterwards, is faster; bench/ measures by how much.
    assert confirmed["settings"]["num_workers"] >= 1
    assert confirmed["speedup"]["expected"] > 0
    assert confirmed["measured_speedup"] > 0
    predicted, measured = confirmed["images_per_second"]["expected"], confirmed["measured_images_per_second"]
    assert confirmed["error"] == pytest.approx(predicted / measured - 1)
    assert measured == pytest.approx(document["images_per_second"] * confirmed["measured_speedup"])
    kept = large_pictures.parent / "runs" / "tiny" / "predictions.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert lines[0]["from"]["pace"] == 100
    assert lines[-1]["error"] == pytest.approx(confirmed["error"])


@pytest.mark.parametrize(
    ("pace", "expected"),
    [
        ("0", "images per second must be above zero"),
        ("nan", "images per second must be above zero"),
        ("a1000", "no datasheet for 'a1000'"),
    ],
)
def test_a_pace_that_makes_no_sense_is_refused(
    pace: str, expected: str, large_pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(large_pictures), "--pace", pace]) == 2
    assert expected in capsys.readouterr().err


@pytest.mark.usefixtures("traced_once")
def test_a_card_by_name_is_as_fast_as_the_plan_says(large_pictures: Path) -> None:
    from stoker.doctor.pacing import read_pace
    from stoker.plan.planning import WantedMachine, plan_config

    network = "model=resnet10t"  # traced in a second
    pace = read_pace("a100-80", large_pictures, ["devices=8", network])
    plan = plan_config(large_pictures, [network], WantedMachine(gpu="a100-80")).plan
    assert pace.images_per_second == plan.time.rates["accelerator"].images_per_second
    assert "A100" in pace.source


WORKERS = Prediction(
    "workers", "num_workers 2 -> 4", Estimate(1.6, 1.8, 2.0), Estimate(160, 180, 200), (("num_workers", 4),)
)


def test_a_prediction_is_settled_once_its_setting_is_observed(tmp_path: Path) -> None:
    before = starved(cpu=0.04, loader=LoaderShape(workers=2, prefetch=2, batch_size=8))
    keep_predictions(tmp_path, Diagnosis("too-few-workers", "", (), before, (WORKERS,)))
    keep_predictions(tmp_path, Diagnosis("too-few-workers", "", (), before, (WORKERS,)))
    assert len((tmp_path / "predictions.jsonl").read_text().splitlines()) == 1
    assert settle_predictions(tmp_path, before) is None
    after = starved(cpu=0.04, workers=4, loader=LoaderShape(workers=4, prefetch=2, batch_size=8))
    settled = settle_predictions(tmp_path, after)
    assert settled is not None
    assert settled.measured_speedup == pytest.approx(2.0)
    assert settled.error == pytest.approx(180 / (after.images_per_second or 0) - 1)
    kept = [json.loads(line) for line in (tmp_path / "predictions.jsonl").read_text().splitlines()]
    assert kept[1]["error"] == pytest.approx(settled.error)
    assert settle_predictions(tmp_path, after) is None


def test_a_prediction_for_one_consumer_is_not_settled_by_another(tmp_path: Path) -> None:
    before = starved(cpu=0.04, loader=LoaderShape(workers=2, prefetch=2, batch_size=8))
    keep_predictions(tmp_path, Diagnosis("too-few-workers", "", (), before, (WORKERS,)))
    after = starved(cpu=0.04, workers=4, loader=LoaderShape(workers=4, prefetch=2, batch_size=8))
    assert settle_predictions(tmp_path, replace(after, rates=LoopRates(pace=800.0))) is None
    assert settle_predictions(tmp_path, after) is not None


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "predictions.jsonl").write_text('{"label": "x"}\n[1]\n{"label": ')
    assert settle_predictions(tmp_path, starved(cpu=0.04)) is None


def test_the_screen_has_a_verdict_a_bar_needs_and_fixes() -> None:
    from stoker.doctor.checks.verdict import judge

    text = doctor_text(judge(starved(cpu=0.04), (WORKERS,)))
    assert text.splitlines()[0].startswith("verdict: too few workers")
    assert "░" in text
    assert "the loop needs 1,600 images/s" in text
    assert "1. DataLoader(..., num_workers=4)   1.8x (1.6-2.0)" in text
    assert "num_workers 2 -> 4:" in text
    assert max(map(len, text.splitlines())) < 160


def test_the_screen_of_an_empty_diagnosis_is_not_empty() -> None:
    from stoker.doctor.checks.verdict import judge

    nothing = Observed("script", 0, 0, LoopTimes(), missing=("no batch was taken",))
    assert "no batch was taken" in doctor_text(judge(nothing))
