"""The answer to `lohan estimate`: one strategy on one machine, or a table of all of them.

`lohan` is planned; the others are simulated as published, with their whole batch as one micro-batch, and choose the
smallest batch within 3 % of their best when none is given. What the engine cannot run says so. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from lohan.errors import ConfigError, PlanInfeasible
from lohan.estimate.costs import Costs, costs_of
from lohan.plan.candidates import Case
from lohan.plan.explain import Upgrade, find_upgrades
from lohan.plan.plan import Plan
from lohan.plan.planner import MAX_TOKENS_PER_STEP, NEARLY_BEST, make_plan
from lohan.plan.predict import predict
from lohan.plan.result import PlanResult
from lohan.profiles import MachineProfile, ModelProfile
from lohan.sim.strategies import SIMULATED_ONLY, STRATEGIES, Scenario, build_scenario, scale_batch
from lohan.sim.timeline import Timeline

WORTH_BUYING = 1.03
"""An upgrade is named when it gives at least this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What is asked."""

    profile: ModelProfile
    """Of one sequence."""

    machine: MachineProfile
    batch_size: int | None = None
    """Sequences per step over all GPUs; None: chosen."""

    micro_batch_size: int | None = None
    steps: int = 1000
    strategy: str = "lohan"
    max_tokens_per_step: int = MAX_TOKENS_PER_STEP

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"There is no strategy {self.strategy!r}. Known are: {', '.join(STRATEGIES)}.")
        gpus = self.machine.gpus
        if gpus < 1:
            raise ConfigError(f"--gpus is {gpus}; it is 1 or more.")
        if self.batch_size is not None and (self.batch_size < 1 or self.batch_size % gpus):
            nearest = max(1, round(self.batch_size / gpus)) * gpus
            raise ConfigError(
                f"--batch-size is {self.batch_size}, which {gpus} GPUs cannot share evenly. The nearest is {nearest}."
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What is predicted. Numbers are None where the run does not fit."""

    model: str
    machine: str
    strategy: str
    simulated_only: bool
    fits: bool
    reason: str
    """Why it does not fit, and what would; empty if it does."""

    parameters: int
    sequence_length: int
    batch_size: int | None = None
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    tokens_per_step: int | None = None
    seconds_per_step: float | None = None
    tokens_per_second: float | None = None
    tflops_6n: float | None = None
    """6 x parameters x tokens per second, of each GPU."""

    gpu_bytes: int | None = None
    host_bytes: int | None = None
    ssd_bytes: int | None = None
    ssd_read_bytes_per_step: int | None = None
    ssd_write_bytes_per_step: int | None = None
    steps: int = 0
    hours: float | None = None
    endurance_share: float | None = None
    energy_kwh: float | None = None
    cost_per_billion_tokens: float | None = None
    bottleneck: str | None = None
    lanes: dict[str, float] = field(default_factory=dict)
    plan: dict[str, Any] = field(default_factory=dict)
    upgrades: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


@dataclass(frozen=True, slots=True)
class Simulated:
    """An estimate with what is behind it."""

    estimate: Estimate
    timeline: Timeline | None = None
    planned: PlanResult | None = None


def answer(question: Question, *, upgrades: bool = True) -> Estimate:
    """The estimate. What does not fit is an answer, too."""
    return simulate_question(question, upgrades=upgrades).estimate


def compare(question: Question) -> list[Estimate]:
    """One estimate for every strategy."""
    return [answer(replace(question, strategy=name), upgrades=False) for name in STRATEGIES]


def simulate_question(question: Question, *, upgrades: bool = False, detailed: bool = False) -> Simulated:
    """The estimate and its timeline; in detail with every micro-batch by itself."""
    if question.strategy == "lohan":
        return _planned(question, upgrades, detailed)
    return _published(question)


def _planned(question: Question, upgrades: bool, detailed: bool) -> Simulated:
    machine, profile = question.machine, question.profile
    tokens = None if question.batch_size is None else question.batch_size * profile.sequence_length
    try:
        result = make_plan(
            profile, machine, tokens_per_step=tokens, micro_batch_size=question.micro_batch_size,
            max_tokens_per_step=question.max_tokens_per_step,
        )  # fmt: skip
    except PlanInfeasible as error:
        return Simulated(_misfit(question, str(error)))
    timeline = None
    if detailed:
        case = Case(
            profile=result.profile, model=result.model, machine=machine, budgets=result.budgets,
            micro_batches=result.num_micro_batches, clip=result.plan.clip,
        )  # fmt: skip
        timeline = predict(case, result.plan)
    more = find_upgrades(result) if upgrades else []
    batch = result.tokens_per_step // profile.sequence_length
    costs = _costs(question, result.seconds_per_step, result.tokens_per_step, _written(result.bytes_per_step))
    notes = list(result.notes)
    if machine.gpus > 1:
        notes.append("several GPUs are simulated only: the engine runs one")
    estimate = Estimate(
        **_head(question),
        **_rates(question, result.seconds_per_step, result.tokens_per_step, result.bytes_per_step, costs),
        batch_size=batch,
        micro_batch_size=result.micro_batch_size,
        num_micro_batches=result.num_micro_batches,
        gpu_bytes=sum(result.gpu_parts.values()),
        host_bytes=sum(result.host_parts.values()),
        ssd_bytes=sum(result.ssd_parts.values()),
        bottleneck=result.bottleneck,
        lanes=result.lanes,
        plan=plan_to_dict(result.plan),
        upgrades=[_upgrade(one) for one in more],
        notes=notes,
    )
    return Simulated(estimate, timeline, result)


