"""How much memory a plan takes on a device of its own, before it runs.

Counted like devices/budget.py counts: live storages. What lies on the device at any moment is weights on their way and
in use, gradients on their way, the activations that stay there or are in transit, what every micro-batch holds between
two blocks, and what the block at work takes (rehearsed without data, see measure/rehearsal.py). The bound on what is in
transit is the Schedule's: swap_window and device_units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lohan.engine.layout import UnitLayout
from lohan.measure.rehearsal import BlockTrace, Rehearsal
from lohan.plan.head import head_bytes
from lohan.plan.plan import Plan

ALIGN = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceNeeds:
    """The most a step holds, and when."""

    total_bytes: int
    stage: str
    weights_bytes: int
    """On their way and in use, the copy in the compute dtype included."""

    waiting_bytes: int
    """Activations that stay on the device until backward."""


def device_needs(
    layouts: Sequence[UnitLayout],
    rehearsal: Rehearsal,
    plan: Plan,
    *,
    micro_batches: int,
    cast_bytes: int,
    element_bytes: int,
    tied_elements: int,
    vocabulary: int,
    tokens: int,
) -> DeviceNeeds:
    """`cast_bytes`: the memory weights are widened into; `element_bytes`: of the compute dtype."""
    kinds: dict[int, BlockTrace] = {block: kind for kind in rehearsal.kinds for block in kind.blocks}
    head = len(layouts) - 1
    hidden = max(kind.output_bytes for kind in rehearsal.kinds)
    shared = max(kind.shared_bytes for kind in rehearsal.kinds)
    sizes = [layout.pieces.weights_bytes for layout in layouts]
    tied_wire = tied_elements * layouts[0].wire.itemsize
    # In the order of a step: forward up to the head, then backward down.
    order = [*range(head + 1), *range(head - 1, -1, -1)]
    weights = max(sum(sizes[unit] for unit in order[start : start + plan.device_units]) for start in range(len(order)))
    trained = [sizes[unit] if layouts[unit].pieces.state_bytes else 0 for unit in range(len(layouts))]
    stays, away = _activations(plan, kinds, head)
    waiting = micro_batches * sum(stays)
    # Between blocks every micro-batch holds a hidden state or its gradient, the embedding's output, masks and tables.
    between = micro_batches * (2 * hidden + shared)
    tied = tied_elements * element_bytes
    parts = {"weights": cast_bytes + weights, "waiting": waiting, "between": between}
    base = sum(parts.values())
    stages: list[tuple[int, str]] = []
    in_flight, several = max(0, plan.swap_window - 1), micro_batches > 1
    for block, kind in kinds.items():
        unit = block + 1
        peaks = rehearsal.peaks(kind, sorted(plan.keeps(unit)))
        stages.append((base + peaks.forward + in_flight * max(away), f"forward of block {block}"))
        arrived = away[unit] + in_flight * max(away[max(0, unit - 1) : unit + 1])
        leaving = sum(trained[unit + 1 : unit + plan.device_units])  # gradients of the units above
        there = base + arrived + leaving + tied
        # Blocks above have let go of theirs, and so have the micro-batches before; the last one's gradient leaves.
        own = stays[unit]
        there -= sum(stays[unit + 1 :]) * micro_batches
        first = peaks.first_backward + (0 if several else trained[unit])
        stages.append((there + first, f"backward of block {block}"))
        if several:
            stages.append((there + peaks.later_backward - own, f"backward of block {block}"))
            last = peaks.later_backward + trained[unit] - own * (micro_batches - 1)
            stages.append((there + last, f"backward of block {block}"))
    logits = head_bytes(tokens, vocabulary, 1) - head_bytes(tokens, vocabulary, plan.head_chunks)
    at_head = rehearsal.later_head_bytes if several else rehearsal.head_bytes
    at_head = max(at_head - logits, 0) + trained[head]
    stages.append((base + tied_wire + at_head + in_flight * max(away), "head"))
    embedding = sum(p.num_elements for p in layouts[0].spec.params if p.trainable) * element_bytes
    gradients = sum(trained[: plan.device_units])
    stages.append(
        (base - waiting + gradients + tied + embedding + (embedding if tied else 0) + hidden, "embedding's backward")
    )
    total, stage = max(stages)
    return DeviceNeeds(total_bytes=total, stage=stage, weights_bytes=parts["weights"], waiting_bytes=waiting)


def _activations(plan: Plan, kinds: dict[int, BlockTrace], head: int) -> tuple[list[int], list[int]]:
    """For each unit, what one micro-batch leaves on the device, and what it sends away."""
    stays, away = [0] * (head + 1), [0] * (head + 1)
    for block, kind in kinds.items():
        unit = block + 1
        # The first block's input is the embedding's output, which the glue holds anyway.
        sizes = [(kind.input_bytes if block else 0, plan.input_tier(unit))]
        for op, tier in plan.keeps(unit).items():
            if op < len(kind.operators) and kind.operators[op].needed:
                sizes.append((kind.operators[op].output_bytes, tier))
        stays[unit] = sum(size for size, tier in sizes if tier == "device")
        away[unit] = sum(-(-size // ALIGN) * ALIGN for size, tier in sizes if tier != "device")
    return stays, away
