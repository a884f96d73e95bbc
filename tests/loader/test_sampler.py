"""The sampler: every sample once, unpredictable positions, and the same for every caller and every starting point."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.loader.sampler import SORTED_UP_TO, EpochSampler, Steps, permute

TINY = (2, 5, 16, 100)
# A fair shuffle exceeds this in one of a million tests; four rounds of a Feistel network gave 20 and more for sets
# of ten.
LARGEST_Z = 5.0


def permutations(size: int, count: int) -> np.ndarray:
    return np.stack([permute(np.arange(size), size, 7919 * key + 13) for key in range(count)])


def chi_square_z(counts: np.ndarray, expected: float, freedom: int) -> float:
    """Distance of a chi-square statistic from its mean, in standard deviations."""
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
@settings(max_examples=37, deadline=None)
def test_every_sample_has_one_position(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@pytest.mark.parametrize("size", [SORTED_UP_TO, SORTED_UP_TO + 1, 65_537])
def test_every_sample_has_one_position_in_edge_cases(size: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, 3)), np.arange(size))


@given(size=st.integers(5000, 2**40), key=st.integers(0, 2**64 - 1), data=st.data())
@settings(max_examples=20, deadline=None)
def test_no_two_samples_share_a_position_in_large_sets(size: int, key: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 2000))
    places = permute(np.arange(first, first + 2000), size, key)
    assert len(np.unique(places)) == 2000
    assert places.min() >= 0
    assert places.max() < size


@pytest.mark.parametrize("size", TINY)
def test_every_position_is_equally_likely(size: int) -> None:
    shuffles = permutations(size, 3000)
    counts = np.stack([(shuffles == sample).sum(axis=0) for sample in range(size)])
    assert abs(chi_square_z(counts, 3000 / size, (size - 1) ** 2)) < LARGEST_Z


@pytest.mark.parametrize("size", TINY)
def test_every_neighbour_is_equally_likely(size: int) -> None:
    shuffles = permutations(size, 3000)
    pairs = np.zeros((size, size))
    np.add.at(pairs, (shuffles[:, :-1].ravel(), shuffles[:, 1:].ravel()), 1)
    apart = pairs[~np.eye(size, dtype=bool)]
    assert abs(chi_square_z(apart, 3000 / size, size * (size - 1) - 1)) < LARGEST_Z


@pytest.mark.parametrize("size", [SORTED_UP_TO + 1, 4096, 5000, 1_281_167])
def test_neighbours_are_independent_where_the_network_shuffles(size: int) -> None:
    """Position of one sample, distance to the next, and position of the one after that, each in 16 equal bins."""
    places = np.concatenate([permute(np.arange(512), size, key) for key in range(60)]).reshape(60, 512)
    parts = 16 * places // size
    # Bins differ by at most one sample, which is negligible at this accuracy.
    assert abs(chi_square_z(np.bincount(parts.ravel(), minlength=16), parts.size / 16, 15)) < LARGEST_Z
    for lag in (1, 2, 32):
        pairs = np.bincount((16 * parts[:, lag:] + parts[:, :-lag]).ravel(), minlength=256)
        assert abs(chi_square_z(pairs, pairs.sum() / 256, 255)) < LARGEST_Z
        distances = 16 * ((places[:, lag:] - places[:, :-lag]) % size) // size
        assert abs(chi_square_z(np.bincount(distances.ravel(), minlength=16), distances.size / 16, 15)) < LARGEST_Z


def test_the_same_position_in_two_epochs_is_independent() -> None:
    sampler = EpochSampler(50_000, seed=5)
    epochs = np.stack([16 * sampler.at(epoch, np.arange(512))[0] // 50_000 for epoch in range(61)])
    pairs = np.bincount((16 * epochs[1:] + epochs[:-1]).ravel(), minlength=256)
    assert abs(chi_square_z(pairs, pairs.sum() / 256, 255)) < LARGEST_Z


def test_a_billion_samples_take_no_memory() -> None:
    sampler = EpochSampler(10**9, seed=1)
    sampler.at(0, np.arange(8))
    tracemalloc.start()
    samples, _ = sampler.at(3, np.arange(10**9 - 256, 10**9))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(np.unique(samples)) == 256
    assert peak < 100_000


def test_without_shuffling_the_order_is_that_of_the_listing() -> None:
    samples, repeats = EpochSampler(10, shuffle=False).at(4, np.arange(10))
    assert samples.tolist() == list(range(10))
    assert not repeats.any()


def drawn(sampler: EpochSampler, steps: list[Steps], epoch: int = 0, start: int = 0) -> list[list[tuple[int, int]]]:
    """The samples of every step, over all ranks."""
    found = []
    for step in range(steps[0].count(start)):
        content: list[tuple[int, int]] = []
        for rank in steps:
            samples, repeats = sampler.at(epoch, rank.positions(step, start))
            content += zip(samples.tolist(), repeats.tolist(), strict=True)
        found.append(content)
    return found


def ranks(samples: int, batch_size: int, world: int, drop_last: bool) -> list[Steps]:
    return [Steps(samples, batch_size, world, rank, drop_last) for rank in range(world)]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(("batch_size", "world"), [(1, 1), (3, 4), (8, 3), (200, 2)])
def test_nothing_is_lost_or_repeated(world: int, batch_size: int, drop_last: bool) -> None:
    samples = 211
    sampler, steps = EpochSampler(samples, seed=4), ranks(samples, batch_size, world, drop_last)
    in_order = sampler.at(1, np.arange(samples))[0].tolist()
    for start in (0, 1, 7, 100, samples - 1, samples):
        contents = drawn(sampler, steps, epoch=1, start=start)
        seen = [sample for content in contents for sample, _ in content]
        left = samples - start
        expected = left - left % (world * batch_size) if drop_last else left
        assert sorted(seen) == sorted(in_order[start : start + expected])
        assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_step_holds_the_same_samples_for_any_world_of_the_same_total_batch(drop_last: bool) -> None:
    sampler = EpochSampler(1000, seed=2)
    alone = [sorted(content) for content in drawn(sampler, ranks(1000, 24, 1, drop_last), start=37)]
    for world in (2, 3, 4):
        shared = [sorted(one) for one in drawn(sampler, ranks(1000, 24 // world, world, drop_last), start=37)]
        assert shared == alone


@pytest.mark.parametrize("repeats", [2, 3])
def test_repeats_are_adjacent_and_keep_the_length_of_the_epoch(repeats: int) -> None:
    samples = 240
    drawn_samples, numbers = EpochSampler(samples, seed=3, repeats=repeats).at(0, np.arange(samples))
    groups = drawn_samples.reshape(-1, repeats)
    assert (groups == groups[:, :1]).all()
    assert len(set(groups[:, 0].tolist())) == samples // repeats
    assert (numbers.reshape(-1, repeats) == np.arange(repeats)).all()
    for world in (1, 2, 4):
        content = drawn(EpochSampler(samples, seed=3, repeats=repeats), ranks(samples, 12, world, drop_last=True))
        assert sum(map(len, content)) == samples


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_repeats_of_an_image_land_on_different_ranks_where_there_are_enough(repeats: int) -> None:
    samples = 480
    sampler = EpochSampler(samples, seed=3, repeats=repeats)
    for world in range(repeats, 6):
        where: dict[int, list[int]] = {}
        for rank in ranks(samples, 10, world, drop_last=False):
            for step in range(rank.count()):
                for sample in sampler.at(0, rank.positions(step))[0].tolist():
                    where.setdefault(sample, []).append(rank.rank)
        assert all(len(places) == len(set(places)) == repeats for places in where.values())
