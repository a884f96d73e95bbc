"""Workers are timed whether they are forked, spawned or started by a fork server."""

from __future__ import annotations

import pytest

from tests.doctor.script.conftest import Attached


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.release)])
def test_the_workers_batches_are_recorded(attached: Attached, method: str, capfd: pytest.CaptureFixture[str]) -> None:
    result = attached("plain.py", "--start", method, "--workers", "1", "--persistent")
    out, err = capfd.readouterr()
    assert out.startswith("trained 16 batches")
    assert err == "a word on stderr\n"
    seen = result.observed
    assert result.exit_code == 0
    assert seen is not None
    assert seen.loader is not None
    assert (seen.loader.start_method, seen.loader.workers, seen.loader.persistent) == (method, 1, True)
    assert (seen.loader.batch_size, seen.loader.samples, seen.loader.prefetch) == (4, 32, 2)
    assert (seen.steps, seen.samples, len(seen.epoch_starts_s)) == (14, 56, 2)
    assert len(seen.batches) == 16
    assert {batch.samples for batch in seen.batches} == {4}
    assert all(batch.bytes == 4 * (8 * 4 + 8) for batch in seen.batches)
    assert seen.stages["collate"].calls == 16
    assert seen.convolves_3d is False
