"""From a model, a device and budgets to the Plan of a run, for micro-batches of one size.

The numbers come from the model (rehearsed without data) and, if one is given, from the machine's profile; the decisions
are plan/'s. With a profile the planner makes the plan, counting pieces and memory as the engine has them. Without one
nothing is known about rates, so nothing is swapped for speed: block inputs wait in host memory and all the rest is
computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from lohan.measure.model import profile_rehearsed
from lohan.measure.rehearsal import Rehearsal, Unrehearsable, rehearse
from lohan.models.units import Units
from lohan.plan.activations import Activations
from lohan.plan.fit import HostBudget, Wishes, fit_plan, staging_bytes
from lohan.plan.head import head_chunks_for
from lohan.plan.memory import Budgets
from lohan.plan.plan import ModelSize, Plan
from lohan.plan.planner import make_plan
from lohan.plan.strategies import PUBLISHED
from lohan.profiles import MachineProfile, ModelProfile
from lohan.sim.paper import choose_activations
from lohan.sim.run import simulate_steps
from lohan.sim.sizes import with_fewer_pieces
from lohan.sizes import format_bytes

_LOGITS_SHARE = 8
"""The head is computed in chunks when its logits would take more than this part of the memory it computes in."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A plan and what it was made of."""

    size: ModelSize
    budget: HostBudget
    plan: Plan
    tokens: int
    """Of the step it was made for."""

    micro_batches: int
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
        self._settings, self._wishes, self._host_bytes, self.machine = settings, wishes, host_bytes, machine
        """`machine` may be another one by the next plan."""
        self._head_chunks = head_chunks
        self._dtype = settings.compute(device.name)
        self._rehearsals: dict[tuple[int, int], Rehearsal | None] = {}

    def other(self, *, machine: MachineProfile, host_bytes: int) -> Planning:
        """For the same model and wishes on another machine. What was rehearsed is shared."""
        changed = copy(self)
        changed.machine, changed._host_bytes = machine, host_bytes
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
        plan, wishes = _fitted(size, budget, wishes)
        plan = replace(plan, head_chunks=chunks)
        needs = self._needs(rehearsal, plan, rows * tokens, num)
        limit = self._device.memory_budget
        if needs is not None and limit is not None and needs.total_bytes > limit:
            self._refuse(needs, limit, rows, tokens, num)
        base = Planned(size=size, budget=budget, plan=plan, tokens=all_tokens, micro_batches=num, needs=needs)
        if self.machine is None or rehearsal is None or self._wishes.activations != Activations():
            return base
        if self._wishes.strategy in PUBLISHED:
            return self._as_published(base, rehearsal, wishes, rows, tokens, limit) or base
        if self._wishes.strategy == "lohan" and not self._wishes.left_units:
            return self._planned(base, rehearsal, wishes, rows, tokens) or base
        return base

    def predict(self, planned: Planned) -> float | None:
        """Seconds of a step by the simulator; None on a machine that was never measured."""
        if self.machine is None:
            return None
        size, plan = with_fewer_pieces(planned.size, planned.plan)
        commit = self._wishes.commit_every == 1
        num = planned.micro_batches
        return simulate_steps(size, plan, self.machine, micro_batches=num, commit=commit).seconds_per_step

    def _planned(self, base: Planned, rehearsal: Rehearsal, wishes: Wishes, rows: int, tokens: int) -> Planned | None:
        """By the planner, with this model's own pieces and memory; None where it finds nothing that fits."""
        assert self.machine is not None
        num, wanted, device = wishes.micro_batches, self._wishes, self._device
        limit = device.memory_budget
        budgets = Budgets(
            gpu_bytes=limit if limit is not None else self.machine.gpu_memory_bytes,
            host_bytes=base.budget.total, host=base.budget,
        )  # fmt: skip
        # A machine that was measured as another device still has its drives and cores.
        machine = replace(self.machine, separate_memory=device.separate_memory, gpus=1)

        def device_bytes(plan: Plan) -> int:
            needs = self._needs(rehearsal, plan, rows * tokens, num)
            return 0 if needs is None else needs.total_bytes

        try:
            profile = self._profile(rehearsal, rows, tokens)
            result = make_plan(
                profile, machine, budgets, tokens_per_step=rows * tokens * num, micro_batch_size=rows,
                clip=wanted.clip, versions=wanted.versions, commit_every=wanted.commit_every,
                wire_bytes=self._settings.wire.itemsize, sizes=lambda profile, count: base.size,
                head_chunks=base.plan.head_chunks, device_bytes=device_bytes,
                spills=wanted.clip != "none",  # as the store is made
                keep_nothing=wanted.keep_nothing,
            )  # fmt: skip
        except (PlanInfeasible, Unrehearsable):
            return None
        return replace(base, plan=result.plan, needs=self._needs(rehearsal, result.plan, rows * tokens, num))

    def _as_published(
        self, base: Planned, rehearsal: Rehearsal, wishes: Wishes, rows: int, tokens: int, limit: int | None
    ) -> Planned | None:
        """The published system's choice of activations, in what its own slabs leave of RAM; None where it cannot be."""
        assert self.machine is not None
        bare = replace(base.plan, host_bytes=0, transit_slabs=0)
        free = 0.97 * (base.budget.staging - staging_bytes(base.size, bare))
        try:
            profile = self._profile(rehearsal, rows, tokens)
            choice = choose_activations(profile, self.machine, free_host_bytes=max(0.0, free))
            wishes = replace(wishes, activations=Activations(inputs=choice.inputs, kept=choice.kept))
            plan = replace(fit_plan(base.size, base.budget, wishes), head_chunks=base.plan.head_chunks)
        except (PlanInfeasible, Unrehearsable):
            return None
        needs = self._needs(rehearsal, plan, rows * tokens, wishes.micro_batches)
        if needs is not None and limit is not None and needs.total_bytes > limit:
            return None
        return replace(base, plan=plan, needs=needs)

    def _profile(self, rehearsal: Rehearsal, rows: int, tokens: int) -> ModelProfile:
        return profile_rehearsed(
            self._model, self._units, rehearsal, rows=rows, tokens=tokens, dtype=self._dtype
        )  # fmt: skip

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
            micro_batch_tokens=tokens,
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


def _fitted(size: ModelSize, budget: HostBudget, wishes: Wishes) -> tuple[Plan, Wishes]:
    """The plan as wished for. Unless activations were, block inputs wait in host memory, or on SSD if it is short."""
    if wishes.activations != Activations():
        return fit_plan(size, budget, wishes), wishes
    refusals: list[PlanInfeasible] = []
    for tier in ("host",) if wishes.strategy == "in-memory" else ("host", "ssd"):
        inputs = tuple(tier if unit.kind == "block" else "device" for unit in size.units)
        wishes = replace(wishes, activations=Activations(inputs=inputs))
        try:
            return fit_plan(size, budget, wishes), wishes
        except PlanInfeasible as refusal:
            refusals.append(refusal)
    raise min(refusals, key=lambda refusal: refusal.least_bytes or 0)
