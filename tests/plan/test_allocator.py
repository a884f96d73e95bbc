"""torch's CUDA allocator, compared with cases worked out by hand."""

from __future__ import annotations

import pytest

from stoker.plan.allocator import CachingAllocator, OutOfMemory, plain_peak, replay, segment_size

MB = 1 << 20


def test_sizes_are_rounded_to_512_bytes_and_small_ones_share_a_segment_of_2_mb() -> None:
    usage = replay([0, 1], [1, 513])
    assert usage.allocated_peak == 512 + 1024
    assert usage.reserved_peak == 2 * MB


def test_each_size_class_has_its_segment() -> None:
    assert [segment_size(size) for size in (MB, MB + 512, 10 * MB - 512, 10 * MB, 11 * MB + 512)] == [
        2 * MB, 20 * MB, 20 * MB, 10 * MB, 12 * MB,
    ]  # fmt: skip


def test_a_full_segment_is_followed_by_another_and_freed_memory_is_reused_and_not_returned_to_the_driver() -> None:
    assert replay([0, 1], [MB, MB]).reserved_peak == 2 * MB
    assert replay([0, 1, 2], [MB, MB, 512]).reserved_peak == 4 * MB
    assert replay([0, ~0, 1, ~1], [50 * MB, 50 * MB]).reserved_peak == 50 * MB


def test_the_best_fit_is_taken_and_split_only_if_more_than_a_megabyte_remains() -> None:
    allocator = CachingAllocator()
    for number, size in ((0, 30 * MB), (1, 40 * MB)):
        allocator.allocate(number, size)
    for number in (0, 1):
        allocator.release(number)
    allocator.allocate(2, 29 * MB)  # from the 30 MB block: 1 MB remains, which is not split off
    assert (allocator.allocated, allocator.reserved) == (30 * MB, 70 * MB)
    allocator.allocate(3, 30 * MB)  # from the 40 MB block
    assert (allocator.allocated, allocator.reserved) == (60 * MB, 70 * MB)
    allocator.allocate(4, 10 * MB)  # the part that was split off
    assert allocator.reserved == 70 * MB


def test_neighbours_merge_again_when_both_are_free() -> None:
    sizes = [60 * MB, 20 * MB, 20 * MB, 20 * MB, 60 * MB]
    apart = [0, ~0, 1, 2, 3, ~1, ~3, 4]
    assert replay(apart, sizes).reserved_peak == 120 * MB  # the one in the middle separates them
    assert replay([0, ~0, 1, 2, 3, ~1, ~3, ~2, 4], sizes).reserved_peak == 60 * MB


def test_a_full_device_frees_whole_segments_before_it_fails() -> None:
    sizes = [30 * MB, 40 * MB]
    assert replay([0, ~0, 1], sizes, limit=60 * MB).reserved_peak == 40 * MB
    with pytest.raises(OutOfMemory):
        replay([0, 1], sizes, limit=60 * MB)


def test_a_cpu_rounds_nothing() -> None:
    assert plain_peak([0, 1, ~0, 2], [10, 5, 7]) == 15
