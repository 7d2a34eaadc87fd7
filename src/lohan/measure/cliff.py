"""Where a drive's fast cache ends: the write rate over time, when it has fallen, and when it has settled. Pure.

Consumer drives write fast into a part of their flash used as a cache, and several times slower when that is full. Fed
with one stretch of writing after another (about a second each), this finds the two rates and the bytes between them.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

FALLEN_SHARE = 0.7
"""Of the first rate: what stays below it is another regime, not noise. Caches differ by a factor of two and more."""

BURST_WINDOWS = 5
"""Stretches the first rate is taken from."""

LASTING_WINDOWS = 10
"""Stretches for which a rate must stay low, and be steady, before it counts. Both picked by feel."""

STEADY_SHARE = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteRates:
    """What a long write showed, bytes and bytes per second."""

    sustained: float
    burst: float | None
    """None: the rate never fell, so there is no cliff within what was written."""

    burst_bytes: int
    settled: bool
    """Whether the rate stood still at the end; if not, it may fall further."""


class Cliff:
    """The stretches of one long write."""

    def __init__(self) -> None:
        self._bytes: list[int] = []
        self._rates: list[float] = []

    def add(self, num_bytes: int, seconds: float) -> None:
        """One more stretch."""
        self._bytes.append(num_bytes)
        self._rates.append(num_bytes / max(seconds, 1e-9))

    @property
    def burst(self) -> float:
        """The first rate."""
        return statistics.median(self._rates[:BURST_WINDOWS])

    @property
    def edge(self) -> int | None:
        """The stretch in which the rate fell for good; None while it has not."""
        low = FALLEN_SHARE * self.burst if self._rates else 0.0
        for start in range(1, len(self._rates) - LASTING_WINDOWS + 1):
            after = self._rates[start : start + LASTING_WINDOWS]
            if after[0] < low and statistics.median(after) < low:
                return start
        return None

    @property
    def settled(self) -> bool:
        """Whether the rate has fallen and stands still: nothing more is to be learned."""
        edge = self.edge
        if edge is None or len(self._rates) - edge < 2 * LASTING_WINDOWS:
            return False
        before, last = self._rates[-2 * LASTING_WINDOWS : -LASTING_WINDOWS], self._rates[-LASTING_WINDOWS:]
        return abs(statistics.mean(last) / statistics.mean(before) - 1) <= STEADY_SHARE

    def rates(self) -> WriteRates:
        """What is known by now."""
        if not self._rates:
            raise ValueError("nothing was written yet")
        edge, last = self.edge, statistics.mean(self._rates[-LASTING_WINDOWS:])
        if edge is None or last >= FALLEN_SHARE * self.burst:  # it never fell, or has recovered since
            return WriteRates(sustained=statistics.median(self._rates), burst=None, burst_bytes=0, settled=True)
        return WriteRates(
            sustained=last,
            burst=self.burst,
            burst_bytes=sum(self._bytes[:edge]),
            settled=self.settled,
        )
