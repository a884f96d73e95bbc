"""Streams, loaders with and without workers, several loaders and ranks, stages; and that sleep is not computing."""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path

import pytest

from stoker.attach.fetching import FetchTotals, collections
from stoker.attach.ring import FETCH_STRUCT, HEADER_BYTES, FetchRecord
from stoker.doctor.script.run_script import AttachResult, run_attached
from tests.doctor.script.conftest import SCRIPTS, attached
from tests.support.images import encode, noise


def test_a_stream_has_samples_but_no_length() -> None:
    seen = attached("plain.py", "--stream").observed
    assert seen.loader.samples is None
    assert seen.samples == 14 * 4
    assert len(seen.batches) == 16
    assert {batch.worker for batch in seen.batches[:2]} == {0, 1}  # in the order they were handed out


def test_without_workers_batches_are_made_in_the_loop_and_validation_is_not_included() -> None:
    seen = attached("plain.py", "--workers", "0", "--sleep-ms", "8", "--validate").observed
    assert (seen.loader.workers, seen.loader.engine, seen.loader.prefetch) == (0, "main", None)
    assert (seen.steps, len(seen.batches)) == (14, 16)
    assert seen.times.validation_s > 2 * 12 * 0.009
    made = sum(batch.wall_s for batch in seen.batches)
    # The loop waits while a batch is made, and hardly longer: far less than validation would add.
    assert 0 <= seen.times.wait_s + sum(seen.times.epoch_starts_s) - made < 0.5 * seen.times.validation_s


@pytest.fixture(scope="module")
def sleeping_and_spinning() -> AttachResult:
    return attached(
        "plain.py", "--workers", "3", "--sleep-ms", "16", "--spin-ms", "8", "--samples", "60", "--epochs", "1",
        "--slow", "17",
    )  # fmt: skip


@pytest.mark.real_time
def test_sleeping_and_computing_are_distinguished_on_a_busy_machine(sleeping_and_spinning: AttachResult) -> None:
    # Three spinning workers, perhaps on two cores that others use too: much of the time they are runnable.
    seen = sleeping_and_spinning.observed
    stage = seen.stages["other"]
    # A sleep may take longer than asked for, but not less.
    assert stage.blocked_s >= 0.95 * (60 * 0.016 + 0.25)
    assert 0.95 * 60 * 0.008 <= stage.cpu_s <= 1.5 * 60 * 0.008
    # What is computed is not counted as sleep as well: not in all batches together, nor in one whose sleeps ended in
    # time. Late wake-ups only ever add.
    assert stage.blocked_s + stage.cpu_s <= 1.01 * sum(batch.wall_s for batch in seen.batches)
    assert any(4 * 0.015 <= (batch.blocked_s or 0.0) < 4 * (0.016 + 0.008) for batch in seen.batches)


@pytest.mark.real_time
def test_a_full_garbage_collection_is_not_the_samples_fault(tmp_path: Path) -> None:
    totals = FetchTotals(str(tmp_path / "fetch.ring"), 0, 1)
    collections.watch()
    try:
        totals.batch_begins()
        for number in range(2):  # the first sample is not judged
            began = totals.sample_begins()
            before = time.perf_counter()
            gc.collect()
            collecting_ns = (time.perf_counter() - before) * 1e9
            totals.sample_ends(began, number)
        totals.batch_ends()
        totals.batch_made(0, 2, None, None)
    finally:
        gc.callbacks.remove(collections._count)
    records = FETCH_STRUCT.unpack_from(totals._ring.memory, HEADER_BYTES)
    assert max((took for took, _ in totals._slow), default=0) < 0.2 * collecting_ns
    assert FetchRecord(*records).collect_us * 1e3 > collecting_ns


def test_a_slow_sample_is_named(sleeping_and_spinning: AttachResult) -> None:
    seen = sleeping_and_spinning.observed
    assert seen.slow_samples[0].name == "sample 17"
    assert seen.slow_samples[0].seconds > 0.25


def test_rank_0_of_two_is_reported() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run"]  # warm
    script = [str(SCRIPTS / "plain.py"), "--workers", "1", "--epochs", "1"]
    result = run_attached([*torchrun, "--standalone", "--nproc-per-node", "2", *script])
    assert result.exit_code == 0
    assert any(note == "2 ranks trained; these are the times of rank 0" for note in result.notes)
    assert result.observed.steps == 7
    assert len(result.observed.batches) == 8


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.release)])
def test_the_workers_batches_are_recorded(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    result = attached("plain.py", "--start", method, "--workers", "1", "--persistent")
    out, err = capfd.readouterr()
    assert out.startswith("trained 16 batches")
    # Python's own tracker may say that a semaphore which another thread is just removing has leaked.
    said = [line for line in err.splitlines() if "resource_tracker" not in line and "warnings.warn(" not in line]
    assert said == ["a word on stderr"]
    seen = result.observed
    assert result.exit_code == 0
    assert (seen.loader.start_method, seen.loader.workers, seen.loader.persistent) == (method, 1, True)
    assert (seen.loader.batch_size, seen.loader.samples, seen.loader.prefetch) == (4, 32, 2)
    assert (seen.steps, seen.samples, len(seen.times.epoch_starts_s)) == (14, 56, 2)
    assert len(seen.batches) == 16
    assert {batch.samples for batch in seen.batches} == {4}
    assert all(batch.bytes == 4 * (8 * 4 + 8) for batch in seen.batches)
    assert seen.stages["collate"].calls == 16
    assert seen.convolves_3d is False


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for number in range(24):
        folder = tmp_path / "train" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.jpg").write_bytes(encode(noise(200, 160, number), "JPEG"))
    return tmp_path


@pytest.mark.parametrize("style", ["torchvision", "timm"])
def test_images_pass_through_every_stage(pictures: Path, style: str) -> None:
    where = [str(pictures), "--timm"] if style == "timm" else [str(pictures / "train")]
    seen = attached("images.py", *where).observed
    assert set(seen.stages) == {"fetch", "decode", "augment", "collate", "other"}
    assert seen.stages["decode"].cpu_s > seen.stages["fetch"].cpu_s
    assert seen.stages["augment"].calls == sum(batch.samples for batch in seen.batches)
    size = sum(path.stat().st_size for path in pictures.rglob("*.jpg")) / 24
    assert seen.storage.bytes_per_sample == pytest.approx(size, rel=0.2)
    assert seen.storage.kind is not None
    assert pictures.is_relative_to(seen.storage.root or "/nowhere")
    assert seen.samples == 10 * 4
    assert all(batch.fetch_s is not None and batch.fetch_s < batch.wall_s for batch in seen.batches)
