"""The real Weights & Biases: offline, without a key, with a dead endpoint, and when training is killed."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from tests.support.waiting import DEADLINE_S, processes_with, wait_until

pytest.importorskip("wandb")

FAKE_KEY = "0123456789abcdef0123456789abcdef01234567"

# A training loop as a tracker sees it: steps of 5 ms, then the end. Prints how long the calls took.
# If its last argument is a file, it runs until that file exists.
PROGRAM = """# warm
import itertools, sys, time
from pathlib import Path
from stoker.config import load_config
from stoker.run.metrics import MetricsFile
from stoker.run.trackers import trackers_for
from stoker.run.folder import RunFolder
root, first, steps, timeout = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
folder = RunFolder(root)
config = load_config(None, ["wandb_project=tests", "data_root=https://me:hidden-password@host/x"]).config
metrics = MetricsFile(folder.metrics_file)
trackers = trackers_for(config, folder)
calls = []
for step in itertools.count(first):
    record = metrics.step(step, 0, {"train/loss": 7 - step / 100, "train/lr": 0.1, "train/acc1": None})
    begin = time.perf_counter()
    trackers.log(record)
    calls.append(time.perf_counter() - begin)
    time.sleep(0.005)
    if step >= first + steps - 1 and all(Path(file).exists() for file in sys.argv[5:]):
        break
