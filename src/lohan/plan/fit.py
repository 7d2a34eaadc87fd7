"""A Plan that fits the budgets: how many slabs, what stays in memory, how clipping waits.

Spent in this order, each only while it fits: the slabs without which nothing moves; the gradients that clipping
must hold; more slabs, until the drive can always be kept busy; then units that stay in memory, those first
that are needed soonest after the turn of forward and backward and again at the turn of the step: the head and the
units above, the embedding (whose update is last and whose fetch is first), then down from the top.

Pure: numbers in, decision out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lohan.errors import PlanInfeasible
from lohan.plan.activations import Activations
from lohan.plan.plan import ModelSize, Plan
from lohan.plan.strategies import PUBLISHED, RULES
from lohan.sizes import format_bytes

PAGE_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class HostBudget:
    """What host memory is for, in bytes."""

    total: int
    compute: int
    """What computing holds outside of the slabs: everything on `cpu`, little elsewhere."""

    slack: float = 1.0
    """On `cpu`: what the allocator makes of activations that wait for backward, over their own size."""

    @property
    def staging(self) -> int:
        return self.total - self.compute


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What the user asked for."""

    separate_memory: bool
    clip: str
    """none, deferred, speculative or auto."""

    versions: int
    commit_every: int
    strategy: str = "lohan"
    left_units: int = 0
    keep_nothing: bool = False
    """Let nothing stay in memory, however much is free: for tests and measurements."""

    micro_batches: int = 1
    activations: Activations = field(default_factory=Activations)


def _slab_bytes(model: ModelSize, plan: Plan) -> tuple[int, int, int]:
    units = range(len(model.units))
    weights = max((model.units[u].weights_bytes for u in units if u not in plan.resident_weights), default=0)
    state = max((max(model.units[u].state_bytes, default=0) for u in units if u not in plan.resident_state), default=0)
    gradient = max((unit.weights_bytes for unit in model.units if unit.trained_pieces), default=0)
    return weights, _pages(state), gradient


def staging_bytes(model: ModelSize, plan: Plan) -> int:
    """What a plan takes of the staging arena."""
    weights, state, gradient = _slab_bytes(model, plan)
    total = plan.weights_slabs * weights + plan.state_slabs * state + plan.gradient_slabs * gradient
    total += plan.host_bytes + plan.transit_slabs * _pages(plan.transit_bytes)
    for unit in plan.resident_weights:
        total += model.units[unit].weights_bytes
    for unit in plan.resident_state:
        total += sum(_pages(size) for size in model.units[unit].state_bytes)
    return total


def undo_bytes(model: ModelSize, plan: Plan) -> int:
    """What a speculative step keeps of resident units, to go back to; outside the arena."""
    if plan.clip != "speculative":
        return 0
    total = sum(sum(model.units[u].piece_weights_bytes) for u in plan.resident_weights)
    return total + sum(sum(model.units[u].state_bytes) for u in plan.resident_state)


def fit_plan(model: ModelSize, budget: HostBudget, wishes: Wishes) -> Plan:
    """The plan of a run, or PlanInfeasible with the budget that would do."""
    in_memory = wishes.strategy == "in-memory"
    stays = frozenset(u for u, unit in enumerate(model.units) if in_memory or not unit.weights_bytes)
    plan = Plan(
        strategy=wishes.strategy,
        separate_memory=wishes.separate_memory,
        resident_weights=stays,
        resident_state=stays,
        left_units=_spread(model, wishes.left_units),
        weights_slabs=3,
        state_slabs=2,
        gradient_slabs=2,
        **RULES[wishes.strategy],
    )
    most_pieces = max(len(unit.trained_pieces) for unit in model.units)
    if plan.blocks_in_flight:
        plan = replace(plan, state_slabs=max(2, plan.blocks_in_flight * most_pieces))
    plan = with_activations(model, plan, wishes.activations, wishes.micro_batches)
    on_device = waiting_bytes(model, plan, wishes.micro_batches, tier="device")
    waiting = 0 if plan.separate_memory else round(on_device * budget.slack)
    free = budget.staging - waiting
    if wishes.clip != "none":
        mode = wishes.clip
        if mode == "auto":
            mode = "speculative" if _can_undo(wishes) else "deferred"
        if mode == "speculative" and not _can_undo(wishes):
            raise PlanInfeasible(
                f"clip: speculative needs a third version on SSD when only every {wishes.commit_every}th step is "
                "committed. Set versions: 3, or commit every step, or use clip: deferred."
            )
        plan = replace(plan, clip=mode)
    holds = plan.clip != "immediate" or plan.separate_stage or bool(plan.left_units)
    if holds:
        trained = sum(1 for unit in model.units if unit.trained_pieces)
        in_ram = replace(plan, gradient_slabs=trained + 1)
        fits = staging_bytes(model, in_ram) <= free and not wishes.keep_nothing
        plan = in_ram if fits else replace(plan, gradients_on_ssd=True, gradient_slabs=3)
    needed = staging_bytes(model, plan) + undo_bytes(model, plan)
    if needed > free:
        activations = waiting + plan.host_bytes + plan.transit_slabs * plan.transit_bytes
        least = needed + budget.compute + waiting
        raise PlanInfeasible(
            f"host_memory is {format_bytes(budget.total)} and this run needs at least {format_bytes(least)}: "
            f"{format_bytes(needed + waiting - activations)} between SSD and device, {format_bytes(budget.compute)} to "
            f"compute, {format_bytes(activations)} for activations that wait for backward.\n"
            f"Set host_memory to {format_bytes(least * 1.02)} or more, or use fewer or shorter micro-batches.",
            least_bytes=least,
        )
    for better in (
        {"state_slabs": 4},
        {"weights_slabs": 4},
        {"state_slabs": 8},
        {"weights_slabs": 5},
        {"state_slabs": 16},
        {"gradient_slabs": plan.gradient_slabs + 1},
        {"state_slabs": max(16, 4 * most_pieces)},  # four whole units under way: 8 % of a balanced step
    ):
        candidate = replace(plan, **better)  # type: ignore[arg-type]
        if "state_slabs" in better and plan.blocks_in_flight:
            continue  # as many as a whole unit needs, and never more under way
        if staging_bytes(model, candidate) + undo_bytes(model, candidate) <= free:
            plan = candidate
    return plan if wishes.keep_nothing or wishes.strategy in PUBLISHED else _keep_in_memory(model, plan, free)