def _published(question: Question) -> Simulated:
    scenario, timeline = _choose_batch(question)
    machine = question.machine
    reason = scenario.needs.misfit(machine)
    if reason:
        return Simulated(_misfit(question, f"{question.strategy} {reason}"))
    moved = timeline.bytes_per_step()
    seconds, tokens = timeline.seconds_per_step, scenario.tokens_per_step
    notes = list(scenario.notes)
    if SIMULATED_ONLY[question.strategy]:
        notes.append(f"{question.strategy} is simulated only: the engine does not run it")
    elif machine.gpus > 1:
        notes.append("several GPUs are simulated only: the engine runs one")
    estimate = Estimate(
        **_head(question),
        **_rates(question, seconds, tokens, moved, _costs(question, seconds, tokens, _written(moved))),
        batch_size=tokens // question.profile.sequence_length,
        micro_batch_size=tokens // question.profile.sequence_length // machine.gpus,
        num_micro_batches=1,
        gpu_bytes=round(scenario.needs.gpu_bytes),
        host_bytes=round(scenario.needs.host_bytes),
        ssd_bytes=round(scenario.needs.ssd_bytes),
        bottleneck=timeline.bottleneck,
        lanes=timeline.busy_seconds() | {"ssd": timeline.drive_seconds()},
        plan=plan_to_dict(scenario.plan),
        notes=notes,
    )
    return Simulated(estimate, timeline)


def _choose_batch(question: Question) -> tuple[Scenario, Timeline]:
    """The batch asked for; else the smallest of 1, 2, 4, ... on each GPU that is nearly as fast as any that fits."""

    def build(sequences: int) -> tuple[Scenario, Timeline]:
        scenario = build_scenario(question.strategy, scale_batch(question.profile, sequences), question.machine)
        return scenario, scenario.run()

    gpus = question.machine.gpus
    if question.batch_size is not None:
        return build(question.batch_size // gpus)
    most = max(1, question.max_tokens_per_step // (question.profile.sequence_length * gpus))
    tried: list[tuple[Scenario, Timeline]] = []
    sequences = 1
    while sequences <= most:
        one = build(sequences)
        if tried and one[0].needs.misfit(question.machine):
            break
        tried.append(one)
        sequences *= 2
    best = max(scenario.tokens_per_step / timeline.seconds_per_step for scenario, timeline in tried)
    return next(
        (scenario, timeline)
        for scenario, timeline in tried
        if scenario.tokens_per_step / timeline.seconds_per_step >= NEARLY_BEST * best
    )


def _head(question: Question, *, fits: bool = True, reason: str = "") -> dict[str, Any]:
    return {
        "model": question.profile.name,
        "machine": question.machine.name,
        "strategy": question.strategy,
        "simulated_only": SIMULATED_ONLY[question.strategy] or question.machine.gpus > 1,
        "fits": fits,
        "reason": reason,
        "parameters": question.profile.num_parameters,
        "sequence_length": question.profile.sequence_length,
        "steps": question.steps,
    }


def _rates(question: Question, seconds: float, tokens: int, moved: dict[str, int], costs: Costs) -> dict[str, Any]:
    rate = tokens / seconds
    return {
        "tokens_per_step": tokens,
        "seconds_per_step": seconds,
        "tokens_per_second": rate,
        "tflops_6n": 6 * question.profile.num_parameters * rate / question.machine.gpus / 1e12,
        "ssd_read_bytes_per_step": moved["ssd_read"] + moved["swap_in"],
        "ssd_write_bytes_per_step": _written(moved),
        "hours": costs.hours,
        "endurance_share": costs.endurance_share,
        "energy_kwh": costs.energy_kwh,
        "cost_per_billion_tokens": costs.per_billion_tokens,
    }


def _costs(question: Question, seconds: float, tokens: int, written: int) -> Costs:
    return costs_of(
        question.machine, seconds_per_step=seconds, tokens_per_step=tokens, written_bytes=written, steps=question.steps
    )


def _written(moved: dict[str, int]) -> int:
    return moved["ssd_write"] + moved["swap_out"]


def _misfit(question: Question, reason: str) -> Estimate:
    return Estimate(**_head(question, fits=False, reason=reason))


def _upgrade(one: Upgrade) -> dict[str, Any]:
    return {"name": one.name, "tokens_per_second": one.tokens_per_second, "gain": one.gain, "price": one.price}


def worth_buying(estimate: Estimate) -> dict[str, Any] | None:
    """The upgrade that gives most, if it gives enough; more tokens per step cost nothing and are not one."""
    bought = [one for one in estimate.upgrades if "tokens" not in one["name"] and one["gain"] >= WORTH_BUYING]
    return max(bought, key=lambda one: float(one["gain"]), default=None)


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """A Plan as JSON knows it."""
    return {
        one.name: sorted(value) if isinstance(value := getattr(plan, one.name), frozenset) else value
        for one in fields(plan)
    }
