"""Random choices as pure functions of (seed, epoch, sample, repeat)."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

from stoker.loader.rng import CROP, FLIP, mix, mix_numbers, sample_keys, uniforms


def keys(seed: int = 1, epoch: int = 2, count: int = 4000, repeat: int = 0) -> np.ndarray:
    return sample_keys(seed, epoch, np.arange(count), np.full(count, repeat))


def test_a_key_depends_on_its_sample_alone_and_not_on_the_batch() -> None:
    whole = keys()
    some = np.array([17, 3, 3999])
    assert np.array_equal(sample_keys(1, 2, some, np.zeros(3, np.int64)), whole[some])
    assert np.array_equal(uniforms(whole[some], CROP, 22), uniforms(whole, CROP, 22)[some])


def test_seed_epoch_sample_and_repeat_each_change_the_key() -> None:
    found = np.concatenate([keys(), keys(seed=2), keys(epoch=3), keys(repeat=1), keys(seed=2, epoch=1)])
    assert len(np.unique(found)) == len(found)


def test_the_values_are_fixed_forever() -> None:
    """A changed hash would silently give every resumed run a different stream."""
    assert int(mix(1, 2)) == 13798864857527202286
    numbers = uniforms(sample_keys(42, 7, np.array([5]), np.array([0])), CROP, 2)
    assert numbers[0].tolist() == [
        0.5674097380170047,
        0.29517253183505865,
    ]


def test_numbers_are_uniform() -> None:
    numbers = uniforms(keys(count=20_000), CROP, 22)[:, 21]
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = np.bincount((numbers * 50).astype(int), minlength=50)
    assert abs(((counts - 400.0) ** 2 / 400).sum() - 49) / math.sqrt(2 * 49) < 5


def test_columns_purposes_epochs_and_neighbours_are_independent() -> None:
    crop, flip, next_epoch = uniforms(keys(), CROP, 4), uniforms(keys(), FLIP, 4), uniforms(keys(epoch=3), CROP, 4)
    first = crop[:, 0]
    others = [*crop[:, 1:].T, *flip.T, *next_epoch.T, np.roll(first, 1), np.roll(first, 2)]
    # For 4,000 independent pairs the correlation is 0 with a standard deviation of 1 / sqrt(4000).
    assert max(abs(np.corrcoef(first, other)[0, 1]) for other in others) < 5 / math.sqrt(4000)


def test_any_integer_is_a_seed_without_warnings() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {int(mix(seed, 0)) for seed in (-1, 0, 1, 2**63, 2**64 - 2, -(2**62))}
    assert len(found) == 6


@pytest.mark.parametrize("a", [0, 1, 2**31, 2**63 - 1, 2**64 - 1, -1])
@pytest.mark.parametrize("b", [0, 7, 2**63, -5])
def test_plain_numbers_are_mixed_as_arrays_are(a: int, b: int) -> None:
    array, number = np.array([a % 2**64], np.uint64), mix_numbers(a, b)
    assert number == int(mix(a, b)) == int(mix(array, b)[0]) == int(mix(a, np.array([b % 2**64], np.uint64))[0])
