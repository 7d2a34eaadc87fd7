"""Schedules of systems that keep or move things where the engine never does.

flashneuron: weights and state stay on the device; only activations leave, to SSD. g10: weights, state and activations
all leave, and the device itself updates, so state crosses the link both ways. Both update on the device, at its
memory's speed, which no profile has; that time is left out in their favour.
"""

from __future__ import annotations

from lohan.plan.plan import ModelSize
from lohan.plan.schedule import Key
from lohan.profiles import ModelProfile
from lohan.sim.op import SimOp


def flashneuron_step(profile: ModelProfile, model: ModelSize, step: int) -> list[SimOp]:
    """Every operator's output goes to SSD in forward and comes back in backward; nothing is recomputed."""
    ops: list[SimOp] = []
    head = len(model.units) - 1
    for unit, size in enumerate(model.units):
        waits: tuple[Key, ...] = (Key(step, "forward", unit - 1),) if unit else ()
        ops.append(_compute(step, "forward", unit, waits, size.forward_flops * (3 if unit == head else 1)))
        if size.kind == "block":
            ops += _send(step, unit, profile.units[unit].saved_bytes)
    for unit in reversed(range(head)):
        size = model.units[unit]
        waits = (Key(step, "forward", head) if unit == head - 1 else Key(step, "backward", unit + 1),)
        if size.kind == "block":
            ops += _return(step, unit, profile.units[unit].saved_bytes)
            waits = (*waits, Key(step, "act_in", unit))
        ops.append(_compute(step, "backward", unit, waits, 2 * size.forward_flops))
    ops.append(SimOp(Key(step, "clip"), "cpu_update", (Key(step, "backward", 0),)))
    return ops


def g10_step(profile: ModelProfile, model: ModelSize, step: int) -> list[SimOp]:
    """Weights come from SSD for forward; for backward weights, state and block inputs do, and state goes back."""
    ops: list[SimOp] = []
    head = len(model.units) - 1
    for unit, size in enumerate(model.units):
        read, copy = Key(step, "load", unit, -1, "f"), Key(step, "to_gpu", unit, -1, "f")
        before = (Key(step, "forward", unit - 1),) if unit else ()
        # Memory for two units: a unit is fetched while the one before is computed.
        room = (Key(step, "forward", unit - 2),) if unit > 1 else ()
        ops.append(SimOp(read, "ssd_read", room, num_bytes=size.weights_bytes))
        ops.append(SimOp(copy, "to_gpu", (read,), num_bytes=size.weights_bytes))
        flops = size.forward_flops * (3 if unit == head else 1)
        ops.append(_compute(step, "forward", unit, (*before, copy), flops))
        if size.kind == "block":
            ops += _send(step, unit, profile.units[unit].input_bytes)
    ops += _g10_update(model, step, head, Key(step, "forward", head), ())
    for unit in reversed(range(head)):
        size = model.units[unit]
        above = Key(step, "forward", head) if unit == head - 1 else Key(step, "backward", unit + 1)
        room = (Key(step, "store", unit + 2),) if unit + 2 <= head else ()
        waits: tuple[Key, ...] = (above,)
        if size.kind == "block":
            ops += _return(step, unit, profile.units[unit].input_bytes)
            read, copy = Key(step, "load", unit, -1, "b"), Key(step, "to_gpu", unit, -1, "b")
            ops.append(SimOp(read, "ssd_read", room, num_bytes=size.weights_bytes))
            ops.append(SimOp(copy, "to_gpu", (read,), num_bytes=size.weights_bytes))
            waits = (above, copy, Key(step, "act_in", unit))
        ops.append(_compute(step, "backward", unit, waits, 3 * size.forward_flops))
        ops += _g10_update(model, step, unit, Key(step, "backward", unit), room)
    ops.append(SimOp(Key(step, "clip"), "cpu_update", (Key(step, "store", 0),)))
    return ops


def _g10_update(model: ModelSize, step: int, unit: int, computed: Key, room: tuple[Key, ...]) -> list[SimOp]:
    size = model.units[unit]
    state = sum(size.state_bytes)
    read, copy = Key(step, "load", unit, -1, "s"), Key(step, "state_in", unit)
    back, store = Key(step, "state_out", unit), Key(step, "store", unit)
    moved = state + size.weights_bytes
    return [
        SimOp(read, "ssd_read", room, num_bytes=state),
        SimOp(copy, "to_gpu", (read,), num_bytes=state),
        SimOp(back, "to_host", (copy, computed), num_bytes=moved),
        SimOp(store, "ssd_write", (back,), num_bytes=moved),
    ]


def _compute(step: int, kind: str, unit: int, waits: tuple[Key, ...], flops: float) -> SimOp:
    return SimOp(Key(step, kind, unit), "gpu", waits, flops=flops)


def _send(step: int, unit: int, num_bytes: int) -> list[SimOp]:
    out, write = Key(step, "act_out", unit), Key(step, "act_write", unit)
    return [
        SimOp(out, "to_host", (Key(step, "forward", unit),), num_bytes=num_bytes),
        SimOp(write, "ssd_write", (out,), num_bytes=num_bytes),
    ]


def _return(step: int, unit: int, num_bytes: int) -> list[SimOp]:
    read, back = Key(step, "act_read", unit), Key(step, "act_in", unit)
    return [
        SimOp(read, "ssd_read", (Key(step, "act_write", unit),), num_bytes=num_bytes),
        SimOp(back, "to_gpu", (read,), num_bytes=num_bytes),
    ]
