"""Which samples, in which sequence: a pure function of (seed, epoch, position).

A keyed permutation (a Feistel network with cycle walking, a sort by hash for small sets) takes the place of
a shuffled list, so that any position of a billion samples is known at once, in no memory, and resuming needs
one integer.

An epoch is a line of positions 0 .. n-1. A step takes the next `world x batch` of them, and rank r of
that step takes every world-th, beginning with its r-th. So the samples of a step are the same ones for any
number of ranks that makes the same total batch, and repeats of an image, which stand side by side, go to
different ranks where there are enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.data.draws import mix

Positions = NDArray[np.int64]
# Six rounds pass the tests for uniformity and independence (tests/data/test_order.py) where they are used, with
# halves of six bits and more; with halves of one or two bits they fail them, so small sets are sorted by hash.
ROUNDS = 6
SORTED_UP_TO = 1024
"""Sets up to this size are shuffled whole for each question: as quick as the rounds, and 16 kB."""


@dataclass(frozen=True)
class Order:
    """The sequence of samples of every epoch."""

    samples: int
    seed: int = 0
    shuffle: bool = True
    repeats: int = 1

    def at(self, epoch: int, positions: Positions) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The sample at each position of an epoch, and which of its repeats that is."""
        draws, repeat = np.divmod(np.asarray(positions, np.int64), self.repeats)
        if not self.shuffle:
            return draws, repeat
        return permute(draws, self.samples, int(mix(self.seed, epoch))), repeat


@dataclass(frozen=True)
class Steps:
    """How an epoch's positions are dealt out to steps and ranks."""

    samples: int
    batch_size: int
    world: int = 1
    rank: int = 0
    drop_last: bool = True

    @property
    def total_batch(self) -> int:
        return self.batch_size * self.world

    def count(self, start: int = 0) -> int:
        """Steps from a position to the end of the epoch; the last partial one counts unless dropped."""
        left = max(0, self.samples - start)
        return left // self.total_batch if self.drop_last else -(-left // self.total_batch)

    def positions(self, step: int, start: int = 0) -> Positions:
        """This rank's positions in a step, counted from `start`; fewer, or none, in the last one."""
        first = start + step * self.total_batch
        end = min(first + self.total_batch, self.samples)
        return np.arange(first + self.rank, end, self.world, dtype=np.int64)


def permute(values: NDArray[np.int64], size: int, key: int) -> NDArray[np.int64]:
    """Each value of 0 .. size-1 sent to another one of them; a bijection for each key."""
    if size <= 1:
        return np.zeros_like(values)
    if size <= SORTED_UP_TO:
        # Two equal hashes among so few are out of the question; were there any, it would stay a bijection.
        return np.argsort(mix(np.arange(size), key), kind="stable")[values]
    half_bits = ((size - 1).bit_length() + 1) // 2
    keys = [np.uint64(mix(key, number)) for number in range(ROUNDS)]
    result = _feistel(values.astype(np.uint64), half_bits, keys)
    # The network permutes a power of four that may be larger than `size`; whoever lands outside walks on,
    # fewer than four times on average, until inside. Walking keeps it a bijection.
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
