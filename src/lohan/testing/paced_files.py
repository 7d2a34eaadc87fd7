"""Real files held to a rate, as if their directory were a slower drive: reads and writes share it.

For measurements that should not depend on how fast, or how busy, the machine's own drive is today. The drive's own work
is done; the rest of the time is slept through.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lohan.store.files import Buffer, Files


class PacedFiles(Files):
    """`rates` in bytes per second by the name of a directory; `rate` for all others, None as fast as it goes."""

    def __init__(self, rates: Mapping[str, float] | None = None, *, rate: float | None = None):
        self._rates, self._rate = dict(rates or {}), rate
        self._names: dict[int, str] = {}
        self._free_at: dict[str, float] = {}
        self._guard = threading.Lock()

    def open(self, path: Path, *, write: bool, create: bool = False, direct: bool = False) -> int:
        descriptor = super().open(path, write=write, create=create, direct=direct)
        self._names[descriptor] = path.parent.name
        return descriptor

    def read(self, descriptor: int, pieces: Sequence[Buffer], offset: int) -> int:
        end = self._reserve(descriptor, sum(map(len, pieces)))
        moved = super().read(descriptor, pieces, offset)
        time.sleep(max(0.0, end - time.perf_counter()))
        return moved

    def write(self, descriptor: int, pieces: Sequence[Buffer | bytes], offset: int) -> int:
        end = self._reserve(descriptor, sum(map(len, pieces)))
        moved = super().write(descriptor, pieces, offset)
        time.sleep(max(0.0, end - time.perf_counter()))
        return moved

    def _reserve(self, descriptor: int, num_bytes: int) -> float:
        name = self._names[descriptor]
        rate = self._rates.get(name, self._rate)
        with self._guard:
            start = max(self._free_at.get(name, 0.0), time.perf_counter())
            self._free_at[name] = start + (num_bytes / rate if rate else 0.0)
            return self._free_at[name]
