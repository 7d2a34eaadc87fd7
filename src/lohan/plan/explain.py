"""A plan in words: where its time goes, what memory is for, and what more of anything would give.

What an upgrade gives is found by planning again on the better machine at the same tokens per step. A plan for less is
still possible with more, so no upgrade is ever said to be worse than nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from lohan.errors import LohanError
from lohan.plan.planner import plan_for
from lohan.plan.result import PlanResult, Request
from lohan.sizes import format_bytes

LANE_NAMES = {
    "gpu": "computing",
    "to_gpu": "copies to the device",
    "to_host": "copies to RAM",
    "ssd": "drives, reading or writing",
    "ssd_read": "of that: reading weights and states",
    "ssd_write": "of that: writing them",
    "swap_in": "of that: reading activations",
    "swap_out": "of that: writing activations",
    "cpu_update": "updates on the CPU",
}
_MORE_RAM = 64 * 10**9


@dataclass(frozen=True, kw_only=True, slots=True)
class Upgrade:
    """More of something, and what it gives."""

    name: str
    tokens_per_second: float
    gain: float
    """1.1: ten percent more tokens per second."""

    price: float | None = None


def find_upgrades(result: PlanResult) -> list[Upgrade]:
    """One more SSD, more RAM, a GPU twice as fast, and twice the tokens per step; what fits nowhere is left out."""
    found = []
    for name, request, price in _better(result):
        try:
            rate = plan_for(request).tokens_per_second
        except LohanError:
            continue
        gain = max(1.0, rate / result.tokens_per_second)
        found.append(Upgrade(name=name, tokens_per_second=result.tokens_per_second * gain, gain=gain, price=price))
    return found


def _better(result: PlanResult) -> Iterator[tuple[str, Request, float | None]]:
    fixed = replace(result.request, tokens_per_step=result.tokens_per_step, micro_batch_size=result.micro_batch_size)
    machine, budgets = fixed.machine, fixed.budgets
    if machine.drives:
        drive = machine.drives[-1]
        ssd = None if budgets.ssd_bytes is None else budgets.ssd_bytes + (drive.capacity_bytes or 0)
        more = replace(machine, drives=(*machine.drives, drive))
        yield "one more SSD", replace(fixed, machine=more, budgets=replace(budgets, ssd_bytes=ssd)), drive.price
    more = replace(machine, host_memory_bytes=machine.host_memory_bytes + _MORE_RAM)
    ram = replace(budgets, host_bytes=budgets.host_bytes + _MORE_RAM)
    yield "64 GB more RAM", replace(fixed, machine=more, budgets=ram), None
    more = replace(machine, gpu_flops_per_second=machine.gpu_flops_per_second * 2)
    yield "a GPU twice as fast", replace(fixed, machine=more), None
    yield "twice the tokens per step", replace(fixed, tokens_per_step=2 * result.tokens_per_step), None


def explain(result: PlanResult, *, upgrades: bool = True) -> str:
    """Several lines for a person."""
    plan, machine = result.plan, result.machine
    lines = [
        f"{result.profile.name} on {machine.name}: {result.seconds_per_step:.4g} s per step of "
        f"{result.tokens_per_step:,} tokens, {result.tokens_per_second:.4g} tokens/s.",
        f"{result.num_micro_batches} micro-batches of {result.micro_batch_size} x {result.profile.sequence_length} "
        f"tokens{f' on each of {machine.gpus} GPUs' if machine.gpus > 1 else ''}; {_decisions(result)}.",
        "",
        f"Time of a step, {result.bottleneck} is the bottleneck:",
    ]
    for lane, name in LANE_NAMES.items():
        seconds = result.lanes.get(lane, 0.0)
        if seconds > 0:
            lines.append(f"  {name:<38}{seconds:>10.4g} s  {seconds / result.seconds_per_step:>4.0%}")
    for title, parts, budget in (
        ("Memory on the device", result.gpu_parts, result.budgets.gpu_bytes),
        ("RAM", result.host_parts, result.budgets.host_bytes),
        ("SSD", result.ssd_parts, result.budgets.ssd_bytes),
    ):
        lines += _memory(title, parts, budget)
    lines += [f"Note: {note}." for note in result.notes]
    if plan.clip == "speculative":
        lines.append(
            "Note: updates are made before the gradient's norm is known; a step that must be clipped redoes them."
        )
    if upgrades:
        lines += ["", "What would help, planned again:"]
        for one in sorted(find_upgrades(result), key=lambda one: -one.gain):
            lines.append(f"  {one.name:<38}{one.tokens_per_second:>10.4g} tokens/s  {one.gain - 1:>+4.0%}")
    return "\n".join(lines)


def _decisions(result: PlanResult) -> str:
    plan, units = result.plan, len(result.model.units)
    kept = [tier for unit in plan.kept for _, tier in unit]
    worth = sum(op.needed for unit in result.model.units if unit.kind == "block" for op in unit.operators)
    said = []
    if kept:
        names = {"device": "on the device", "host": "in RAM", "ssd": "on SSD"}
        where = ", ".join(f"{kept.count(tier)} {name}" for tier, name in names.items() if tier in kept)
        said.append(f"{len(kept)} of {worth} operators' outputs kept ({where}), the rest computed again")
    else:
        said.append("everything inside blocks computed again")
    said.append(
        f"weights of {len(plan.resident_weights)} and states of {len(plan.resident_state)} of {units} units in RAM"
    )
    if plan.left_units:
        said.append(f"updates of {len(plan.left_units)} units left for the next forward")
    said.append(f"clipping {plan.clip}" if plan.clip != "immediate" else "no clipping")
    if plan.head_chunks > 1:
        said.append(f"the loss in {plan.head_chunks} chunks")
    return "; ".join(said)


def _memory(title: str, parts: Mapping[str, int], budget: int | None) -> list[str]:
    if not parts:
        return []
    used = sum(parts.values())
    of = f" of {format_bytes(budget)}" if budget is not None else ""
    lines = ["", f"{title}, {format_bytes(used)}{of}:"]
    return lines + [
        f"  {name:<38}{format_bytes(size):>10}" for name, size in sorted(parts.items(), key=lambda p: -p[1])
    ]
