"""One drive: a directory with a header, a lock, a data file and the threads that serve it.

    lohan.header.0 .1      which store and which of its drives this is
    lohan.lock             held by the one process that has the store open
    lohan.data             all chunks that were dealt to this drive
    lohan.layout.0 .1      on the first drive only
    lohan.manifest.0 .1    on the first drive only

No file of the store names a path: the data file is always `lohan.data` in the directory the user gave, opened
without following links, so nothing read from a drive can lead outside of it.
"""

from __future__ import annotations

import errno
import json
import threading
from dataclasses import dataclass
from pathlib import Path

from lohan.errors import (
    DriveMismatch,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreIOError,
    StoreLocked,
    StoreMissing,
)
from lohan.sizes import format_bytes
from lohan.store.arena import PAGE_BYTES, map_memory
from lohan.store.files import Files
from lohan.store.layout import MAX_DRIVES
from lohan.store.queues import Queue
from lohan.store.sealed import HEADER, UNUSABLE
from lohan.store.transfer import describe
from lohan.store.twins import Twins

HEADER_PLACE_BYTES = PAGE_BYTES
DATA_NAME = "lohan.data"
LOCK_NAME = "lohan.lock"

# A POSIX lock does not stop the process that holds it from opening the store again; this does.
_open_here: set[str] = set()
_open_here_guard = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """What a drive says of itself."""

    store: str
    """A random name shared by all drives of the store."""

    drive: int
    num_drives: int
    data_bytes: int
    layout_place_bytes: int
    manifest_place_bytes: int

    def to_bytes(self) -> bytes:
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> Header:
        header = cls(**json.loads(payload))
        numbers = [getattr(header, name) for name in cls.__slots__ if name != "store"]
        if any(type(n) is not int or n < 0 for n in numbers) or type(header.store) is not str:
            raise ValueError("its values make no sense")
        if not header.drive < header.num_drives <= MAX_DRIVES:
            raise ValueError(f"it calls itself drive {header.drive} of {header.num_drives}")
        return header


def header_twins(files: Files, directory: Path) -> Twins:
    return Twins(files, directory, HEADER, place_bytes=HEADER_PLACE_BYTES)


def has_store(directory: str | Path, files: Files | None = None) -> bool:
    """Whether a directory holds a drive of a store (whole or damaged)."""
    files = files or Files()
    return any(files.exists(path) for path in header_twins(files, Path(directory)).paths)


def read_header(files: Files, directory: Path, *, repair: bool) -> tuple[Header, list[str]]:
    """The drive's header and notes about damage. StoreMissing if there is no store here."""
    if not files.is_directory(directory):
        raise StoreMissing(
            f"{directory} does not exist or is not a directory. Mount the drive or correct the path in `ssd`."
        )
    twins = header_twins(files, directory)
    if not any(files.exists(path) for path in twins.paths):
        state = "holds an unfinished store" if files.exists(directory / DATA_NAME) else "holds no store"
        raise StoreMissing(
            f"{directory} {state}: lohan.header.0 is missing. Create the store, or correct the path in `ssd`."
        )
    page = twins.read(repair=repair)
    try:
        return Header.from_bytes(page.payload), twins.notes
    except UNUSABLE as error:
        raise StoreCorrupt(
            f"The header in {directory} cannot be used: {error}. Create the store again.", drive=str(directory)
        ) from error


def order_drives(directories: list[Path], headers: list[Header]) -> list[tuple[Path, Header]]:
    """The drives in the store's own order, whatever order they were given in; refused unless exactly complete."""
    names = sorted({h.store for h in headers})
    if len(names) > 1:
        first = headers[0].store
        other = next(d for d, h in zip(directories, headers, strict=True) if h.store != first)
        raise DriveMismatch(
            f"{other} belongs to another store than {directories[0]} ({names[0][:8]} and {names[1][:8]}). "
            "Give the directories of one store."
        )
    expected = headers[0].num_drives
    found = [h.drive for h in headers]
    if len(set(found)) < len(found):
        twice = next(i for i in found if found.count(i) > 1)
        same = [str(d) for d, h in zip(directories, headers, strict=True) if h.drive == twice]
        raise DriveMismatch(f"{' and '.join(same)} are both drive {twice + 1} of the store: one is a copy. Give one.")
    if len(found) != expected:
        missing = ", ".join(str(i + 1) for i in range(expected) if i not in found)
        raise DriveMismatch(
            f"This store has {expected} drives and {len(found)} were given: drive {missing} is missing. "
            "Give all its directories in `ssd`."
        )
    return sorted(zip(directories, headers, strict=True), key=lambda pair: pair[1].drive)


