"""The event loop: every operation of a Schedule at the moment it would start and end on a described machine.

The rules are the engine's. A lane does its operations in the order given; one starts when its waits are over and its
lane is free. The drives' lanes only issue: several operations are under way at once, served in the order of issue,
reads and writes side by side, and slower where too few are under way. Reading needs a slab of its pool and waits for
one; evict and the end of a write give slabs back. What a later call puts on the lanes starts after the clip of the step
before, as run.step() does. Without separate memory compute and update take turns; an update that can run goes first;
while no slab is free for state it even goes into a block's backward, which stands still meanwhile.

Between two events every rate is constant, so time advances from one end of an operation to the next. The loop keeps
plain lists and integers: 100,000 operations take about a second.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from lohan.plan.activations import recompute_flops
from lohan.plan.drives import drive_rates
from lohan.plan.plan import ModelSize, Plan
from lohan.plan.schedule import LANES, Key, Scheduler
from lohan.profiles import MachineProfile
from lohan.sim.op import AnyOp, SimOp
from lohan.sim.rates import (
    CPU,
    GPU,
    NUM_SERVERS,
    READ,
    SERVER_OF_LANE,
    TO_GPU,
    TO_HOST,
    WRITE,
    server_rates,
)
from lohan.sim.timeline import Timeline

NORM_SHARE = 0.15
"""Of an update's time, what the norm of the same parameters takes: it reads 2 of the update's 28 bytes per parameter
and widens them to f32. Reckoned from bytes, not measured."""

_NO_LIMIT = float("inf")
_LANE_NUMBER = {name: number for number, name in enumerate(LANES)}
_SERVERS = [SERVER_OF_LANE[name] for name in LANES]
_LOOKS = sorted(range(len(LANES)), key=lambda lane: (_SERVERS[lane] in (GPU, CPU), _SERVERS[lane] == GPU))
"""In which order lanes may start something: where the cores are shared, the update's before the one that computes."""

_DRIVES = 1 << READ | 1 << WRITE
_WEIGHTS, _STATE, _GRADIENT, _TRANSIT = range(4)
_LEASES = {"read_weights": _WEIGHTS, "read_state": _STATE, "gradient": _GRADIENT, "read_gradient": _GRADIENT}


class StandStill(RuntimeError):
    """Nothing can go on: a schedule whose operations wait for each other, or too few slabs."""


def simulate_steps(
    model: ModelSize,
    plan: Plan,
    machine: MachineProfile,
    *,
    micro_batches: int = 1,
    steps: int = 5,
    commit: bool = True,
    norm_share: float | None = None,
) -> Timeline:
    """Several training steps of the engine's own Schedule; speculative steps keep what they guessed.

    Where the drives are what a step waits for, writes pile up over the first three, and only the fourth is like all
    that follow.
    """
    scheduler = Scheduler(model, plan)
    puts: list[Sequence[AnyOp]] = []
    for step in range(1, steps + 1):
        puts.append(scheduler.step(step, commit=commit, micro_batches=micro_batches))
        if plan.clip == "speculative":
            puts.append(scheduler.settle(step, redo=False, skip=False))
    return simulate(puts, machine, model=model, plan=plan, norm_share=norm_share)


