"""From chunks in memory to requests on drives: few and large, checksummed on the thread that moves them.

Neighbouring chunks on one drive become one vectored request. A piece of memory that direct I/O cannot use as
it is (not on a page, or ending inside one) takes a detour through the worker's own aligned memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lohan.errors import StoreCorrupt
from lohan.store.arena import PAGE_BYTES, map_memory, round_up
from lohan.store.drive import Drive
from lohan.store.files import MAX_PIECES
from lohan.store.layout import Layout
from lohan.store.queues import Worker
from lohan.store.sealed import checksum
from lohan.store.transfer import EndOfFile, describe, read_fully, write_fully
from lohan.store.versions import Slots, Versions

REQUEST_BYTES = 12 << 20
"""A drive is no faster with more than 4 MiB at a time (benchmarks/results/
2026-11-16_store_io.md), but every request wakes a thread: with 4 MiB a step that computes on the same cores had a third
more context switches and took 2 to 4 % longer (benchmarks/results/2026-11-17_engine_threads.md)."""


@dataclass(frozen=True, slots=True)
class Request:
    """Consecutive bytes of one drive's data file, and the chunks that lie there."""

    drive: int
    offset: int
    chunks: npt.NDArray[np.int64]
    slots: Slots
    positions: tuple[int, ...]
    """Where each chunk starts in the caller's memory."""

    lengths: tuple[int, ...]


class Memory:
    """The caller's buffer: a flat view of it, and whether direct I/O can use it as it is."""

    __slots__ = ("aligned", "view")

    def __init__(self, buffer: object, *, writable: bool):
        view = memoryview(buffer)  # type: ignore[arg-type]
        if writable and view.readonly:
            raise ValueError("The buffer to read into is read-only.")
        self.view = view.cast("B") if view.nbytes else view
        address = np.frombuffer(self.view, np.uint8).__array_interface__["data"][0] if view.nbytes else 0
        self.aligned = address % PAGE_BYTES == 0


