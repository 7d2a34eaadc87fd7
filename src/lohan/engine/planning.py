"""From a model, a device and budgets to the Plan of a run, for micro-batches of one size.

The numbers come from the model (rehearsed without data) and, if one is given, from the machine's profile; the decisions
are plan/'s. Without a profile nothing is known about rates, so nothing is swapped for speed: block inputs wait in host
memory and all the rest is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lohan.engine.compute import cast_memory_bytes
from lohan.engine.device_memory import DeviceNeeds, device_needs
from lohan.engine.devices import Device
from lohan.engine.head_loss import why_not_chunked
from lohan.engine.layout import UnitLayout, model_size
from lohan.engine.memory import hidden_size, host_budget
from lohan.engine.settings import Settings
from lohan.errors import PlanInfeasible
from lohan.measure.rehearsal import Rehearsal, Unrehearsable, rehearse
from lohan.models.units import Units
from lohan.plan.activations import Activations, Room, choose
from lohan.plan.fit import HostBudget, Wishes, fit_plan, staging_bytes, with_activations
from lohan.plan.head import head_chunks_for
from lohan.plan.plan import ModelSize, Plan
from lohan.profiles import MachineProfile
from lohan.sim import simulate_steps
from lohan.sizes import format_bytes

_LOGITS_SHARE = 8
"""The head is computed in chunks when its logits would take more than this part of the memory it computes in."""


_MAX_SIMULATED = 1500
"""Units times micro-batches up to which a choice is refined by simulating it: about 30 ms each at that size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan and what it was made of."""

    size: ModelSize
    budget: HostBudget
    plan: Plan
    needs: DeviceNeeds | None
    """Memory on a device of its own; None where it is not known."""


class Planning:
    """Makes plans for one run."""

    def __init__(
        self,
        *,
        model: nn.Module,
        units: Units,
        layouts: Sequence[UnitLayout],
        device: Device,
        settings: Settings,
        wishes: Wishes,
        host_bytes: int,
        machine: MachineProfile | None,
        head_chunks: int | None,
    ):
        self._model, self._units, self._layouts, self._device = model, units, layouts, device
        self._settings, self._wishes, self._host_bytes, self._machine = settings, wishes, host_bytes, machine
        self._head_chunks = head_chunks
        self._dtype = settings.compute(device.name)
        self._rehearsals: dict[tuple[int, int], Rehearsal | None] = {}

    def other(self, *, machine: MachineProfile, host_bytes: int) -> Planning:
        """For the same model and wishes on another machine. What was rehearsed is shared."""
        changed = copy(self)
        changed._machine, changed._host_bytes = machine, host_bytes
        return changed

    def plan(self, micro_batches: Sequence[Mapping[str, Any]]) -> Planned:
        """The plan for a step like this one, or PlanInfeasible with what would fit."""
        shapes = [tuple(batch["labels"].shape) for batch in micro_batches]
        rows, tokens = max(shapes, key=lambda shape: shape[0] * shape[-1])[0], max(shape[-1] for shape in shapes)
        total = sum(int(batch["labels"].numel()) for batch in micro_batches)
        return self._plan(rows, tokens, len(shapes), total)

    def _plan(self, rows: int, tokens: int, num: int, all_tokens: int) -> Planned:
        rehearsal = self._rehearse(rows, tokens)
        size = self._size(rehearsal, rows * tokens, all_tokens)
        chunks = self._chunks(rows * tokens)
        budget = host_budget(
            self._units, self._layouts, total=self._host_bytes, max_tokens=rows * tokens, dtype=self._dtype,
            separate_memory=self._device.separate_memory, head_chunks=chunks,
        )  # fmt: skip
        wishes = replace(self._wishes, micro_batches=num)
        if wishes.activations == Activations():
            inputs = tuple("host" if unit.kind == "block" else "device" for unit in size.units)
            wishes = replace(wishes, activations=Activations(inputs=inputs))
        plan = replace(fit_plan(size, budget, wishes), head_chunks=chunks)
        needs = self._needs(rehearsal, plan, rows * tokens, num)
        limit = self._device.memory_budget
        if needs is not None and limit is not None and needs.total_bytes > limit:
            self._refuse(needs, limit, rows, tokens, num)
        if self._machine is None or self._wishes.activations != Activations() or rehearsal is None:
            return Planned(size=size, budget=budget, plan=plan, needs=needs)
        # Room on the device is found by trying: what else lies there depends on what is kept.
        room_on_device = 0 if needs is None or limit is None else limit - needs.total_bytes
        for _ in range(4):
            room = Room(device=max(0, room_on_device), host=self._host_room(size, budget, plan), ssd=1 << 60)
            best = choose(size, plan, self._machine, room, micro_batches=num, predict=self._predictor(size, plan, num))
            chosen = replace(fit_plan(size, budget, replace(wishes, activations=best.activations)), head_chunks=chunks)
            needs = self._needs(rehearsal, chosen, rows * tokens, num)
            if needs is None or limit is None or needs.total_bytes <= limit:
                return Planned(size=size, budget=budget, plan=chosen, needs=needs)
            room_on_device -= needs.total_bytes - limit + (limit >> 6)
        return Planned(size=size, budget=budget, plan=plan, needs=self._needs(rehearsal, plan, rows * tokens, num))

    def _predictor(self, size: ModelSize, plan: Plan, num: int) -> Callable[[Activations], float] | None:
        """Seconds of a step by the simulator, where that takes less than a moment."""
        machine = self._machine
        if machine is None or len(size.units) * num > _MAX_SIMULATED:
            return None

        def predict(activations: Activations) -> float:
            changed = with_activations(size, plan, activations, num)
            return simulate_steps(size, changed, machine, micro_batches=num, steps=3, commit=False).seconds_per_step

        return predict

    # -- numbers --------------------------------------------------------------------------------------

    def _rehearse(self, rows: int, tokens: int) -> Rehearsal | None:
        key = (rows, tokens)
        if key not in self._rehearsals:
            try:
                self._rehearsals[key] = rehearse(
                    self._model, self._units, rows=rows, tokens=tokens, dtype=self._dtype,
                    device=self._device.torch_device,
                )  # fmt: skip
            except Unrehearsable:
                self._rehearsals[key] = None  # such a model runs, but nothing about its operators is known before
        return self._rehearsals[key]

    def _size(self, rehearsal: Rehearsal | None, tokens: int, all_tokens: int) -> ModelSize:
        operators = {}
        for kind in rehearsal.kinds if rehearsal is not None else ():
            operators.update({block + 1: kind.operators for block in kind.blocks})
        return model_size(
            self._layouts, tied=bool(self._units.tied), tokens=all_tokens, operators=operators,
            input_bytes=tokens * hidden_size(self._model, self._units) * self._dtype.itemsize,
        )  # fmt: skip

    @property
    def _vocabulary(self) -> int:
        tables = [p.shape[0] for p in (*self._units.head.params, *self._units.embedding.params) if len(p.shape) == 2]
        return max(tables, default=0)

    def _chunks(self, tokens: int) -> int:
        if self._head_chunks is not None:
            return self._head_chunks
        whole = self._device.memory_budget if self._device.separate_memory else self._host_bytes
        if whole is None or not self._vocabulary or why_not_chunked(self._model) is not None:
            return 1
        return head_chunks_for(tokens, self._vocabulary, whole // _LOGITS_SHARE)

    def _needs(self, rehearsal: Rehearsal | None, plan: Plan, tokens: int, num: int) -> DeviceNeeds | None:
        if rehearsal is None or not self._device.separate_memory:
            return None
        return device_needs(
            self._layouts, rehearsal, plan, micro_batches=num, vocabulary=self._vocabulary, tokens=tokens,
            cast_bytes=cast_memory_bytes(self._units, self._layouts, self._dtype, self._settings.wire),
            element_bytes=self._dtype.itemsize,
            tied_elements=sum(p.num_elements for p in self._units.embedding.params if p.name in self._units.tied),
        )  # fmt: skip

    def _host_room(self, size: ModelSize, budget: HostBudget, plan: Plan) -> int:
        """Host memory that is left for activations beside the least that a run needs."""
        least = replace(
            plan, host_bytes=0, weights_slabs=4, state_slabs=8, transit_slabs=0,
            resident_weights=frozenset(u for u in plan.resident_weights if not size.units[u].weights_bytes),
            resident_state=frozenset(u for u in plan.resident_state if not size.units[u].weights_bytes),
        )  # fmt: skip
        return max(0, budget.staging - staging_bytes(size, least))

    def _refuse(self, needs: DeviceNeeds, limit: int, rows: int, tokens: int, num: int) -> None:
        """A micro-batch that cannot fit is refused with the largest that can."""
        best = 0
        low, high = 1, rows - 1
        while low <= high:
            middle = (low + high) // 2
            if self._fits(middle, tokens, num, limit):
                best, low = middle, middle + 1
            else:
                high = middle - 1
        advice = f"Use micro-batches of {best} sequences of {tokens} tokens"
        if not best:
            shorter = tokens
            while shorter > 16 and not self._fits(1, shorter, num, limit):
                shorter //= 2
            advice = f"Use micro-batches of one sequence of {shorter} tokens" if shorter > 16 else "Use a smaller model"
        raise PlanInfeasible(
            f"gpu_memory is {format_bytes(limit)} and a micro-batch of {rows} x {tokens} tokens needs "
            f"{format_bytes(needs.total_bytes)} at its peak ({needs.stage}).\n{advice}, or raise gpu_memory to "
            f"{format_bytes(needs.total_bytes)} or more."
        )

    def _fits(self, rows: int, tokens: int, num: int, limit: int) -> bool:
        rehearsal = self._rehearse(rows, tokens)
        inputs = tuple("host" if layout.spec.kind == "block" else "device" for layout in self._layouts)
        plan = Plan(separate_memory=True, inputs=inputs, head_chunks=self._chunks(rows * tokens))
        needs = self._needs(rehearsal, plan, rows * tokens, num)
        return needs is not None and needs.total_bytes <= limit
