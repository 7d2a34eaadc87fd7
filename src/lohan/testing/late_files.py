"""File layers for testing what stands on the store: real files without durability, and I/O that lands late.

QuickFiles goes through the page cache and never waits for a drive: a test of arithmetic needs no durability, and on a
busy disk one sync costs more than the test. LateFiles also sleeps before every read and write, so the bytes arrive,
or are taken, long after the call was issued: whoever uses a buffer before its handle is done, loses.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lohan.store.files import Buffer, Files


class QuickFiles(Files):
    """Survives the process, not the power."""

    def open(self, path: Path, *, write: bool, create: bool = False, direct: bool = False) -> int:
        return super().open(path, write=write, create=create)

    def sync(self, descriptor: int) -> None:
        pass

    def sync_directory(self, path: Path) -> None:
        pass

    def drop_cache(self, descriptor: int, offset: int, num_bytes: int) -> None:
        pass

    def reserve(self, descriptor: int, num_bytes: int) -> None:
        os.ftruncate(descriptor, num_bytes)


class LateFiles(QuickFiles):
    """Sleeps up to `max_delay_seconds` before each read and write."""

    def __init__(self, seed: int, max_delay_seconds: float = 0.01):
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._max_delay_seconds = max_delay_seconds

    def read(self, descriptor: int, pieces: Sequence[Buffer], offset: int) -> int:
        self._delay()
        return super().read(descriptor, pieces, offset)

    def write(self, descriptor: int, pieces: Sequence[Buffer | bytes], offset: int) -> int:
        self._delay()
        return super().write(descriptor, pieces, offset)

    def _delay(self) -> None:
        with self._lock:
            share = self._rng.random() ** 3  # mostly short, now and then the whole length
        time.sleep(self._max_delay_seconds * share)
