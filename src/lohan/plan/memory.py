"""What a plan takes of the device's memory, of RAM and of the SSD, part by part and in words.

The device is counted as engine/device_memory.py counts it, from a profile instead of a rehearsal: weights of the units
on the device, gradients made and on their way, what every micro-batch holds between two blocks, activations that stay
or are in transit, and the working memory of the block at work. RAM is plan.fit's staging arena and what computing takes
outside of it. Pure: numbers in, numbers out.
"""

from __future__ import annotations

from dataclasses import dataclass

from lohan.plan.fit import PAGE_BYTES, HostBudget, staging_bytes, undo_bytes
from lohan.plan.head import head_bytes
from lohan.plan.plan import ModelSize, Plan
from lohan.profiles import MachineProfile, ModelProfile

DEVICE_RESERVE_BYTES = 600_000_000
"""Of a GPU's memory, left to the driver's context and the allocator's rounding. Picked by feel."""

_OVERHEAD_BYTES = 64 << 20
_ALLOCATOR_SLACK = 2.0
"""Both as engine/memory.py has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Budgets:
    """Bytes a run may take."""

    gpu_bytes: int
    host_bytes: int
    ssd_bytes: int | None = None
    """None: as much as it needs."""

    host: HostBudget | None = None
    """host_bytes, split between staging and computing by who knows the model better than its profile does."""


def budgets_of(machine: MachineProfile) -> Budgets:
    """All that a machine has, but for what its GPU needs for itself."""
    capacities = [drive.capacity_bytes for drive in machine.drives if drive.capacity_bytes is not None]
    known = len(capacities) == len(machine.drives)
    return Budgets(
        gpu_bytes=machine.gpu_memory_bytes - (DEVICE_RESERVE_BYTES if machine.separate_memory else 0),
        host_bytes=machine.host_memory_bytes,
        ssd_bytes=sum(capacities) if known else None,
    )


def device_use(profile: ModelProfile, plan: Plan, micro_batches: int, *, wire_bytes: int = 2) -> dict[str, int]:
    """The parts of the device's memory at the step's fullest moment; nothing where it has no memory of its own."""
    if not plan.separate_memory:
        return {}
    units, head = profile.units, len(profile.units) - 1
    weights = [unit.num_parameters * wire_bytes for unit in units]
    order = [*range(head + 1), *range(head - 1, -1, -1)]
    there = max(sum(weights[unit] for unit in order[at : at + plan.device_units]) for at in range(len(order)))
    widened = max(weights) * profile.compute_bytes // wire_bytes if profile.compute_bytes != wire_bytes else 0
    blocks = [number for number, unit in enumerate(units) if unit.kind == "block"]
    stays, away = zip(*(_activations(profile, plan, unit) for unit in range(len(units))), strict=True)
    between = micro_batches * max(2 * units[b].input_bytes + units[b].shared_bytes for b in blocks)
    always = {
        "weights in use and arriving": there + widened,
        "hidden states between blocks": between,
        "activations that stay": micro_batches * sum(stays),
    }
    tied = (weights[0] if profile.tied else 0) * profile.compute_bytes // wire_bytes
    in_transit = plan.swap_window * max(away)
    stages: list[dict[str, int]] = []
    for kind in {id(units[b]): b for b in blocks}.values():  # equal blocks are one object
        made = units[kind].num_parameters * profile.compute_bytes
        leaving = sum(weights[kind : kind + plan.device_units])
        gradients = {"gradients made and leaving": made + leaving + tied}
        stages.append(gradients | {"the block at work": units[kind].working_bytes, "activations moving": in_transit})
    logits = head_bytes(profile.tokens, profile.vocabulary, plan.head_chunks)
    stages.append(
        {
            "the head and its loss": logits + 2 * units[head].input_bytes,
            "gradients made and leaving": weights[head] + units[head].num_parameters * profile.compute_bytes + 2 * tied,
            "activations moving": in_transit,
        }
    )
    return always | max(stages, key=lambda stage: sum(stage.values()))


def host_budget_of(profile: ModelProfile, plan: Plan, budgets: Budgets, *, wire_bytes: int = 2) -> HostBudget:
    """RAM, split between staging and what computing takes outside of it."""
    if budgets.host is not None:
        return budgets.host
    host_bytes = budgets.host_bytes
    largest = max((max(unit.tensor_elements, default=0) for unit in profile.units), default=0) * 4
    if plan.separate_memory:
        return HostBudget(total=host_bytes, compute=_OVERHEAD_BYTES + largest)
    cast = profile.compute_bytes if profile.compute_bytes != wire_bytes else 0
    busiest = 0
    for unit in profile.units:
        weights = unit.num_parameters * (profile.compute_bytes + cast)
        working = unit.working_bytes
        if unit.kind == "head":
            tied = profile.units[0].num_parameters if profile.tied else 0
            weights += tied * (profile.compute_bytes + cast)
            working = head_bytes(profile.tokens, profile.vocabulary, plan.head_chunks) + 2 * unit.input_bytes
        busiest = max(busiest, weights + working)
    compute = _OVERHEAD_BYTES + round(max(busiest, largest) * _ALLOCATOR_SLACK)
    return HostBudget(total=host_bytes, compute=compute, slack=_ALLOCATOR_SLACK)


def host_use(model: ModelSize, plan: Plan, budget: HostBudget, micro_batches: int) -> dict[str, int]:
    """What each byte of RAM is for."""
    units = range(len(model.units))
    rest_weights = max((model.units[u].weights_bytes for u in units if u not in plan.resident_weights), default=0)
    rest_state = max(
        (max(model.units[u].state_bytes, default=0) for u in units if u not in plan.resident_state), default=0
    )
    gradient = max((unit.weights_bytes for unit in model.units if unit.trained_pieces), default=0)
    on_heap = 0 if plan.separate_memory else heap_bytes(model, plan, micro_batches, budget)
    waiting = plan.host_bytes + on_heap
    parts = {
        "optimizer states that stay": sum(sum(model.units[u].state_bytes) for u in plan.resident_state),
        "weights that stay": sum(model.units[u].weights_bytes for u in plan.resident_weights),
        "weights on their way": plan.weights_slabs * rest_weights,
        "states on their way": plan.state_slabs * -(-rest_state // PAGE_BYTES) * PAGE_BYTES,
        "gradients": plan.gradient_slabs * gradient,
        "activations waiting for backward": waiting,
        "activations on their way to SSD": plan.transit_slabs * plan.transit_bytes,
        "what a rejected guess goes back to": undo_bytes(model, plan),
        "computing": budget.compute,
    }
    staged = staging_bytes(model, plan) + undo_bytes(model, plan) + budget.compute
    staged += on_heap
    parts["computing"] += max(0, staged - sum(parts.values()))  # rounding of pieces to pages
    return {name: size for name, size in parts.items() if size}


def heap_bytes(model: ModelSize, plan: Plan, micro_batches: int, budget: HostBudget) -> int:
    """On `cpu`: what activations that stay where they are take of RAM, with what the allocator makes of them."""
    total = 0
    for number, unit in enumerate(model.units):
        if unit.kind == "block":
            total += unit.input_bytes if plan.input_tier(number) == "device" else 0
            kept = plan.keeps(number).items()
            total += sum(unit.operators[op].output_bytes for op, tier in kept if tier == "device")
    return round(total * micro_batches * budget.slack)


def ssd_use(model: ModelSize, plan: Plan, micro_batches: int, *, versions: int = 2) -> dict[str, int]:
    """What lies on the drives."""
    state = sum(unit.weights_bytes + sum(unit.state_bytes) for unit in model.units)
    held = [u for u, unit in enumerate(model.units) if unit.trained_pieces and plan.holds_gradient(u)]
    activations = 0
    for number, unit in enumerate(model.units):
        if unit.kind == "block":
            activations += unit.input_bytes if plan.input_tier(number) == "ssd" else 0
            activations += sum(
                unit.operators[op].output_bytes for op, tier in plan.keeps(number).items() if tier == "ssd"
            )
    parts = {
        f"weights and states, {versions} versions": versions * state,
        "gradients": sum(model.units[u].weights_bytes for u in held) if plan.gradients_on_ssd else 0,
        "activations": activations * micro_batches,
    }
    return {name: size for name, size in parts.items() if size}


def _activations(profile: ModelProfile, plan: Plan, number: int) -> tuple[int, int]:
    """Of one micro-batch of a unit, what stays on the device and what is sent away."""
    unit = profile.units[number]
    if unit.kind != "block":
        return 0, 0
    sizes = [(unit.input_bytes, plan.input_tier(number))]
    sizes += [(unit.operators[op].output_bytes, tier) for op, tier in plan.keeps(number).items()]
    stays = sum(size for size, tier in sizes if tier == "device")
    return stays, sum(size for size, tier in sizes) - stays
