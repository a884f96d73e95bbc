"""CUDA's caching allocator, replayed: how much it takes from the driver for a sequence of allocations.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings (no expandable segments, no
max_split_size), on one stream: rounding, two pools, best fit, splitting, merging, and returning free segments when the
device is full.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

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
    segment: int
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
            self._split(block, rounded)
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
        block = _Block(wanted, self._next_address, self._next_address, small)
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

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.size - size, block.address + size, block.segment, block.small, block, block.next)
        if block.next is not None:
            block.next.previous = rest
        block.size, block.next = size, rest
        self._put_in(rest)

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


def plain_peak(events: Iterable[int], sizes: Sequence[int]) -> int:
    """The most bytes in use at once without rounding or caching: a CPU's malloc."""
    used = peak = 0
    for event in events:
        used += sizes[event] if event >= 0 else -sizes[~event]
        peak = max(peak, used)
    return peak
