"""Needless work on samples, useless caches, changing shapes and float32 by mistake are named, and nothing else is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from stoker.doctor.checks.verdict import judge
from stoker.doctor.diagnosing import diagnosis_of
from stoker.doctor.screen import doctor_text
from stoker.profile.observed import (
    CacheFacts,
    FilterWork,
    HostFacts,
    HotSpot,
    Observed,
    Preparation,
    StorageFacts,
)
from tests.doctor.checks.observations import BATCH, STEPS, batches, healthy, starved

VOXELS = 72 * 136 * 136
SPOT = HotSpot("Patches.load", "data.py", 88, 0.91, "scipy.ndimage.median_filter")
SAMPLES = STEPS * BATCH


def preparation(**changes: Any) -> Preparation:
    """A median filter over 320 voxels a side for every patch of 72 x 136 x 136."""
    found = Preparation(
        samples=SAMPLES,
        spots=(SPOT,),
        filters=(FilterWork("scipy.ndimage.median_filter", SAMPLES, SAMPLES * 320**3),),
        sample_elements=float(VOXELS),
        sample_dimensions=4,
        batches_seen=STEPS,
    )
    return replace(found, **changes)


def slow(**changes: Any) -> Observed:
    """A sample costs 1.5 s, and one worker of 8 cores makes them."""
    return starved(cpu=1.5 * BATCH, workers=1, preparation=preparation(**changes))


def ids(observed: Observed) -> set[str]:
    return {finding.name for finding in diagnosis_of(observed).findings}


def message(observed: Observed, finding_id: str) -> str:
    return next(finding.seen for finding in diagnosis_of(observed).findings if finding.name == finding_id)


def test_a_filter_over_a_whole_volume_is_the_verdict_with_its_line_and_its_cost() -> None:
    found = diagnosis_of(slow())
    assert found.verdict == "whole-volume-preprocessing"
    said = found.findings[0].seen
    assert "one sample costs 1.5 s of CPU, 91% of it in `scipy.ndimage.median_filter`" in said
    assert "called in data.py:88 (Patches.load)" in said
    assert "32,768,000 voxels, 25 times the patch" in said
    assert found.findings[0].speedup.expected > 5


@pytest.mark.parametrize(("calls", "elements"), [(SAMPLES, SAMPLES * VOXELS * 2), (8, 8 * 320**3)])
def test_the_same_filter_on_patches_or_with_its_result_kept_is_not(calls: int, elements: int) -> None:
    found = ids(slow(filters=(FilterWork("scipy.ndimage.median_filter", calls, elements),)))
    assert "whole-volume-preprocessing" not in found
    assert "costly-line" in found


def test_reading_a_volume_for_a_patch_counts_where_the_function_was_not_measured() -> None:
    spot = HotSpot("Patches.load", "data.py", 91, 0.8, "numpy.percentile")
    made = tuple(replace(batch, bytes=4 * VOXELS * BATCH) for batch in batches(cpu=1.5 * BATCH))
    seen = replace(slow(spots=(spot,), filters=()), batches=made)
    assert "whole-volume-preprocessing" not in ids(seen)
    seen = replace(seen, storage=StorageFacts(bytes_per_sample=320**3))
    assert "32.8 MB are read for a sample, 6 times its size" in message(seen, "whole-volume-preprocessing")
    # Large photographs are decoded, not preprocessed.
    photographs = replace(seen, preparation=preparation(spots=(spot,), filters=(), sample_dimensions=3))
    assert "whole-volume-preprocessing" not in ids(photographs)


def test_a_model_on_the_cpu_that_hides_a_costly_sample_is_not_told_to_stop_tuning() -> None:
    hidden = healthy(
        elapsed_s=2000.0, wait_s=20.0, compute_s=1980.0, batches=batches(cpu=1.4 * BATCH), preparation=preparation()
    )
    found = judge(hidden)
    assert found.verdict == "compute-bound"
    assert "stop tuning" not in found.findings[0].fix
    assert "an accelerator would wait" in found.findings[0].seen
    assert "whole-volume-preprocessing" in {finding.name for finding in found.findings}


def test_an_unknown_function_that_takes_the_time_is_named_too() -> None:
    seen = slow(spots=(HotSpot("parse", "text.py", 12, 0.8),), filters=())
    assert "80% of it in text.py:12 (parse)" in message(seen, "costly-line")
    assert "costly-line" not in ids(starved(cpu=0.04, preparation=preparation(filters=())))  # 5 ms a sample


CACHE = CacheFacts("self.cache.volumes", 50, 13_000_000_000, 40)


def test_a_cache_that_throws_away_what_is_asked_for_next_is_named() -> None:
    seen = slow(caches=(CACHE,), samples_that_read=int(0.94 * SAMPLES), opens=1500, files=500)
    assert message(seen, "cache-cannot-hit") == (
        "`self.cache.volumes` keeps 50 entries (13 GB) in each worker, and 94% of the samples are not in it: "
        "500 files were opened 3.0 times each"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"caches": (replace(CACHE, evicted=0),), "samples_that_read": SAMPLES},
        {"caches": (CACHE,), "samples_that_read": SAMPLES // 4},
    ],
    ids=["still filling", "mostly hits"],
)
def test_a_cache_that_may_help_is_not(changes: dict[str, Any]) -> None:
    assert "cache-cannot-hit" not in ids(slow(**changes))


def test_shapes_that_change_from_batch_to_batch_are_named_but_not_seldom_changes_and_texts() -> None:
    seen = slow(shape_changes=90, shapes=("1x72x136x136", "1x88x160x160"), size_spread=3.8)
    said = message(seen, "shapes-change")
    assert "90 of 100 batches" in said
    assert "1x72x136x136, then 1x88x160x160" in said
    assert "3.8 times" in said
    assert "shapes-change" not in ids(slow(shape_changes=1)) | ids(slow(shape_changes=90, sample_dimensions=1))


def test_a_scaler_without_autocast_is_named_with_its_line() -> None:
    seen = healthy(scaled_in_32_bits=True, scaled_at="train.py:214")
    assert "train.py:214" in message(seen, "scaler-without-autocast")
    assert "scaler-without-autocast" not in ids(healthy(scaled_in_32_bits=False))
    assert "scaler-without-autocast" not in ids(healthy())


def test_more_workers_are_not_advised_where_memory_would_run_out() -> None:
    plenty = starved(cpu=0.4, workers=1, preparation=preparation(spots=(), worker_bytes=7 * 10**9))
    plenty = replace(plenty, host=HostFacts(cpus=8, available_bytes=200 * 10**9))
    found = diagnosis_of(plenty)
    assert found.verdict == "too-few-workers"
    assert "no-memory-for-workers" not in ids(plenty)

    some = diagnosis_of(replace(plenty, host=HostFacts(cpus=8, available_bytes=16 * 10**9)))
    assert some.findings[0].fix == "DataLoader(..., num_workers=3)"

    none = diagnosis_of(replace(plenty, host=HostFacts(cpus=8, available_bytes=5 * 10**9)))
    assert "num_workers" not in doctor_text(none)
    said = next(finding.seen for finding in none.findings if finding.name == "no-memory-for-workers")
    assert said == "a worker takes 7 GB, and 5 GB of memory are available: no more workers fit"
