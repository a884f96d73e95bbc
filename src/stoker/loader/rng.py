"""Random choices as pure functions: a hash of (seed, epoch, member, repeat) instead of a generator's state.

Without state there is nothing to save or to send to workers, and a sample gets the same crop in any of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]

# One number for each kind of choice, so that a new kind changes none of the others.
CROP, FLIP, REPLACEMENT = 1, 2, 3

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_GOLDEN_NUMBER, _ALL_BITS = int(_GOLDEN), 0xFFFFFFFFFFFFFFFF
_GOLDEN_TWICE = np.uint64((2 * _GOLDEN_NUMBER) & _ALL_BITS)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(a: Any, b: Any) -> Any:
    """A 64-bit hash of two numbers or arrays of them (the finaliser of SplitMix64 over both)."""
    # Sums and products of arrays wrap around silently; those of numpy's numbers would warn, so Python's are used.
    if not isinstance(a, np.ndarray) and not isinstance(b, np.ndarray):
        return np.uint64(mix_numbers(int(a), int(b)))
    if isinstance(a, np.ndarray):
        value = _finalise(a.astype(np.uint64, copy=False) + _GOLDEN)
    else:
        value = np.uint64(_finalise_number((int(a) + _GOLDEN_NUMBER) & _ALL_BITS))
    if isinstance(b, np.ndarray):
        return _finalise(value ^ (b.astype(np.uint64, copy=False) + _GOLDEN_TWICE))
    return _finalise(value ^ np.uint64((int(b) + 2 * _GOLDEN_NUMBER) & _ALL_BITS))


def mix_numbers(a: int, b: int) -> int:
    """The same hash of two plain numbers without numpy, in a twelfth of the time; called once in every step."""
    value = _finalise_number((a + _GOLDEN_NUMBER) & _ALL_BITS)
    return _finalise_number(value ^ ((b + 2 * _GOLDEN_NUMBER) & _ALL_BITS))


def sample_keys(seed: int, epoch: int, members: NDArray[np.int64], repeats: NDArray[np.int64]) -> Keys:
    """The key of each sample, from which every random choice about it in this epoch follows."""
    keys: Keys = mix(mix(mix_numbers(seed, epoch), members), repeats)
    return keys


def uniforms(keys: Keys, purpose: int, count: int) -> NDArray[np.float64]:
    """`count` numbers in [0, 1) for each key, independent between purposes; shape (keys, count)."""
    purpose_keys = mix(keys, purpose)
    bits = mix(purpose_keys[:, None], np.arange(count, dtype=np.uint64)[None, :])
    numbers: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers


def _finalise(value: Any) -> Any:
    value = (value ^ (value >> np.uint64(30))) * _M1
    value = (value ^ (value >> np.uint64(27))) * _M2
    return value ^ (value >> np.uint64(31))


def _finalise_number(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _ALL_BITS
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _ALL_BITS
    return value ^ (value >> 31)
