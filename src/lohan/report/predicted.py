"""What is predicted of a run, as plain values for a file: where time and bytes go, and what more would give.

Everything comes from the plan the engine runs. Time needs a machine's profile: the same schedule on the simulator's
clock, once for each way of clipping the run may switch to; the time model along the order of offloading benefit; and
the run planned again with more of something.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lohan.engine.planning import Planned, Planning
from lohan.errors import LohanError
from lohan.plan.activations import Activations, Room, base_work, points, stage_seconds
from lohan.plan.fit import staging_bytes, waiting_bytes, with_activations
from lohan.plan.memory import host_use
from lohan.plan.plan import Plan
from lohan.plan.stage_work import moved_by
from lohan.profiles import MachineProfile
from lohan.report.spans import lanes_of
from lohan.sim.run import StandStill, simulate_steps
from lohan.sim.sizes import with_fewer_pieces
from lohan.sim.timeline import Timeline

MORE_RAM_BYTES = 64 * 10**9
_CURVE_POINTS = 60
_SIMULATED_POINTS = 9
_MAX_SIMULATED = 1500
"""Units times micro-batches up to which amounts along the curve are simulated, too."""

_UPGRADE_SECONDS = 4.0
"""No further upgrade is tried after this long: a training run is waiting."""


def memory_parts(planned: Planned, micro_batches: int) -> dict[str, Any]:
    """What RAM and the device's own memory are for."""
    needs = planned.needs
    device = {}
    if needs is not None:
        device = {
            "weights in use and arriving": needs.weights_bytes,
            "activations that stay": needs.waiting_bytes,
            "the block at work, gradients, activations moving": needs.total_bytes
            - needs.weights_bytes
            - needs.waiting_bytes,
        }
    return {"host": host_use(planned.size, planned.plan, planned.budget, micro_batches), "device": device}


def timelines(planned: Planned, machine: MachineProfile, micro_batches: int, modes: Sequence[str]) -> dict[str, Any]:
    """A step for each way of clipping."""
    found = {mode: _simulate(planned, replace(planned.plan, clip=mode), machine, micro_batches) for mode in modes}
    return {mode: _timeline(timeline) for mode, timeline in found.items() if timeline is not None}


def _simulate(planned: Planned, plan: Plan, machine: MachineProfile, micro_batches: int) -> Timeline | None:
    """None where such a plan could not run: a training must not fail for what it would have been."""
    try:
        size, plan = with_fewer_pieces(planned.size, plan)
        return simulate_steps(size, plan, machine, micro_batches=micro_batches)
    except StandStill:
        return None


def _timeline(timeline: Timeline) -> dict[str, Any]:
    busy = timeline.busy_seconds()
    lanes = {lane: busy[lane] for lane in ("gpu", "cpu_update", "to_gpu", "to_host")}
    lanes["ssd"] = timeline.drive_seconds()
    lanes["drives read"], lanes["drives write"] = (
        busy["ssd_read"] + busy["swap_in"],
        busy["ssd_write"] + busy["swap_out"],
    )
    return {
        "seconds": timeline.seconds_per_step,
        "bottleneck": timeline.bottleneck,
        "busy": {name: round(seconds, 7) for name, seconds in lanes.items()},
        "bytes": timeline.bytes_per_step(),
        "lanes": lanes_of(_served(timeline), *timeline.window),
    }


def _served(timeline: Timeline) -> Iterator[tuple[str, str, float, float]]:
    """Operations while they are worked on, without the time they queue."""
    for op, begin, end in zip(timeline.ops, timeline.service, timeline.end, strict=True):
        yield op.lane, f"{op.key.kind} {op.key.unit}", begin, end


