"""How long something takes: run it again and again for a while, and keep every duration."""

from __future__ import annotations

import time
from collections.abc import Callable


def durations(
    work: Callable[[], object], seconds: float, *, least: int = 2, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of each run of `work`: once unmeasured, then until `seconds` are used up, at least `least` times."""
    work()  # memory is faulted in, kernels are chosen
    found: list[float] = []
    started = now = clock()
    while len(found) < least or now - started < seconds:
        work()
        before, now = now, clock()
        found.append(now - before)
    return found
