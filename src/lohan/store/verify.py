"""Reading everything once, to find damage before a run does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lohan.errors import StoreCorrupt, StoreError, StoreIOError
from lohan.store.arena import Slab, open_arena, round_up
from lohan.store.handle import Handle
from lohan.store.store import Store

_WINDOW_BYTES = 16 << 20
_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """One stretch of a record that cannot be read back as it was written."""

    record: str
    drive: str
    offset: int | None
    message: str


def verify_store(store: Store, progress: Callable[[int], None] | None = None) -> list[Problem]:
    """Read every byte that was written and check it; `progress` is told the bytes done as they are done.

    Goes on after damage: where a window fails, its chunks are read one by one and each bad one is reported.
    """
    problems: list[Problem] = []
    window = max(_WINDOW_BYTES, store.layout.chunk_bytes) // store.layout.chunk_bytes * store.layout.chunk_bytes
    pending: deque[tuple[Handle, Slab, str, int, int]] = deque()

    def finish() -> Slab:
        handle, slab, name, offset, size = pending.popleft()
        try:
            handle.wait()
        except StoreError:
            problems.extend(_one_by_one(store, name, offset, size, slab))
        if progress:
            progress(size)
        return slab

    with open_arena(_WINDOWS * round_up(window)) as arena:
        spare = [arena.lease(window) for _ in range(_WINDOWS)]
        for name, offset, size in _windows(store, window):
            slab = spare.pop() if spare else finish()
            handle = store.read(name, slab.padded[: round_up(size)], offset=offset, num_bytes=size)
            pending.append((handle, slab, name, offset, size))
        while pending:
            finish()
    return problems


def _windows(store: Store, window: int) -> Iterator[tuple[str, int, int]]:
    for record in store.layout.records:
        # A record may be written in part; scratch is nobody's promise.
        for offset, size in [] if record.scratch else store.written_parts(record.name):
            for start in range(offset, offset + size, window):
                yield record.name, start, min(window, offset + size - start)


def _one_by_one(store: Store, name: str, offset: int, size: int, slab: Slab) -> list[Problem]:
    problems = []
    for start in range(offset, offset + size, store.layout.chunk_bytes):
        length = min(store.layout.chunk_bytes, offset + size - start)
        try:
            store.read(name, slab.padded[: round_up(length)], offset=start, num_bytes=length).wait()
        except (StoreCorrupt, StoreIOError) as error:
            problems.append(Problem(name, error.drive, error.offset, str(error)))
    return problems
