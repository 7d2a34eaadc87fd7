"""Files in memory that forget what was never made durable, and fail when told to.

Every file has two images: what a reader sees now, and what the drive would hold after the power is cut. write()
changes the first, sync() carries it to the second; a name made or removed is durable after sync_directory() of its
folder. Stricter than any real filesystem, on purpose: what survives here relies on nothing but the rules that
`lohan.store.files` states.

    files.fail("write", errno.EIO, name="lohan.data")    the next such call fails; a failing write is torn
    files.crash_after(3)                                 the process dies inside the third change from now
    files.power_loss(rng)                                every 512-byte sector not yet synced survives or not

Direct descriptors insist on pages: address, length and offset. All methods are safe from any thread.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lohan.store.arena import PAGE_BYTES
from lohan.store.files import Buffer, Files

SECTOR_BYTES = 512


@dataclass(eq=False, slots=True)
class _File:
    seen: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    """Writes since the last sync, in order. A size that was reserved is a write of nothing at that offset."""


class _Folder:
    pass


class _Link:
    pass


_Entry = _File | _Folder | _Link


@dataclass(frozen=True, slots=True)
class _Open:
    file: _File
    path: Path
    write: bool
    direct: bool
    life: int


@dataclass(slots=True)
class _Fault:
    call: str
    error: int | None
    name: str
    skip: int
    times: int
    keep_bytes: int


class Gate:
    """Holds every matching call until opened, so that a test can look at a store in mid-flight."""

    def __init__(self, call: str, name: str):
        self.call, self.name = call, name
        self._reached = threading.Event()
        self._opened = threading.Event()

    def wait_until_reached(self) -> None:
        if not self._reached.wait(30):
            raise TimeoutError(f"no {self.call} of {self.name or 'any file'} came to the gate")

    def open(self) -> None:
        self._opened.set()

    def pass_through(self) -> None:
        self._reached.set()
        if not self._opened.wait(60):
            raise TimeoutError("the gate was never opened")


class FaultyFiles(Files):
    """Drives in memory. `folders` exist from the start; each is a filesystem of its own."""

    def __init__(self, folders: Sequence[Path | str], *, capacity_bytes: int = 1 << 40, seed: int = 0):
        self.capacity_bytes = capacity_bytes
        self.refuse_direct = ""
        """"open" or "read": where direct I/O gets EINVAL, as some filesystems do it."""
        self.read_only: set[Path] = set()
        self.changes = 0
        """Calls so far that changed something or made it durable."""
        self.calls: list[tuple[str, str, int]] = []
        """Every read, write and sync: what, the file's name, and the offset."""
        self._rng = random.Random(seed)
        self._lock = threading.RLock()
        self._names: dict[Path, _Entry] = {Path(f): _Folder() for f in folders}
        self._durable_names = dict(self._names)
        self._roots = tuple(self._names)
        self._gone: set[Path] = set()
        self._open: dict[int, _Open] = {}
        self._next = 1000
        self._life = 0
        self._locked: dict[Path, int] = {}
        self._faults: list[_Fault] = []
        self._gates: list[Gate] = []
        self._changes_left: int | None = None
        self._dead = False

    # -- what the store calls -------------------------------------------------------------------------

    def open(self, path: Path, *, write: bool, create: bool = False, direct: bool = False) -> int:
        with self._lock:
            self._enter("open", path)
            self._check_folder(path)
            if write:
                self._check_writable(path)
            entry = self._names.get(path)
            if create:
                if entry is not None:
                    raise _oserror(errno.EEXIST, path)
                self._change()
                entry = self._names[path] = _File()
            if entry is None:
                raise _oserror(errno.ENOENT, path)
            if isinstance(entry, _Link):
                raise _oserror(errno.ELOOP, path)
            if isinstance(entry, _Folder) or (direct and self.refuse_direct == "open"):
                raise _oserror(errno.EINVAL, path)
            return self._descriptor(entry, path, write, direct)

    def close(self, descriptor: int) -> None:
        with self._lock:
            gone = self._open.pop(descriptor, None)
            if gone is None:
                raise OSError(errno.EBADF, "closed twice")
            if self._locked.get(gone.path) == descriptor:
                del self._locked[gone.path]

    def read(self, descriptor: int, pieces: Sequence[Buffer], offset: int) -> int:
        self._gate("read", descriptor)
        with self._lock:
            opened = self._living(descriptor)
            self.calls.append(("read", opened.path.name, offset))
            self._check_direct(opened, pieces, offset)
            if opened.direct and self.refuse_direct == "read":
                raise _oserror(errno.EINVAL, opened.path)
            keep = self._enter("read", opened.path)
            moved = 0
            for piece in pieces:
                into = memoryview(piece).cast("B")
                data = opened.file.seen[offset + moved : offset + moved + len(into)]
                data = data if keep is None else data[: max(0, keep - moved)]
                into[: len(data)] = data
                moved += len(data)
                if len(data) < len(into):
                    break
            return moved

    def write(self, descriptor: int, pieces: Sequence[Buffer | bytes], offset: int) -> int:
        self._gate("write", descriptor)
        with self._lock:
            opened = self._living(descriptor)
            self.calls.append(("write", opened.path.name, offset))
            if not opened.write:
                raise _oserror(errno.EBADF, opened.path)
            self._check_direct(opened, pieces, offset)
            data = b"".join(bytes(piece) for piece in pieces)
            try:
                keep = self._enter("write", opened.path)
                self._change()
            except OSError:
                for start, sector in _sectors(offset, data):
                    if self._rng.random() < 0.5:
                        _put(opened.file, start, sector)
                raise
            data = data if keep is None else data[:keep]
            _put(opened.file, offset, data)
            return len(data)

    def sync(self, descriptor: int) -> None:
        self._gate("sync", descriptor)
        with self._lock:
            opened = self._living(descriptor)
            self.calls.append(("sync", opened.path.name, 0))
            try:
                self._enter("sync", opened.path)
                self._change()
            except OSError:
                # Linux forgets which pages failed to reach the drive: they stay readable, and no later sync says so.
                if not self._dead:
                    self._settle(opened.file, self._rng)
                raise
            for offset, data in opened.file.pending:
                _place(opened.file.durable, offset, data)
            opened.file.pending.clear()

    def size(self, descriptor: int) -> int:
        with self._lock:
            return len(self._living(descriptor).file.seen)

    def reserve(self, descriptor: int, num_bytes: int) -> None:
        with self._lock:
            opened = self._living(descriptor)
            self._enter("reserve", opened.path)
            if num_bytes - len(opened.file.seen) > self._free(opened.path.parent):
                raise _oserror(errno.ENOSPC, opened.path)
            self._change()
            _put(opened.file, num_bytes, b"")

    def drop_cache(self, descriptor: int, offset: int, num_bytes: int) -> None:
        with self._lock:
            file = self._living(descriptor).file
            if not file.pending:
                file.seen = bytearray(file.durable)

    def make_directory(self, path: Path) -> None:
        with self._lock:
            entry = self._names.get(path)
            if isinstance(entry, _Folder):
                return
            if entry is not None:
                raise _oserror(errno.EEXIST, path)
            self._check_folder(path)
            self._check_writable(path)
            self._enter("make_directory", path)
            self._change()
            self._names[path] = _Folder()

    def sync_directory(self, path: Path) -> None:
        with self._lock:
            self._check_folder(path / "anything")
            self._enter("sync_directory", path)
            self._change()
            for name in {n for n in (*self._names, *self._durable_names) if n.parent == path}:
                _copy_entry(self._names, self._durable_names, name)

    def is_directory(self, path: Path) -> bool:
        with self._lock:
            return path not in self._gone and isinstance(self._names.get(path), _Folder)

    def exists(self, path: Path) -> bool:
        with self._lock:
            return path.parent not in self._gone and path in self._names

    def is_same_file(self, descriptor: int, path: Path) -> bool:
        with self._lock:
            opened = self._open.get(descriptor)
            return opened is not None and self.exists(path) and self._names[path] is opened.file

    def remove(self, path: Path) -> None:
        with self._lock:
            if not self.exists(path):
                return
            self._check_writable(path)
            self._enter("remove", path)
            self._change()
            del self._names[path]

    def free_bytes(self, path: Path) -> int:
        with self._lock:
            self._enter("free_bytes", path)
            return self._free(path)

    def filesystem(self, path: Path) -> int:
        return self._roots.index(self._root(path))

    def identity(self, path: Path) -> str:
        return str(path)

    def lock(self, path: Path) -> int:
        with self._lock:
            self._check_folder(path)
            self._check_writable(path)
            self._enter("lock", path)
            entry = self._names.get(path)
            if isinstance(entry, _Link):
                raise _oserror(errno.ELOOP, path)
            if path in self._locked:
                raise BlockingIOError(errno.EAGAIN, "locked", str(path))
            if entry is None:
                self._change()
                entry = self._names[path] = _File()
            assert isinstance(entry, _File)
            self._locked[path] = self._descriptor(entry, path, True, False)
            return self._locked[path]

    def lock_owner(self, path: Path) -> str:
        return "another process"

    # -- what tests do to it --------------------------------------------------------------------------

    def fail(self, call: str, error: int, *, name: str = "", skip: int = 0, times: int = 1) -> None:
        """Let `call` on files whose path contains `name` fail `times` times, after letting `skip` through."""
        with self._lock:
            self._faults.append(_Fault(call, error, name, skip, times, 0))

    def stop_short(self, call: str, keep_bytes: int, *, name: str = "", skip: int = 0, times: int = 1) -> None:
        """Let a read or write move at most `keep_bytes`, without an error, as the kernel may."""
        with self._lock:
            self._faults.append(_Fault(call, None, name, skip, times, keep_bytes))

    def heal(self) -> None:
        """No more faults."""
        with self._lock:
            self._faults.clear()
            self._changes_left = None

    @contextmanager
    def gate(self, call: str, *, name: str = "") -> Iterator[Gate]:
        """Hold matching calls until the gate is opened, at the latest on the way out."""
        gate = Gate(call, name)
        self._gates.append(gate)
        try:
            yield gate
        finally:
            self._gates.remove(gate)
            gate.open()

    def crash_after(self, num_changes: int) -> None:
        """Let the process die inside the change that comes after `num_changes` more. That one is torn."""
        with self._lock:
            self._changes_left = num_changes

    def freeze(self) -> None:
        """The process is dead from now on: nothing it still does reaches the files."""
        with self._lock:
            self._dead = True

    @property
    def frozen(self) -> bool:
        return self._dead

    def crash(self) -> None:
        """Bury the process: descriptors and locks are gone, what it wrote stays. A new process may start."""
        with self._lock:
            self._life += 1
            self._locked.clear()
            self._dead = False
            self.heal()

    def power_loss(self, rng: random.Random) -> None:
        """Like crash(), and of everything not made durable each sector and each name survives or does not."""
        with self._lock:
            self.crash()
            for name in {*self._names, *self._durable_names}:
                if self._names.get(name) is not self._durable_names.get(name) and rng.random() < 0.5:
                    _copy_entry(self._names, self._durable_names, name)
            self._names = {
                n: e for n, e in self._durable_names.items() if n in self._roots or n.parent in self._durable_names
            }
            self._durable_names = dict(self._names)
            for entry in self._names.values():
                if isinstance(entry, _File):
                    self._settle(entry, rng)
                    entry.seen = bytearray(entry.durable)

    def contents(self, path: Path) -> bytes:
        with self._lock:
            return bytes(self._file(path).seen)

    def put(self, path: Path, data: bytes) -> None:
        """Forge a file: its bytes and its name are durable at once."""
        with self._lock:
            file = _File(bytearray(data), bytearray(data))
            self._names[path] = self._durable_names[path] = file

    def flip(self, path: Path, offset: int, bit: int = 0) -> None:
        """Decay: one bit changes on the drive."""
        with self._lock:
            for image in (self._file(path).seen, self._file(path).durable):
                image[offset] ^= 1 << bit

    def truncate(self, path: Path, num_bytes: int) -> None:
        with self._lock:
            for image in (self._file(path).seen, self._file(path).durable):
                del image[num_bytes:]

    def put_link(self, path: Path) -> None:
        """A symbolic link where a file should be."""
        with self._lock:
            self._names[path] = self._durable_names[path] = _Link()

    def vanish(self, folder: Path) -> None:
        """Unmount a drive: its names lead nowhere. Descriptors that are open keep working."""
        with self._lock:
            self._gone.add(folder)

    def come_back(self, folder: Path) -> None:
        with self._lock:
            self._gone.discard(folder)

    def listing(self) -> set[Path]:
        with self._lock:
            return set(self._names)

    # -- inside ---------------------------------------------------------------------------------------

    def _gate(self, call: str, descriptor: int) -> None:
        opened = self._open.get(descriptor)
        for gate in [g for g in self._gates if g.call == call and opened and g.name in str(opened.path)]:
            gate.pass_through()

    def _enter(self, call: str, path: Path) -> int | None:
        """Raise the fault that is due; or say how many bytes may move, if not all."""
        if self._dead:
            raise _oserror(errno.EIO, path)
        for fault in self._faults:
            if fault.call != call or fault.name not in str(path) or fault.times <= 0:
                continue
            if fault.skip:
                fault.skip -= 1
                continue
            fault.times -= 1
            if fault.error is not None:
                raise _oserror(fault.error, path)
            return fault.keep_bytes
        return None

    def _change(self) -> None:
        self.changes += 1
        if self._changes_left is not None:
            if self._changes_left == 0:
                self._dead = True
                raise OSError(errno.EIO, "the process died here")
            self._changes_left -= 1

    def _descriptor(self, file: _File, path: Path, write: bool, direct: bool) -> int:
        self._next += 1
        self._open[self._next] = _Open(file, path, write, direct, self._life)
        return self._next

    def _living(self, descriptor: int) -> _Open:
        opened = self._open.get(descriptor)
        if opened is None:
            raise OSError(errno.EBADF, "not open")
        if opened.life != self._life:
            raise OSError(errno.EBADF, "opened before the crash", str(opened.path))
        return opened

    def _check_direct(self, opened: _Open, pieces: Sequence[Buffer | bytes], offset: int) -> None:
        if not opened.direct:
            return
        addresses = [np.frombuffer(piece, np.uint8).__array_interface__["data"][0] for piece in pieces]
        lengths = [memoryview(piece).nbytes for piece in pieces]
        if any(number % PAGE_BYTES for number in (*addresses, *lengths, offset)):
            raise OSError(errno.EINVAL, f"not made of pages: {addresses}, {lengths} at {offset}", str(opened.path))

    def _check_folder(self, path: Path) -> None:
        if path.parent in self._gone or not isinstance(self._names.get(path.parent), _Folder):
            raise _oserror(errno.ENOENT, path)

    def _check_writable(self, path: Path) -> None:
        if self._root(path) in self.read_only:
            raise _oserror(errno.EROFS, path)

    def _root(self, path: Path) -> Path:
        return next(root for root in self._roots if root == path or root in path.parents)

    def _free(self, path: Path) -> int:
        root = self._root(path)
        used = sum(len(e.seen) for n, e in self._names.items() if isinstance(e, _File) and root in n.parents)
        return max(0, self.capacity_bytes - used)

    def _file(self, path: Path) -> _File:
        entry = self._names[path]
        assert isinstance(entry, _File)
        return entry

    def _settle(self, file: _File, rng: random.Random) -> None:
        """Decide for every sector of every write since the last sync whether it reached the drive."""
        luck = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
        for offset, data in file.pending:
            for start, sector in _sectors(offset, data) if data else [(offset, b"")]:
                if rng.random() < luck:
                    _place(file.durable, start, sector)
        file.pending.clear()


def _oserror(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def _place(image: bytearray, offset: int, data: bytes) -> None:
    if len(image) < offset + len(data):
        image.extend(bytes(offset + len(data) - len(image)))
    image[offset : offset + len(data)] = data


def _put(file: _File, offset: int, data: bytes) -> None:
    _place(file.seen, offset, data)
    file.pending.append((offset, data))


def _sectors(offset: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        step = SECTOR_BYTES - (offset + at) % SECTOR_BYTES
        yield offset + at, data[at : at + step]
        at += step


def _copy_entry(source: dict[Path, _Entry], target: dict[Path, _Entry], name: Path) -> None:
    if name in source:
        target[name] = source[name]
    else:
        target.pop(name, None)
