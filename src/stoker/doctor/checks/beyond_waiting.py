"""What else takes time: epoch starts, copies, kernel launches, the model itself; and a host that slows them down."""

from __future__ import annotations

import statistics

from stoker.core.finding import Estimate, Finding
from stoker.core.units import duration_text, size_text
from stoker.doctor.checks.facts import PACK, STARVED, Facts, check, speedup_without
from stoker.doctor.checks.samples import COSTLY_S
from stoker.doctor.checks.script_habits import MAKE_ONCE
from stoker.doctor.preparing import sample_cpu_s

TRANSFER = 0.15
"""Share of a step: a pinned batch is copied while the previous step computes, so whatever shows is avoidable."""
BUSY_DEVICE = 0.75
"""Share of compute time in which the device has work; below it, it waits for the CPU to launch kernels. Large batches
of large networks are above 0.95."""
HIDDEN = 0.1
"""Share of a step on the CPU: an accelerator takes less, so a batch that takes longer would keep it waiting."""
SHARED = 0.2
"""Share of a step that a model on the CPU loses to the loader, from which that is the thing to look at: twice the line
for waiting, because some of it cannot be avoided where both need the same cores."""
FEW_CORES = 0.1
"""Cores: a loader that takes less is not what slows a model down."""
COMPUTES = 0.25
"""Share of all cores: a loop that uses less has its model elsewhere, or hardly any."""
OTHERS = 0.5
"""Cores in use by other programs from which they are worth mentioning."""
FULL = 0.85
"""Share of all cores: the system takes some of the rest."""
TIGHT = 0.8
"""Share of /dev/shm: one more batch per worker, or a larger image, and a worker is killed by SIGBUS."""


def _transfer(facts: Facts) -> float:
    observed = facts.observed
    return (observed.times.transfer_s or 0.0) / observed.times.elapsed_s if observed.times.elapsed_s > 0 else 0.0


def _idle_device(facts: Facts) -> float:
    """Share of the time in which the device has nothing to do although data is there."""
    accelerator, observed = facts.observed.accelerator, facts.observed
    if accelerator is None or accelerator.device_busy_share is None or observed.times.elapsed_s <= 0:
        return 0.0
    return (1 - accelerator.device_busy_share) * (observed.times.compute_s or 0.0) / observed.times.elapsed_s


def _shared_cores(facts: Facts) -> float:
    """Share of the time that a model on the CPU loses because batches are prepared on the same cores; 0 if it has a
    device of its own, or if nothing was measured that would say."""
    observed, host, used = facts.observed, facts.observed.host, facts.cores_used
    rate, ceiling = observed.images_per_second, observed.rates.ceiling
    if observed.accelerator is not None or observed.times.elapsed_s <= 0 or observed.rates.pace is not None:
        return 0.0
    if host is None or used is None or used < FEW_CORES or not observed.times.compute_s:
        return 0.0
    if rate is not None and ceiling:  # the same steps with batches that were there before
        return max(0.0, 1 - rate / ceiling - (observed.times.wait_share or 0.0))
    queued = (observed.times.consumer_runq_s or 0.0) / observed.times.elapsed_s
    # Where all cores are busy, what one of the two takes, the other goes without; a loop that sleeps misses nothing.
    computing = (observed.times.consumer_cpu_s or 0.0) / observed.times.elapsed_s >= COMPUTES * host.cpus
    full = computing and facts.own_cores >= FULL * host.cpus
    return max(queued, used / facts.own_cores * (1 - (observed.times.wait_share or 0.0)) if full else 0.0)


@check("epoch-start-stalls", "every epoch starts with a long wait", loss=lambda facts: facts.epoch_start_share)
def epoch_start_stalls(facts: Facts) -> Finding | None:
    """What: each epoch begins with a long wait for its first batch.

    Why: without persistent_workers every epoch restarts its workers: imports, opening the dataset, first batches.

    Example: 32 spawned workers that import torch and open an index: 20 s, every epoch of 3 minutes.
    """
    share = facts.epoch_start_share
    if share < STARVED:
        return None
    shape, mean_s = facts.observed.loader, statistics.fmean(facts.observed.times.epoch_starts_s[1:])
    message = f"the first batch of an epoch takes {mean_s:.1f} s, {share:.0%} of the time"
    if shape is not None and shape.persistent is False:
        habits = facts.observed.habits
        anew = habits is not None and habits.loader_builds > 1
        fix = MAKE_ONCE if anew else facts.setting("persistent_workers", True)
        return Finding(f"{message}: workers are restarted every epoch", fix, speedup_without(share))
    if shape is not None and shape.workers == 0 and facts.filling is None:
        return Finding(message, facts.setting("num_workers", 2))
    return Finding(message, "longer epochs: repeat the dataset within one")