def simulate(
    puts: Sequence[Sequence[AnyOp]],
    machine: MachineProfile,
    *,
    model: ModelSize,
    plan: Plan,
    barrier: bool = False,
    norm_share: float | None = None,
) -> Timeline:
    """Run lists of operations, as they would be put on the lanes call by call.

    `barrier`: a put starts when everything before it is done, instead of when the last clip before it is. It is for
    operations that are not the Schedule's; the Schedule's own barrier is one of its waits.
    `norm_share`: of an update's time, what the norm of the same gradient takes; None: as measured, or NORM_SHARE.
    """
    ops = [op for put in puts for op in put]
    index = {op.key: number for number, op in enumerate(ops)}
    lanes = [_LANE_NUMBER.get(op.lane, -1) for op in ops]
    if norm_share is None:
        norm_share = NORM_SHARE if machine.norm_share is None else machine.norm_share
    work = _work(ops, lanes, machine, model, norm_share)
    for put in puts:  # all of it is scheduled before the first of it computes
        first = next((op.key for op in put if op.key.kind == "forward"), None)
        if first is not None:
            work[index[first]] += len(put) * machine.op_seconds
    lease, release = _slabs(ops, index)
    dependents: list[list[int]] = [[] for _ in ops]
    left = [0] * len(ops)
    for number, op in enumerate(ops):
        for key in op.waits:
            other = index.get(key)
            if other is not None:
                dependents[other].append(number)
                left[number] += 1
    gates, limits = _gates(puts, lanes, barrier)
    order: list[list[int]] = [[] for _ in LANES]
    for number, lane in enumerate(lanes):
        if lane >= 0:
            order[lane].append(number)

    table = server_rates(machine)
    singles = _singles(machine)
    members = [tuple(server for server in range(NUM_SERVERS) if busy >> server & 1) for busy in range(1 << NUM_SERVERS)]
    turns = 0 if machine.separate_memory else 1 << GPU | 1 << CPU
    lets_in = [op.key.kind == "backward" and model.units[op.key.unit].kind == "block" for op in ops]
    # A plan without slabs for activations on their way has not counted them.
    free = [plan.weights_slabs, plan.state_slabs, plan.gradient_slabs, plan.transit_slabs or len(ops)]
    start, service, end = [0.0] * len(ops), [0.0] * len(ops), [0.0] * len(ops)
    position = [0] * len(LANES)
    current = [-1] * NUM_SERVERS
    remaining = [0.0] * NUM_SERVERS
    queues: list[deque[int]] = [deque() for _ in range(NUM_SERVERS)]
    limit = list(limits[0])
    gate = 0
    released = [0.0]
    num_done = 0
    busy = 0
    now = 0.0
    # Operations without a lane and without waits, which only a hand-made schedule has.
    finished = [number for number, lane in enumerate(lanes) if lane < 0 and not left[number]]

    while True:
        # What has just ended, and all that ends with it at the same moment.
        while finished:
            number = finished.pop()
            end[number] = now
            num_done += 1
            if release[number] >= 0:
                free[release[number]] += 1
            for other in dependents[number]:
                left[other] -= 1
                if not left[other] and lanes[other] < 0:
                    start[other] = service[other] = now
                    finished.append(other)
            while gate < len(gates) and (num_done >= gates[gate] if barrier else number == gates[gate]):
                gate += 1
                limit = limits[gate]
                released.append(now)
        # What can start now: only heads of lanes.
        for lane in _LOOKS:
            here = position[lane]
            server = _SERVERS[lane]
            issues = server in (READ, WRITE)
            while here < limit[lane] and (issues or current[server] < 0):
                number = order[lane][here]
                if left[number]:
                    break
                if (
                    busy & turns and 1 << server & turns
                    and not (server == CPU and lets_in[current[GPU]] and not free[_STATE])
                ):  # fmt: skip
                    break
                pool = lease[number]
                if pool >= 0:
                    if not free[pool]:
                        break
                    free[pool] -= 1
                here += 1
                start[number] = service[number] = now
                if work[number] <= 0.0:
                    finished.append(number)
                    if not issues:
                        break
                elif current[server] < 0:
                    current[server], remaining[server] = number, work[number]
                    busy |= 1 << server
                else:
                    queues[server].append(number)
            position[lane] = here
        if finished:
            continue
        if not busy:
            break
        # To the next end of anything.
        at_work = busy ^ 1 << GPU if turns and busy & turns == turns else busy
        rates: Sequence[float] = table[at_work]
        if few := singles[at_work & _DRIVES]:
            rates = list(rates)
            for server, single in few:
                rates[server] = min(rates[server], (1 + len(queues[server])) * single)
        active = members[at_work]
        step_seconds, soonest = float("inf"), -1
        for server in active:
            seconds = remaining[server] / rates[server]
            if seconds < step_seconds:
                step_seconds, soonest = seconds, server
        now += step_seconds
        for server in active:
            remaining[server] -= step_seconds * rates[server]
        finished.append(current[soonest])
        if queues[soonest]:
            number = queues[soonest].popleft()
            current[soonest], remaining[soonest], service[number] = number, work[number], now
        else:
            current[soonest] = -1
            busy ^= 1 << soonest

    if num_done < len(ops):
        stuck = [
            tuple(ops[order[lane][position[lane]]].key) for lane in range(len(LANES)) if position[lane] < limit[lane]
        ]
        raise StandStill(
            f"{len(ops) - num_done} of {len(ops)} operations never start; next on their lanes: {stuck}; "
            f"free slabs (weights, state, gradient): {free}"
        )
    sizes = [len(put) for put in puts]
    return Timeline(ops, lanes, start, service, end, sizes, released, barrier)


def _singles(machine: MachineProfile) -> dict[int, list[tuple[int, float]]]:
    """For reads, writes or both under way (bits as in a set of busy servers): what one record at a time reaches."""
    read, write = machine.single_read_bytes_per_second, machine.single_write_bytes_per_second
    half = None if machine.single_mixed_bytes_per_second is None else machine.single_mixed_bytes_per_second / 2
    alone = {0: [], 1 << READ: [(READ, read)], 1 << WRITE: [(WRITE, write)]}
    together = [(READ, half or read), (WRITE, half or write)]
    return {
        busy: [(server, rate) for server, rate in known if rate is not None]
        for busy, known in (alone | {_DRIVES: together}).items()
    }


