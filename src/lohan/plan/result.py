"""What a planner is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lohan.plan.memory import Budgets
from lohan.plan.plan import ModelSize, Plan
from lohan.profiles import MachineProfile, ModelProfile

SizeFactory = Callable[[ModelProfile, int], ModelSize]
"""The units of a step with so many micro-batches of the profile's size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanResult:
    """A plan, what it was made for and what is predicted of it."""

    plan: Plan
    model: ModelSize
    """What the plan's slabs are counted in."""

    profile: ModelProfile
    """At the chosen size of a micro-batch."""

    machine: MachineProfile
    budgets: Budgets
    num_micro_batches: int
    """On each device."""

    tokens_per_step: int
    """On all devices."""

    seconds_per_step: float
    lanes: dict[str, float]
    """Seconds each lane works in a step; `ssd` is the time the drives have anything to do."""

    bytes_per_step: dict[str, int]
    bottleneck: str
    gpu_parts: dict[str, int]
    host_parts: dict[str, int]
    ssd_parts: dict[str, int]
    notes: tuple[str, ...] = ()
    request: Request

    @property
    def micro_batch_size(self) -> int:
        return self.profile.micro_batch_size

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_step / self.seconds_per_step

    def explain(self, *, upgrades: bool = True) -> str:
        """In words: where the time goes, what memory is for, what more hardware would give."""
        from lohan.plan.explain import explain

        return explain(self, upgrades=upgrades)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What was asked for, so that it can be asked again of another machine."""

    profile: ModelProfile
    machine: MachineProfile
    budgets: Budgets
    tokens_per_step: int | None
    micro_batch_size: int | None
    max_tokens_per_step: int
    clip: str
    versions: int
    commit_every: int
    state_bytes_per_parameter: float
    wire_bytes: int
    sizes: SizeFactory | None
    head_chunks: int | None
    spills: bool
    device_bytes: Callable[[Plan], int] | None
    keep_nothing: bool = False
