"""Plans worth simulating for one size and number of micro-batches, found by the closed form of stage_work.py.

Tried in all combinations: how many units' updates are left for the next forward, how much of the free RAM activations
may take (the rest goes to units that stay), in which order units stay, and how many operators are kept along their
order of benefit. A combination is a few numbers; the ones with the least closed time become Plans, and only those are
checked against the budgets in full. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from lohan.plan.activations import Activations, Room, points
from lohan.plan.fit import with_activations
from lohan.plan.head import head_chunks_for
from lohan.plan.memory import Budgets, device_use, heap_bytes, host_budget_of, ssd_use
from lohan.plan.plan import ModelSize, Plan
from lohan.plan.stage_work import Moved, moved_by, weights_work
from lohan.plan.staging import Order, Short, Staging
from lohan.profiles import MachineProfile, ModelProfile

DeviceBytes = Callable[[Plan], int]

LEFT_EIGHTHS = (0, 1, 2, 3, 4)
"""Of the blocks' updates, what may be left for the next forward. More than half only moves the wait."""

ORDERS = (Order(), Order(weights_first=False))
_NOTHING = Order(nothing=True)

HOST_SHARES = (1.0, 0.5, 0.0)
"""Of the RAM beside the slabs, what activations may take."""

_POINTS = 24
"""Amounts of kept operators that are looked at along the order of benefit."""

_AMOUNTS = 3
"""Of those, how many are tried for each combination in a thorough search."""

_LOGITS_SHARE = 8
"""The head is computed in chunks when its logits would take more than this part of memory; as engine/planning.py."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is to be planned: a step of `micro_batches` of the profile's size on each device."""

    profile: ModelProfile
    model: ModelSize
    machine: MachineProfile
    budgets: Budgets
    micro_batches: int
    clip: str
    """immediate, deferred or speculative."""

    versions: int = 2
    commit_every: int = 1
    wire_bytes: int = 2
    head_chunks: int | None = None
    """None: as many as the logits' size asks for."""

    spills: bool = True
    """Whether there is room on the drives for gradients that are held."""

    device_bytes: DeviceBytes | None = None
    """Who knows better than plan.memory what a plan takes on the device."""

    keep_nothing: bool = False
    """No unit stays in memory, however much is free."""


class _Amount(NamedTuple):
    """One amount along the order of benefit."""

    activations: Activations
    moved: Moved


