"""The few file operations the store stands on, behind one small class.

The store never calls `os` for its files: it calls this. That makes the list of what must be durable and in
which order short enough to read, and lets tests put a layer here that fails, tears or forgets writes
(`lohan.testing.faults`). Descriptors are plain integers that only the layer itself interprets.

Durability rules the store relies on: a write is durable after sync(); a file's existence after
sync_directory() of its folder; nothing else is.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Sequence
from pathlib import Path

Buffer = memoryview | mmap.mmap | bytearray

# Linux's limit on the pieces of one vectored request is 1024 (IOV_MAX).
MAX_PIECES = 512


class Files:
    """The real thing: Linux file calls. Thread-safe; every call that can wait releases the GIL."""

    def open(self, path: Path, *, write: bool, create: bool = False, direct: bool = False) -> int:
        """Open a regular file. Never follows a link out of the store; never truncates."""
        flags = os.O_RDWR if write else os.O_RDONLY
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # a pipe put here must be refused, not waited for
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        flags |= os.O_DIRECT if direct else 0
        descriptor = os.open(path, flags, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return descriptor

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def read(self, descriptor: int, pieces: Sequence[Buffer], offset: int) -> int:
        """Fill the pieces in order from `offset`; may stop short. Returns bytes read, 0 at the end."""
        return os.preadv(descriptor, pieces, offset)

    def write(self, descriptor: int, pieces: Sequence[Buffer | bytes], offset: int) -> int:
        """Write the pieces in order at `offset`; may stop short. Returns bytes written."""
        return os.pwritev(descriptor, pieces, offset)

    def sync(self, descriptor: int) -> None:
        """Make all completed writes of this file durable."""
        os.fdatasync(descriptor)

    def size(self, descriptor: int) -> int:
        return os.fstat(descriptor).st_size

    def reserve(self, descriptor: int, num_bytes: int) -> None:
        """Take the space now, so that a full disk is found here and not in the middle of a run."""
        os.posix_fallocate(descriptor, 0, num_bytes)

    def drop_cache(self, descriptor: int, offset: int, num_bytes: int) -> None:
        """Advise the kernel that cached pages of this range will not be needed."""
        os.posix_fadvise(descriptor, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def make_directory(self, path: Path) -> None:
        """Make this folder, but not its parents: a drive that is not mounted must not turn into a folder."""
        path.mkdir(exist_ok=True)

    def sync_directory(self, path: Path) -> None:
        """Make the creation and removal of files in this folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def is_directory(self, path: Path) -> bool:
        return path.is_dir()

    def exists(self, path: Path) -> bool:
        return os.path.lexists(path)

    def is_same_file(self, descriptor: int, path: Path) -> bool:
        """Whether the path still leads to the file this descriptor has open."""
        try:
            there, here = os.lstat(path), os.fstat(descriptor)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def free_bytes(self, path: Path) -> int:
        """What an ordinary user may still write on this path's filesystem."""
        usage = os.statvfs(path)
        return usage.f_bavail * usage.f_frsize

    def filesystem(self, path: Path) -> int:
        """A number shared by all paths whose free space is the same space."""
        return os.stat(path).st_dev

    def identity(self, path: Path) -> str:
        """One name per folder, whatever path leads to it."""
        return os.path.realpath(path)

    def lock(self, path: Path) -> int:
        """Take the process-wide lock of this file, creating it if needed. BlockingIOError if another holds it.

        A POSIX lock: it goes with its process, however that dies, and a forked child does not keep it alive.
        It does not guard against this same process; `drive.py` keeps a list for that.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Always as long as before: a store on a full disk must still open.
            os.pwrite(descriptor, f"{os.getpid():<20}".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise BlockingIOError(error.errno, "locked", str(path)) from None
            raise
        return descriptor

    def lock_owner(self, path: Path) -> str:
        """The process that wrote itself into the lock, for an error message."""
        try:
            return f"process {int(path.read_text())}"
        except (OSError, ValueError):
            return "another process"
