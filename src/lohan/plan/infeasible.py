"""What to say when nothing fits: which budget, by how much, and the nearest settings that work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lohan.errors import PlanInfeasible
from lohan.plan.candidates import Case
from lohan.plan.staging import Short
from lohan.sizes import format_bytes

if TYPE_CHECKING:
    from lohan.plan.result import Request


def refuse(
    request: Request, shortage: Callable[[Case], Short | None], cases: Callable[[int, int], Sequence[Case]]
) -> PlanInfeasible:
    """The error to raise. `cases` makes what is to be planned from sequences per step and of a micro-batch."""
    per_sequence = request.profile.sequence_length * request.machine.gpus
    base = request.micro_batch_size or request.profile.micro_batch_size
    sequences = base if request.tokens_per_step is None else max(base, request.tokens_per_step // per_sequence)

    def short_at(count: int, size: int) -> Short | None:
        shorts = [shortage(case) for case in cases(count, size)]
        return None if None in shorts else min((s for s in shorts if s is not None), key=lambda s: s.need_bytes)

    short = short_at(sequences, base if sequences % base == 0 else request.profile.micro_batch_size)
    if short is None:  # the candidates themselves were refused; the least plan fits
        return PlanInfeasible("No plan was found, although the least one fits. Please report this.")
    lines = [
        f"{short.budget} is {format_bytes(short.have_bytes)} and this run needs at least "
        f"{format_bytes(short.need_bytes)}, {format_bytes(short.need_bytes - short.have_bytes)} more "
        f"(most of it: {short.what}; {sequences * per_sequence:,} tokens per step in micro-batches of {base})."
    ]
    nearest = _nearest(sequences, request.profile.micro_batch_size, short_at)
    if nearest is not None:
        count, size = nearest
        lines.append(
            f"With {count * per_sequence:,} tokens per step in micro-batches of {size} "
            f"{'sequences' if size > 1 else 'sequence'} it fits."
        )
    budget = _enough(short, lambda need: _with(request, short.budget, need), cases, sequences, base, shortage)
    lines.append(f"Or raise {short.budget} to {format_bytes(budget)} or more.")
    return PlanInfeasible("\n".join(lines))


def _nearest(sequences: int, base: int, short_at: Callable[[int, int], Short | None]) -> tuple[int, int] | None:
    """The most sequences, then the largest micro-batch, that fit."""
    count = sequences
    while count >= base:
        for size in (size for size in range(count, 0, -1) if count % size == 0 and size % base == 0 and size <= 8):
            if short_at(count, size) is None:
                return count, size
        count //= 2
    return None


def _enough(
    short: Short,
    given: Callable[[int], Request],
    cases: Callable[[int, int], Sequence[Case]],
    sequences: int,
    size: int,
    shortage: Callable[[Case], Short | None],
) -> int:
    """A budget that does: other needs may grow with it (a head in fewer chunks), so it is tried."""
    need = short.need_bytes
    for _ in range(8):
        budgets = given(need).budgets
        shorts = [shortage(replace(case, budgets=budgets)) for case in cases(sequences, size)]
        still = [s for s in shorts if s is not None and s.budget == short.budget]
        if len(still) < len(shorts):
            break
        need = max(need + (need >> 6), min(s.need_bytes for s in still))
    return round(need * 1.01)


def _with(request: Request, budget: str, num_bytes: int) -> Request:
    name = {"gpu_memory": "gpu_bytes", "host_memory": "host_bytes", "ssd": "ssd_bytes"}[budget]
    changes: dict[str, Any] = {name: num_bytes}
    if budget == "host_memory" and request.budgets.host is not None:
        changes["host"] = replace(request.budgets.host, total=num_bytes)
    return replace(request, budgets=replace(request.budgets, **changes))
