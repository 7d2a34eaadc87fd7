"""Changes to a Schedule's operations that turn it into one of a system we only compare with.

Each takes a step's operations and gives new ones; keys and lanes stay, so waits still mean the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lohan.sim.op import AnyOp, SimOp


def copy_op(op: AnyOp, **changes: object) -> SimOp:
    """The same operation with some fields changed."""
    fields: dict[str, object] = {
        "key": op.key, "lane": op.lane, "waits": op.waits, "source": op.source, "num_bytes": op.num_bytes,
        "flops": op.flops, "seconds": getattr(op, "seconds", 0.0),
    }  # fmt: skip
    return SimOp(**(fields | changes))  # type: ignore[arg-type]


def with_several_devices(ops: Sequence[AnyOp], *, gpus: int, bytes_per_second: float) -> list[AnyOp]:
    """One of several devices that share host and drives, each with its part of the batch and a link of its own.

    Weights and state are read and written once for all; activations on SSD are those of all devices. Before a piece's
    update, whoever updates sums its gradient over the devices, in host memory.
    """
    gradient_bytes = {(op.key.step, op.key.unit): op.num_bytes for op in ops if op.key.kind == "gradient"}
    state_bytes: Counter[tuple[int, int]] = Counter()
    for op in ops:
        if op.key.kind == "update":
            state_bytes[op.key.step, op.key.unit] += op.num_bytes
    result: list[AnyOp] = []
    for op in ops:
        place = (op.key.step, op.key.unit)
        if op.key.kind == "update" and state_bytes[place]:
            share = op.num_bytes / state_bytes[place]
            moved = gradient_bytes.get(place, 0) * share * (gpus - 1) / gpus
            result.append(copy_op(op, seconds=moved / bytes_per_second))
        elif op.key.kind in ("act_write", "act_read"):
            result.append(copy_op(op, num_bytes=op.num_bytes * gpus))
        else:
            result.append(op)
    return result
