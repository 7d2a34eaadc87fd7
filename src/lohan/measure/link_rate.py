"""How fast bytes cross the link between host and device: each way, and both ways at once.

Through the device's own copies, from memory that is page-locked as a run's is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lohan.engine.devices.base import Device
from lohan.engine.pools import as_tensor
from lohan.measure.timing import durations
from lohan.store import Arena, open_arena

COPY_BYTES = 64 << 20
"""About a block's weights: large enough that starting a copy costs nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRates:
    """Bytes per second."""

    to_gpu: float
    to_host: float
    duplex_share: float
    """Of each rate that is left when both directions copy at once."""


def measure_links(device: Device, *, seconds: float = 2.0, num_bytes: int = COPY_BYTES) -> LinkRates:
    """The rates of a device with memory of its own."""
    with open_arena(2 * num_bytes) as arena:
        device.pin(arena.memory)
        try:
            return _measure(device, arena, seconds, num_bytes)
        finally:
            device.unpin(arena.memory)


def _measure(device: Device, arena: Arena, seconds: float, num_bytes: int) -> LinkRates:
    outgoing, incoming = (as_tensor(arena.lease(num_bytes).view) for _ in range(2))
    with device.lane("to_gpu"):
        arriving = device.empty(num_bytes)
    with device.lane("to_host"):
        leaving = device.empty(num_bytes)

    def to_gpu() -> None:
        with device.lane("to_gpu"):
            device.to_device(outgoing, arriving)

    def to_host() -> None:
        with device.lane("to_host"):
            device.to_host(leaving, incoming)

    try:
        up, down = (num_bytes / statistics.median(durations(copy, seconds / 3)) for copy in (to_gpu, to_host))
        both_up, both_down = (num_bytes * rate for rate in _at_once((to_gpu, to_host), seconds / 3))
    finally:
        device.free(arriving)
        device.free(leaving)
    share = (both_up / up + both_down / down) / 2
    return LinkRates(to_gpu=up, to_host=down, duplex_share=min(1.0, share))


def _at_once(works: tuple[Callable[[], None], ...], seconds: float) -> list[float]:
    """How often per second each of these runs while the others do."""
    until = time.perf_counter() + seconds

    def repeat(work: Callable[[], None]) -> float:
        started, count = time.perf_counter(), 0
        while count < 2 or time.perf_counter() < until:
            work()
            count += 1
        return count / (time.perf_counter() - started)

    with ThreadPoolExecutor(len(works)) as threads:
        return list(threads.map(repeat, works))