def plan_requests(layout: Layout, chunks: slice, slots: Slots) -> list[Request]:
    """Cut a run of chunks into requests, in an order that starts all drives at once."""
    drives = layout.chunk_drive[chunks]
    lengths = layout.chunk_length[chunks]
    padded = -(-lengths // PAGE_BYTES) * PAGE_BYTES
    positions = np.concatenate(([0], np.cumsum(padded)[:-1]))
    offsets = layout.file_offsets(chunks, slots)
    per_drive: list[list[Request]] = []
    for drive in np.unique(drives):
        own = np.flatnonzero(drives == drive)
        requests: list[Request] = []
        for run in _runs(offsets[own], padded[own]):
            picked = own[run]
            requests.append(
                Request(
                    drive=int(drive),
                    offset=int(offsets[picked[0]]),
                    chunks=picked + chunks.start,
                    slots=slots[picked],
                    positions=tuple(positions[picked].tolist()),
                    lengths=tuple(lengths[picked].tolist()),
                )
            )
        per_drive.append(requests)
    longest = max(len(requests) for requests in per_drive)
    return [requests[i] for i in range(longest) for requests in per_drive if i < len(requests)]


def _runs(offsets: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> Iterator[slice]:
    """Stretches of adjacent chunks, each small enough for one request."""
    adjacent = offsets[1:] == offsets[:-1] + sizes[:-1]
    start, total = 0, int(sizes[0])
    for i, size in enumerate(sizes[1:].tolist(), start=1):
        if not adjacent[i - 1] or total + size > REQUEST_BYTES or i - start >= MAX_PIECES // 2:
            yield slice(start, i)
            start, total = i, 0
        total += size
    yield slice(start, len(sizes))


def read_request(
    layout: Layout, versions: Versions, drive: Drive, request: Request, memory: Memory, worker: Worker, verify: bool
) -> None:
    """Read one request into the caller's memory and check every chunk of it."""
    pieces, detours = _pieces(request, memory, worker)
    try:
        read_fully(drive.files, drive.descriptor, pieces, request.offset)
    except EndOfFile:
        raise StoreCorrupt(
            f"{drive.data_path} ends inside record {_names(layout, request)} (offset {request.offset}). "
            "Restore the file, or create the store again from the model or its last export.",
            drive=str(drive.directory),
            record=layout.record_of_chunk(int(request.chunks[0]))[0].name,
            offset=request.offset,
        ) from None
    except OSError as error:
        raise describe(error, f"reading {_names(layout, request)}", drive.directory, offset=request.offset) from error
    for mine, theirs in detours:
        theirs[:] = mine[: len(theirs)]
    if not drive.direct:
        drive.files.drop_cache(drive.descriptor, request.offset, sum(len(p) for p in pieces))
    if not verify:
        return
    at = request.offset
    for chunk, slot, position, length in _each(request):
        if checksum(memory.view[position : position + length]) != versions.sums[slot, chunk]:
            record, start = layout.record_of_chunk(chunk)
            raise StoreCorrupt(
                f"Record {record.name!r} is damaged on {drive.directory}: the {length} bytes from its byte {start} "
                f"({drive.data_path.name} offset {at}) do not match their checksum. Check the drive's SMART data; "
                "create the store again from the model or its last export.",
                drive=str(drive.directory),
                record=record.name,
                offset=at,
            )
        at += round_up(length)


def write_request(
    layout: Layout, versions: Versions, drive: Drive, request: Request, memory: Memory, worker: Worker
) -> None:
    """Write one request from the caller's memory and remember every chunk's checksum."""
    pieces, detours = _pieces(request, memory, worker)
    for mine, theirs in detours:
        mine[: len(theirs)] = theirs
        mine[len(theirs) :] = bytes(len(mine) - len(theirs))
    for chunk, slot, position, length in _each(request):
        versions.sums[slot, chunk] = checksum(memory.view[position : position + length])
    try:
        write_fully(drive.files, drive.descriptor, pieces, request.offset)
    except OSError as error:
        raise describe(error, f"writing {_names(layout, request)}", drive.directory, offset=request.offset) from error
    if not drive.direct:
        drive.files.drop_cache(drive.descriptor, request.offset, sum(len(p) for p in pieces))


def _each(request: Request) -> Iterator[tuple[int, int, int, int]]:
    return zip(request.chunks.tolist(), request.slots.tolist(), request.positions, request.lengths, strict=True)


def _names(layout: Layout, request: Request) -> str:
    first = layout.record_of_chunk(int(request.chunks[0]))[0].name
    last = layout.record_of_chunk(int(request.chunks[-1]))[0].name
    return first if first == last else f"{first} to {last}"


def _pieces(
    request: Request, memory: Memory, worker: Worker
) -> tuple[Sequence[memoryview], list[tuple[memoryview, memoryview]]]:
    """The memory of a request in disk order, and the pairs (ours, caller's) that have to be copied."""
    pieces: list[memoryview] = []
    detours: list[tuple[memoryview, memoryview]] = []
    used = 0
    end = memory.view.nbytes
    for position, length in zip(request.positions, request.lengths, strict=True):
        size = round_up(length)
        whole = 0
        if memory.aligned:
            whole = size if position + size <= end else length // PAGE_BYTES * PAGE_BYTES
            if whole:
                pieces.append(memory.view[position : position + whole])
        if whole < size:
            if used == 0:
                bounce = _bounce(worker, sum(map(round_up, request.lengths)))
            ours = bounce[used : used + size - whole]
            used += size - whole
            pieces.append(ours)
            detours.append((ours, memory.view[position + whole : position + length]))
    return pieces, detours


def _bounce(worker: Worker, num_bytes: int) -> memoryview:
    if worker.bounce is None or len(worker.bounce) < num_bytes:
        worker.bounce = memoryview(map_memory(max(REQUEST_BYTES, num_bytes), touch=False))
    return worker.bounce
