"""`stoker watch` and `stoker report` on a live run."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from tests.support.ready_process import ReadyProcess
from tests.support.tiny_training import steps_done, write_config


def test_a_real_run_is_followed_to_its_end_and_not_disturbed(ready: ReadyProcess, images: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, images, epochs=400)
    training = ready.start("train", config, cwd=tmp_path)
    run = tmp_path / "runs" / "tiny"
    training.wait_for(lambda: steps_done(run) > 3)

    piped = ready.start("watch", run, cwd=tmp_path)
    piped.wait_for(lambda: piped.out_file.exists() and "images/s" in piped.out)
    assert piped.out.startswith("tiny running: epoch")

    interrupted = ready.start("watch", run, cwd=tmp_path)
    interrupted.wait_for(lambda: interrupted.out_file.exists() and "tiny running" in interrupted.out)
    interrupted.send(signal.SIGINT)
    assert interrupted.wait() == 0
    assert "the run is not affected" in interrupted.err
    assert training.poll() is None

    training.send(signal.SIGINT)
    assert training.wait() == 130
    assert piped.wait() == 0
    assert "tiny stopped: " in piped.out.splitlines()[-1]
    document = ready.run("report", run, "--json", cwd=tmp_path)
    assert document.code == 0, document.err
    (found,) = json.loads(document.out)["runs"]
    assert found["split"], found["missing"]
    assert found["ending"].startswith("interrupted")
    assert {"fetch", "decode"} <= {stage["name"] for stage in found["stages"]}
    assert found["verdict"] is not None