@check("transfer-bound", "copying to the device holds up steps", loss=_transfer)
def transfer_bound(facts: Facts) -> Finding | None:
    """What: steps wait while a batch is copied to the device.

    Why: from pageable memory the copy cannot overlap; float32 is four times the bytes of uint8.

    Example: 154 MB a batch over PCIe 3 x4 at 3 GB/s: 51 ms of every step.
    """
    share = _transfer(facts)
    if share < TRANSFER:
        return None
    accelerator, shape = facts.observed.accelerator, facts.observed.loader
    rate = accelerator.transfer_bytes_per_second if accelerator is not None else None
    at = "" if rate is None else f" at {size_text(rate)}/s"
    pageable = shape is not None and shape.pin_memory is False
    fix = facts.setting("pin_memory", True) if pageable else "send uint8 and convert on the device; non_blocking=True"
    return Finding(f"{share:.0%} of a step is copying to the device{at}", fix, speedup_without(share))


@check("launch-bound", "the device waits for the CPU to launch kernels", loss=_idle_device)
def launch_bound(facts: Facts) -> Finding | None:
    """What: the device is idle for part of the compute time, although data is there.

    Why: many small kernels take longer to launch than to run; larger batches, compiling or CUDA graphs help.

    Example: a small U-Net at batch 2: 4,000 kernels of 5 µs, 8 µs to launch each.
    """
    accelerator, idle = facts.observed.accelerator, _idle_device(facts)
    if accelerator is None or accelerator.device_busy_share is None or idle < STARVED:
        return None
    if accelerator.device_busy_share >= BUSY_DEVICE:
        return None
    fix = (
        "compile_model=true, or a larger batch_size" if facts.config_line else "torch.compile(model), or larger batches"
    )
    message = (
        f"the device is busy {accelerator.device_busy_share:.0%} of the compute time: it waits for kernel launches"
    )
    return Finding(message, fix, speedup_without(idle))


@check("torch-2.9-conv3d")
def slow_conv3d_of_torch_2_9(facts: Facts) -> Finding | None:
    """What: torch 2.9 with 3D convolutions.

    Why: it turns cuDNN off for them; with AMP they take up to four times as long (pytorch #166122); 2.8 and 2.10 do
    not. 2.9.1 turns it on again with cuDNN 9.15 and newer.

    Example: nnU-Net after `pip install -U torch` in October 2025.
    """
    version = facts.observed.torch_version
    if version is None or not version.startswith("2.9.") or not facts.observed.convolves_3d:
        return None
    compute, elapsed = facts.observed.times.compute_s, facts.observed.times.elapsed_s
    share = compute / elapsed if compute is not None and elapsed > 0 else None
    # Published: 4x in the worst case. A quarter of the compute time is what could remain.
    return Finding(
        f"torch {version} runs 3D convolutions with AMP up to four times slower (pytorch issue 166122)",
        "pip install 'torch>=2.10'",
        None if share is None else Estimate(1.0, 1 / (1 - share * 0.5), 1 / (1 - share * 0.75)),
    )


@check("shared-cores", "loader and model share the cores", loss=_shared_cores)
def shared_cores(facts: Facts) -> Finding | None:
    """What: the model computes on the CPU, and the workers take the cores that it needs. The loop hardly waits for
    data, because its own computing is late instead.

    Why: what a sample costs is added to every step, though no wait shows it. More workers make it worse.

    Example: 2 cores, a small network, 1.5 ms of decoding per image: a step takes twice as long as the network alone.
    """
    lost, host = _shared_cores(facts), facts.observed.host
    if lost < SHARED or host is None:
        return None
    others = 0.0 if host.cpu_busy_share is None else host.cpu_busy_share * host.cpus - facts.own_cores
    beside = f", and other programs {others:.1f}" if others >= OTHERS else ""
    fix = f"make samples cheaper: {PACK}" if facts.config_line and facts.has_large_files else "make samples cheaper"
    return Finding(
        f"preparing batches takes {facts.cores_used or 0.0:.1f} of {host.cpus} cores{beside}; a step takes "
        f"{1 / max(0.01, 1 - lost):.1f} times as long as with all of them",
        f"{fix}, or more cores",
        speedup_without(lost),
    )


