"""The memory of one accelerator: the traced step in CUDA's allocator, what else is needed, and the largest batch."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from stoker.core.errors import UserError
from stoker.plan.records import VramBudget
from stoker.plan.tracing import CannotTrace, Trace, trace_step
from stoker.train.ema import WeightAverage
from stoker.train.step import TraceableStep

# CUDA's caching allocator, replayed: how much it takes from the driver for a sequence of allocations. The rules are
# those of c10/cuda/CUDACachingAllocator.cpp with its default settings (no expandable segments, no max_split_size), on
# one stream: rounding, two pools, best fit, splitting, merging, and returning free segments when the device is full.
#
# c10/core/AllocatorConfig.h of torch 2.15; CUDACachingAllocator.cpp has had the same numbers since torch 1.4.
MIN_BLOCK = 512  # kMinBlockSize: every size is rounded up to a multiple
SMALL_SIZE = 1 << 20  # kSmallSize: up to here a request goes to the small pool
SMALL_SEGMENT = 2 << 20  # kSmallBuffer: a segment of the small pool
LARGE_SEGMENT = 20 << 20  # large_segment_size_: a segment for requests below MIN_LARGE
MIN_LARGE = 10 << 20  # kMinLargeAlloc: from this size on, a request gets its own segment
ROUND_LARGE = 2 << 20  # kRoundLarge: such a segment is rounded up to a multiple


@dataclass(slots=True)
class _Block:
    size: int
    address: int
    small: bool
    previous: _Block | None = None
    next: _Block | None = None
    free: bool = False


@dataclass(frozen=True)
class Usage:
    reserved_peak: int
    """The most bytes taken from the driver: what nvidia-smi counts."""
    allocated_peak: int
    """The most bytes in blocks in use, after rounding."""
    peak_event: int
    """The event after which `allocated_peak` was first reached."""


class OutOfMemory(Exception):
    """The sequence does not fit under the limit."""


@dataclass
class CachingAllocator:
    """One device's allocator; the caller identifies blocks by numbers of its own."""

    limit: int | None = None
    reserved: int = 0
    allocated: int = 0
    reserved_peak: int = 0
    _used: dict[int, _Block] = field(default_factory=dict)
    # Free blocks of the two pools, sorted by size and then address: the best fit is the first that is large enough.
    _free: dict[bool, list[tuple[int, int, int]]] = field(default_factory=lambda: {True: [], False: []})
    _blocks: dict[int, _Block] = field(default_factory=dict)
    _next_address: int = 0

    def allocate(self, number: int, size: int) -> None:
        """Allocates `size` bytes; raises OutOfMemory if neither the cache nor the device has them."""
        rounded = max(MIN_BLOCK, -(-size // MIN_BLOCK) * MIN_BLOCK)
        small = rounded <= SMALL_SIZE
        block = self._best_fit(rounded, small) or self._new_segment(rounded, small)
        remaining = block.size - rounded
        if remaining >= MIN_BLOCK if small else remaining > SMALL_SIZE:
            rest = _Block(remaining, block.address + rounded, small, block, block.next)
            if block.next is not None:
                block.next.previous = rest
            block.size, block.next = rounded, rest
            self._put_in(rest)
        self._used[number] = block
        self.allocated += block.size

    def release(self, number: int) -> None:
        """Puts a block back into its pool, merged with free neighbours; the driver does not get it back."""
        block = self._used.pop(number)
        self.allocated -= block.size
        for neighbour in (block.previous, block.next):
            if neighbour is not None and neighbour.free:
                self._take_out(neighbour)
                first, second = (neighbour, block) if neighbour.address < block.address else (block, neighbour)
                first.size += second.size
                first.next = second.next
                if second.next is not None:
                    second.next.previous = first
                block = first
        self._put_in(block)

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        pool = self._free[small]
        place = bisect_left(pool, (size, -1, -1))
        if place == len(pool):
            return None
        return self._take_out(self._blocks[pool[place][1]])

    def _new_segment(self, size: int, small: bool) -> _Block:
        wanted = segment_size(size)
        if self.limit is not None and self.reserved + wanted > self.limit:
            self._give_back()
            if self.reserved + wanted > self.limit:
                raise OutOfMemory(f"{wanted} bytes on top of {self.reserved} of {self.limit}")
        self.reserved += wanted
        self.reserved_peak = max(self.reserved_peak, self.reserved)
        block = _Block(wanted, self._next_address, small)
        # Far apart: blocks of two segments are never neighbours.
        self._next_address += wanted + 1
        return block

    def _give_back(self) -> None:
        """Returns completely free segments to the driver, as after a failed cudaMalloc."""
        whole = [
            self._blocks[address]
            for pool in self._free.values()
            for _, address, _ in pool
            if self._blocks[address].previous is None and self._blocks[address].next is None
        ]
        for block in whole:
            self._take_out(block)
            self.reserved -= block.size

    def _put_in(self, block: _Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        insort(self._free[block.small], (block.size, block.address, 0))

    def _take_out(self, block: _Block) -> _Block:
        block.free = False
        pool = self._free[block.small]
        del pool[bisect_left(pool, (block.size, block.address, 0))]
        del self._blocks[block.address]
        return block


def segment_size(size: int) -> int:
    """Bytes requested from the driver for a rounded request that no cached block can serve."""
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    return LARGE_SEGMENT if size < MIN_LARGE else -(-size // ROUND_LARGE) * ROUND_LARGE


def replay(events: Iterable[int], sizes: Sequence[int], limit: int | None = None) -> Usage:
    """Runs a sequence through a new allocator: `n` allocates block n with `sizes[n]` bytes, `~n` frees it."""
    allocator = CachingAllocator(limit)
    peak, peak_event = 0, 0
    for place, event in enumerate(events):
        if event < 0:
            allocator.release(~event)
            continue
        allocator.allocate(event, sizes[event])
        if allocator.allocated > peak:
            peak, peak_event = allocator.allocated, place
    return Usage(allocator.reserved_peak, peak, peak_event)


# Any batch size from two traces: what does not depend on the batch stays, everything else grows in proportion.

# Nobody trains with more samples in one pass; without a bound, a model without activations would be searched forever.
LARGEST_SEARCHED = 1 << 16


@dataclass
class Traces:
    """Traces of one step for every batch size, derived from two traces if that is exact."""

    step: TraceableStep
    first: Trace
    second: Trace | None
    """At another batch size, if both have the same events; otherwise None."""
    base: Trace | None = None
    """What other batch sizes are derived from together with the second, if that is not the first."""

    def at(self, batch: int) -> Trace:
        """The trace for a batch size; its ops are those of one of the traces, and only valid for that batch size."""
        if batch == self.first.batch:
            return self.first
        if self.second is None:
            return trace_step(self.step, batch)
        base = self.base or self.first
        span, away = self.second.batch - base.batch, batch - base.batch
        sizes = tuple(
            one + (other - one) // span * away for one, other in zip(base.sizes, self.second.sizes, strict=True)
        )
        return replace(base, batch=batch, sizes=sizes)


def trace_batches(step: TraceableStep, batch: int) -> Traces:
    """Traces at this batch size and at another one; raises CannotTrace."""
    first = trace_step(step, batch)
    # A single sample takes a different path through broadcasting and batch norm, so nothing is derived from it.
    base = first if batch > 1 else trace_step(step, 2)
    second = trace_step(step, batch // 2 if batch >= 4 else base.batch + 2)
    return Traces(step, first, second if _grow_together(base, second) else None, base)


def _grow_together(first: Trace, second: Trace) -> bool:
    """Whether both have the same pieces of memory, and each grows by a whole number of bytes per sample."""
    if first.events != second.events or first.categories != second.categories:
        return False
    span = second.batch - first.batch
    return all((other - one) % span == 0 for one, other in zip(first.sizes, second.sizes, strict=True))


def largest_that_fits(fits: Callable[[int], bool], start: int) -> int:
    """The largest batch for which `fits` is true, by doubling and bisecting; 0 if not even one sample fits."""
    low, high = 0, max(1, start)
    while high <= LARGEST_SEARCHED and fits(high):
        low, high = high, high * 2
    high = min(high, LARGEST_SEARCHED + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# A bound on a step's memory for models that cannot be traced: what one real forward pass keeps for the backward.

# Batch norm refuses to train on a single value; half of what two samples keep is what one keeps.
SAMPLES = 2
# Buffers of an optimizer, each as large as the weights: LAMB has two averages and a scratch buffer. AdamW has two, and
# SGD's momentum is one.
STATES = 3
# When the backward pass begins, the gradients of the two largest tensors exist at the same time as the tensors.
LARGEST_TEMPORARIES = 2
# Rounding and gaps: the traces in results/vram reserve up to a fifth more than they use.
FRAGMENTATION = 0.2


def bound_without_trace(step: TraceableStep) -> Callable[[int], dict[str, int]]:
    """The parts of the budget for a number of samples, at most, from a real forward pass of two samples on the CPU.

    It runs in float32: an upper bound for mixed precision."""
    with torch.random.fork_rng(devices=[]):
        model = step.build_model()
        model.train()
        inputs = step.make_batch(SAMPLES).inputs
        kept = _kept_for_backward(model, inputs)
    parameters = list(model.parameters())
    everything = [*parameters, *model.buffers()]
    own = {tensor.untyped_storage()._cdata for tensor in everything}
    activations = [size for key, size in kept.items() if key not in own]
    kept_bytes, largest_bytes, input_bytes = (
        -(-size // SAMPLES)
        for size in (sum(activations), max(activations, default=0), inputs.untyped_storage().nbytes())
    )
    trained_bytes = _bytes([parameter for parameter in parameters if parameter.requires_grad])
    average = [] if step.ema_decay is None else list(WeightAverage(model, step.ema_decay).tensors.values())
    fixed = {
        "parameters": _bytes(everything),
        "gradients": trained_bytes,
        "optimizer": STATES * trained_bytes,
        "ema": _bytes(average),
    }

    def parts(batch: int) -> dict[str, int]:
        found = fixed | {
            "activations": batch * kept_bytes,
            "temporary": LARGEST_TEMPORARIES * batch * largest_bytes,
            "batch": 2 * batch * input_bytes * step.accumulation,
        }
        return found | {"fragmentation": int(FRAGMENTATION * sum(found.values()))}

    return parts


def _kept_for_backward(model: nn.Module, inputs: Tensor) -> dict[int, int]:
    """Bytes of each storage that autograd keeps."""
    found: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = storage.nbytes()
        alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(inputs)
    return found


def _bytes(tensors: list[Tensor]) -> int:
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


MIB = 1 << 20

# The driver's own structures and the loaded kernels, which nvidia-smi counts and torch does not. Since CUDA 11.7,
# kernels are loaded when they are first called: 300 to 400 MB (pytorch issues 107667 and 109888).
CONTEXT = 400 * MIB
# cuBLAS: ':4096:2:16:8' up to Ampere and Ada, 32 MiB from Hopper on (parseChosenWorkspaceSize in ATen's
# CublasHandlePool.cpp); cuBLASLt 1 MiB more (pytorch 73328). We assume the larger one: 24 MiB do not matter.
CUBLAS_WORKSPACE = 33 * MIB
# torch.nn.parallel.DistributedDataParallel keeps a second copy of the gradients in flat buckets
# (gradient_as_bucket_view is off by default); each is a separate segment, rounded up to 2 MiB.
BUCKET_CAP = 25 * MIB
BUCKET_ROUNDING = 2 * MIB
# NCCL_BUFFSIZE is 4 MiB (NCCL's list of environment variables), for each direction of each channel; 16 channels are
# between the 2 of a PCIe machine and the 32 of NVLink.
NCCL_BUFFERS = 2 * 16 * 4 * MIB
# Inductor keeps the same results of convolution, norm and activation for the backward pass as eager mode, so the eager
# trace applies. Its own kernels come on top, in the context: some hundred cubins of up to 100 KB.
COMPILED_KERNELS = 32 * MIB
PARTS = (
    "parameters", "gradients", "optimizer", "ema", "activations", "temporary", "batch",
    "fragmentation", "workspace", "context",
)  # fmt: skip


def trace_vram(
    step: TraceableStep,
    batch: int | None = None,
    limit_bytes: int | None = None,
    *,
    compiled: bool = False,
    gpus: int = 1,
    search: bool = True,
) -> tuple[VramBudget, Trace | None]:
    """The budget of a step on one of `gpus` accelerators with `limit_bytes` each, as torch reports their capacity.

    With it the trace, from which the time is computed.

    Without a limit there is no search for the largest batch. A model that cannot be traced gets an upper bound, a note
    that names the operator, and no trace.
    """
    batch = step.batch_size if batch is None else batch
    searching = limit_bytes is not None and search
    try:
        traces = trace_batches(step, batch) if searching else Traces(step, trace_step(step, batch), None)
    except CannotTrace as error:
        return _bounded(step, batch, limit_bytes, error, compiled=compiled, gpus=gpus), None
    outside = outside_bytes(traces.first, compiled=compiled, gpus=gpus)
    budget = _budget_of(traces.first, limit_bytes, outside)
    if limit_bytes is not None and search:
        largest = largest_batch(traces, limit_bytes, outside, batch)
        checkpointed = None
        if step.checkpointed is not None:
            with suppress(UserError):  # the model does not support checkpointing, or cannot be traced with it
                less = trace_batches(step.checkpointed, step.batch_size)
                checkpointed = largest_batch(less, limit_bytes, outside, max(batch, largest))
        budget = replace(budget, largest_batch=largest, largest_batch_checkpointed=checkpointed)
    return budget, traces.first


def _budget_of(trace: Trace, limit_bytes: int | None, outside: dict[str, int]) -> VramBudget:
    parts = parts_at_peak(trace, usage_under(trace, limit_bytes, outside), outside)
    return VramBudget(sum(parts.values()), parts, limit_bytes)


def outside_bytes(trace: Trace, *, compiled: bool, gpus: int, context: int = CONTEXT) -> dict[str, int]:
    """Memory other than the step's own tensors, by part of the budget."""
    outside = {"context": context + (COMPILED_KERNELS if compiled else 0), "workspace": CUBLAS_WORKSPACE}
    if gpus > 1:
        buckets = -(-trace.trained_bytes // BUCKET_CAP)
        outside["gradients"] = trace.trained_bytes + buckets * BUCKET_ROUNDING
        outside["context"] += NCCL_BUFFERS
    return outside


def usage_under(trace: Trace, limit: int | None, outside: dict[str, int]) -> Usage:
    """Usage under the limit if it fits, as the allocator empties its cache on a full device; otherwise without one."""
    if limit is not None:
        try:
            return replay(trace.events, trace.sizes, max(0, limit - sum(outside.values())))
        except OutOfMemory:
            pass
    return replay(trace.events, trace.sizes)


def parts_at_peak(trace: Trace, usage: Usage, outside: dict[str, int]) -> dict[str, int]:
    parts = dict.fromkeys(PARTS, 0) | trace.parts_after(usage.peak_event)
    # Rounding, and gaps between used blocks.
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


def _bounded(
    step: TraceableStep, batch: int, limit: int | None, error: CannotTrace, *, compiled: bool, gpus: int
) -> VramBudget:
    bound = bound_without_trace(step)
    context = CONTEXT + (COMPILED_KERNELS if compiled else 0) + (NCCL_BUFFERS if gpus > 1 else 0)

    def parts(size: int) -> dict[str, int]:
        found = dict.fromkeys(PARTS, 0) | bound(size)
        found["gradients"] *= 2 if gpus > 1 else 1
        found["workspace"] += CUBLAS_WORKSPACE
        found["context"] += context
        return found

    now = parts(batch)
    largest = None if limit is None else largest_that_fits(lambda size: sum(parts(size).values()) <= limit, batch)
    return VramBudget(
        sum(now.values()), now, limit, largest, None,
        note=f"an upper bound instead of a trace: {error.seen}; scaled up from a real forward pass of two samples in "
        "float32, plus a fifth for fragmentation",
    )  # fmt: skip


# Several questions from one trace: the budget of any batch size, and the largest batch under any limit.


class VramSearch:
    """The memory of a step at other batch sizes; an upper bound for a model that cannot be traced."""

    def __init__(self, step: TraceableStep, batch: int, *, compiled: bool, gpus: int) -> None:
        self._step, self._compiled, self._gpus = step, compiled, gpus
        self._start = batch
        self._traces: Traces | None = None
        self._outside: dict[str, int] = {}
        with suppress(CannotTrace):
            self._traces = trace_batches(step, batch)
            self._outside = outside_bytes(self._traces.first, compiled=compiled, gpus=gpus)

    def budget(self, batch: int, limit_bytes: int | None) -> VramBudget:
        """The memory of a step with this batch size; does not search for the largest one."""
        if self._traces is None:
            return trace_vram(self._step, batch, limit_bytes, compiled=self._compiled, gpus=self._gpus, search=False)[0]
        return _budget_of(self._traces.at(batch), limit_bytes, self._outside)

    def largest(self, limit_bytes: int) -> int | None:
        """The largest batch that stays below a limit without emptying the cache; None if the model cannot be traced.

        On a full device the allocator empties its cache, so that more would fit; but a tier uses only a share of it.
        """
        if self._traces is None:
            return None
        return largest_that_fits(lambda batch: self.budget(batch, None).peak_bytes <= limit_bytes, self._start)