trackers.log(metrics.epoch(step, 0, {"val/acc1": 12.5}))
begin = time.monotonic()
trackers.close(timeout)
calls.sort()
print(calls[len(calls) // 2], time.monotonic() - begin, time.time())
"""


@dataclass(frozen=True)
class Trained:
    median_call_s: float
    close_s: float
    after_close_s: float
    said: str


def environment(home: Path, **variables: str) -> dict[str, str]:
    """An environment with an empty home: no key, no netrc, no settings."""
    home.mkdir(exist_ok=True)
    return os.environ | {"HOME": str(home)} | variables


def train(
    root: Path, first: int = 1, steps: int = 20, timeout: float = 100, until: Path | None = None, **variables: str
) -> Trained:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), str(first), str(steps), str(timeout), *([until] if until else [])],
        capture_output=True, text=True, check=True, timeout=DEADLINE_S,
        env=environment(root.parent / "home", **variables),
    )  # fmt: skip
    median_call_s, close_s, closed = map(float, done.stdout.split())
    return Trained(median_call_s, close_s, time.time() - closed, done.stderr)


def offline_runs(root: Path) -> list[Path]:
    return sorted((root / "wandb").glob("offline-run-*/run-*.wandb"))


def rows_of(file: Path) -> tuple[Any, list[dict[str, str]]]:
    """The run and its rows, as W&B itself reads its file."""
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    store = DataStore()
    store.open_for_scan(str(file))
    run, rows = None, []
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run" and run is None:
            run = record.run
        elif record.WhichOneof("record_type") == "history":
            rows.append({item.nested_key[0] or item.key: item.value_json for item in record.history.item})
    return run, rows


def test_every_row_is_written_offline_and_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    root = tmp_path / "run-one"
    first = train(root, WANDB_MODE="offline")
    assert re.fullmatch(
        rf"W&B: offline \(WANDB_MODE=offline\); to send it later: wandb sync {root}/wandb/offline-run-\S+\n", first.said
    )
    train(root, first=21, WANDB_MODE="offline")
    files = offline_runs(root)
    assert len(files) == 2
    identity = (root / "wandb_id.txt").read_text().strip()
    for file, begin in zip(files, (1, 21), strict=True):
        run, rows = rows_of(file)
        assert (run.run_id, run.project, run.display_name) == (identity, "tests", "run-one")
        config = {item.key: item.value_json for item in run.config.update}
        assert config["batch_size"] == "256"
        assert config["data_root"] == '"https://[removed]@host/x"'
        steps = [row for row in rows if "train/loss" in row]
        assert [int(row["step"]) for row in steps] == list(range(begin, begin + 20))
        assert float(steps[0]["train/loss"]) == pytest.approx(7 - begin / 100)
        assert "train/acc1" not in steps[0]
        assert [row["val/acc1"] for row in rows if "val/acc1" in row] == ["12.5"]
        assert b"hidden-password" not in file.read_bytes()
    wait_until(lambda: processes_with(str(tmp_path / "home")) == [])


def test_without_a_key_it_is_offline_and_says_so(tmp_path: Path) -> None:
    done = train(tmp_path / "run")
    assert "W&B: offline (no key: neither WANDB_API_KEY nor `wandb login`)" in done.said
    assert len(offline_runs(tmp_path / "run")) == 1


def test_a_refused_connection_means_offline(tmp_path: Path) -> None:
    done = train(tmp_path / "run", WANDB_API_KEY=FAKE_KEY, WANDB_BASE_URL="http://127.0.0.1:9")
    assert "W&B: offline (http://127.0.0.1:9 does not answer: " in done.said
    assert FAKE_KEY not in done.said
    assert len(rows_of(offline_runs(tmp_path / "run")[0])[1]) == 21


@contextmanager
def silent_endpoint() -> Iterator[str]:
    """Accepts connections and never answers, like a firewall that drops packets."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def endpoint_that_hangs(asked: Path) -> Iterator[str]:
    """Answers GET requests but never W&B's queries; creates the file `asked` when the first one arrives."""
    over = Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_POST(self) -> None:
            if self.path.endswith("/graphql"):
                asked.touch()
            over.wait()

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()


@pytest.mark.release
def test_an_endpoint_that_never_answers_means_offline(tmp_path: Path) -> None:
    with silent_endpoint() as url:
        done = train(tmp_path / "run", WANDB_API_KEY=FAKE_KEY, WANDB_BASE_URL=url)
    assert f"W&B: offline ({url} does not answer: timed out)" in done.said
    assert len(rows_of(offline_runs(tmp_path / "run")[0])[1]) == 21


def test_an_endpoint_that_hangs_delays_neither_the_steps_nor_the_exit(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    with endpoint_that_hangs(asked) as url:
        done = train(tmp_path / "run", timeout=2, until=asked, WANDB_API_KEY=FAKE_KEY, WANDB_BASE_URL=url)
        # Waiting for the endpoint would take forever; these limits are far above what a busy machine needs.
        assert done.median_call_s < 0.1
        assert done.close_s < 60
        # W&B's exit handlers do not delay the interpreter's exit either.
        assert done.after_close_s < 60
        assert "note: W&B did not finish in time" in done.said
        wait_until(lambda: processes_with(str(tmp_path / "home")) == [])


def test_a_broken_package_only_causes_a_note(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "wandb.py").write_text("raise ImportError('no such thing')\n")
    path = os.pathsep.join(filter(None, [str(broken), os.environ.get("PYTHONPATH")]))
    done = train(tmp_path / "run", PYTHONPATH=path)
    assert done.said == (
        "warning: W&B is disabled: the wandb package cannot be imported (no such thing); "
        "pip install 'stoker[trackers]'; metrics.jsonl has everything\n"
    )
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 21


def test_nothing_is_printed_when_the_environment_disables_it(tmp_path: Path) -> None:
    done = train(tmp_path / "run", WANDB_MODE="disabled")
    assert done.said == ""
    assert not (tmp_path / "run" / "wandb").exists()


def test_nothing_outlives_a_training_process_that_was_killed(tmp_path: Path) -> None:
    root = tmp_path / "run"
    training = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(root), "1", "1000000", "10"],
        stderr=subprocess.PIPE, text=True, env=environment(tmp_path / "home", WANDB_MODE="offline"),
    )  # fmt: skip
    assert training.stderr is not None
    assert training.stderr.readline().startswith("W&B: offline")
    assert len(processes_with(str(tmp_path / "home"))) > 1
    wait_until(lambda: bool(offline_runs(root)) and len(rows_of(offline_runs(root)[0])[1]) > 0)
    training.kill()
    training.wait()
    training.stderr.close()
    wait_until(lambda: processes_with(str(tmp_path / "home")) == [])
    assert len(rows_of(offline_runs(root)[0])[1]) > 0
