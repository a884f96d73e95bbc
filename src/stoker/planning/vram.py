"""The memory of one accelerator: the traced step in CUDA's allocator, and what lies around it."""

from __future__ import annotations

from stoker.errors import UserError
from stoker.facts.plan import VramBudget
from stoker.planning.allocator import OutOfMemory, Usage, replay
from stoker.planning.batch_search import Traces, largest_that_fits, trace_batches
from stoker.planning.tracing import CannotTrace, Trace, trace_step
from stoker.planning.vram_bound import bound_without_trace
from stoker.training.traceable import TraceableStep

MIB = 1 << 20

# The driver's own structures and the kernels that were loaded, which nvidia-smi counts and torch does not. Since CUDA
# 11.7 kernels are loaded when they are first called: 300 to 400 MB (pytorch issues 107667 and 109888). Before, all of
# them were there from the start, more than 1,000 MB (the same).
CONTEXT = 400 * MIB
EAGER_CONTEXT = 1000 * MIB
# cuBLAS: ':4096:2:16:8' up to Ampere and Ada, 32 MiB from Hopper on (parseChosenWorkspaceSize in ATen's
# CublasHandlePool.cpp); cuBLASLt 1 MiB more (pytorch 73328). The larger is assumed: 24 MiB decide nothing.
CUBLAS_WORKSPACE = 33 * MIB
# torch.nn.parallel.DistributedDataParallel keeps gradients a second time, in flat buckets (gradient_as_bucket_view is
# off by default); they are segments of their own, rounded up to 2 MiB each.
BUCKET_CAP = 25 * MIB
BUCKET_ROUNDING = 2 * MIB
# NCCL_BUFFSIZE is 4 MiB (NCCL's list of environment variables), for each of two directions of each channel; 16 channels
# stand between the 2 of a PCIe box and the 32 of NVLink.
NCCL_BUFFERS = 2 * 16 * 4 * MIB
# Inductor keeps for the backward pass what eager mode keeps of convolution, norm and activation, so the eager trace
# stands for it. On top come its own kernels in the context: some hundred cubins of up to 100 KB.
COMPILED_KERNELS = 32 * MIB
PARTS = (
    "parameters", "gradients", "optimizer", "ema", "activations", "temporary", "batch",
    "fragmentation", "workspace", "context",
)  # fmt: skip


def vram_budget(
    step: TraceableStep,
    batch: int | None = None,
    limit_bytes: int | None = None,
    *,
    compiled: bool = False,
    gpus: int = 1,
    search: bool = True,
) -> VramBudget:
    """The budget of a step on one of `gpus` accelerators with `limit_bytes` each, as torch shows their capacity.

    Without a limit nothing is searched for. A model that cannot be traced gets a bound, and a note that names the
    operator.
    """
    return trace_vram(step, batch, limit_bytes, compiled=compiled, gpus=gpus, search=search)[0]


def trace_vram(
    step: TraceableStep,
    batch: int | None = None,
    limit_bytes: int | None = None,
    *,
    compiled: bool = False,
    gpus: int = 1,
    search: bool = True,
) -> tuple[VramBudget, Trace | None]:
    """`vram_budget`, and the trace behind it, whose operators the time is computed from; None where there is none."""
    batch = step.batch_size if batch is None else batch
    searching = limit_bytes is not None and search
    try:
        traces = trace_batches(step, batch) if searching else Traces(step, trace_step(step, batch), None)
    except CannotTrace as error:
        return _bounded(step, batch, limit_bytes, error, compiled=compiled, gpus=gpus), None
    outside = outside_bytes(traces.first, compiled=compiled, gpus=gpus)
    largest = checkpointed = None
    if limit_bytes is not None and search:
        largest = largest_batch(traces, limit_bytes, outside, batch)
        checkpointed = _largest_checkpointed(step, limit_bytes, outside, max(batch, largest))
    usage = usage_under(traces.first, limit_bytes, outside)
    parts = parts_at_peak(traces.first, usage, outside)
    return VramBudget(sum(parts.values()), parts, limit_bytes, largest, checkpointed), traces.first


def outside_bytes(trace: Trace, *, compiled: bool, gpus: int, context: int = CONTEXT) -> dict[str, int]:
    """What is taken besides the step's own tensors, by the part it counts to."""
    outside = {"context": context + (COMPILED_KERNELS if compiled else 0), "workspace": CUBLAS_WORKSPACE}
    if gpus > 1:
        buckets = -(-trace.trained_bytes // BUCKET_CAP)
        outside["gradients"] = trace.trained_bytes + buckets * BUCKET_ROUNDING
        outside["context"] += NCCL_BUFFERS
    return outside


def usage_under(trace: Trace, limit: int | None, outside: dict[str, int]) -> Usage:
    """Under the limit where it fits: a full device has its cache emptied first. Else what it would have taken."""
    if limit is not None:
        try:
            return replay(trace.events, trace.sizes, max(0, limit - sum(outside.values())))
        except OutOfMemory:
            pass
    return replay(trace.events, trace.sizes)


def parts_at_peak(trace: Trace, usage: Usage, outside: dict[str, int]) -> dict[str, int]:
    parts = dict.fromkeys(PARTS, 0) | trace.parts_after(usage.peak_event)
    # Rounding, and what lies free between what is used.
    parts["fragmentation"] = usage.reserved_peak - sum(parts.values())
    for name, size in outside.items():
        parts[name] += size
    return parts


def largest_batch(traces: Traces, limit: int, outside: dict[str, int], start: int) -> int:
    room = max(0, limit - sum(outside.values()))

    def fits(batch: int) -> bool:
        trace = traces.at(batch)
        try:
            replay(trace.events, trace.sizes, room)
        except OutOfMemory:
            return False
        return True

    return largest_that_fits(fits, start)


def _largest_checkpointed(step: TraceableStep, limit: int, outside: dict[str, int], start: int) -> int | None:
    if step.checkpointed is None:
        return None
    try:
        traces = trace_batches(step.checkpointed, step.batch_size)
    except UserError:  # the model has no checkpointing, or what it has cannot be followed
        return None
    return largest_batch(traces, limit, outside, start)


def _bounded(
    step: TraceableStep, batch: int, limit: int | None, error: CannotTrace, *, compiled: bool, gpus: int
) -> VramBudget:
    bound = bound_without_trace(step)
    trained = bound.trained_bytes if gpus > 1 else 0
    context = CONTEXT + (COMPILED_KERNELS if compiled else 0) + (NCCL_BUFFERS if gpus > 1 else 0)

    def parts(size: int) -> dict[str, int]:
        found = dict.fromkeys(PARTS, 0) | bound.parts(size)
        found["gradients"] += trained
        found["workspace"] += CUBLAS_WORKSPACE
        found["context"] += context
        return found

    now = parts(batch)
    largest = None if limit is None else largest_that_fits(lambda size: sum(parts(size).values()) <= limit, batch)
    return VramBudget(
        sum(now.values()), now, limit, largest, None,
        note=f"a bound, not a trace: {error.seen}; {bound.how}",
    )  # fmt: skip
