"""Which operators' outputs are kept for backward, and where: LoHan's traffic-aware activation swapping.

Keeping an output saves computing it again and costs its bytes on every link it crosses. Operators are taken in the
order of their offloading benefit, FLOPs saved per byte moved (ties: the smaller first, then from the top of the model
down, what backward needs soonest). The first to be taken stay on the device while it has room, the next go to host
memory, the rest on to SSD. Along that order the time of a step is the larger of a falling line (computing) and rising
ones (links, drives), for forward and for backward: convex, so the best amount is where it stops falling. Block inputs
are always kept: nothing could be computed again without them.

Pure: numbers in, decision out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lohan.plan.drives import drive_seconds
from lohan.profiles import MachineProfile, OperatorProfile

if TYPE_CHECKING:
    from lohan.plan.plan import ModelSize, Plan


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a stage of a step asks of each resource, in FLOPs, bytes and parameters."""

    flops: float = 0.0
    to_gpu: float = 0.0
    to_host: float = 0.0
    ssd_read: float = 0.0
    ssd_write: float = 0.0
    parameters: float = 0.0


def stage_seconds(work: Work, machine: MachineProfile) -> float:
    """Duration of one overlapped stage: the busiest resource sets the pace."""
    compute = work.flops / machine.gpu_flops_per_second
    update = work.parameters / machine.update_parameters_per_second
    drives = drive_seconds(work.ssd_read, work.ssd_write, machine)
    if not machine.separate_memory:  # computing and updating take turns on the same cores
        return max(compute + update, drives)
    both = machine.duplex_share
    to_gpu, to_host = work.to_gpu / machine.to_gpu_bytes_per_second, work.to_host / machine.to_host_bytes_per_second
    # Where both directions share a bus, the time they overlap counts at the shared rate.
    links = max(to_gpu, to_host) + min(to_gpu, to_host) * (1 / both - 1)
    return max(compute, links, update, drives)


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """Bytes that activations waiting for backward may take, in total."""

    device: int = 0
    host: int = 0
    ssd: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One amount along the order of benefit: what is kept, and what the time model makes of it."""

    activations: Activations
    moved_bytes: int
    """Sent off the device in a step, block inputs included."""

    ssd_bytes: int
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds


def by_benefit(model: ModelSize) -> list[tuple[int, int]]:
    """Every (unit, operator) worth keeping, the most FLOPs saved per byte first."""
    found = []
    for unit, size in enumerate(model.units):
        if size.kind != "block":
            continue
        for op, one in enumerate(size.operators):
            if one.needed and one.flops > 0 and one.output_bytes > 0:
                found.append((-one.flops / one.output_bytes, one.output_bytes, -unit, op))
    return [(-unit, op) for _, _, unit, op in sorted(found)]


def points(
    model: ModelSize, plan: Plan, machine: MachineProfile, room: Room, *, micro_batches: int, stride: int = 1
) -> list[Point]:
    """The time model along the order of benefit, from block inputs only to everything that is worth keeping.

    `plan` says where weights and state live and when updates run; every `stride`th amount is returned, and the last.
    """
    order = by_benefit(model)
    placed = _Placed(model, machine, room, micro_batches)
    base = base_work(model, plan)
    made = []
    for count in range(len(order) + 1):
        if count and not placed.put(*order[count - 1]):
            break  # no tier has room: nothing more can be kept
        if count % stride == 0 or count == len(order):
            made.append(placed.point(base))
    return made


def choose(
    model: ModelSize,
    plan: Plan,
    machine: MachineProfile,
    room: Room,
    *,
    micro_batches: int,
    predict: Callable[[Activations], float] | None = None,
) -> Point:
    """The amount with the least time; among equals the one that moves least.

    The closed time model knows nothing of a pipeline's filling and emptying. With `predict` (seconds of a step, by the
    simulator) a few amounts along the order are looked at more closely: evenly spread ones and the model's own first,
    then between the best and its neighbours.
    """
    along = points(model, plan, machine, room, micro_batches=micro_batches)
    best = min(range(len(along)), key=lambda i: (along[i].seconds, along[i].moved_bytes))
    if predict is None:
        return along[best]
    seconds: dict[int, float] = {}

    def look(index: int) -> None:
        if index not in seconds:
            seconds[index] = predict(along[index].activations)

    last = len(along) - 1
    for index in {best, *(round(i * last / 6) for i in range(7))}:
        look(index)
    for _ in range(3):
        here = min(sorted(seconds), key=seconds.__getitem__)
        below = max((i for i in seconds if i < here), default=here)
        above = min((i for i in seconds if i > here), default=here)
        look((below + here) // 2)
        look((above + here + 1) // 2)
    # Differences below a thousandth are the simulator's own grain: then less traffic is worth more.
    least = min(seconds.values())
    return along[min(index for index, taken in seconds.items() if taken <= least * 1.001)]


def base_work(model: ModelSize, plan: Plan) -> tuple[Work, Work]:
    """Forward and backward without any kept operator: weights, gradients, state, and the arithmetic but recompute."""
    separate, head = plan.separate_memory, len(model.units) - 1
    flops = [0.0, 0.0]
    to_gpu, read, write = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    to_host, parameters = [0.0, 0.0], [0.0, 0.0]
    for number, unit in enumerate(model.units):
        block = unit.kind == "block"
        # The head's forward is its backward too, and comes at the end of forward.
        flops[0] += unit.forward_flops * (3 if number == head else 1)
        flops[1] += unit.forward_flops * 2 if block else 0
        streamed = unit.weights_bytes if number not in plan.resident_weights else 0
        trained = bool(unit.trained_pieces)
        later = plan.leaves(number)
        read[0] += streamed
        read[1] += streamed if block or (trained and not later) else 0
        to_gpu[0] += unit.weights_bytes if separate else 0
        to_gpu[1] += unit.weights_bytes if separate and block else 0
        if not trained:
            continue
        to_host[1] += unit.weights_bytes if separate else 0
        when = 0 if later else 1
        parameters[when] += unit.num_parameters
        state = sum(unit.state_bytes) if number not in plan.resident_state else 0
        read[when] += state
        write[when] += state + streamed
        if plan.gradients_on_ssd and plan.holds_gradient(number):
            write[1] += unit.weights_bytes
            read[when] += unit.weights_bytes if later else 0
    forward, backward = (
        Work(flops=f, to_gpu=up, to_host=down, ssd_read=r, ssd_write=w, parameters=p)
        for f, up, down, r, w, p in zip(flops, to_gpu, to_host, read, write, parameters, strict=True)
    )
    return forward, backward


class _Placed:
    """What has been kept so far, and where it found room."""

    def __init__(self, model: ModelSize, machine: MachineProfile, room: Room, micro_batches: int):
        self._model, self._machine, self._times = model, machine, micro_batches
        self._free = {"device": room.device, "host": room.host, "ssd": room.ssd}
        self._moved = {"device": 0, "host": 0, "ssd": 0}
        self._kept: list[dict[int, str]] = [{} for _ in model.units]
        self._again = [
            recompute_flops(unit.operators, ()) if unit.operators else unit.forward_flops / micro_batches
            for unit in model.units
        ]
        self._inputs = ["device"] * len(model.units)
        for unit in range(len(model.units) - 1, -1, -1):  # what backward needs first stays nearest
            if model.units[unit].kind == "block":
                self._inputs[unit] = self._place(model.units[unit].input_bytes) or "ssd"

    def _place(self, size: int) -> str | None:
        for tier in ("device", "host", "ssd"):
            if size * self._times <= self._free[tier]:
                self._free[tier] -= size * self._times
                self._moved[tier] += size * self._times
                return tier
        return None

    def put(self, unit: int, op: int) -> bool:
        size = self._model.units[unit]
        tier = self._place(size.operators[op].output_bytes)
        if tier is None:
            return False
        self._kept[unit][op] = tier
        self._again[unit] = recompute_flops(size.operators, self._kept[unit])
        return True

    def point(self, base: tuple[Work, Work]) -> Point:
        separate, machine = self._machine.separate_memory, self._machine
        away = self._moved["host"] + self._moved["ssd"] if separate else 0
        ssd = self._moved["ssd"]
        again = (
            sum(flops for flops, unit in zip(self._again, self._model.units, strict=True) if unit.kind == "block")
            * self._times
        )
        forward, backward = base
        first = replace(forward, to_host=forward.to_host + away, ssd_write=forward.ssd_write + ssd)
        second = replace(
            backward, flops=backward.flops + again, to_gpu=backward.to_gpu + away, ssd_read=backward.ssd_read + ssd
        )
        return Point(
            activations=Activations(
                inputs=tuple(self._inputs), kept=tuple(tuple(sorted(one.items())) for one in self._kept)
            ),
            moved_bytes=away,
            ssd_bytes=ssd,
            forward_seconds=stage_seconds(first, machine),
            backward_seconds=stage_seconds(second, machine),
        )