# The verdict only where no check found a loss.
@check("compute-bound", "the model takes the time, the data keeps up", loss=lambda _facts: 0.0)
def compute_bound(facts: Facts) -> Finding | None:
    """What: data is there when the loop asks for it.

    Why: no change of the data path can make this faster. Stop tuning it.

    Example: wait 1 %: with num_workers 8 or 32, the step takes as long as the network does.
    """
    share = facts.observed.times.wait_share
    if share is None or share >= STARVED or not facts.observed.steps or _shared_cores(facts) >= SHARED:
        return None
    if _hides_the_data(facts):
        cost = sample_cpu_s(facts.observed)
        assert cost is not None
        return Finding(
            f"the loop waits for data only {share:.1%} of the time, because the model computes on the CPU; a sample "
            f"costs {duration_text(cost)} of CPU, and an accelerator would wait for it",
            "make samples cheaper first; `stoker doctor --pace 400ms -- ...` simulates steps of 400 ms",
        )
    gain = facts.gain("accelerator")
    faster = "" if gain is None else f"; {facts.observed.faster_model} would give {gain.expected:.1f}x"
    return Finding(f"the loop waits for data only {share:.1%} of the time{faster}", "stop tuning the data pipeline")


def _hides_the_data(facts: Facts) -> bool:
    """Whether a slow model on the CPU hides that samples are costly."""
    observed, split, cost = facts.observed, facts.split, sample_cpu_s(facts.observed)
    shape, device = observed.loader, observed.accelerator
    if observed.source != "script" or shape is None or split is None or cost is None or cost < COSTLY_S:
        return False
    if (device is not None and device.name) or observed.rates.pace is not None:
        return False
    return split.wall_s / max(1, shape.workers) >= HIDDEN * observed.times.elapsed_s / observed.steps


@check("page-cache-too-small")
def page_cache_too_small(facts: Facts) -> Finding | None:
    """What: the files do not fit into the memory that is left to cache them, so every epoch reads them cold.

    Why: with a little more memory, or smaller files, all epochs but the first would read from memory.

    Example: 140 GB of ImageNet on a host with 62 GB: the second epoch is as slow as the first.
    """
    storage, host = facts.observed.storage, facts.observed.host
    if storage is None or host is None or not facts.starved or not facts.is_blocked:
        return None
    if storage.dataset_bytes is None or host.page_cache_bytes is None or storage.remote is not False:
        return None
    if storage.dataset_bytes <= host.page_cache_bytes:
        return None
    return Finding(
        f"{size_text(storage.dataset_bytes)} of files, and {size_text(host.page_cache_bytes)} of memory to cache "
        "them: every epoch reads from disk",
        PACK if facts.config_line and facts.has_large_files else "smaller files, or more memory",
        facts.gain("packing"),
    )


@check("slow-pcie-link")
def slow_link(facts: Facts) -> Finding | None:
    """What: the device is connected with fewer lanes, or an older generation, than it could use.

    Why: a card in the wrong slot, a riser or a BIOS setting halves the rate of every copy.

    Example: an x16 card that runs at x4 beside an NVMe card.
    """
    accelerator = facts.observed.accelerator
    if accelerator is None:
        return None
    slower = []
    if accelerator.pcie_width and accelerator.pcie_width_max and accelerator.pcie_width < accelerator.pcie_width_max:
        slower.append(f"x{accelerator.pcie_width} of x{accelerator.pcie_width_max} lanes")
    generation, most = accelerator.pcie_generation, accelerator.pcie_generation_max
    if generation and most and generation < most:
        slower.append(f"generation {generation} of {most}")
    if not slower:
        return None
    return Finding(
        f"the device's PCIe link runs at {' and '.join(slower)}",
        "check with `nvidia-smi -q -d PCIE` while training; try another slot, or its BIOS setting",
        speedup_without(_transfer(facts)) if _transfer(facts) else None,
    )


@check("shared-memory-tight")
def shared_memory_tight(facts: Facts) -> Finding | None:
    """What: /dev/shm is nearly full, or will be when every worker has its batches in flight.

    Why: a worker that writes beyond its end is killed by SIGBUS ('DataLoader worker is killed by signal: Bus error').

    Example: docker's 64 MB, 4 workers x 2 batches of 19 MB.
    """
    host, shape = facts.observed.host, facts.observed.loader
    if host is None or not host.shm_bytes or shape is None or shape.engine != "process" or shape.workers == 0:
        return None
    size = next((b.bytes for b in facts.observed.batches if b.bytes is not None), None)
    in_flight = None if size is None else size * shape.workers * (shape.prefetch or 2)
    most = max((value for value in (host.shm_used_bytes, in_flight) if value is not None), default=None)
    if most is None or most < TIGHT * host.shm_bytes:
        return None
    what = "were used" if most == host.shm_used_bytes else "are needed once every worker has its batches in flight"
    return Finding(
        f"{size_text(most)} of /dev/shm's {size_text(host.shm_bytes)} {what}",
        f"docker run --shm-size=8g, or {facts.setting('prefetch_factor', 1)}",
    )