def waiting_bytes(model: ModelSize, plan: Plan, micro_batches: int, *, tier: str) -> int:
    """Activations of a step that wait for backward on one tier."""
    total = 0
    for number, unit in enumerate(model.units):
        if unit.kind != "block":
            continue
        total += unit.input_bytes if plan.input_tier(number) == tier else 0
        for op, where in plan.keeps(number).items():
            total += unit.operators[op].output_bytes if where == tier and op < len(unit.operators) else 0
    return total * micro_batches


def with_activations(model: ModelSize, plan: Plan, asked: Activations, micro_batches: int) -> Plan:
    """The plan with these activations, and host memory for what waits there or passes through on its way to SSD."""
    plan = replace(plan, inputs=asked.inputs, kept=asked.kept)
    transit, waiting = 0, 0
    for number, unit in enumerate(model.units):
        sizes = [(unit.input_bytes, plan.input_tier(number))]
        for op, tier in plan.keeps(number).items():
            sizes.append((unit.operators[op].output_bytes if op < len(unit.operators) else 0, tier))
        transit = max(transit, sum(-(-size // 64) * 64 for size, tier in sizes if tier == "ssd"))
        waiting += sum(_pages(size) for size, tier in sizes if tier == "host" and unit.kind == "block")
    transit = _pages(asked.transit_bytes if asked.transit_bytes is not None else transit)
    if asked.host_bytes is not None:
        waiting = asked.host_bytes
    elif waiting:
        # A little more, for what blocks pass on besides their hidden states.
        waiting = waiting * micro_batches + (waiting * micro_batches >> 5) + (1 << 20)
    return replace(
        plan,
        transit_bytes=transit,
        transit_slabs=4 if transit else 0,
        host_bytes=waiting,
    )


def _keep_in_memory(model: ModelSize, plan: Plan, free: int) -> Plan:
    """Let units stay in memory while they fit: all of a unit if possible, its weights otherwise."""
    last = len(model.units) - 1
    order = [u for u in (0, *range(last, 0, -1)) if u not in plan.resident_weights]
    for unit in order:
        both = replace(
            plan, resident_weights=plan.resident_weights | {unit}, resident_state=plan.resident_state | {unit}
        )
        weights = replace(plan, resident_weights=plan.resident_weights | {unit})
        for candidate in (both, weights):
            if staging_bytes(model, candidate) + undo_bytes(model, candidate) <= free:
                plan = candidate
                break
    return plan


def _can_undo(wishes: Wishes) -> bool:
    return wishes.versions >= 3 or (wishes.versions == 2 and wishes.commit_every == 1)


def _spread(model: ModelSize, count: int) -> frozenset[int]:
    """Units whose update is left for the next forward, evenly over the depth: the drives' work is spread, too."""
    blocks = [u for u, unit in enumerate(model.units) if unit.trained_pieces and unit.kind != "embedding"]
    count = min(count, len(blocks))
    return frozenset(blocks[(2 * i + 1) * len(blocks) // (2 * count)] for i in range(count))


def _pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
