"""Progressive resizing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.train.schedule import all_sizes, default_resize_epochs, image_size


def test_sizes_grow_in_multiples_and_end_at_the_final_one() -> None:
    assert [image_size(epoch, 128, 224, 12) for epoch in range(14)] == [
        128, 128, 160, 160, 160, 160, 192, 192, 192, 192, 224, 224, 224, 224,
    ]  # fmt: skip
    assert all_sizes(128, 224, 12) == [128, 160, 192, 224]


def test_without_a_start_there_is_one_size() -> None:
    assert all_sizes(None, 224, 10) == [224]
    assert image_size(0, None, 224, 10) == 224


def test_sizes_that_are_not_multiples_are_taken_as_they_are() -> None:
    assert all_sizes(100, 176, 8) == [100, 128, 160, 176]


@given(
    start=st.integers(8, 512),
    more=st.integers(0, 512),
    until=st.integers(1, 300),
    multiple=st.sampled_from([1, 16, 32]),
)
def test_sizes_never_shrink_and_stay_in_bounds(start: int, more: int, until: int, multiple: int) -> None:
    final = start + more
    sizes = [image_size(epoch, start, final, until, multiple) for epoch in range(until + 3)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[until], sizes[-1]) == (start, final, final)
    assert all(size % multiple == 0 or size in (start, final) for size in sizes)


def test_the_default_is_most_of_the_run() -> None:
    assert [default_resize_epochs(epochs) for epochs in (1, 10, 88)] == [1, 8, 70]
