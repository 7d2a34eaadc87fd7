"""What `lohan store info` and `lohan store verify` know about a store, as plain values.

Neither changes the store. Info takes no lock and may be asked while a run writes; verify takes it, since a
running writer moves on to the very slots that are being read.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from lohan.errors import StoreCorrupt, StoreIOError
from lohan.store.drive import LOCK_NAME, DriveLock, is_open_here
from lohan.store.files import Files
from lohan.store.sealed import FORMAT_VERSION
from lohan.store.store import Store, open_store
from lohan.store.verify import verify_store

# A reader without the lock can meet the writer of the manifest in the middle of both copies. The next look is
# later than that write by far: a manifest takes milliseconds. Picked by feel.
_LOOKS = 3
_PAUSE_SECONDS = 0.2

_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, process


def describe_store(directories: Sequence[Path]) -> dict[str, Any]:
    """The keys are listed in docs/store.md."""
    with _open_unlocked(directories) as (store, notes):
        layout = store.layout
        kept = [record for record in layout.records if not record.scratch]
        return {
            "store": store.name,
            "format_version": FORMAT_VERSION,
            "state": "open" if _is_open(directories) else "torn" if store.torn else "clean",
            "committed_step": store.committed_step,
            "metadata": sorted(store.metadata),
            "versions": layout.versions,
            "chunk_bytes": layout.chunk_bytes,
            "num_chunks": layout.num_chunks,
            "num_records": len(layout.records),
            "num_groups": len(layout.group_names),
            "num_written": sum(store.is_written(record.name) for record in kept),
            "record_bytes": sum(record.num_bytes for record in layout.records),
            "data_bytes": sum(drive.header.data_bytes for drive in store.drives),
            "drives": [
                {
                    "drive": drive.index + 1,
                    "directory": str(drive.directory),
                    "data_bytes": drive.header.data_bytes,
                    "direct": drive.direct,
                }
                for drive in store.drives
            ],
            "notes": notes,
        }


def verify_directories(
    directories: Sequence[Path], progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Read everything committed; `progress` is told the bytes done and the bytes there are."""
    with held(directories), open_store(directories, read_only=True) as store:
        parts = {r.name: store.written_parts(r.name) for r in store.layout.records if not r.scratch}
        total, done = sum(size for own in parts.values() for _, size in own), 0

        def advance(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress(done, total)

        progress(0, total)
        problems = [
            {"record": p.record, "drive": p.drive, "offset": p.offset, "message": p.message}
            for p in verify_store(store, advance)
        ]
        if store.torn:
            message = f"The store keeps one version and was cut off inside a step after {store.committed_step}."
            problems.insert(0, {"record": None, "drive": None, "offset": None, "message": message})
        return {
            "store": store.name,
            "committed_step": store.committed_step,
            "num_records": sum(bool(own) for own in parts.values()),
            "verified_bytes": done,
            "problems": problems,
            "notes": list(store.notes),
        }


@contextmanager
def _open_unlocked(directories: Sequence[Path]) -> Iterator[tuple[Store, list[str]]]:
    """The store and the notes that two looks agree on: one look may have met a write under way."""
    with ExitStack() as owned:
        for look in range(_LOOKS):
            try:
                store = owned.enter_context(open_store(directories, read_only=True))
                break
            except StoreCorrupt:
                if look == _LOOKS - 1:
                    raise
                time.sleep(_PAUSE_SECONDS)
        notes = list(store.notes)
        if notes:
            time.sleep(_PAUSE_SECONDS)
            with open_store(directories, read_only=True) as again:
                notes = [note for note in notes if note in again.notes]
        yield store, notes


@contextmanager
def held(directories: Sequence[Path]) -> Iterator[None]:
    """The locks of all drives. A drive nobody may write to needs none."""
    files, locks = Files(), []
    try:
        for directory in directories:
            if not files.exists(directory / LOCK_NAME):
                continue
            try:
                locks.append(DriveLock(files, directory))
            except StoreIOError:
                pass  # no permission to lock it, or mounted read-only
        yield
    finally:
        for lock in locks:
            lock.release()


def _is_open(directories: Sequence[Path]) -> bool:
    """Whether some process holds a lock. Only asks: taking it, even for a moment, could turn a starting run away."""
    files = Files()
    for directory in directories:
        if is_open_here(files, directory):
            return True  # and its lock file is not touched: closing it would drop this process's lock
        question = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        try:
            with open(directory / LOCK_NAME, "rb") as lock:
                answer = fcntl.fcntl(lock, fcntl.F_GETLK, question)
        except OSError:
            continue
        if _FLOCK.unpack(answer)[0] != fcntl.F_UNLCK:
            return True
    return False
