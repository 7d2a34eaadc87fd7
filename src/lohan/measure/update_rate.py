"""How fast the CPU updates: the run's own Updater on pieces of the run's own size, and the norm of a gradient.

The memory is an arena's, as in a run, and larger than any cache, so every piece comes from RAM.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from lohan.engine.pools import as_tensor
from lohan.measure.timing import durations
from lohan.measure.traffic import Shares, Traffic
from lohan.optim import GradNorm, Updater
from lohan.plan.pieces import PIECE_ELEMENTS
from lohan.store import Arena, open_arena, round_up

_NUM_PIECES = 3
_BLOCK_PIECES = 2
"""That are updated between two operators of the model, where both run on the same cores: about a block's."""

_NORM_PIECES = 1
"""A norm is taken of a whole tensor; 8 million elements is a projection of a small model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateRate:
    """What the cores do to parameters whose state is in RAM, with all threads."""

    parameters_per_second: float
    norm_share: float
    """Of that time, what the norm of as many gradients takes."""

    shares: Shares | None = None
    """With traffic on the drives; None where that was not measured."""


def measure_update(
    updater: Updater,
    *,
    seconds: float = 2.0,
    piece_elements: int = PIECE_ELEMENTS,
    traffic: Traffic | None = None,
    computing: bool = False,
    block_pieces: int = _BLOCK_PIECES,
) -> UpdateRate:
    """The rate of this updater: its optimizer, its state format, its wire dtype.

    `computing`: on the same cores as the model, in turns with it, `block_pieces` at a time.
    """
    item = updater.wire_dtype.itemsize
    state_bytes = updater.state_bytes(piece_elements)
    weights_bytes = _NUM_PIECES * piece_elements * item
    with open_arena(2 * round_up(weights_bytes) + _NUM_PIECES * round_up(state_bytes)) as arena:
        # Every view of the arena's memory must be gone before it is closed, so they live in a call of their own.
        return _measure(updater, arena, seconds, piece_elements, traffic, block_pieces if computing else 0)


def _measure(
    updater: Updater, arena: Arena, seconds: float, size: int, traffic: Traffic | None, between: int
) -> UpdateRate:
    """`between`: how many are updated between two operators; 0: there are none."""
    wire, grad = (_values(arena, updater.wire_dtype, _NUM_PIECES * size, scale) for scale in (0.02, 1e-3))
    states = [as_tensor(arena.lease(updater.state_bytes(size)).view) for _ in range(_NUM_PIECES)]
    pieces = [slice(number * size, (number + 1) * size) for number in range(_NUM_PIECES)]
    for piece, state in zip(pieces, states, strict=True):
        updater.initialise(wire[piece], wire[piece], state)
    turns = cycle(range(_NUM_PIECES))
    step = 0

    def update() -> None:
        nonlocal step
        number = next(turns)
        step += number == 0
        piece = pieces[number]
        updater.update(
            wire[piece], states[number], grad[piece], step=step, lr=1e-5, weight_decay=0.01,
            in_team=between > 0,
        )  # fmt: skip

    tensors = cycle(range(0, _NUM_PIECES * size, _NORM_PIECES * size))

    def norm() -> None:
        start = next(tensors)
        GradNorm.tensor_norm(grad[start : start + _NORM_PIECES * size])

    matrix = torch.ones(1024, 1024)

    def compute() -> None:
        for _ in range(4):
            matrix @ matrix

    # As in a run: right after operators, by their helpers.
    taken = partial(durations, before=compute if between else None, every=between or 1)
    share = 0.8 if traffic is None else 0.4
    updating = statistics.mean(taken(update, share * seconds, least=_NUM_PIECES))
    taking_norms = statistics.median(taken(norm, 0.2 * seconds)) / _NORM_PIECES
    shares = None
    if traffic is not None:
        # State comes and goes at the drives' pace, and meanwhile the cores compute, or have nothing to do.
        moved = 2 * (updater.state_bytes(size) + size * updater.wire_dtype.itemsize)
        pause = partial(time.sleep, max(0.0, moved / traffic.rate - updating))
        with traffic.flowing() as flow:
            beside = statistics.mean(
                taken(update, share * seconds, least=_NUM_PIECES)
                if between
                else durations(update, share * seconds, least=_NUM_PIECES, before=pause)
            )
        shares = traffic.shares(updating, beside, flow)
    return UpdateRate(parameters_per_second=size / updating, norm_share=taking_norms / updating, shares=shares)


def _values(arena: Arena, dtype: torch.dtype, num: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = as_tensor(arena.lease(num * dtype.itemsize).view).view(dtype)
    some = (torch.randn(1 << 16, generator=generator) * scale).to(dtype)
    for start in range(0, num, some.numel()):
        values[start : start + some.numel()] = some[: num - start]
    return values
