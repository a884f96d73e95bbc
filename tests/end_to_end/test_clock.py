"""A real run records where its time went, and a run that starts over does not count the steps of the lost one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from stoker.profile.clock_reading import read_observed
from tests.conftest import Run
from tests.support.tiny_training import write_config, write_images

STEPS = 2 * (3 * 16 // 8)


def test_a_run_records_where_its_time_went(stoker: Run, tmp_path: Path) -> None:
    config = write_config(tmp_path, write_images(tmp_path / "data"), log_every=4, num_workers=1)
    assert stoker("train", config).code == 0
    run = tmp_path / "runs" / "tiny"
    seen = read_observed(run)
    # The first step of each of the two epochs is counted separately.
    assert (seen.steps, seen.samples) == (STEPS - 2, 8 * (STEPS - 2))
    assert len(seen.times.epoch_starts_s) == 2
    assert seen.times.validation_s is not None
    assert seen.times.validation_s > 0
    assert seen.times.compute_s is not None
    assert seen.times.other_s is not None
    assert seen.times.wait_s + seen.times.compute_s + seen.times.other_s == pytest.approx(
        seen.times.elapsed_s, abs=1e-3
    )
    assert seen.stages["decode"].calls == STEPS
    assert seen.storage is not None
    assert seen.storage.bytes_per_sample is not None
    assert seen.loader is not None
    assert (seen.loader.workers, seen.loader.engine) == (1, "thread")
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    whole = sum(line["seconds"] for line in told if line["kind"] == "epoch")
    assert seen.times.elapsed_s + sum(seen.times.epoch_starts_s) + seen.times.validation_s <= whole + 0.05
    # The checkpoints are lost, and with them the steps.
    shutil.rmtree(run / "checkpoints")
    assert stoker("train", config).code == 0
    assert read_observed(run).steps == STEPS - 2
