"""Filling a new store: every parameter streamed in as fp32, split into wire weights and state, and committed.

Reading, splitting and writing go on at once, each a few pieces ahead of the next, so memory does not depend on the
model's size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from lohan.store import Handle, Store, open_arena, round_up

_IN_FLIGHT = 8
"""Pieces being written: eight keep a drive busy."""

_READERS = 3
"""Threads that read ahead, each a piece: with one, a billion parameters took 22.7 s, with three 15.7 s."""


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
    with on_one_core(), open_arena(_IN_FLIGHT * largest) as arena:
        pool = Pool(arena, largest, _IN_FLIGHT)
        store.begin(0)
        for layout, index, values in _read_ahead(layouts, source):
            if len(pending) == _IN_FLIGHT:
                _finish(pending)
            piece, buffer = layout.pieces.pieces[index], pool.lease()
            split = round_up(piece.weights_bytes)
            weights = buffer.tensor[:split]
            state = buffer.tensor[split : split + round_up(piece.state_bytes)]
            reached = 0
            for chunk in piece.chunks:
                part = values[reached : reached + chunk.num_elements]
                reached += chunk.num_elements
                start = chunk.weights_offset - piece.weights_offset
                wire = weights[start : start + chunk.num_elements * layout.wire.itemsize].view(layout.wire)
                if piece.state_bytes:
                    size = updater.state_bytes(chunk.num_elements)
                    updater.initialise(part, wire, state[chunk.state_offset : chunk.state_offset + size])
                else:
                    round_to_wire(part, wire)
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


def _read_ahead(layouts: Sequence[UnitLayout], source: MasterSource) -> Iterator[tuple[UnitLayout, int, Tensor]]:
    """Every piece with its values, in order. The values are the caller's until it asks for the next piece."""
    places = [(layout, index) for layout in layouts for index in range(len(layout.pieces.pieces))]
    most = max(layout.pieces.pieces[index].num_elements for layout, index in places)

    def read(layout: UnitLayout, index: int, memory: Tensor) -> Tensor:
        reached = 0
        for chunk in layout.pieces.pieces[index].chunks:
            name = layout.spec.params[chunk.tensor].name
            source.read(name, chunk.start, memory[reached : reached + chunk.num_elements])
            reached += chunk.num_elements
        return memory[:reached]

    num = _READERS + 1
    with (
        open_arena(num * round_up(4 * most)) as arena,
        ThreadPoolExecutor(_READERS, initializer=use_cores, initargs=(1,)) as readers,
    ):
        free = deque(as_tensor(arena.lease(4 * most).view).view(torch.float32) for _ in range(num))
        coming: deque[tuple[UnitLayout, int, Tensor, Future[Tensor]]] = deque()
        for layout, index in places:
            if not free:
                yield from _arrived(coming, free)
            memory = free.popleft()
            coming.append((layout, index, memory, readers.submit(read, layout, index, memory)))
        while coming:
            yield from _arrived(coming, free)


def _arrived(
    coming: deque[tuple[UnitLayout, int, Tensor, Future[Tensor]]], free: deque[Tensor]
) -> Iterator[tuple[UnitLayout, int, Tensor]]:
    layout, index, memory, values = coming.popleft()
    yield layout, index, values.result()
    free.append(memory)


def _finish(pending: deque[tuple[Handle, HostBuffer]]) -> None:
    handle, buffer = pending.popleft()
    handle.wait()
    buffer.release()
