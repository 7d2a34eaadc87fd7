"""What a step takes of one resource when nothing else goes on: the parts of the limit a step is measured against."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lohan.engine.layout import UnitLayout, records_of
from lohan.store import Arena, Handle, Slab, Store, create_store, has_store, open_arena, open_store, round_up
from lohan.store.files import Files
from lohan.store.sealed import checksum

_UNDER_WAY = 4
"""Records each way: a piece's state is several requests to the drive."""


def drive_alone(layouts: Sequence[UnitLayout], directory: Path, files: Files | None = None) -> float:
    """Seconds to read and write what one step does, in a store of its own, with nothing else going on."""
    records = records_of(layouts, gradients=False)
    if not has_store(directory, files):
        create_store([directory], records, files=files)
    reads, writes = step_records(layouts)
    most = round_up(max(record.num_bytes for record in records))
    with open_store([directory], files=files) as store, open_arena(2 * _UNDER_WAY * most) as arena:
        first = (store.committed_step or 0) + 1
        if first == 1:  # both slots of every record are written once before anything is timed
            for step in (1, 2):
                store.begin(step)
                _stream(store, arena, [], writes)
                store.commit(step, {}).wait()
            first = 3
        store.begin(first)
        started = time.perf_counter()
        _stream(store, arena, reads, writes)
        seconds = time.perf_counter() - started
        store.commit(first, {}).wait()
    return seconds


def step_records(layouts: Sequence[UnitLayout]) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Name and size of every record that one step reads and writes when nothing stays in memory."""
    reads, writes = [], []
    for layout in layouts:
        for index, piece in enumerate(layout.pieces.pieces):
            weights = (layout.weights_record(index), piece.weights_bytes)
            state = (layout.state_record(index), piece.state_bytes)
            reads += [weights, state] + ([weights] if layout.spec.kind == "block" else [])
            writes += [weights, state]
    return reads, writes


def _stream(store: Store, arena: Arena, reads: list[tuple[str, int]], writes: list[tuple[str, int]]) -> None:
    """Both streams at once, some records of each under way."""
    most = arena.num_bytes // (2 * _UNDER_WAY)

    def run(start: Callable[[str, memoryview], Handle], records: list[tuple[str, int]]) -> None:
        pending: deque[tuple[Handle, Slab]] = deque()
        for name, size in records:
            if len(pending) == _UNDER_WAY:
                handle, slab = pending.popleft()
                handle.wait()
            else:
                slab = arena.lease(most)
            pending.append((start(name, slab.padded[: round_up(size)]), slab))
        for handle, slab in pending:
            handle.wait()
            slab.release()

    # The records of one stream are written while the other reads them: the store orders each pair, so the writer
    # starts in the middle of the list and the two never meet.
    half = len(writes) // 2
    writer = threading.Thread(target=run, args=(store.write, writes[half:] + writes[:half]))
    writer.start()
    run(store.read, reads)
    writer.join()


def checksum_rate() -> float:
    """Bytes per second of the store's checksum with all cores on it, from what one core does.

    From RAM, as a record comes from the drive, and not from a cache: in requests over more memory than any cache has.
    """
    data = memoryview(bytearray(os.urandom(1 << 20) * 512))
    request = 4 << 20
    started = time.perf_counter()
    for start in range(0, len(data), request):
        checksum(data[start : start + request])
    return torch.get_num_threads() * len(data) / (time.perf_counter() - started)


def sequential_rates(directory: Path, num_bytes: int = 1 << 30) -> tuple[float, float]:
    """Bytes per second of reading and of writing one file from end to end with O_DIRECT, 4 threads and 8 MiB requests.

    The fastest plain loop found for such drives: benchmarks/results/2026-11-16_store_io.md
    """
    request, threads = 8 << 20, 4
    path = directory / "sequential"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    memory = mmap.mmap(-1, request * threads)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)  # small pages would be cut into several requests
        memory.write(bytes(request * threads))
        os.posix_fallocate(descriptor, 0, num_bytes)

        def run(write: bool) -> float:
            def work(thread: int) -> None:
                own = memoryview(memory)[thread * request : (thread + 1) * request]
                for offset in range(thread * request, num_bytes - request + 1, threads * request):
                    moved = os.pwritev(descriptor, [own], offset) if write else os.preadv(descriptor, [own], offset)
                    if moved != request:
                        raise OSError(f"{moved} of {request} bytes at {offset}")
                own.release()

            started = time.perf_counter()
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, range(threads)))
            if write:
                os.fsync(descriptor)
            return num_bytes // request * request / (time.perf_counter() - started)

        run(write=True)  # the first time over, the file system is still putting the file together
        write_rate = run(write=True)
        return run(write=False), write_rate
    finally:
        os.close(descriptor)
        path.unlink()
        memory.close()
