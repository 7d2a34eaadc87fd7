"""What only a measured machine knows is in the simulator's time: installing weights, and the norm's own share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lohan.measure.drift import step_work
from lohan.plan.plan import ModelSize, Plan, UnitSize
from lohan.profiles import MachineProfile, OperatorProfile
from lohan.sim.run import NORM_SHARE, simulate_steps

MACHINE = MachineProfile(
    name="test", gpu_flops_per_second=1e3, gpu_memory_bytes=10**9, separate_memory=False, to_gpu_bytes_per_second=1e12,
    to_host_bytes_per_second=1e12, host_memory_bytes=10**10, update_parameters_per_second=1e3, drives=(),
)  # fmt: skip
MODEL = ModelSize(
    tuple(UnitSize(kind, 200, (200,), (1000,), 100, 40.0) for kind in ("embedding", "block", "block", "head"))
)
PLAN = Plan(resident_weights=frozenset(range(4)), resident_state=frozenset(range(4)))


def step_seconds(machine: MachineProfile, micro_batches: int) -> float:
    timeline = simulate_steps(MODEL, PLAN, machine, micro_batches=micro_batches, steps=1, commit=False)
    return max(timeline.end)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_installing_weights_is_paid_once_a_pass_whatever_the_number_of_micro_batches(micro_batches):
    slower = replace(MACHINE, weights_seconds_per_parameter=1e-3)
    installed = step_work(MODEL, PLAN, micro_batches).installed
    found = step_seconds(slower, micro_batches) - step_seconds(MACHINE, micro_batches)
    assert found == pytest.approx(installed * 1e-3)


def test_what_keeping_does_not_save_is_paid():
    operators = (OperatorProfile(name="mm", flops=40.0, output_bytes=8, needed=True),)
    units = tuple(replace(unit, operators=operators if unit.kind == "block" else ()) for unit in MODEL.units)
    model, kept = replace(MODEL, units=units), replace(PLAN, kept=((), ((0, "device"),), (), ()))

    def seconds(plan: Plan, saved: float) -> float:
        machine = replace(MACHINE, saved_by_keeping=saved)
        return max(simulate_steps(model, plan, machine, steps=1, commit=False).end)

    recomputed = seconds(PLAN, 1.0)
    assert seconds(PLAN, 0.5) == pytest.approx(recomputed)
    assert recomputed - seconds(kept, 1.0) == pytest.approx(40.0 / 1e3)
    assert recomputed - seconds(kept, 0.25) == pytest.approx(40.0 / 1e3 * 0.25)


def test_the_measured_share_of_the_norm_takes_the_place_of_the_reckoned_one():
    known = replace(MACHINE, norm_share=NORM_SHARE + 0.5)
    assert step_seconds(known, 1) - step_seconds(MACHINE, 1) == pytest.approx(400 * 1e-3 * 0.5)