class _Sketch(NamedTuple):
    """A combination, before RAM is spent and the budgets are checked."""

    rank: float
    left: Plan
    share: float
    order: Order
    on_device: bool
    """Whether activations may stay there."""

    kept: int
    """How far along the order of benefit."""

    amount: _Amount


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan, its closed times, and where it stands in the search."""

    plan: Plan
    staged_seconds: float
    flowing_seconds: float
    sketch: _Sketch

    @property
    def rank(self) -> float:
        return self.staged_seconds + self.flowing_seconds


class Finder:
    """Finds candidates for one case. Raises nothing: what does not fit is a Short."""

    def __init__(self, case: Case):
        self.case = case
        self._staging = Staging(case.model)
        start = self._start()
        self.short = start if isinstance(start, Short) else None
        """The budget that even the least of all plans breaks."""
        self._least = start if isinstance(start, Plan) else Plan()
        self._blocks = [u for u, unit in enumerate(case.model.units) if unit.kind == "block" and unit.trained_pieces]
        self._along: dict[Room, list[_Amount]] = {}
        self._device_room = self._left_on_device() if self.short is None else 0

    def best(self, limit: int, *, thorough: bool = False) -> list[Candidate]:
        """At most `limit` plans, the most promising first; at least one if anything fits.

        Thorough: also with activations kept off the device although it has room, and with several amounts of them.
        """
        if self.short is not None:
            return []
        drives = bool(self.case.machine.drives)
        orders = (*ORDERS, *(replace(order, few_slabs=True) for order in ORDERS)) if thorough else ORDERS
        if self.case.keep_nothing:
            orders = (_NOTHING,)
        sketches = [
            sketch
            for left in self._lefts(thorough)
            for share in (HOST_SHARES if drives else (1.0,))
            for order in (orders if drives else orders[:1])
            for on_device in ((True, False) if thorough and self._device_room else (True,))
            for sketch in self._sketches(left, share, order, on_device, _AMOUNTS if thorough else 3)
        ]
        found: dict[Plan, Candidate] = {}
        done: set[tuple[object, ...]] = set()
        of_left: Counter[frozenset[int]] = Counter()
        # The closed form cannot tell some from others that are 10 % slower: no number of left updates takes all places.
        for most in (max(1, limit // 3), limit):
            for sketch in sorted(sketches, key=lambda one: one.rank):  # stable: what was tried first goes first
                left = sketch.left.left_units
                combination = (left, sketch.share, sketch.order, sketch.on_device, thorough and sketch.kept)
                if combination in done or of_left[left] >= most or len(found) >= limit:
                    continue
                made = self._finish(sketch.left, sketch.amount.activations, sketch.order)
                if isinstance(made, Plan):
                    done.add(combination)
                    of_left[left] += 1
                    found.setdefault(made, self._candidate(made, sketch))
        if not found:  # nothing but the least may fit
            order = _NOTHING if self.case.keep_nothing else Order()
            sketch = _Sketch(
                0.0, self._least, 1.0, order, True, 0, self._amount(Activations(inputs=self._least.inputs))
            )
            made = self._finish(self._least, sketch.amount.activations, order)
            if isinstance(made, Short):
                self.short = made
            else:
                found[made] = self._candidate(made, sketch)
        return sorted(found.values(), key=lambda one: one.rank)

    def beside(self, one: Candidate, by: int) -> Candidate | None:
        """The same with more or fewer operators kept."""
        at = one.sketch.kept + by
        along = self._amounts(self._given(one.sketch.left, one.sketch.share), one.sketch.on_device)
        if not 0 <= at < len(along):
            return None
        sketch = one.sketch._replace(kept=at, amount=along[at])
        made = self._finish(sketch.left, sketch.amount.activations, sketch.order)
        return self._candidate(made, sketch) if isinstance(made, Plan) else None

    # -- along one combination ------------------------------------------------------------------------

    def _lefts(self, thorough: bool) -> list[Plan]:
        """With none and with more and more updates left for the next forward."""
        case = self.case
        if case.clip == "deferred" or not case.machine.drives:
            return [self._least]
        counts = dict.fromkeys(len(self._blocks) * eighths // 8 for eighths in LEFT_EIGHTHS)
        if thorough and len(self._blocks) <= 8:
            counts = dict.fromkeys(range(len(self._blocks) + 1))
        return [replace(self._least, left_units=_evenly(self._blocks, count)) for count in counts]

    def _given(self, left: Plan, share: float) -> int:
        """RAM for activations: a share of what all useful slabs leave, or the least ones where RAM is short."""
        bare = self._bare(left)
        free = self._free(bare) - self._transit_bytes()
        spare = free - self._staging.total(self._staging.comfortable(bare))
        if spare <= 0:
            spare = free - self._staging.total(self._staging.least(bare))
        return int(max(0, spare) * share)

    def _transit_bytes(self) -> int:
        """Slabs for activations on their way to SSD, if everything went there."""
        most = 0
        for unit in {id(unit): unit for unit in self.case.model.units if unit.kind == "block"}.values():
            most = max(most, unit.input_bytes + sum(one.output_bytes for one in unit.operators if one.needed) + 8192)
        return 4 * most * self.case.machine.gpus

    def _bare(self, plan: Plan) -> Plan:
        """Without activations in RAM."""
        inputs = tuple("ssd" if unit.kind == "block" else "device" for unit in self.case.model.units)
        return replace(plan, inputs=inputs, kept=(), host_bytes=0, transit_slabs=0, transit_bytes=0)

    def _sketches(self, left: Plan, share: float, order: Order, on_device: bool, count: int) -> list[_Sketch]:
        """The best amounts of activations, by the closed form."""
        machine = self.case.machine
        given = self._given(left, share)
        bare = replace(self._bare(left), host_bytes=given)
        reserved = self._staging.fit(bare, self._free(bare), order)
        if isinstance(reserved, Short):
            return []
        base = weights_work(self.case.model, reserved, 1 / self.case.commit_every)
        made = []
        for at, amount in enumerate(self._amounts(given, on_device)):
            work = base.with_activations(amount.moved, machine.gpus)
            rank = work.staged(machine) + work.flowing(machine)
            made.append(_Sketch(rank, left, share, order, on_device, at, amount))
        return sorted(made, key=lambda one: one.rank)[:count]

    def _candidate(self, plan: Plan, sketch: _Sketch) -> Candidate:
        case = self.case
        work = weights_work(case.model, plan, 1 / case.commit_every)
        work = work.with_activations(moved_by(case.model, plan, case.micro_batches), case.machine.gpus)
        return Candidate(plan, work.staged(case.machine), work.flowing(case.machine), sketch)

    def _amounts(self, host: int, on_device: bool) -> list[_Amount]:
        case = self.case
        device = self._device_room if on_device else 0
        room = Room(device=device, host=host // case.machine.gpus, ssd=self._ssd_room())
        if room not in self._along:
            count = sum(len(unit.operators) for unit in case.model.units)
            found = points(
                case.model, self._least, case.machine, room, micro_batches=case.micro_batches,
                stride=max(1, count // _POINTS),
            )  # fmt: skip
            self._along[room] = [self._amount(point.activations) for point in found]
        return self._along[room]

    def _amount(self, activations: Activations) -> _Amount:
        plan = replace(self._least, inputs=activations.inputs, kept=activations.kept)
        return _Amount(activations, moved_by(self.case.model, plan, self.case.micro_batches))

    def _finish(self, plan: Plan, activations: Activations, order: Order) -> Plan | Short:
        """RAM spent, every budget checked."""
        placed = self._place(plan, activations)
        made: Plan | Short = self._staging.fit(placed, self._free(placed), order)
        return made if isinstance(made, Short) else self._misfit(made) or made

    # -- budgets --------------------------------------------------------------------------------------

    def _start(self) -> Plan | Short:
        """Block inputs in host memory, or on SSD where RAM is short; nothing kept, nothing left."""
        case, model = self.case, self.case.model
        separate = case.machine.separate_memory
        plan = Plan(
            separate_memory=separate, clip=case.clip, head_chunks=self._head_chunks(),
        )  # fmt: skip
        short: Short | None = None
        for tier in ("host", "ssd") if case.machine.drives else ("host",):
            inputs = tuple(tier if unit.kind == "block" else "device" for unit in model.units)
            least = self._staging.least(self._place(plan, Activations(inputs=inputs)))
            if not case.machine.drives:
                least = self._staging.resident(least)
            short = self._misfit(least)
            if short is None:
                return least
        assert short is not None
        return short

    def _head_chunks(self) -> int:
        case = self.case
        if case.head_chunks is not None:
            return case.head_chunks
        memory = case.budgets.gpu_bytes if case.machine.separate_memory else case.budgets.host_bytes
        words = case.profile.vocabulary
        return head_chunks_for(case.profile.tokens, words, max(memory // _LOGITS_SHARE, 16 * words)) if words else 1

    def _misfit(self, plan: Plan) -> Short | None:
        """The budget this plan breaks, if any."""
        case, budgets = self.case, self.case.budgets
        if plan.separate_memory:
            parts = device_use(case.profile, plan, case.micro_batches, wire_bytes=case.wire_bytes)
            used = sum(parts.values()) if case.device_bytes is None else case.device_bytes(plan)
            if used > budgets.gpu_bytes:
                return Short("gpu_memory", used, budgets.gpu_bytes, max(parts, key=lambda name: parts[name]))
        if not case.machine.drives:
            plan = self._staging.resident(plan)
        need = self._staging.total(plan) + budgets.host_bytes - self._free(plan)
        if need > budgets.host_bytes:
            what = "slabs, activations and computing" if case.machine.drives else "everything, for there is no drive"
            return Short("host_memory", need, budgets.host_bytes, what)
        if plan.gradients_on_ssd and not case.spills:
            return Short("host_memory", need + 1, budgets.host_bytes, "gradients that are held")
        if budgets.ssd_bytes is not None and case.machine.drives:
            batches = case.micro_batches * case.machine.gpus
            on_ssd = sum(ssd_use(case.model, plan, batches, versions=case.versions).values())
            if on_ssd > budgets.ssd_bytes:
                return Short("ssd", on_ssd, budgets.ssd_bytes, f"{case.versions} versions of weights and states")
        return None

    def _free(self, plan: Plan) -> int:
        """RAM for staging: without what computing takes, on `cpu` without the activations that wait."""
        case = self.case
        budget = host_budget_of(case.profile, plan, case.budgets, wire_bytes=case.wire_bytes)
        if plan.separate_memory:
            return budget.staging
        return budget.staging - heap_bytes(case.model, plan, case.micro_batches, budget)

    def _place(self, plan: Plan, activations: Activations) -> Plan:
        """With room in RAM for the activations of all devices."""
        plan = with_activations(self.case.model, plan, activations, self.case.micro_batches)
        devices = self.case.machine.gpus
        return replace(plan, host_bytes=plan.host_bytes * devices, transit_slabs=plan.transit_slabs * devices)

    def _left_on_device(self) -> int:
        """Left on the device when everything that can be is in transit."""
        case = self.case
        if not case.machine.separate_memory:
            return 0
        everything = tuple(
            tuple((op, "host") for op, one in enumerate(unit.operators) if one.needed) if unit.kind == "block" else ()
            for unit in case.model.units
        )
        plan = replace(self._least, kept=everything)
        used = device_use(case.profile, plan, case.micro_batches, wire_bytes=case.wire_bytes)
        return max(0, case.budgets.gpu_bytes - sum(used.values()))

    def _ssd_room(self) -> int:
        case = self.case
        if not case.machine.drives or case.budgets.ssd_bytes is None:
            return (1 << 60) if case.machine.drives else 0
        # As if all gradients had to wait there too.
        plain = replace(self._least, inputs=(), kept=(), gradients_on_ssd=True, separate_stage=True)
        used = sum(ssd_use(case.model, plain, 1, versions=case.versions).values())
        return max(0, case.budgets.ssd_bytes - used) // case.machine.gpus


def _evenly(blocks: Sequence[int], count: int) -> frozenset[int]:
    return frozenset(blocks[(2 * i + 1) * len(blocks) // (2 * count)] for i in range(count))
