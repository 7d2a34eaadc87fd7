"""What holds of every plan, whatever the model and the machine."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planner_cases import MACHINE, budgets, machines, profiles, small_profile

from lohan.errors import PlanInfeasible
from lohan.plan.activations import Room, points
from lohan.plan.candidates import Case
from lohan.plan.fit import staging_bytes, undo_bytes, with_activations
from lohan.plan.memory import device_use, heap_bytes, host_budget_of, ssd_use
from lohan.plan.planner import make_plan
from lohan.plan.predict import predict
from lohan.plan.stage_work import step_work
from lohan.plan.staging import Order, Short, Staging

RESOURCES = (
    "gpu_flops_per_second", "to_gpu_bytes_per_second", "to_host_bytes_per_second", "update_parameters_per_second",
    "gpu_memory_bytes", "host_memory_bytes", "read", "write", "drives",
)  # fmt: skip
GRAIN = 1.03
"""The simulator's own: what is ready earlier can get in the way of what is more urgent (docs/simulator.md), and on
models of a few blocks that is a larger part. Of 200 random cases one was slower by more than 0.05 %: by 1.8 %."""


def with_more(machine, what, times):
    if what == "drives":
        return replace(machine, drives=machine.drives * 2)
    if what in ("read", "write"):
        name = f"{what}_bytes_per_second"
        return replace(machine, drives=tuple(replace(d, **{name: getattr(d, name) * times}) for d in machine.drives))
    more = getattr(machine, what) * times
    return replace(machine, **{what: int(more) if what.endswith("memory_bytes") else more})


def plan_or_skip(profile, machine, **asked):
    try:
        return make_plan(profile, machine, budgets(machine), **asked)
    except PlanInfeasible:
        assume(False)


asked = st.fixed_dictionaries({"sequences": st.sampled_from([1, 2, 4, 8]), "clip": st.sampled_from(["none", "auto"])})


@given(profiles, machines(), asked, st.sampled_from(RESOURCES), st.floats(1.05, 4))
@settings(max_examples=30, deadline=None)
def test_more_of_any_resource_never_gives_a_slower_plan(profile, machine, asked, what, times):
    tokens = asked["sequences"] * profile.sequence_length
    less = plan_or_skip(profile, machine, tokens_per_step=tokens, clip=asked["clip"], micro_batch_size=1)
    better = with_more(machine, what, times)
    more = make_plan(profile, better, budgets(better), tokens_per_step=tokens, clip=asked["clip"], micro_batch_size=1)
    assert more.seconds_per_step <= less.seconds_per_step * GRAIN


@given(profiles, machines(), asked)
@settings(max_examples=40, deadline=None)
def test_no_plan_exceeds_a_budget(profile, machine, asked):
    limits = replace(budgets(machine), ssd_bytes=int(profile.num_parameters * 24.2) + 2**24)
    try:
        result = make_plan(
            profile, machine, limits, tokens_per_step=asked["sequences"] * profile.sequence_length, clip=asked["clip"]
        )
    except PlanInfeasible:
        return
    plan, count = result.plan, result.num_micro_batches
    assert sum(device_use(result.profile, plan, count).values()) <= limits.gpu_bytes or not plan.separate_memory
    budget = host_budget_of(result.profile, plan, limits)
    heap = 0 if plan.separate_memory else heap_bytes(result.model, plan, count, budget)
    used = staging_bytes(result.model, plan) + undo_bytes(result.model, plan) + budget.compute + heap
    assert used <= limits.host_bytes
    assert sum(result.host_parts.values()) == pytest.approx(used, abs=2**20)
    assert sum(ssd_use(result.model, plan, count).values()) <= limits.ssd_bytes
    assert result.tokens_per_step == result.micro_batch_size * count * profile.sequence_length


@given(profiles, machines(), asked)
@settings(max_examples=10, deadline=None)
def test_identical_inputs_give_identical_plans(profile, machine, asked):
    tokens = asked["sequences"] * profile.sequence_length
    first = plan_or_skip(profile, machine, tokens_per_step=tokens, clip=asked["clip"])
    second = make_plan(profile, machine, budgets(machine), tokens_per_step=tokens, clip=asked["clip"])
    assert (first.plan, first.seconds_per_step, first.lanes) == (second.plan, second.seconds_per_step, second.lanes)


def every_plan(case):
    """All amounts of activations in all splits of RAM, all numbers of left units, both orders of staying."""
    staging = Staging(case.model)
    blocks = [u for u, unit in enumerate(case.model.units) if unit.kind == "block"]
    base = make_plan(
        case.profile, case.machine, case.budgets, tokens_per_step=case.profile.tokens * case.micro_batches, clip="none",
        micro_batch_size=case.profile.micro_batch_size,
    ).plan  # fmt: skip
    free = host_budget_of(case.profile, base, case.budgets).staging
    device = case.budgets.gpu_bytes - sum(device_use(case.profile, replace(base, kept=()), case.micro_batches).values())
    for host in [free * eighth // 8 for eighth in range(8)]:
        room = Room(device=device, host=host, ssd=1 << 60)
        for point in points(case.model, base, case.machine, room, micro_batches=case.micro_batches):
            for count in range(len(blocks) + 1):
                plan = replace(base, left_units=frozenset(blocks[:count]), transit_slabs=0, gradients_on_ssd=False)
                plan = with_activations(case.model, plan, point.activations, case.micro_batches)
                for order in (Order(), Order(weights_first=False)):
                    made = staging.fit(plan, free, order)
                    fits = not isinstance(made, Short)
                    if (
                        fits
                        and sum(device_use(case.profile, made, case.micro_batches).values()) <= case.budgets.gpu_bytes
                    ):
                        yield made


@pytest.mark.parametrize("flops", [2e11, 6e12])
@pytest.mark.parametrize("host_memory", [97, 107, 122])
def test_the_plan_is_within_two_percent_of_brute_force_on_a_small_space(flops, host_memory):
    profile = small_profile(5)
    machine = replace(MACHINE, gpu_flops_per_second=flops, host_memory_bytes=host_memory * 10**6)
    chosen = make_plan(profile, machine, budgets(machine), tokens_per_step=4 * 256, micro_batch_size=1, clip="none")
    case = Case(
        profile=chosen.profile, model=chosen.model, machine=machine, budgets=budgets(machine), micro_batches=4,
        clip="immediate",
    )  # fmt: skip
    best = float("inf")
    for plan in dict.fromkeys(every_plan(case)):
        work = step_work(case.model, plan, micro_batches=4)
        if work.flowing(machine) < best:
            best = min(best, max(predict(case, plan).seconds_per_step, work.flowing(machine)))
    assert chosen.seconds_per_step <= best * 1.02


@given(profiles, machines(separate=True), asked)
@settings(max_examples=30, deadline=None)
def test_no_run_is_faster_than_its_busiest_resource(profile, machine, asked):
    tokens = asked["sequences"] * profile.sequence_length
    result = plan_or_skip(profile, machine, tokens_per_step=tokens, clip=asked["clip"])
    work = step_work(result.model, result.plan, micro_batches=result.num_micro_batches).together
    assert result.seconds_per_step >= work.flops / machine.gpu_flops_per_second * (1 - 1e-9)
    assert result.seconds_per_step >= work.parameters / machine.update_parameters_per_second * (1 - 1e-9)
