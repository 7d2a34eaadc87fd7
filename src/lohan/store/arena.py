"""Host memory for staging: one budget, taken at start, leased out in page-aligned slabs.

Everything between SSD and device passes through here, so this file sets how much RAM staging uses:
`num_bytes`, mapped and touched once, never grown. A slab belongs to its lease until release(). Leases
are granted strictly in the order they were asked for, so a large one cannot starve behind small ones, and
since free neighbours are merged, a lease that fits the arena is granted once enough others are released: never
wait for a lease on the thread that must release the others. lease() and release() are safe from any thread.
"""

from __future__ import annotations

import bisect
import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

import numpy as np

from lohan.errors import ArenaError
from lohan.sizes import format_bytes

PAGE_BYTES = 4096


def round_up(num_bytes: int, to: int = PAGE_BYTES) -> int:
    """The next multiple of `to`."""
    return -(-num_bytes // to) * to


def map_memory(num_bytes: int, *, touch: bool = True) -> mmap.mmap:
    """Private, page-aligned memory; with `touch` its pages exist now and no page fault is paid for later."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if touch:
        # Small pages lie scattered, and a drive takes only so many pieces in one request (254 is common): 4 MiB of
        # them become five requests, of large pages one. Reads are half as fast again and cost a fifth of the CPU time:
        # benchmarks/results/2026-11-16_store_io.md.
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except (AttributeError, OSError):
            pass  # a kernel without large pages; everything works with small ones
        np.frombuffer(mapping, np.uint8)[::PAGE_BYTES] = 0
    return mapping


class Slab:
    """One lease: `view` is the memory asked for, `padded` the same memory up to the end of its last page."""

    __slots__ = ("_arena", "num_bytes", "offset", "padded", "view")

    def __init__(self, arena: Arena, offset: int, num_bytes: int):
        self._arena: Arena | None = arena
        self.offset = offset
        self.num_bytes = num_bytes
        self.padded = arena.memory[offset : offset + round_up(num_bytes)]
        self.view = self.padded[:num_bytes]

    def release(self) -> None:
        """Give the memory back. Calling it twice is harmless."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena._give_back(self.offset, round_up(self.num_bytes))

    def __enter__(self) -> Slab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


class Arena:
    """A fixed budget of page-aligned memory, leased in slabs of any size."""

    def __init__(self, num_bytes: int):
        if num_bytes < PAGE_BYTES:
            raise ArenaError(f"A staging arena of {num_bytes} bytes is too small: it needs at least {PAGE_BYTES}.")
        self.num_bytes = num_bytes // PAGE_BYTES * PAGE_BYTES
        try:
            self._mapping = map_memory(self.num_bytes)
        except (OSError, ValueError, OverflowError) as error:
            raise ArenaError(
                f"The system refused {format_bytes(self.num_bytes)} of staging memory ({error}). Lower host_memory."
            ) from error
        self.memory = memoryview(self._mapping)
        # Free ranges as parallel sorted lists; neighbours are always merged, so both stay short.
        self._starts = [0]
        self._sizes = [self.num_bytes]
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._closed = False
        self.peak_bytes = 0
        self._leased = 0

    @property
    def leased_bytes(self) -> int:
        return self._leased

    @property
    def free_bytes(self) -> int:
        return self.num_bytes - self._leased

    def lease(self, num_bytes: int, *, timeout_seconds: float | None = None) -> Slab:
        """Wait until `num_bytes` of contiguous memory are free and take them.

        Raises ArenaError at once if the arena could never hold it, and TimeoutError if asked to give up.
        """
        size = self._check(num_bytes)
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                ready = self._changed.wait_for(
                    lambda: self._closed or (self._waiting[0] is ticket and self._best(size) is not None),
                    timeout_seconds,
                )
                if self._closed:
                    raise ArenaError("The staging arena was closed while a lease waited for memory.")
                if not ready:
                    raise TimeoutError(
                        f"No {format_bytes(size)} of staging memory came free in {timeout_seconds} s: "
                        f"{format_bytes(self._leased)} of {format_bytes(self.num_bytes)} are leased."
                    )
                return self._take(num_bytes, size)
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def try_lease(self, num_bytes: int) -> Slab | None:
        """The same without waiting: None when others are ahead or the memory is not free."""
        size = self._check(num_bytes)
        with self._changed:
            if self._closed:
                raise ArenaError("The staging arena is closed.")
            if self._waiting or self._best(size) is None:
                return None
            return self._take(num_bytes, size)

    def _check(self, num_bytes: int) -> int:
        if num_bytes <= 0:
            raise ArenaError(f"A lease of {num_bytes} bytes makes no sense.")
        size = round_up(num_bytes)
        if size > self.num_bytes:
            raise ArenaError(
                f"A lease of {format_bytes(size)} can never fit the staging arena of {format_bytes(self.num_bytes)}. "
                f"Raise host_memory by at least {format_bytes(size - self.num_bytes)}."
            )
        return size

    def _best(self, size: int) -> int | None:
        """The smallest free range that holds `size`: small leases leave the large ranges whole."""
        fits = [(free, index) for index, free in enumerate(self._sizes) if free >= size]
        return min(fits)[1] if fits else None

    def _take(self, num_bytes: int, size: int) -> Slab:
        index = self._best(size)
        assert index is not None
        offset = self._starts[index]
        if self._sizes[index] == size:
            del self._starts[index], self._sizes[index]
        else:
            self._starts[index] += size
            self._sizes[index] -= size
        self._leased += size
        self.peak_bytes = max(self.peak_bytes, self._leased)
        return Slab(self, offset, num_bytes)

    def _give_back(self, offset: int, size: int) -> None:
        with self._changed:
            index = bisect.bisect(self._starts, offset)
            self._starts.insert(index, offset)
            self._sizes.insert(index, size)
            if index + 1 < len(self._starts) and offset + size == self._starts[index + 1]:
                self._sizes[index] += self._sizes.pop(index + 1)
                del self._starts[index + 1]
            if index > 0 and self._starts[index - 1] + self._sizes[index - 1] == offset:
                self._sizes[index - 1] += self._sizes.pop(index)
                del self._starts[index]
            self._leased -= size
            self._changed.notify_all()

    def close(self) -> None:
        """Wake whoever waits with an error, and free the memory once the last view of it is gone."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self.memory.release()
        try:
            self._mapping.close()
        except BufferError:
            pass  # a slab's view is still alive somewhere; the mapping goes with it


@contextmanager
def open_arena(num_bytes: int) -> Iterator[Arena]:
    """An arena that is closed on the way out."""
    arena = Arena(num_bytes)
    try:
        yield arena
    finally:
        arena.close()
