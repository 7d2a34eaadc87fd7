"""How a plan spends RAM: slabs, held gradients, units that stay. plan.fit's order, fast enough to be tried many times.

Two orders of staying are known: whole units first (plan.fit's own), or all weights before any state. A byte of weights
that stays saves two bytes read in a step, a byte of state one, as long as every step is committed; where few are, a
state's byte saves its write too. Slabs for state are counted out until a whole unit, then two, can be on its way:
simulated, that is worth up to 13 % of a step the drives decide. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lohan.plan.fit import PAGE_BYTES
from lohan.plan.plan import ModelSize, Plan


@dataclass(frozen=True, slots=True)
class Order:
    """In which order RAM is spent."""

    weights_first: bool = True
    """All weights stay before any state does; else whole units."""

    few_slabs: bool = False
    """No more slabs for state than needed, so that more stays."""

    nothing: bool = False
    """Nothing stays, however much is free: for measurements."""


@dataclass(frozen=True, slots=True)
class Short:
    """A budget that does not suffice."""

    budget: str
    """gpu_memory, host_memory or ssd."""

    need_bytes: int
    have_bytes: int
    what: str = ""
    """What needs it."""


class Staging:
    """Sizes of one model, looked up once."""

    def __init__(self, model: ModelSize):
        self._model = model
        cached: dict[int, tuple[int, int, int]] = {}
        for unit in model.units:
            if id(unit) not in cached:
                pages = [-(-size // PAGE_BYTES) * PAGE_BYTES for size in unit.state_bytes]
                cached[id(unit)] = (max(pages, default=0), sum(pages), sum(unit.state_bytes))
        self._weights = [unit.weights_bytes for unit in model.units]
        self._piece = [cached[id(unit)][0] for unit in model.units]
        self._state = [cached[id(unit)][1] for unit in model.units]
        self._plain_state = [cached[id(unit)][2] for unit in model.units]
        self._trained = [bool(unit.trained_pieces) for unit in model.units]
        self._plain_weights = [sum(unit.piece_weights_bytes) for unit in model.units]
        self._gradient = max((w for w, t in zip(self._weights, self._trained, strict=True) if t), default=0)
        self.pieces = max((len(unit.state_bytes) for unit in model.units), default=1)
        self.all_units = frozenset(range(len(model.units)))
        self.empty_units = frozenset(u for u in self.all_units if not self._weights[u])

    def total(self, plan: Plan) -> int:
        """Staging arena and undo copies, as plan.fit counts them."""
        weights = max((w for u, w in enumerate(self._weights) if u not in plan.resident_weights), default=0)
        piece = max((p for u, p in enumerate(self._piece) if u not in plan.resident_state), default=0)
        total = plan.weights_slabs * weights + plan.state_slabs * piece + plan.gradient_slabs * self._gradient
        total += plan.host_bytes + plan.transit_slabs * (-(-plan.transit_bytes // PAGE_BYTES) * PAGE_BYTES)
        total += sum(self._weights[u] for u in plan.resident_weights)
        total += sum(self._state[u] for u in plan.resident_state)
        if plan.clip == "speculative":
            total += sum(self._plain_weights[u] for u in plan.resident_weights)
            total += sum(self._plain_state[u] for u in plan.resident_state)
        return total

    def least(self, plan: Plan) -> Plan:
        """The fewest slabs with which nothing stands still; held gradients on SSD."""
        holds = plan.clip != "immediate" or plan.separate_stage or bool(plan.left_units)
        return replace(
            plan, weights_slabs=3, state_slabs=2, gradient_slabs=3 if holds else 2, gradients_on_ssd=holds,
            resident_weights=self.empty_units, resident_state=self.empty_units,
        )  # fmt: skip

    def resident(self, plan: Plan) -> Plan:
        """Everything in RAM."""
        holds = plan.clip != "immediate" or plan.separate_stage
        slabs = sum(self._trained) + 1 if holds else len(plan.left_units) + (3 if plan.left_units else 2)
        return replace(
            plan, resident_weights=self.all_units, resident_state=self.all_units, gradients_on_ssd=False,
            gradient_slabs=slabs,
        )  # fmt: skip

    def comfortable(self, plan: Plan) -> Plan:
        """As many slabs as are any use, nothing that stays, held gradients in RAM."""
        plan = self._in_ram(self.least(plan))
        return replace(
            plan, weights_slabs=5, state_slabs=max(8, 2 * self.pieces), gradient_slabs=plan.gradient_slabs + 1
        )

    def fit(self, plan: Plan, free: int, order: Order) -> Plan | Short:
        """The plan with slabs and units that stay, within `free` bytes of RAM."""
        plan = self.least(plan)
        everything = self.resident(plan)
        if self.total(everything) <= free and not order.nothing:
            return everything
        if self.total(plan) > free:
            return Short("host_memory", self.total(plan), free, "what moves between SSD and device, and activations")
        if self.total(self._in_ram(plan)) <= free:
            plan = self._in_ram(plan)
        for better in (
            {"state_slabs": min(4, self.pieces)},  # small ones first: the largest unit may have many pieces
            {"state_slabs": min(8, self.pieces)},
            {"state_slabs": max(2, self.pieces // 4)},
            {"weights_slabs": 4},
            {"state_slabs": max(4, self.pieces)},
            {"weights_slabs": 5},
            {"gradient_slabs": plan.gradient_slabs + 1},
            {"state_slabs": max(8, 2 * self.pieces)},
        ):
            candidate = replace(plan, **better)  # type: ignore[arg-type]
            if candidate.state_slabs < plan.state_slabs or (order.few_slabs and "state_slabs" in better):
                continue
            if self.total(candidate) <= free:
                plan = candidate
        return plan if order.nothing else self._stay(plan, free, order.weights_first)

    def _in_ram(self, plan: Plan) -> Plan:
        """With held gradients in RAM, if any are held."""
        if not plan.gradients_on_ssd:
            return plan
        everyone = plan.clip != "immediate" or plan.separate_stage
        count = sum(self._trained) + 1 if everyone else len(plan.left_units) + 3
        return replace(plan, gradients_on_ssd=False, gradient_slabs=count)

    def _stay(self, plan: Plan, free: int, weights_first: bool) -> Plan:
        """The embedding first, whose update is last and whose fetch is first; the head; then evenly over the depth.

        A stretch of units that stay and one of units that do not would leave the drives idle in one and late in the
        other: simulated, up to 3 % of a step. Slabs are taken to stay as large as they are: they shrink
        only when the last of the largest units stays.
        """
        last = len(self._model.units) - 1
        order = [u for u in (0, last, *_evenly_down(last)) if u not in plan.resident_weights]
        undo = plan.clip == "speculative"
        weights = [w + (p if undo else 0) for w, p in zip(self._weights, self._plain_weights, strict=True)]
        state = [s + (p if undo else 0) for s, p in zip(self._state, self._plain_state, strict=True)]
        left = free - self.total(plan)
        stays, with_state = set(plan.resident_weights), set(plan.resident_state)
        # Whole units, or only the first and then all weights before any other state.
        for unit in order[:1] if weights_first else order:
            if weights[unit] + state[unit] <= left:
                left -= weights[unit] + state[unit]
                stays.add(unit)
                with_state.add(unit)
        for unit in order:
            if unit not in stays and weights[unit] <= left:
                left -= weights[unit]
                stays.add(unit)
        for unit in order:
            if unit in stays and unit not in with_state and state[unit] <= left:
                left -= state[unit]
                with_state.add(unit)
        return replace(plan, resident_weights=frozenset(stays), resident_state=frozenset(with_state))


def _evenly_down(last: int) -> list[int]:
    """The units between the first and the last, so that the first few of them are spread over the depth."""
    order: list[int] = []
    step = 1 << max(0, last - 1).bit_length()
    while step >= 1:
        order += [u for u in range(last - 1, 0, -1) if (last - 1 - u) % step == 0 and u not in order]
        step //= 2
    return order
