"""What the simulator runs: operations of the Schedule, and those of systems that only exist here.

A SimOp names its lane itself, so that a strategy the engine cannot run needs no entry in the Schedule's tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lohan.plan.schedule import Key


class AnyOp(Protocol):
    """As much of an operation as the simulator looks at: `plan.schedule.Op` has it, and SimOp."""

    @property
    def key(self) -> Key: ...
    @property
    def waits(self) -> tuple[Key, ...]: ...
    @property
    def source(self) -> Key | None: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def flops(self) -> float: ...
    @property
    def lane(self) -> str: ...


@dataclass(frozen=True, slots=True)
class SimOp:
    """An operation of a simulated system."""

    key: Key
    lane: str
    waits: tuple[Key, ...] = ()
    source: Key | None = None
    num_bytes: int = 0
    flops: float = 0.0
    seconds: float = 0.0
    """Time it takes whatever the machine, on top of its bytes and FLOPs."""
