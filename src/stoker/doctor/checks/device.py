"""Where the device limits, the way to it, shared memory, or a version that is known to be slow."""

from __future__ import annotations

from stoker.doctor.checks.case import STARVED, Case, without
from stoker.plan.records import Estimate, Finding

# Where the device, or the way to it, is what limits.

TRANSFER = 0.15
"""Share of a step: a pinned batch goes over while the step before computes, so all that shows is avoidable."""
IDLE_DEVICE = 0.75
"""Share of compute time in which the device has work; below, it waits for the CPU to launch kernels. Large batches
of large networks are above 0.95."""


def transfer_bound(case: Case) -> Finding | None:
    """What: steps stand still while a batch goes to the device.

    Why: from pageable memory the copy cannot overlap; float32 is four times the bytes of uint8.

    Example: 154 MB a batch over PCIe 3 x4 at 3 GB/s: 51 ms of every step.
    """
    transfer, elapsed = case.observed.transfer_s, case.observed.elapsed_s
    if transfer is None or elapsed <= 0 or transfer / elapsed < TRANSFER:
        return None
    accelerator, shape = case.observed.accelerator, case.observed.loader
    rate = accelerator.transfer_bytes_per_second if accelerator is not None else None
    at = "" if rate is None else f" at {rate / 1e9:.1f} GB/s"
    pinned = shape is not None and shape.pin_memory is False
    fix = case.setting("pin_memory", True) if pinned else "send uint8 and convert on the device; non_blocking=True"
    message = f"{transfer / elapsed:.0%} of a step is the copy to the device{at}"
    return Finding("transfer-bound", message, fix, without(transfer / elapsed))


def slow_link(case: Case) -> Finding | None:
    """What: the device is connected with fewer lanes, or an older generation, than it could use.

    Why: a card in the wrong slot, a riser or a BIOS setting halves the rate of every copy.

    Example: an x16 card that runs at x4 beside an NVMe card.
    """
    accelerator = case.observed.accelerator
    if accelerator is None:
        return None
    told = []
    if accelerator.pcie_width and accelerator.pcie_width_max and accelerator.pcie_width < accelerator.pcie_width_max:
        told.append(f"x{accelerator.pcie_width} of x{accelerator.pcie_width_max} lanes")
    generation, most = accelerator.pcie_generation, accelerator.pcie_generation_max
    if generation and most and generation < most:
        told.append(f"generation {generation} of {most}")
    if not told:
        return None
    transfer, elapsed = case.observed.transfer_s, case.observed.elapsed_s
    gain: Estimate | None = without(transfer / elapsed) if transfer and elapsed > 0 else None
    return Finding(
        "slow-pcie-link",
        f"the device is connected with {' and '.join(told)}",
        "nvidia-smi -q -d PCIE while training; another slot, or the BIOS setting of this one",
        gain,
    )


def launch_bound(case: Case) -> Finding | None:
    """What: the device has nothing to do for part of the compute time, although data is there.

    Why: many small kernels take longer to launch than to run; larger batches, compiling or CUDA graphs help.

    Example: a small U-Net at batch 2: 4,000 kernels of 5 µs, 8 µs to launch each.
    """
    accelerator, compute, elapsed = case.observed.accelerator, case.observed.compute_s, case.observed.elapsed_s
    if accelerator is None or accelerator.device_busy_share is None or compute is None or elapsed <= 0:
        return None
    if accelerator.device_busy_share >= IDLE_DEVICE:
        return None
    idle = (1 - accelerator.device_busy_share) * compute / elapsed
    if idle < STARVED:
        return None
    fix = (
        "compile_model=true, or a larger batch_size" if case.config_line else "torch.compile(model), or larger batches"
    )
    return Finding(
        "launch-bound",
        f"the device has work {accelerator.device_busy_share:.0%} of the compute time: kernels wait to be launched",
        fix,
        without(idle),
    )


def compute_bound(case: Case) -> Finding | None:
    """What: data is there when the loop asks for it.

    Why: nothing on the data path can make this faster. Stop tuning it.

    Example: wait 1 %: num_workers 8 or 32, the step takes as long as the network does.
    """
    share = case.observed.wait_share
    if share is None or share >= STARVED or not case.observed.steps:
        return None
    busy = 1 - share
    gain = case.gain("accelerator")
    faster = "" if gain is None else f"; a 2x faster accelerator: {gain.expected:.1f}x"
    return Finding(
        "compute-bound",
        f"{busy:.0%} of the time the loop computes, {share:.1%} it waits for data{faster}",
        "stop tuning the data",
    )


# Shared memory: where worker processes hand over batches.

TIGHT = 0.8
"""Of /dev/shm: one batch more per worker, or a larger image, and a worker dies of SIGBUS."""


def shared_memory_tight(case: Case) -> Finding | None:
    """What: /dev/shm is nearly full, or will be when every worker has its batches in flight.

    Why: a worker that writes beyond its end is killed by SIGBUS ('DataLoader worker is killed by signal: Bus error').

    Example: docker's 64 MB, 4 workers x 2 batches of 19 MB.
    """
    host, shape = case.observed.host, case.observed.loader
    if host is None or not host.shm_bytes or shape is None or shape.engine != "process" or shape.workers == 0:
        return None
    size = next((b.bytes for b in case.observed.batches if b.bytes is not None), None)
    in_flight = None if size is None else size * shape.workers * (shape.prefetch or 2)
    most = max((value for value in (host.shm_used_bytes, in_flight) if value is not None), default=None)
    if most is None or most < TIGHT * host.shm_bytes:
        return None
    what = "were used" if most == host.shm_used_bytes else "are in flight when all workers are ahead"
    return Finding(
        "shared-memory-tight",
        f"{most / 1e6:,.0f} MB of /dev/shm's {host.shm_bytes / 1e6:,.0f} MB {what}",
        f"docker run --shm-size=8g, or {case.setting('prefetch_factor', 1)}",
    )


# Versions that are known to be slow at what this run does.


def slow_conv3d_of_torch_2_9(case: Case) -> Finding | None:
    """What: torch 2.9 with 3D convolutions.

    Why: it turns cuDNN off for them; with AMP they take up to four times as long (pytorch #166122); 2.8 and 2.10 do
    not. 2.9.1 turns it on again beside cuDNN 9.15 and newer.

    Example: nnU-Net after `pip install -U torch` in October 2025.
    """
    version = case.observed.torch_version
    if version is None or not version.startswith("2.9.") or not case.observed.convolves_3d:
        return None
    compute, elapsed = case.observed.compute_s, case.observed.elapsed_s
    share = compute / elapsed if compute is not None and elapsed > 0 else None
    # Published: 4x in the worst case. A quarter of the compute time is what could remain.
    gain = None if share is None else Estimate(1.0, 1 / (1 - share * 0.5), 1 / (1 - share * 0.75))
    return Finding(
        "torch-2.9-conv3d",
        f"torch {version} runs 3D convolutions with AMP up to four times slower (pytorch issue 166122)",
        "pip install 'torch>=2.10'",
        gain,
    )
