"""A system without /proc, such as macOS: what can be measured is reported, and what cannot is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.script.conftest import SCRIPTS
from tests.support.tiny_training import write_config, write_images
from tests.support.waiting import DEADLINE_S

HIDE = 'mount -t tmpfs tmpfs /proc && exec "$@"'


@pytest.fixture(scope="module")
def without_proc() -> list[str]:
    """A command prefix that makes /proc an empty folder."""
    user = [] if os.geteuid() == 0 else ["--map-root-user"]
    before = ["unshare", *user, "--mount", "sh", "-c", HIDE, "sh"]
    if subprocess.run([*before, "true"], capture_output=True).returncode != 0:
        pytest.skip("cannot create a mount namespace here")
    return before


def run(command: list[str], folder: Path) -> dict[str, Any]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return json.loads(done.stdout)


def test_a_scripts_waits_are_reported_with_what_could_not_be_measured(without_proc: list[str], tmp_path: Path) -> None:
    script = [sys.executable, str(SCRIPTS / "plain.py"), "--workers", "2", "--samples", "200", "--sleep-ms", "5"]
    found = run([*without_proc, sys.executable, "-m", "stoker", "doctor", "--json", "--", *script], tmp_path)
    assert found["wait_share"] > 0.05
    assert found["images_per_second"] > 0
    assert all(stage["wall_s"] >= 0 for stage in found["stages"].values())
    assert all(stage["runq_s"] is None for stage in found["stages"].values())
    assert any("run-queue" in text for text in found["not_seen"])


@pytest.mark.release
def test_a_config_can_still_be_tried(without_proc: list[str], tmp_path: Path) -> None:
    config = write_config(tmp_path, write_images(tmp_path / "data", train=40), num_workers=1)
    command = [sys.executable, "-m", "stoker", "doctor", str(config), "--pace", "200", "--seconds", "1", "--json"]
    found = run([*without_proc, *command], tmp_path)
    assert found["images_per_second"] > 0
    assert found["verdict"] != "unknown"
    assert any("run queue" in text for text in found["not_seen"])
