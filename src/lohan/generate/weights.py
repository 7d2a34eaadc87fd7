"""Where a unit's weights come from when a model only writes: a run's store, or the files of a folder.

read() fills tensors of any floating dtype, in RAM or on a device, in pieces of a few megabytes: what is staged does not
depend on the size of a unit. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from lohan.engine.layout import UnitLayout
from lohan.models.checkpoint import Checkpoint, read_elements
from lohan.store import Handle, Store, round_up
from lohan.store.arena import map_memory

_COPIED_ELEMENTS = 1 << 20
"""At once, to a device with memory of its own."""

_IN_FLIGHT = 3
"""Pieces of up to 17 MB under way at once: enough for a drive's full rate. Picked by arithmetic."""


class Weights(Protocol):
    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill each tensor with the parameter of this name."""


class StoreWeights:
    """The weights a store holds now: those of its last commit, or of the step that an open run has finished."""

    def __init__(self, store: Store, layouts: Sequence[UnitLayout]):
        self._store = store
        self._pieces: dict[str, list[tuple[UnitLayout, int]]] = {}
        largest = 0
        for layout in layouts:
            for number, piece in enumerate(layout.pieces.pieces):
                largest = max(largest, round_up(piece.weights_bytes))
                for name in {layout.spec.params[chunk.tensor].name for chunk in piece.chunks}:
                    self._pieces.setdefault(name, []).append((layout, number))
        self._staging = [
            torch.from_numpy(np.frombuffer(map_memory(largest), dtype=np.uint8)) for _ in range(_IN_FLIGHT)
        ]

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        wanted = {(layout.spec.index, number): layout for name in tensors for layout, number in self._pieces[name]}
        free = list(self._staging)
        pending: deque[tuple[Handle, Tensor, UnitLayout, int]] = deque()
        try:
            for (_, number), layout in sorted(wanted.items(), key=lambda item: item[0]):
                if not free:
                    free.append(self._finish(*pending.popleft(), tensors))
                staging = free.pop()
                size = layout.pieces.pieces[number].weights_bytes
                handle = self._store.read(layout.weights_record(number), staging[: round_up(size)].numpy())
                pending.append((handle, staging, layout, number))
            while pending:
                self._finish(*pending.popleft(), tensors)
        finally:
            for handle, *_ in pending:  # after an error: memory on its way belongs to the store until it is there
                handle.then(lambda _: None)
            if pending:
                self._store.drain()

    @staticmethod
    def _finish(
        handle: Handle, staging: Tensor, layout: UnitLayout, number: int, tensors: Mapping[str, Tensor]
    ) -> Tensor:
        handle.wait()
        piece = layout.pieces.pieces[number]
        for chunk in piece.chunks:
            target = tensors.get(layout.spec.params[chunk.tensor].name)
            if target is None:
                continue
            start = chunk.weights_offset - piece.weights_offset
            wire = staging[start : start + chunk.num_elements * layout.wire.itemsize].view(layout.wire)
            target.view(-1)[chunk.start : chunk.start + chunk.num_elements].copy_(wire)
        return staging


class FolderWeights:
    """The weights in a Hugging Face folder."""

    def __init__(self, checkpoint: Checkpoint):
        self._checkpoint = checkpoint

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            stored, flat = self._checkpoint.params[name], tensor.view(-1)
            if flat.device.type == "cpu":
                read_elements(self._checkpoint.folder, stored, flat, 0)
                continue
            staging = torch.empty(min(_COPIED_ELEMENTS, flat.numel()), dtype=flat.dtype)
            for start in range(0, flat.numel(), _COPIED_ELEMENTS):
                part = staging[: min(_COPIED_ELEMENTS, flat.numel() - start)]
                read_elements(self._checkpoint.folder, stored, part, start)
                flat[start : start + part.numel()].copy_(part)
