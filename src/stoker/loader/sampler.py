"""The samples of every step: a pure function of (seed, epoch, position).

A sample has an index, its number in the data set, and a position, its place in the epoch. A subset numbers its samples
anew: these numbers, the members, are what a sampler permutes (without a subset they equal the indices).

A keyed permutation (a Feistel network with cycle walking; a sort by hash for small sets) replaces a shuffled list, so
the sample at any position of a billion is known at once, without memory, and resuming needs one integer.

An epoch is a line of positions 0 .. n-1. A step takes the next `world x batch` of them, of which rank r takes every
world-th, starting with the r-th. So the samples of a step are the same for any number of ranks with the same total
batch, and the repeats of a sample, which are neighbours, go to different ranks if there are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.loader.rng import mix

Positions = NDArray[np.int64]
# With halves of six bits or more, six rounds pass the tests for uniformity and independence
# (tests/loader/test_sampler.py); with halves of one or two bits they fail, so small sets are sorted by hash.
ROUNDS = 6
SORTED_UP_TO = 1024
"""Sets up to this size are shuffled whole on every call: as fast as the rounds, and 16 kB."""


@dataclass(frozen=True)
class EpochSampler:
    """Which sample is at each position of every epoch; `Steps` divides the positions among steps and ranks."""

    samples: int
    seed: int = 0
    shuffle: bool = True
    repeats: int = 1

    def at(self, epoch: int, positions: Positions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The member at each position of an epoch, and which of its repeats it is."""
        places, repeat = np.divmod(np.asarray(positions, np.int64), self.repeats)
        if not self.shuffle:
            return places, repeat
        return permute(places, self.samples, int(mix(self.seed, epoch))), repeat


@dataclass(frozen=True)
class Steps:
    """How an epoch's positions are divided among steps and ranks."""

    samples: int
    batch_size: int
    world: int = 1
    rank: int = 0
    drop_last: bool = True

    @property
    def total_batch(self) -> int:
        return self.batch_size * self.world

    def count(self, start: int = 0) -> int:
        """Steps from a position to the end of the epoch; a last partial step counts unless it is dropped."""
        left = max(0, self.samples - start)
        return left // self.total_batch if self.drop_last else -(-left // self.total_batch)

    def next_position(self, step: int, start: int = 0) -> int:
        """The position at which a run resumes after a step, counted from `start`."""
        return min(start + (step + 1) * self.batch_size * self.world, self.samples)

    def positions(self, step: int, start: int = 0) -> Positions:
        """This rank's positions in a step, counted from `start`; the last step may have fewer, or none."""
        first = start + step * self.total_batch
        end = min(first + self.total_batch, self.samples)
        return np.arange(first + self.rank, end, self.world, dtype=np.int64)


@dataclass(frozen=True)
class Excerpt(Steps):
    """A single step with chosen positions: samples exactly as a run would see them there, without the others."""

    chosen: tuple[int, ...] = ()

    def count(self, start: int = 0) -> int:  # noqa: ARG002 - there is only one step
        return 1

    def positions(self, step: int, start: int = 0) -> Positions:  # noqa: ARG002
        return np.array(self.chosen, np.int64)


def excerpt(chosen: Positions) -> Excerpt:
    """The step that holds these positions, in this order."""
    places = tuple(chosen.tolist())
    return Excerpt(samples=len(places), batch_size=len(places), chosen=places)


def permute(values: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """The values, all in 0 .. size-1, through a bijection of that range that depends on the key."""
    if size <= 1:
        return np.zeros_like(values)
    if size <= SORTED_UP_TO:
        # Equal hashes are practically impossible among so few, and would still give a bijection.
        return np.argsort(mix(np.arange(size), key), kind="stable")[values]
    half_bits = ((size - 1).bit_length() + 1) // 2
    keys = [np.uint64(mix(key, round_)) for round_ in range(ROUNDS)]
    result = _feistel(values.astype(np.uint64), half_bits, keys)
    # The network permutes a power of four that may be larger than `size`. A value that lands outside goes through it
    # again until it is inside, fewer than four times on average; that keeps it a bijection.
    outside = result >= size
    while outside.any():
        result[outside] = _feistel(result[outside], half_bits, keys)
        outside = result >= size
    return result.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix(right, key) & mask)
    return (left << shift) | right
