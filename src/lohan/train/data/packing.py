"""Which examples share a row: best fit, the longest first.

Every example goes whole into exactly one row. Rows do not depend on the seed, so an epoch has the same number of steps
every time; their order does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lohan.train.data.order import Indices


@dataclass(frozen=True, slots=True)
class Rows:
    """Examples in rows: row r has examples[starts[r] : starts[r + 1]]."""

    examples: Indices
    starts: Indices

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> Indices:
        return self.examples[self.starts[row] : self.starts[row + 1]]


def one_each(num_examples: int) -> Rows:
    """A row for every example."""
    return Rows(np.arange(num_examples), np.arange(num_examples + 1))


def pack(lengths: Indices, row_tokens: int) -> Rows:
    """Rows of at most `row_tokens` tokens. An example goes to the row in which it leaves the least room.

    About 2 microseconds per example, so not worth keeping on disk.
    """
    if lengths.size and int(lengths.max()) > row_tokens:
        raise ValueError(f"an example of {int(lengths.max())} tokens is longer than a row of {row_tokens}")
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), dtype=np.int64)
    waiting: dict[int, list[int]] = {}  # rows by the room they have left
    rooms = 0  # bit i: some row has i tokens left; its lowest bit above a length is the best fit
    num_rows = 0
    for example, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = waiting[room].pop()
            if not waiting[room]:
                del waiting[room]
                rooms ^= 1 << room
        else:
            room, row = row_tokens, num_rows
            num_rows += 1
        row_of[example] = row
        left = room - length
        if left:
            waiting.setdefault(left, []).append(row)
            rooms |= 1 << left
    by_row = np.argsort(row_of, kind="stable")
    starts = np.zeros(num_rows + 1, dtype=np.int64)
    np.cumsum(np.bincount(row_of, minlength=num_rows), out=starts[1:])
    return Rows(by_row, starts)
