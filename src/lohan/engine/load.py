"""Filling a new store: every parameter streamed in as fp32, split into wire weights and state, and committed.

Memory does not depend on the model's size: a few pieces are on their way at any time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lohan.engine.engine import join
from lohan.engine.layout import UnitLayout
from lohan.engine.pools import HostBuffer, Pool
from lohan.models.source import MasterSource
from lohan.optim.rounding import round_to_wire
from lohan.optim.update import Updater
from lohan.store import Handle, Store, open_arena, round_up

_IN_FLIGHT = 4


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
    elements = max(chunk.num_elements for layout in layouts for p in layout.pieces.pieces for chunk in p.chunks)
    values = torch.empty(elements, dtype=torch.float32)
    pending: deque[tuple[Handle, HostBuffer]] = deque()
    with open_arena(_IN_FLIGHT * largest) as arena:
        pool = Pool(arena, largest, _IN_FLIGHT)
        store.begin(0)
        for layout in layouts:
            for index, piece in enumerate(layout.pieces.pieces):
                if len(pending) == _IN_FLIGHT:
                    _finish(pending)
                buffer = pool.lease()
                split = round_up(piece.weights_bytes)
                weights = buffer.tensor[:split]
                state = buffer.tensor[split : split + round_up(piece.state_bytes)]
                for chunk in piece.chunks:
                    param = layout.spec.params[chunk.tensor]
                    part = values[: chunk.num_elements]
                    source.read(param.name, chunk.start, part)
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


def _finish(pending: deque[tuple[Handle, HostBuffer]]) -> None:
    handle, buffer = pending.popleft()
    handle.wait()
    buffer.release()
