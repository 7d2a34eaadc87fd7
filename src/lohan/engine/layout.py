"""From a model's units to the store's records, and back to tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lohan.models.units import ParamSpec, Units, UnitSpec
from lohan.optim.update import Updater
from lohan.plan.pieces import Chunk, TensorSize, UnitPieces, cut_unit
from lohan.plan.plan import ModelSize, UnitSize
from lohan.profiles import OperatorProfile
from lohan.store import RecordSpec


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """A unit, its pieces and the names of their records."""

    spec: UnitSpec
    pieces: UnitPieces
    wire: torch.dtype

    @property
    def weights_group(self) -> str:
        return f"{self.spec.name}/weights"

    def weights_record(self, piece: int) -> str:
        return f"{self.spec.name}/weights/{piece}"

    def state_record(self, piece: int) -> str:
        return f"{self.spec.name}/state/{piece}"

    @property
    def gradient_record(self) -> str:
        return f"{self.spec.name}/gradient"

    def tensor(self, buffer: Tensor, index: int) -> Tensor:
        """Parameter `index` in a buffer that holds the unit's weights or gradient."""
        param = self.spec.params[index]
        start = self.pieces.tensor_offset[index]
        flat = buffer[start : start + param.num_elements * self.wire.itemsize].view(self.wire)
        return flat.view(param.shape)

    def chunk(self, buffer: Tensor, chunk: Chunk) -> Tensor:
        """A chunk of a parameter in such a buffer, flat."""
        start = chunk.weights_offset
        return buffer[start : start + chunk.num_elements * self.wire.itemsize].view(self.wire)

    def params(self) -> Sequence[ParamSpec]:
        return self.spec.params


def lay_out(units: Units, wire: torch.dtype, updater: Updater, piece_elements: int) -> list[UnitLayout]:
    """Cut every unit into pieces."""
    return [
        UnitLayout(
            unit,
            cut_unit(
                [TensorSize(param.name, param.num_elements, param.trainable) for param in unit.params],
                element_bytes=wire.itemsize,
                state_bytes=updater.state_bytes,
                piece_elements=piece_elements,
            ),
            wire,
        )
        for unit in units
    ]


def records_of(layouts: Sequence[UnitLayout], *, gradients: bool) -> list[RecordSpec]:
    """All records of a run. Scratch records for gradients only if the plan sends them to SSD."""
    records = []
    for layout in layouts:
        for index, piece in enumerate(layout.pieces.pieces):
            name = layout.weights_record(index)
            records.append(RecordSpec(name=name, num_bytes=piece.weights_bytes, group=layout.weights_group))
        for index, piece in enumerate(layout.pieces.pieces):
            if piece.state_bytes:
                group = f"{layout.spec.name}/state"
                records.append(RecordSpec(name=layout.state_record(index), num_bytes=piece.state_bytes, group=group))
    if gradients:
        records += [
            RecordSpec(name=layout.gradient_record, num_bytes=layout.pieces.weights_bytes, scratch=True)
            for layout in layouts
            if layout.pieces.state_bytes
        ]
    return records


def model_size(
    layouts: Sequence[UnitLayout],
    *,
    tied: bool,
    tokens: int = 0,
    input_bytes: int = 0,
    operators: Mapping[int, tuple[OperatorProfile, ...]] | None = None,
    micro_batch_tokens: int = 0,
) -> ModelSize:
    """The numbers the plan works with, for `tokens` in a step and this size of a block's input in a micro-batch.

    `operators`: the heavy ones of each unit, for one micro-batch of `micro_batch_tokens`, where they are known. Forward
    FLOPs are theirs, attention included; elsewhere 2 per parameter and token, none for embedding tables.
    """
    known = operators or {}

    def forward_flops(unit: int, layout: UnitLayout) -> float:
        if known.get(unit):
            return sum(operator.flops for operator in known[unit]) * tokens / micro_batch_tokens
        if layout.spec.kind == "embedding":
            return 0.0
        return 2.0 * tokens * sum(p.num_elements for p in layout.spec.params if len(p.shape) >= 2)

    return ModelSize(
        tuple(
            UnitSize(
                kind=layout.spec.kind,
                weights_bytes=layout.pieces.weights_bytes,
                piece_weights_bytes=tuple(piece.weights_bytes for piece in layout.pieces.pieces),
                state_bytes=tuple(piece.state_bytes for piece in layout.pieces.pieces),
                num_parameters=layout.pieces.num_elements,
                forward_flops=forward_flops(unit, layout),
                input_bytes=input_bytes if layout.spec.kind == "block" else 0,
                operators=known.get(unit, ()),
            )
            for unit, layout in enumerate(layouts)
        ),
        tied=tied,
    )
