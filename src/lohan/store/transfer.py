"""Whole transfers on top of file calls that may stop short, and the translation of what went wrong.

The kernel may move fewer bytes than asked. With direct I/O a continuation must start on a page again, so a
transfer that stopped inside one goes back to its start.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from lohan.errors import StoreError, StoreFull, StoreIOError
from lohan.store.arena import PAGE_BYTES
from lohan.store.files import Buffer, Files

# A call that moves nothing is tried again this often before we call the drive broken. Picked by feel.
_MAX_STALLS = 8


class EndOfFile(Exception):
    """The file ends before the transfer does."""


def read_fully(files: Files, descriptor: int, pieces: Sequence[memoryview], offset: int) -> None:
    """Fill all pieces from `offset` on. EndOfFile if the file is too short, OSError from the drive."""
    _move(lambda rest, at: files.read(descriptor, rest, at), pieces, offset, reading=True)


def write_fully(files: Files, descriptor: int, pieces: Sequence[memoryview], offset: int) -> None:
    """Write all pieces at `offset`. OSError from the drive."""
    _move(lambda rest, at: files.write(descriptor, rest, at), pieces, offset, reading=False)


def _move(call, pieces: Sequence[memoryview], offset: int, *, reading: bool) -> None:  # type: ignore[no-untyped-def]
    total = sum(len(piece) for piece in pieces)
    done, stalls = 0, 0
    while done < total:
        moved = call(_after(pieces, done), offset + done)
        if moved == 0 and reading:
            raise EndOfFile
        reached = done + moved
        if reached < total:
            reached -= reached % PAGE_BYTES
        stalls = stalls + 1 if reached <= done else 0
        if stalls > _MAX_STALLS:
            raise OSError(errno.EIO, f"the drive moves no bytes at offset {offset + done}")
        done = max(done, reached)


def _after(pieces: Sequence[Buffer], skip: int) -> Sequence[Buffer]:
    if skip == 0:
        return pieces
    rest: list[Buffer] = []
    for piece in pieces:
        if skip >= len(piece):
            skip -= len(piece)
        else:
            rest.append(memoryview(piece)[skip:])
            skip = 0
    return rest


_ADVICE = {
    errno.EROFS: "The filesystem is read-only: remount it for writing, or choose another directory.",
    errno.EACCES: "Permission is missing: change the owner or mode of the directory, or choose another.",
    errno.EPERM: "Permission is missing: change the owner or mode of the directory, or choose another.",
    errno.EIO: "The drive failed: look at the kernel log (dmesg) and the drive's SMART data, and replace it.",
    errno.ENOENT: "It has vanished: mount the drive again, then repeat the command.",
    errno.ENODEV: "The drive is gone: connect and mount it again, then repeat the command.",
    errno.ENXIO: "The drive is gone: connect and mount it again, then repeat the command.",
    errno.ESTALE: "The filesystem is gone: mount it again, then repeat the command.",
    errno.ELOOP: "A link stands where the store's own file should be: remove the link.",
    errno.EMFILE: "Too many files are open: raise the limit with `ulimit -n 65536`.",
}


def describe(error: OSError, doing: str, drive: Path, *, offset: int | None = None) -> StoreError:
    """Our error for what the system said, with what to do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(
            f"{drive} ran out of space while {doing}. Free some space there and repeat the command; "
            "what was committed is untouched."
        )
    where = f" at offset {offset}" if offset is not None else ""
    reason = os.strerror(error.errno) if error.errno else str(error)
    advice = _ADVICE.get(error.errno or 0, "Check the drive and its mount, then repeat the command.")
    return StoreIOError(
        f"{drive}: {reason}{where} while {doing}. {advice}", drive=str(drive), offset=offset, errno=error.errno
    )
