"""The pipeline of a published project whose A100 took 18 s a step, run under the doctor: its faults are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.profile import host
from stoker.profile.host import usable_cpus
from stoker.profile.memory import MemoryState
from stoker.tasks.demo import write_scrolls
from tests.doctor.script.conftest import diagnosed, line_of

REPLICA = Path(__file__).parents[3] / "bench" / "document_replica.py"
WIDTH = ("--width", "2")
FAULTS = {
    "whole-volume-preprocessing", "cache-cannot-hit", "shapes-change", "scaler-without-autocast",
    "no-memory-for-workers",
}  # fmt: skip


@pytest.fixture(scope="module")
def scrolls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scrolls")
    write_scrolls(folder, volumes=8, shape=(96, 96, 96), tests=0)
    return folder


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that wait for each other on busy cores take many times as long: the loop would hardly wait for data
    any more."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_its_five_faults_are_named_with_their_lines(
    scrolls: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A worker takes 28 MB: there is no memory for a second one.
    monkeypatch.setattr(host, "read_memory", lambda: MemoryState(10_000_000, 20_000_000_000))
    document = diagnosed(
        capfd, REPLICA, str(scrolls), "--patch", "24", "40", "40", *WIDTH, "--steps", "16", "--cache", "1"
    )
    said = {finding["id"]: finding["message"] for finding in document["findings"]}

    costly = said["whole-volume-preprocessing"]
    assert "of it in `scipy.ndimage.median_filter`, called in " in costly
    assert f"{line_of(REPLICA, '# the whole volume')} (Patches.load)" in costly
    assert "884,736 voxels" in costly
    assert document["lines"][0]["calls"] == "scipy.ndimage.median_filter"
    assert document["lines"][0]["share"] > 0.8
    assert "`self.cache.volumes` keeps 1 entry" in said["cache-cannot-hit"]
    assert "another shape than the one before" in said["shapes-change"]
    assert line_of(REPLICA, "scaler.scale(loss)") in said["scaler-without-autocast"]
    assert all("num_workers" not in (finding["fix"] or "") for finding in document["findings"])
    assert all(prediction["id"] != "workers" for prediction in document["what_if"])
    if usable_cpus() > 1 and document["wait_share"] > 0.1:
        assert document["verdict"] == "whole-volume-preprocessing"
        assert "no more workers fit" in said["no-memory-for-workers"]


def test_the_same_script_without_the_faults_has_none_of_them(scrolls: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # Small patches: filtering one is far from costly, even on a slow machine.
    healthy = (
        "--patch", "16", "24", "32", "--read", "patch", "--filter", "patch", "--no-zoom", "--autocast", "--cache", "100"
    )  # fmt: skip
    document = diagnosed(capfd, REPLICA, str(scrolls), *WIDTH, *healthy, "--steps", "40")
    assert FAULTS.isdisjoint(finding["id"] for finding in document["findings"])
    assert "costly-line" not in {finding["id"] for finding in document["findings"]}
