"""Which operators' outputs are kept for backward, and where: LoHan's traffic-aware activation swapping.

Pure: numbers in, decision out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lohan.profiles import OperatorProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """What happens to every unit's activations between forward and backward."""

    inputs: tuple[str, ...] = ()
    """For each unit, where its input waits: device, host or ssd."""

    kept: tuple[tuple[tuple[int, str], ...], ...] = ()
    """For each unit, the heavy operators whose outputs are kept: (number, tier). The rest is computed again."""

    transit_bytes: int | None = None
    """The most that one micro-batch of one unit sends to SSD; None: worked out from the operators' sizes."""

    host_bytes: int | None = None
    """All that waits in host memory; None: worked out."""


def recomputed(operators: Sequence[OperatorProfile], kept: Collection[int]) -> set[int]:
    """The heavy operators of a block that backward has to compute again when these are kept."""
    again: set[int] = set()
    waiting = [number for number, one in enumerate(operators) if one.needed or one.always]
    while waiting:
        number = waiting.pop()
        if number in again or number in kept:
            continue
        again.add(number)
        waiting += operators[number].inputs
    return again


def recompute_flops(operators: Sequence[OperatorProfile], kept: Collection[int]) -> float:
    """What computing them again costs, for one micro-batch."""
    return sum(operators[number].flops for number in recomputed(operators, kept))
