"""How long something takes: run it again and again for a while, and keep every duration."""

from __future__ import annotations

import time
from collections.abc import Callable


def durations(
    work: Callable[[], object],
    seconds: float,
    *,
    least: int = 2,
    before: Callable[[], object] | None = None,
    every: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Seconds of each run of `work`: once unmeasured, then until `seconds` are used up, at least `least` times.

    `before` runs ahead of every so many of them; its own time does not count as theirs.
    """
    work()  # memory is faulted in, kernels are chosen
    found: list[float] = []
    started = now = clock()
    while len(found) < least or now - started < seconds:
        if before is not None and len(found) % every == 0:
            before()
            now = clock()
        work()
        last, now = now, clock()
        found.append(now - last)
    return found
