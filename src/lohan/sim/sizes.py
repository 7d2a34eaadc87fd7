"""From a model's profile to the sizes a Schedule is built from.

The engine cuts units into pieces of a million parameters. A simulation of 175B cannot afford 170,000 pieces, nor does
it need them: a unit in `max_pieces` pieces overlaps its reading, updating and writing well enough.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from lohan.plan.pieces import PIECE_ELEMENTS
from lohan.plan.plan import ModelSize, Plan, UnitSize
from lohan.profiles import ModelProfile, UnitProfile

MAX_PIECES = 8
"""Per unit. 16 changes the simulated step of 13B and of 175B by less than 0.1 % (measured with 8 to 64 slabs)."""


_ALL_PIECES = 400
"""Of a model whose plan has few slabs. 1B is then planned in 2 to 3 s."""


def size_model(
    profile: ModelProfile,
    *,
    num_micro_batches: int = 1,
    wire_bytes: int = 2,
    state_bytes_per_parameter: float = 12.0,
    max_pieces: int = MAX_PIECES,
) -> ModelSize:
    """The units of a step with this many micro-batches of the profile's size."""
    made: dict[int, UnitSize] = {}

    def size(unit: UnitProfile) -> UnitSize:
        if id(unit) not in made:
            made[id(unit)] = _size_unit(unit, num_micro_batches, wire_bytes, state_bytes_per_parameter, max_pieces)
        return made[id(unit)]

    return ModelSize(tuple(size(unit) for unit in profile.units), profile.tied)


def _size_unit(
    unit: UnitProfile, num_micro_batches: int, wire_bytes: int, state_bytes: float, max_pieces: int
) -> UnitSize:
    count = unit.num_parameters
    pieces = min(max_pieces, -(-count // PIECE_ELEMENTS))
    bounds = [count * piece // pieces for piece in range(pieces + 1)] if pieces else [0]
    elements = [high - low for low, high in pairwise(bounds)]
    return UnitSize(
        kind=unit.kind,
        weights_bytes=count * wire_bytes,
        piece_weights_bytes=tuple(number * wire_bytes for number in elements),
        state_bytes=tuple(round(number * state_bytes) for number in elements),
        num_parameters=count,
        forward_flops=unit.forward_flops * num_micro_batches,
        input_bytes=unit.input_bytes,
        operators=unit.operators,
    )


def with_fewer_pieces(model: ModelSize, plan: Plan, max_pieces: int = MAX_PIECES) -> tuple[ModelSize, Plan]:
    """Units of many pieces in at most so many, and slabs for as much state: 70B has 70,000 pieces.

    Two slabs are the fewest there are, and of larger pieces they hold more than the plan has. So where it has few,
    pieces stay smaller, as far as the model is small.
    """
    most = max(len(unit.state_bytes) for unit in model.units)
    max_pieces = max(max_pieces, min(2 * most // max(plan.state_slabs, 1), _ALL_PIECES // len(model.units)))
    if most <= max_pieces:
        return model, plan
    made: dict[int, UnitSize] = {}
    for unit in model.units:
        if id(unit) not in made:
            made[id(unit)] = _with_fewer(unit, max_pieces)
    coarse = replace(model, units=tuple(made[id(unit)] for unit in model.units))
    piece, larger = (
        max((max(unit.state_bytes, default=0) for unit in one.units), default=0) for one in (model, coarse)
    )
    slabs = max(2, plan.state_slabs * piece // max(larger, 1), plan.blocks_in_flight * max_pieces)
    return coarse, replace(plan, state_slabs=slabs)


def _with_fewer(unit: UnitSize, max_pieces: int) -> UnitSize:
    count = min(max_pieces, len(unit.state_bytes))
    bounds = [len(unit.state_bytes) * part // count for part in range(count + 1)] if count else [0]
    weights, state = (
        tuple(sum(sizes[low:high]) for low, high in pairwise(bounds))
        for sizes in (unit.piece_weights_bytes, unit.state_bytes)
    )
    return replace(unit, piece_weights_bytes=weights, state_bytes=state)
