"""How fast a drive is, measured in about a second: what striping weights are made of.

Writes a file of its own with direct I/O (buffered where refused), reads it back and removes it. The write
goes twice over the same place and only the second pass counts: first writes to new extents are slower and
say nothing about a store, whose extents are written once and rewritten ever after.
"""

from __future__ import annotations

import errno
import os
import time
from dataclasses import dataclass
from pathlib import Path

from lohan.store.arena import map_memory
from lohan.store.files import Files
from lohan.store.transfer import describe, read_fully, write_fully

_REQUEST_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class DriveRate:
    """Bytes per second each way, one after the other."""

    read: float
    write: float
    direct: bool

    @property
    def weight(self) -> float:
        """A store reads and writes about as much, so a drive's share follows the time of both together."""
        return 1 / (1 / self.read + 1 / self.write)


def measure_drive(files: Files, directory: Path, *, num_bytes: int = 128 << 20) -> DriveRate:
    """Measure one directory's drive with `num_bytes` each way."""
    path = directory / f"lohan.rate.{os.getpid()}"
    requests = max(1, num_bytes // _REQUEST_BYTES)
    with memoryview(map_memory(_REQUEST_BYTES)) as memory:
        # Not zeros: some drives and filesystems store those for free.
        memory[:] = os.urandom(1 << 16) * (_REQUEST_BYTES >> 16)
        try:
            direct, descriptor = _open(files, path, memory)
            try:
                for _ in range(2):
                    started = time.perf_counter()
                    for i in range(requests):
                        write_fully(files, descriptor, [memory], i * _REQUEST_BYTES)
                    files.sync(descriptor)
                    written = time.perf_counter() - started
                if not direct:
                    files.drop_cache(descriptor, 0, requests * _REQUEST_BYTES)
                started = time.perf_counter()
                for i in range(requests):
                    read_fully(files, descriptor, [memory], i * _REQUEST_BYTES)
                read = time.perf_counter() - started
            finally:
                files.close(descriptor)
        except OSError as error:
            raise describe(error, "measuring its speed", directory) from error
        finally:
            files.remove(path)
    total = requests * _REQUEST_BYTES
    return DriveRate(read=total / max(read, 1e-9), write=total / max(written, 1e-9), direct=direct)


def _open(files: Files, path: Path, memory: memoryview) -> tuple[bool, int]:
    files.remove(path)
    try:
        descriptor = files.open(path, write=True, create=True, direct=True)
        try:
            write_fully(files, descriptor, [memory], 0)
            return True, descriptor
        except OSError:
            files.close(descriptor)
            raise
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    files.remove(path)
    return False, files.open(path, write=True, create=True)
