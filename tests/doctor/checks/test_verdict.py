"""From observation to verdict: each fault is named correctly, and nothing unmeasured is reported."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest

from stoker.core.finding import Estimate
from stoker.doctor.checks.facts import Facts, waiting_for_data
from stoker.doctor.checks.verdict import CHECKS, judge
from stoker.doctor.diagnosis import Prediction
from stoker.profile.observed import (
    AcceleratorFacts,
    BatchTime,
    HostFacts,
    LoaderShape,
    LoopRates,
    LoopTimes,
    Observed,
    SlowSample,
    StorageFacts,
)
from tests.doctor.checks.observations import BATCH, STEPS, batches, changed, healthy, stages, starved
from tests.support.documents import PROJECT

FULL = HostFacts(cpus=2, cpu_busy_share=1.0)


EMPTY = Observed("script", 0, 0, LoopTimes(), missing=("no DataLoader",))
QUOTA = HostFacts(cpus=2, cpu_busy_share=0.3)
CROWDED = LoaderShape(workers=2, prefetch=2, threads_per_worker=4)
RESTARTED = LoaderShape(workers=2, prefetch=2, persistent=False)
PAGEABLE = LoaderShape(workers=2, prefetch=2, pin_memory=False)
READING = stages(fetch=batches(cpu=0.001, blocked=0.05), other=batches(cpu=0.002))


@pytest.mark.parametrize(
    ("observed", "verdict", "fix"),
    [
        (healthy(), "compute-bound", "stop tuning the data pipeline"),
        (starved(cpu=0.04), "too-few-workers", "DataLoader(..., num_workers=8)"),
        (starved(cpu=0.04, workers=0), "too-few-workers", "num_workers"),
        (starved(cpu=0.04, source="run"), "too-few-workers", "num_workers=8"),
        (starved(cpu=0.04, host=FULL), "cpu-bound", "do that work once"),
        (starved(cpu=0.04, runq=0.12, workers=8, host=FULL), "too-many-workers", "DataLoader(..., num_workers=2)"),
        # Threads of each worker count as well.
        (starved(cpu=0.02, runq=0.03, host=FULL, loader=CROWDED), "too-many-workers", "OMP_NUM_THREADS=1"),
        (starved(cpu=0.01, runq=0.02, workers=1, host=FULL), "cores-are-taken", "stop the other programs"),
        (starved(cpu=0.04, runq=0.12, workers=8, host=replace(FULL, throttled_share=0.4)), "cpu-throttled", "CPU"),
        # Waiting for a core while cores are idle is a hidden quota.
        (starved(cpu=0.01, runq=0.03, workers=2, host=QUOTA), "cpu-throttled", "CPU limit"),
        (starved(cpu=0.04, workers=1, host=QUOTA), "too-few-workers", "num_workers"),
        (starved(cpu=0.003, blocked=0.05, stages=READING), "storage-bound", "copy the data"),
        (starved(cpu=0.003, blocked=0.05), "waits-elsewhere", "__getitem__"),
        (starved(cpu=0.01, blocked=0.03, workers=4), "workers-take-turns", "in each worker"),
        (replace(starved(cpu=0.04), batches=batches(cpu=0.005), stages={}), "handover-bound", "large tensors"),
        (healthy(epoch_starts_s=(60.0,)), "compute-bound", ""),  # the first start of a run is not a fault
        (healthy(transfer_s=3.0, compute_s=6.9, loader=PAGEABLE), "transfer-bound", "pin_memory=True"),
        (healthy(accelerator=AcceleratorFacts(device_busy_share=0.4)), "launch-bound", "torch.compile"),
        (healthy(accelerator=AcceleratorFacts(device_busy_share=0.97)), "compute-bound", ""),
        # The larger loss is the verdict.
        (healthy(epoch_starts_s=(1.0, 9.0), wait_s=1.5, compute_s=8.4, loader=RESTARTED), "epoch-start-stalls", ""),
        (starved(cpu=0.04, epoch_starts_s=(1.0, 0.3), loader=replace(RESTARTED, batch_size=BATCH)),
         "too-few-workers", ""),
    ],
)  # fmt: skip
def test_each_fault_is_named_with_its_fix(observed: Observed, verdict: str, fix: str) -> None:
    found = judge(observed)
    assert found.verdict == verdict
    assert fix in (found.findings[0].fix or "")


@pytest.mark.parametrize(
    "observed", [EMPTY, healthy(wait_s=8.0, compute_s=None, other_s=None, batches=(), host=None, loader=None)]
)
def test_what_was_not_measured_gets_no_verdict(observed: Observed) -> None:
    found = judge(observed)
    assert (found.verdict, found.findings) == ("unknown", ())
    assert observed is not EMPTY or "no DataLoader" in found.line


def test_the_predicted_number_of_workers_is_advised_with_its_gain() -> None:
    gain = Estimate(1.8, 2.1, 2.3)
    six = Prediction("workers", "num_workers 2 -> 6", gain, Estimate(1, 2, 3), (("num_workers", 6),))
    finding = judge(starved(cpu=0.04), (six,)).findings[0]
    assert finding.fix == "DataLoader(..., num_workers=6)"
    assert finding.speedup == gain


@pytest.mark.parametrize("stage", ["decode", "augment", "collate"])
def test_full_cores_are_named_by_their_largest_stage(stage: str) -> None:
    made = stages(**{stage: batches(cpu=0.03), "other": batches(cpu=0.01)})
    found = judge(starved(cpu=0.04, stages=made, host=FULL))
    assert found.verdict == f"{stage}-bound"


def test_as_many_workers_as_cores_are_not_too_few_unless_a_prediction_says_so() -> None:
    idle = HostFacts(cpus=2, cpu_busy_share=0.1)
    observed = replace(starved(cpu=0.04, workers=2, host=idle), batches=batches(cpu=0.005), stages={})
    assert "too-few-workers" not in [finding.name for finding in judge(observed).findings]
    one = starved(cpu=0.04, workers=1, host=idle)
    assert "too-few-workers" in [finding.name for finding in judge(one).findings]


def test_a_workers_first_batch_is_not_a_slow_sample() -> None:
    first = tuple(replace(one, wall_s=2.0, worker=number) for number, one in enumerate(batches(cpu=0.04, count=8)))
    later = tuple(replace(one, worker=number % 8) for number, one in enumerate(batches(cpu=0.04, count=92)))
    observed = replace(starved(cpu=0.04, workers=8, host=HostFacts(cpus=16)), batches=(*first, *later))
    assert judge(observed).verdict != "slow-samples"


def remote(**facts: float) -> Observed:
    made = stages(fetch=batches(cpu=0.001, blocked=0.08), other=batches(cpu=0.002))
    storage = StorageFacts(remote=True, kind="s3", bytes_per_sample=100_000, **facts)
    return starved(cpu=0.003, blocked=0.08, stages=made, storage=storage)


def test_remote_latency_is_distinguished_from_remote_bandwidth() -> None:
    rate = remote().images_per_second
    assert judge(remote(parallel_bytes_per_second=rate * 100_000 * 10)).verdict == "storage-bound-latency"
    assert judge(remote(parallel_bytes_per_second=rate * 100_000)).verdict == "storage-bound-bandwidth"
    assert judge(remote(latency_s=0.009)).verdict == "storage-bound-latency"
    assert judge(remote(latency_s=0.001)).verdict == "storage-bound-bandwidth"
    assert judge(remote()).verdict == "storage-bound"


def test_a_cold_local_disk_and_the_page_cache_that_is_too_small_for_it() -> None:
    observed = replace(
        remote(), storage=StorageFacts(remote=False, kind="ext4", dataset_bytes=140 * 10**9),
        host=HostFacts(cpus=8, page_cache_bytes=50 * 10**9),
    )  # fmt: skip
    found = judge(observed)
    assert found.verdict == "storage-bound-cold"
    assert "page-cache-too-small" in {finding.name for finding in found.findings}


def test_a_few_slow_samples_are_named() -> None:
    slow = BatchTime(0.5, 0.01, 0.0, 0.49, BATCH)
    made = tuple(slow if number % 10 == 9 else one for number, one in enumerate(batches(cpu=0.01)))
    observed = replace(
        starved(cpu=0.01, blocked=0.05), batches=made, slow_samples=(SlowSample("scans/7.tif", 0.48, 0.001),)
    )
    found = judge(observed)
    assert found.verdict == "slow-samples"
    assert "scans/7.tif 480 ms" in found.line
    collecting = tuple(replace(one, collect_s=max(0.0, one.wall_s - 0.01)) for one in made)
    assert judge(replace(observed, batches=collecting, slow_samples=())).verdict != "slow-samples"


def test_with_few_slow_batches_most_work_is_in_unfinished_ones() -> None:
    slow = batches(cpu=0.01, blocked=4.0, count=1)
    few = changed(starved(cpu=0.01), steps=1, samples=8, elapsed_s=4.1, wait_s=4.0, batches=slow, stages={})
    few = replace(few, loader=replace(few.loader, workers=4))
    assert Facts(few).busy_workers == pytest.approx(0.245, abs=0.01)
    assert judge(few).verdict != "handover-bound"


def test_slow_epoch_starts_without_persistent_workers() -> None:
    found = judge(healthy(epoch_starts_s=(5.0, 4.0, 4.0), loader=RESTARTED)).findings[0]
    assert found.fix == "DataLoader(..., persistent_workers=True)"
    gain = found.speedup
    assert gain.low < 1.8 == pytest.approx(gain.high)


def ids(observed: Observed) -> set[str]:
    return {finding.name for finding in judge(observed).findings}


def test_a_narrow_link_and_shared_memory_that_all_batches_in_flight_fill_are_reported() -> None:
    assert "slow-pcie-link" in ids(healthy(accelerator=AcceleratorFacts(pcie_width=4, pcie_width_max=16)))
    assert "slow-pcie-link" not in ids(healthy(accelerator=AcceleratorFacts(pcie_width=16, pcie_width_max=16)))
    made = tuple(replace(one, bytes=15_000_000) for one in batches(cpu=0.01))
    docker = HostFacts(cpus=8, shm_bytes=64 * 1024**2)
    assert "shared-memory-tight" in ids(healthy(host=docker, batches=made))
    assert "shared-memory-tight" not in ids(healthy(host=replace(docker, shm_bytes=10**9), batches=made))


@pytest.mark.parametrize(("version", "said"), [("2.9.1+cu128", True), ("2.10.0", False), (None, False)])
def test_torch_2_9_with_3d_convolutions(version: str | None, said: bool) -> None:
    assert ("torch-2.9-conv3d" in ids(healthy(torch_version=version, convolves_3d=True))) is said
    assert "torch-2.9-conv3d" not in ids(healthy(torch_version=version, convolves_3d=False))


def test_needs_are_listed_next_to_what_is_available() -> None:
    storage = StorageFacts(bytes_per_sample=100_000, cold_bytes_per_second=20e6)
    needs = judge(starved(cpu=0.04, storage=storage, rates=LoopRates(ceiling=1600.0))).needs
    cpu, cold = {need.what: need for need in needs}["CPU"], {need.what: need for need in needs}["storage, cold"]
    assert cpu.has == pytest.approx(8 / (0.04 / BATCH))
    assert cpu.covered == pytest.approx(1.0)
    assert cold.wants == pytest.approx(160e6)
    assert cold.covered == pytest.approx(0.125)


def test_every_check_has_a_line_in_the_docs() -> None:
    page = (PROJECT / "docs" / "why-is-my-gpu-idle.md").read_text()
    listed = re.findall(r"^\| `([a-z0-9.-]+)` \| ", page, flags=re.MULTILINE)
    assert sorted(listed) == sorted(check.name for check in CHECKS)


def test_every_check_says_what_why_and_an_example() -> None:
    for check in CHECKS:
        text = inspect.getdoc(check.look) or ""
        assert all(f"{part}:" in text for part in ("What", "Why", "Example")), check.name


def test_a_check_is_declared_once_and_has_a_text_if_it_can_be_the_verdict() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert all((check.words is None) == (check.loss is None) for check in CHECKS)


def test_the_first_of_the_checks_that_explain_the_same_wait_names_it() -> None:
    """The order of the checks decides; changing it changes verdicts."""
    assert [check.name for check in CHECKS if check.loss is waiting_for_data] == [
        "cpu-throttled", "slow-samples", "workers-take-turns", "too-many-workers", "cores-are-taken", "handover-bound",
        "storage-bound", "storage-bound-cold", "storage-bound-latency", "storage-bound-bandwidth", "waits-elsewhere",
        "too-few-workers", "decode-bound", "augment-bound", "preprocess-bound", "collate-bound",
        "cpu-bound",
    ]  # fmt: skip
    throttled = starved(cpu=0.04, runq=0.12, workers=8, host=replace(FULL, throttled_share=0.4))
    assert [finding.name for finding in judge(throttled).findings] == ["cpu-throttled", "too-many-workers"]


def test_with_full_cores_more_workers_promise_no_more_than_the_prediction() -> None:
    full = starved(cpu=0.04, host=FULL)
    assert "more workers cannot help" in judge(full).line
    some = Prediction(
        "workers", "num_workers 2 -> 3", Estimate(1.0, 1.1, 1.2), Estimate(1, 1, 1), (("num_workers", 3),)
    )
    assert "more workers give 1.1x at most" in judge(full, (some,)).line


def test_a_loop_that_computes_on_the_same_cores_leaves_them_while_it_waits() -> None:
    # One worker on two cores, and a loop whose threads use almost all of the second one.
    alone = starved(cpu=0.04, workers=1, host=FULL, stages=stages(decode=batches(cpu=0.04)))
    busy = changed(alone, consumer_cpu_s=3.6)
    few = Prediction("workers", "num_workers 1 -> 2", Estimate(1.3, 1.4, 1.5), Estimate(1, 1, 1), (("num_workers", 2),))
    little = replace(few, speedup=Estimate(1.0, 1.1, 1.2))
    assert judge(busy, (few,)).verdict == "too-few-workers"
    assert judge(busy, (little,)).verdict == "decode-bound"


def test_a_script_that_waits_for_a_network_is_told_to_copy_if_that_helps_most() -> None:
    away = starved(cpu=0.002, blocked=0.04, storage=StorageFacts(remote=True, kind="network", bytes_per_sample=1e5))
    away = replace(away, stages=stages(fetch=batches(cpu=0.002, blocked=0.04)))
    copy = Prediction("staging", "staging to local disk", Estimate(3.0, 3.3, 3.6), Estimate(1, 1, 1))
    more = Prediction(
        "workers", "num_workers 2 -> 4", Estimate(1.8, 1.9, 2.0), Estimate(1, 1, 1), (("num_workers", 4),)
    )
    assert judge(away, (copy, more)).findings[0].fix == "copy the data to a local disk first"
    best = replace(more, speedup=Estimate(3.8, 4.0, 4.2))
    assert judge(away, (copy, best)).findings[0].fix == "DataLoader(..., num_workers=4)"


def test_slow_remote_storage_is_fixed_by_the_exact_command_where_a_disk_has_room() -> None:
    facts = StorageFacts(
        remote=True, kind="nfs4", bytes_per_sample=1e5, dataset_bytes=10**9, root="/mnt/data", local_folder="/nvme",
        local_free_bytes=10**10, parallel_bytes_per_second=1e8,
    )  # fmt: skip
    away = starved(cpu=0.002, blocked=0.04, storage=facts)
    away = replace(away, stages=stages(fetch=batches(cpu=0.002, blocked=0.04)))
    copy = Prediction("staging", "staging to local disk", Estimate(3.0, 4.0, 5.0), Estimate(1, 1, 1))
    found = judge(away, (copy,)).findings[0]
    assert found.fix == "stoker stage /mnt/data /nvme/data, then let the script read /nvme/data"
    # 10,000 samples at 381 a second: 26 s an epoch, three quarters of which a copy of 10 s saves.
    assert "copying 1 GB first takes 10 s and pays off after 0.5 epochs; /nvme has 10 GB free" in found.seen
    trial = replace(away, source="trial", config="rsb_a3.yaml batch_size=64")
    assert judge(trial, (copy,)).findings[0].fix == "stoker stage rsb_a3.yaml batch_size=64 --to /nvme/data"
    full = replace(trial, storage=replace(facts, local_free_bytes=10**8))
    kept = judge(full, (copy,)).findings[0]
    assert kept.fix == "cache_dir=/nvme/stoker-cache cache_size=90MB: keeps 9% of the data nearby"
    assert "1 GB do not fit: /nvme has 100 MB free" in kept.seen
    unknown = replace(trial, config=None, storage=replace(facts, root=None, local_folder=None))
    assert judge(unknown, (copy,)).findings[0].fix == "stoker stage CONFIG --to /local/disk/data"
    here = replace(trial, storage=replace(facts, remote=False, packed=False))
    assert judge(here).findings[0].fix == "stoker pack DATA_ROOT PACKED --longest 500 --quality 90"


def test_a_model_on_the_cpu_that_loses_its_cores_to_the_loader_is_not_compute_bound() -> None:
    # Batches in memory would give twice the rate, and the loop does not wait: the workers have its cores.
    busy = {"batches": batches(cpu=0.09, runq=0.08), "host": HostFacts(cpus=2), "consumer_cpu_s": 10.0}
    slowed = healthy(rates=LoopRates(ceiling=2 * STEPS * BATCH / 10.0), **busy)
    found = judge(slowed)
    assert found.verdict == "shared-cores"
    assert "loader and model share the cores" in found.line
    assert "2.0 times as long" in found.line
    assert "compute-bound" not in [finding.name for finding in found.findings]
    # The same from a run, which knows no ceiling: its own thread waits for a core, or all cores are full.
    assert judge(healthy(consumer_runq_s=3.0, **busy)).verdict == "shared-cores"
    assert judge(healthy(**busy)).verdict == "shared-cores"
    # With a device of its own, with a loader that takes little, or as fast as the ceiling, it is not that.
    device = AcceleratorFacts(name="GPU", device_busy_share=0.99)
    assert judge(healthy(consumer_runq_s=3.0, accelerator=device, **busy)).verdict == "compute-bound"
    assert judge(healthy(consumer_runq_s=3.0, batches=batches(cpu=0.0005))).verdict == "compute-bound"
    assert judge(healthy(rates=LoopRates(ceiling=1.1 * STEPS * BATCH / 10.0), **busy)).verdict == "compute-bound"
