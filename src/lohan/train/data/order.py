"""A shuffled order that is a formula: the place of any row in any epoch, without a list of them all.

A Feistel network over the smallest power of four that holds the rows, walked until it lands inside: a permutation for
every seed, the same on every machine and with every version of every library, which no library's shuffle promises.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
_ROUNDS = 6
_ONES = (1 << 64) - 1


def shuffled(positions: Indices, num_rows: int, seed: int) -> Indices:
    """The rows at these positions of the order that this seed gives to `num_rows` rows."""
    if num_rows < 1 or (positions.size and not 0 <= int(positions.min()) <= int(positions.max()) < num_rows):
        raise ValueError(f"positions must be in 0..{num_rows - 1}")
    half = np.uint64(max(1, ((num_rows - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(seed, round_)) for round_ in range(_ROUNDS)]
    rows = positions.astype(np.uint64)
    outside = np.ones(rows.shape, dtype=bool)
    while outside.any():
        walked = rows[outside]
        left, right = walked >> half, walked & mask
        for key in keys:
            left, right = right, left ^ (mixed(right ^ key) & mask)
        rows[outside] = (left << half) | right
        outside = rows >= np.uint64(num_rows)
    return rows.astype(np.int64)


def mix(*numbers: int) -> int:
    """One 64-bit number that depends on every bit of these (splitmix64)."""
    state = 0
    for number in numbers:
        state = int(mixed(np.array([(state ^ number) & _ONES], dtype=np.uint64))[0])
    return state


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every number scrambled so that each of its bits changes half of the others."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
