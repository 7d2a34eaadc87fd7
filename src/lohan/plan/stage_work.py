"""What a planned step asks of each resource, in forward and in backward: the closed form behind the search.

The same as activations.base_work and Point, for any finished Plan, with the writes of commits counted. Two times
follow: `staged`, as if forward and backward were two stages each as long as its busiest resource, and `flowing`, as if
nothing separated them. No run of many steps is faster than `flowing`; most are within 10 % of the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from lohan.plan.activations import Work, recompute_flops, stage_seconds
from lohan.plan.plan import ModelSize, Plan, UnitSize
from lohan.profiles import MachineProfile


class Moved(NamedTuple):
    """What a choice of activations asks for, of a whole step on one device."""

    away_bytes: int
    """Sent off the device and brought back."""

    ssd_bytes: int
    again_flops: float
    """Computed again in backward."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """One step's two stages."""

    forward: Work
    backward: Work

    def staged(self, machine: MachineProfile) -> float:
        return _seconds(self.forward, machine) + _seconds(self.backward, machine)

    def flowing(self, machine: MachineProfile) -> float:
        return _seconds(self.together, machine)

    @property
    def together(self) -> Work:
        one, two = self.forward, self.backward
        return Work(
            flops=one.flops + two.flops, to_gpu=one.to_gpu + two.to_gpu, to_host=one.to_host + two.to_host,
            ssd_read=one.ssd_read + two.ssd_read, ssd_write=one.ssd_write + two.ssd_write,
            parameters=one.parameters + two.parameters,
        )  # fmt: skip

    def with_activations(self, moved: Moved, devices: int = 1) -> StepWork:
        """And the activations; those on SSD are of all devices."""
        ssd = moved.ssd_bytes * devices
        forward, backward = self.forward, self.backward
        return StepWork(
            replace(forward, to_host=forward.to_host + moved.away_bytes, ssd_write=forward.ssd_write + ssd),
            replace(
                backward, flops=backward.flops + moved.again_flops, to_gpu=backward.to_gpu + moved.away_bytes,
                ssd_read=backward.ssd_read + ssd,
            ),
        )  # fmt: skip


def step_work(model: ModelSize, plan: Plan, *, micro_batches: int, commits: float = 1.0, devices: int = 1) -> StepWork:
    """`commits`: of all steps, the share that is committed."""
    return weights_work(model, plan, commits).with_activations(moved_by(model, plan, micro_batches), devices)


def moved_by(model: ModelSize, plan: Plan, micro_batches: int) -> Moved:
    """Of `plan`, only what it says about activations."""
    away, ssd, again = 0, 0, 0.0
    known: dict[tuple[int, str, tuple[tuple[int, str], ...]], Moved] = {}
    for number, unit in enumerate(model.units):
        if unit.kind != "block":
            continue
        kept = plan.kept[number] if number < len(plan.kept) else ()
        key = (id(unit), plan.input_tier(number), kept)
        if key not in known:
            known[key] = _of_unit(unit, plan.input_tier(number), kept, micro_batches)
        one = known[key]
        away, ssd, again = away + one.away_bytes, ssd + one.ssd_bytes, again + one.again_flops
    return Moved(away, ssd, again)


def _of_unit(unit: UnitSize, input_tier: str, kept: tuple[tuple[int, str], ...], micro_batches: int) -> Moved:
    sizes = [(unit.input_bytes, input_tier)]
    sizes += [(unit.operators[op].output_bytes, tier) for op, tier in kept if op < len(unit.operators)]
    ssd = sum(size for size, tier in sizes if tier == "ssd") * micro_batches
    away = sum(size for size, tier in sizes if tier != "device") * micro_batches
    again = recompute_flops(unit.operators, dict(kept)) * micro_batches if unit.operators else unit.forward_flops
    return Moved(away, ssd, again)


def _seconds(work: Work, machine: MachineProfile) -> float:
    """stage_seconds, and on `cpu` the copies of activations that leave the heap."""
    seconds = stage_seconds(work, machine)
    if machine.separate_memory:
        return seconds
    return max(seconds, work.to_gpu / machine.to_gpu_bytes_per_second, work.to_host / machine.to_host_bytes_per_second)


def weights_work(model: ModelSize, plan: Plan, commits: float = 1.0) -> StepWork:
    """Weights, gradients, states and the arithmetic but recompute."""
    flops, to_gpu, read, write, parameters = ([0.0, 0.0] for _ in range(5))
    to_host, head = 0.0, len(model.units) - 1
    for number, unit in enumerate(model.units):
        block, trained, later = unit.kind == "block", bool(unit.trained_pieces), plan.leaves(number)
        # The head's forward is its backward too, and comes at the end of forward.
        flops[0] += unit.forward_flops * (3 if number == head else 1)
        flops[1] += unit.forward_flops * 2 if block else 0
        streamed = unit.weights_bytes if number not in plan.resident_weights else 0
        read[0] += streamed
        read[1] += streamed if block or (trained and not later) else 0
        if plan.separate_memory:
            to_gpu[0] += unit.weights_bytes
            to_gpu[1] += unit.weights_bytes if block else 0
            to_host += unit.weights_bytes if trained else 0
        if not trained:
            continue
        when = 0 if later else 1
        parameters[when] += unit.num_parameters
        state = sum(unit.state_bytes)
        read[when] += state if number not in plan.resident_state else 0
        write[when] += state * (commits if number in plan.resident_state else 1.0)
        write[when] += unit.weights_bytes * (commits if number in plan.resident_weights else 1.0)
        if plan.gradients_on_ssd and plan.holds_gradient(number):
            write[1] += unit.weights_bytes
            read[when] += unit.weights_bytes if later or plan.separate_stage else 0
    if model.tied:
        to_gpu[0] += model.units[0].weights_bytes if plan.separate_memory else 0
        read[0] += 0 if 0 in plan.resident_weights else model.units[0].weights_bytes
    forward, backward = (
        Work(flops=f, to_gpu=up, to_host=down, ssd_read=r, ssd_write=w, parameters=p)
        for f, up, down, r, w, p in zip(flops, to_gpu, (0.0, to_host), read, write, parameters, strict=True)
    )
    return StepWork(forward, backward)