def is_open_here(files: Files, directory: Path) -> bool:
    """Whether this process holds the directory's lock."""
    with _open_here_guard:
        return _lock_key(files, directory) in _open_here


def _lock_key(files: Files, directory: Path) -> str:
    return f"{id(files) if type(files) is not Files else ''}{files.identity(directory)}"


class DriveLock:
    """The right to write in a drive directory, for one process. Gone with the process, however it ends."""

    def __init__(self, files: Files, directory: Path):
        self._files = files
        self._key = _lock_key(files, directory)
        with _open_here_guard:
            if self._key in _open_here:
                raise StoreLocked(f"{directory} is already open in this process. Close that store first.")
            try:
                self._descriptor = files.lock(directory / LOCK_NAME)
            except BlockingIOError:
                raise StoreLocked(
                    f"{directory} is in use by {files.lock_owner(directory / LOCK_NAME)}. Wait for its end, or stop it."
                ) from None
            except OSError as error:
                raise describe(error, "taking its lock", directory) from error
            _open_here.add(self._key)

    def release(self) -> None:
        with _open_here_guard:
            if self._key in _open_here:
                _open_here.remove(self._key)
                self._files.close(self._descriptor)


class Drive:
    """An open drive."""

    def __init__(self, files: Files, directory: Path, header: Header, *, write: bool, num_threads: int):
        self.files, self.directory, self.header = files, directory, header
        self.index = header.drive
        self.notes: list[str] = []
        self.data_path = directory / DATA_NAME
        self.direct, self.descriptor = self._open_data(write)
        size = files.size(self.descriptor)
        if size < header.data_bytes:
            files.close(self.descriptor)
            raise StoreCorrupt(
                f"{self.data_path} is cut short: {size} of {header.data_bytes} bytes. "
                "Restore the file, or create the store again from the model or its last export.",
                drive=str(directory),
                offset=size,
            )
        self.reads = Queue(f"lohan-read-{self.index}", num_threads)
        self.writes = Queue(f"lohan-write-{self.index}", num_threads)

    def _open_data(self, write: bool) -> tuple[bool, int]:
        """Open the data file for direct I/O, or buffered where the filesystem refuses that."""
        try:
            try:
                descriptor = self.files.open(self.data_path, write=write, direct=True)
                try:
                    with memoryview(map_memory(PAGE_BYTES)) as probe:
                        self.files.read(descriptor, [probe], 0)
                except BaseException:
                    self.files.close(descriptor)
                    raise
                return True, descriptor
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
            descriptor = self.files.open(self.data_path, write=write)
        except FileNotFoundError:
            raise StoreMissing(
                f"{self.data_path} has vanished. Mount the drive again, or create the store again from the model."
            ) from None
        except OSError as error:
            raise describe(error, "opening data", self.directory) from error
        self.notes.append(
            f"{self.directory}: the filesystem refuses direct I/O, so reads and writes pass through the page cache "
            "and are slower. Use ext4 or XFS on the drive itself for full speed."
        )
        return False, descriptor

    def check_still_there(self) -> None:
        """A deleted or replaced data file would swallow writes without an error; a commit must not trust it."""
        if not self.files.is_same_file(self.descriptor, self.data_path):
            raise StoreIOError(
                f"{self.data_path} has vanished or was replaced while the store was open. "
                "Mount the drive again and reopen the store; what was committed before is untouched.",
                drive=str(self.directory),
                errno=errno.ENOENT,
            )

    def sync(self) -> None:
        try:
            self.files.sync(self.descriptor)
        except OSError as error:
            raise describe(error, "making a step durable", self.directory) from error

    def close(self) -> None:
        self.reads.close()
        self.writes.close()
        self.files.close(self.descriptor)


def reserve_data(files: Files, directory: Path, num_bytes: int) -> None:
    """Create the data file with all its space taken."""
    path = directory / DATA_NAME
    try:
        descriptor = files.open(path, write=True, create=True)
        try:
            free = files.free_bytes(directory)
            if free < num_bytes:
                raise _too_full(directory, num_bytes, free)
            files.reserve(descriptor, num_bytes)
            files.sync(descriptor)
        finally:
            files.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _too_full(directory, num_bytes, files.free_bytes(directory)) from error
        raise describe(error, "reserving space", directory) from error


def _too_full(directory: Path, needed: int, free: int) -> StoreError:
    return StoreFull(
        f"{directory} needs {format_bytes(needed)} for the store and has {format_bytes(free)} free. "
        f"Free {format_bytes(max(needed - free, 1))}, add a drive to `ssd`, or give this one a smaller weight."
    )
