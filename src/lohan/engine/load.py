"""Filling a new store: every parameter streamed in as fp32, split into wire weights and state, and committed.

Reading, splitting and writing go on at once, each a few pieces ahead of the next, so memory does not depend on the
model's size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from lohan.engine.cores import on_one_core, use_cores
from lohan.engine.engine import join
from lohan.engine.layout import UnitLayout
from lohan.engine.pools import HostBuffer, Pool, as_tensor
from lohan.models.source import MasterSource
from lohan.optim.rounding import round_to_wire
from lohan.optim.update import Updater
from lohan.plan.pieces import Chunk, Piece
from lohan.store import Handle, Store, open_arena, round_up

_IN_FLIGHT = 2
"""Pieces: one is being written, several requests at once, while the next is filled."""

_READ_ELEMENTS = 1 << 20
_READERS = 3
"""Threads that read ahead, each so many elements: with one, a billion parameters took 22.7 s, with three 15.7 s."""


def fill_store(
    store: Store,
    layouts: Sequence[UnitLayout],
    updater: Updater,
    source: MasterSource,
    metadata: dict[str, Any],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write all weights and fresh state as step 0. `progress` is told parameters as they are done."""
    largest = max(
        round_up(piece.weights_bytes) + round_up(piece.state_bytes)
        for layout in layouts
        for piece in layout.pieces.pieces
    )
    pending: deque[tuple[Handle, HostBuffer]] = deque()
    # What there is to compute keeps one core busy for half the time. The helpers of operators on more would stay awake
    # in between, on cores that the threads that read and write need: half of the CPU time for a billion parameters.
    with (
        on_one_core(),
        open_arena(_IN_FLIGHT * largest) as arena,
        closing(_read_ahead(layouts, source)) as parts,
    ):
        pool = Pool(arena, largest, _IN_FLIGHT)
        store.begin(0)
        for layout in layouts:
            for index, piece in enumerate(layout.pieces.pieces):
                if len(pending) == _IN_FLIGHT:
                    _finish(pending)
                buffer, split = pool.lease(), round_up(piece.weights_bytes)
                _fill(buffer.tensor[:split], buffer.tensor[split:], piece, layout, updater, parts)
                handles = [store.write(layout.weights_record(index), buffer.view[:split])]
                if piece.state_bytes:
                    view = buffer.view[split : split + round_up(piece.state_bytes)]
                    handles.append(store.write(layout.state_record(index), view))
                pending.append((join(handles), buffer))
                if progress is not None:
                    progress(piece.num_elements)
        while pending:
            _finish(pending)
        store.commit(0, metadata).wait()


def _parts(piece: Piece) -> Iterator[tuple[Chunk, int]]:
    """What is read at once: chunks of a piece, each from an element of its own on."""
    return ((chunk, start) for chunk in piece.chunks for start in range(0, chunk.num_elements, _READ_ELEMENTS))


def _fill(
    weights: Tensor, state: Tensor, piece: Piece, layout: UnitLayout, updater: Updater, parts: Iterator[Tensor]
) -> None:
    """The weights and the state of a piece, from its parts."""
    for chunk, start in _parts(piece):
        values, first = next(parts), chunk.weights_offset - piece.weights_offset
        wire = weights[first : first + chunk.num_elements * layout.wire.itemsize].view(layout.wire)
        if piece.state_bytes:
            size = updater.state_bytes(chunk.num_elements)
            updater.initialise(values, wire, state[chunk.state_offset : chunk.state_offset + size], start)
        else:
            round_to_wire(values, wire[start : start + values.numel()])


def _read_ahead(layouts: Sequence[UnitLayout], source: MasterSource) -> Generator[Tensor, None, None]:
    """The values of all parts, in order. They are the caller's until it asks for the next."""
    places = [
        (layout.spec.params[chunk.tensor].name, chunk.start + start, min(_READ_ELEMENTS, chunk.num_elements - start))
        for layout in layouts
        for piece in layout.pieces.pieces
        for chunk, start in _parts(piece)
    ]

    def read(name: str, start: int, values: Tensor) -> Tensor:
        source.read(name, start, values)
        return values

    num = _READERS + 1
    with (
        open_arena(num * 4 * _READ_ELEMENTS) as arena,
        ThreadPoolExecutor(_READERS, initializer=use_cores, initargs=(1,)) as readers,
    ):
        free = deque(as_tensor(arena.lease(4 * _READ_ELEMENTS).view).view(torch.float32) for _ in range(num))
        coming: deque[tuple[Tensor, Future[Tensor]]] = deque()
        for name, start, count in places:
            if not free:
                yield from _arrived(coming, free)
            memory = free.popleft()
            coming.append((memory, readers.submit(read, name, start, memory[:count])))
        while coming:
            yield from _arrived(coming, free)


def _arrived(coming: deque[tuple[Tensor, Future[Tensor]]], free: deque[Tensor]) -> Iterator[Tensor]:
    memory, values = coming.popleft()
    yield values.result()
    free.append(memory)


def _finish(pending: deque[tuple[Handle, HostBuffer]]) -> None:
    handle, buffer = pending.popleft()
    handle.wait()
    buffer.release()