def _work(
    ops: Sequence[AnyOp], lanes: Sequence[int], machine: MachineProfile, model: ModelSize, norm_share: float
) -> list[float]:
    """Seconds for the computing lanes, bytes for the others."""
    # Parameters per byte of state, of each unit.
    per_byte = [unit.num_parameters / max(sum(unit.state_bytes), 1) for unit in model.units]
    parameters = [unit.num_parameters for unit in model.units]
    per_flop, per_parameter = 1 / machine.gpu_flops_per_second, 1 / machine.update_parameters_per_second
    overhead, install = machine.op_seconds, machine.weights_seconds_per_parameter
    rates = (1.0, machine.to_gpu_bytes_per_second, machine.to_host_bytes_per_second)
    drives = drive_rates(machine.drives, machine.array_bytes_per_second)
    light = (1 - machine.saved_by_keeping) * per_flop
    whole = _whole_backwards(ops, model) if light else []
    work = []
    for op, lane in zip(ops, lanes, strict=True):
        amount = 0.0
        server = _SERVERS[lane] if lane >= 0 else -1
        if server == GPU:
            amount = op.flops * per_flop + overhead
            if light and op.key.kind == "backward":
                amount += light * max(0.0, whole[op.key.unit] - op.flops)
            if install and op.key.piece == 0 and op.key.kind in ("forward", "backward"):  # the first micro-batch pays
                passes = 2 if op.key.kind == "forward" and op.key.unit == len(parameters) - 1 else 1
                amount += passes * parameters[op.key.unit] * install
        elif server in (TO_GPU, TO_HOST):
            amount = op.num_bytes + overhead * rates[server]
        elif server == CPU:
            kind = op.key.kind
            if kind == "update":
                amount = op.num_bytes * per_byte[op.key.unit] * per_parameter
            elif kind == "norm":
                amount = parameters[op.key.unit] * per_parameter * norm_share
            amount += overhead
        elif server in (READ, WRITE):
            amount = float(op.num_bytes)
            if op.key.kind == "commit":
                amount = machine.commit_seconds * min(drives.write, machine.single_write_bytes_per_second or _NO_LIMIT)
        if isinstance(op, SimOp) and op.seconds:
            assert server in (GPU, CPU), "only computing lanes are counted in seconds"
            amount += op.seconds
        work.append(amount)
    return work


def _whole_backwards(ops: Sequence[AnyOp], model: ModelSize) -> list[float]:
    """Of each unit, FLOPs of one micro-batch's backward when nothing is kept."""
    micro_batches = 1 + max((op.key.piece for op in ops if op.key.kind == "forward"), default=0)
    found: dict[int, float] = {}
    for unit in model.units:
        if id(unit) not in found:
            forward = unit.forward_flops / micro_batches
            found[id(unit)] = 2 * forward + (recompute_flops(unit.operators, ()) if unit.operators else forward)
    return [found[id(unit)] for unit in model.units]


def _slabs(ops: Sequence[AnyOp], index: dict[Key, int]) -> tuple[list[int], list[int]]:
    """Which pool each operation takes a slab from when it starts, and gives one back to when it ends; -1 for none."""
    lease, release = [-1] * len(ops), [-1] * len(ops)
    last_compute: dict[tuple[int, int], int] = {}
    for number, op in enumerate(ops):
        key = op.key
        kind = key.kind
        if kind in _LEASES:
            lease[number] = _LEASES[kind]
        elif kind == "write":
            if Key(key.step, "read_state", key.unit, key.piece, key.phase) in index:
                release[number] = _STATE
        elif kind in ("forward", "backward"):
            last_compute[key.step, key.unit] = number
        elif kind == "act_out":
            # On its way to SSD an activation is in a slab from its copy to the end of its write, and the same back.
            lease[number] = _TRANSIT if key._replace(kind="act_write") in index else -1
        elif kind == "act_in":
            release[number] = _TRANSIT if key._replace(kind="act_read") in index else -1
        elif kind == "act_write":
            release[number] = _TRANSIT
        elif kind == "act_read":
            lease[number] = _TRANSIT
    for number, op in enumerate(ops):
        if op.key.kind != "evict" or op.source is None or op.source.kind not in _LEASES:
            continue
        release[number] = _LEASES[op.source.kind]
        if op.source not in index:
            # Without separate memory a gradient is made where it stays, by the compute that completes it.
            maker = last_compute.get((op.source.step, op.source.unit))
            if maker is None:
                release[number] = -1
            else:
                lease[maker] = _GRADIENT
    return lease, release


def _gates(puts: Sequence[Sequence[AnyOp]], lanes: Sequence[int], barrier: bool) -> tuple[list[int], list[list[int]]]:
    """What opens the next puts, and up to where each lane may go before and after each opening.

    A gate is the number of a clip operation or, with a barrier, how many operations must be done.
    """
    gates: list[int] = []
    limits: list[list[int]] = []
    here = [0] * len(LANES)
    number = 0
    clip = -1
    for put in puts:
        if barrier and number:
            gates.append(number)
            limits.append(list(here))
        elif clip >= 0:
            gates.append(clip)
            limits.append(list(here))
            clip = -1
        for op in put:
            if lanes[number] >= 0:
                here[lanes[number]] += 1
            if op.key.kind == "clip":
                clip = number
            number += 1
    limits.append(list(here))
    return gates, limits