def activation_curve(
    planned: Planned, machine: MachineProfile, micro_batches: int, device_limit: int | None
) -> dict[str, Any] | None:
    """Seconds of a step over what is kept for backward, and the plan's own place on it; None where nothing is known of
    the blocks' operators."""
    size, plan = planned.size, planned.plan
    if not any(unit.operators for unit in size.units):
        return None
    room = _room(planned, micro_batches, device_limit)
    number = sum(one.needed for unit in size.units if unit.kind == "block" for one in unit.operators)
    stride = max(1, number // _CURVE_POINTS)
    along = points(size, plan, machine, room, micro_batches=micro_batches, stride=stride)
    curve = [_place(planned, machine, micro_batches, point.activations) for point in along]
    if len(size.units) * micro_batches <= _MAX_SIMULATED:
        last = len(along) - 1
        for index in sorted({round(i * last / (_SIMULATED_POINTS - 1)) for i in range(_SIMULATED_POINTS)}):
            changed = with_activations(size, plan, along[index].activations, micro_batches)
            if not _fits(planned, changed):
                continue
            curve[index]["simulated"] = _simulated(planned, machine, micro_batches, changed)
    chosen = _place(planned, machine, micro_batches, Activations(inputs=plan.inputs, kept=plan.kept))
    chosen["simulated"] = _simulated(planned, machine, micro_batches, plan)
    return {"swapped": machine.separate_memory, "points": curve, "chosen": chosen}


def _fits(planned: Planned, plan: Plan) -> bool:
    """With nothing of the model in RAM: slabs through which activations go to SSD take some, too."""
    bare = _with_nothing_resident(planned, plan)
    return staging_bytes(planned.size, bare) <= planned.budget.staging


def _with_nothing_resident(planned: Planned, plan: Plan) -> Plan:
    empty = frozenset(unit for unit in plan.resident_weights if not planned.size.units[unit].weights_bytes)
    return replace(plan, resident_weights=empty, resident_state=empty)


def _simulated(planned: Planned, machine: MachineProfile, micro_batches: int, plan: Plan) -> float | None:
    timeline = _simulate(planned, plan, machine, micro_batches)
    return None if timeline is None else timeline.seconds_per_step


def _place(planned: Planned, machine: MachineProfile, micro_batches: int, kept: Activations) -> dict[str, Any]:
    """Bytes kept on each tier and the time model's seconds, as plan/activations.py has them."""
    plan = replace(planned.plan, inputs=kept.inputs, kept=kept.kept)
    moved = moved_by(planned.size, plan, micro_batches)
    away = moved.away_bytes if machine.separate_memory else 0
    forward, backward = base_work(planned.size, plan)
    first = replace(forward, to_host=forward.to_host + away, ssd_write=forward.ssd_write + moved.ssd_bytes)
    second = replace(
        backward, flops=backward.flops + moved.again_flops, to_gpu=backward.to_gpu + away,
        ssd_read=backward.ssd_read + moved.ssd_bytes,
    )  # fmt: skip
    tiers = {tier: waiting_bytes(planned.size, plan, micro_batches, tier=tier) for tier in ("device", "host", "ssd")}
    return tiers | {
        "operators": sum(len(unit) for unit in kept.kept),
        "forward": stage_seconds(first, machine),
        "backward": stage_seconds(second, machine),
    }


def _room(planned: Planned, micro_batches: int, device_limit: int | None) -> Room:
    """What activations may take where everything else takes the least it can."""
    size, plan, budget = planned.size, planned.plan, planned.budget
    bare = _with_nothing_resident(planned, plan)
    least = replace(bare, host_bytes=0, weights_slabs=4, state_slabs=8, transit_slabs=0)
    device = 0
    if planned.needs is not None and device_limit is not None:
        stays = waiting_bytes(size, plan, micro_batches, tier="device")
        device = max(0, device_limit - planned.needs.total_bytes + stays)
    return Room(device=device, host=max(0, budget.staging - staging_bytes(size, least)), ssd=1 << 60)


def upgrades(
    planning: Planning,
    machine: MachineProfile,
    host_bytes: int,
    shapes: Sequence[Mapping[str, Any]],
    tokens_per_second: float,
    tokens: int,
) -> list[dict[str, Any]]:
    """One more SSD, more RAM, twice the tokens, a faster device: the run planned again. A plan for less is still
    possible with more, so nothing is ever said to be worse; what does not fit has no rate."""
    found: list[dict[str, Any]] = []
    until = time.perf_counter() + _UPGRADE_SECONDS
    for name, better, host, times in _better(machine, host_bytes):
        if time.perf_counter() > until:
            break
        more = [shape for _ in range(times) for shape in shapes]
        try:
            planned = planning.other(machine=better, host_bytes=host).plan(more)
            timeline = _simulate(planned, planned.plan, better, len(more))
        except LohanError:
            timeline = None
        if timeline is None:
            found.append({"name": name, "tokens_per_second": None, "gain": None})
            continue
        gain = max(1.0, times * tokens / timeline.seconds_per_step / tokens_per_second)
        found.append({"name": name, "tokens_per_second": gain * tokens_per_second, "gain": gain})
    return found


def _better(machine: MachineProfile, host: int) -> Iterator[tuple[str, MachineProfile, int, int]]:
    if machine.drives:
        yield "one more SSD", replace(machine, drives=(*machine.drives, machine.drives[-1])), host, 1
    more = replace(machine, host_memory_bytes=machine.host_memory_bytes + MORE_RAM_BYTES)
    yield "64 GB more RAM", more, host + MORE_RAM_BYTES, 1
    yield "twice the tokens per step", machine, host, 2
    faster = replace(machine, gpu_flops_per_second=machine.gpu_flops_per_second * 2)
    yield "a device twice as fast", faster, host, 1
