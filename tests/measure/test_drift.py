"""A run that drifts from its profile is told of once, in one sentence with both figures; noise is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lohan.measure.drift import (
    LASTING,
    RATES,
    TOLERANCE,
    WARM_UP,
    WINDOW,
    DriftWatch,
    Request,
    StepWork,
    busy_drive_rates,
    corrected,
    expected_rates,
    is_lasting,
    observed_step,
    step_work,
)
from lohan.plan.plan import ModelSize, Plan, UnitSize
from lohan.profiles import DriveProfile, MachineProfile

MACHINE = MachineProfile(
    name="test", gpu_flops_per_second=1e12, gpu_memory_bytes=10**9, to_gpu_bytes_per_second=1e10,
    to_host_bytes_per_second=1e10, host_memory_bytes=10**10, update_parameters_per_second=1e9, norm_share=0.25,
    weights_seconds_per_parameter=1e-9,
    drives=(DriveProfile(read_bytes_per_second=3e9, write_bytes_per_second=2e9, mixed_bytes_per_second=2.4e9),),
)  # fmt: skip
EXPECTED = expected_rates(MACHINE)
names = st.sampled_from(RATES)
off = st.one_of(st.floats(0.05, 0.99 - TOLERANCE), st.floats(1.01 + TOLERANCE, 20))
near = st.floats(1.01 - TOLERANCE, 0.99 + TOLERANCE)


def reports(watch: DriftWatch, name: str, shares: list[float]) -> list:
    return [drift for share in shares for drift in watch.see({name: EXPECTED[name] * share})]


@settings(deadline=None)
@given(names, st.lists(near, max_size=60))
def test_a_run_near_its_profile_is_never_reported(name, shares):
    assert reports(DriftWatch(MACHINE), name, shares) == []


@settings(deadline=None)
@given(names, off, st.integers(0, 60))
def test_a_lasting_drift_is_reported_once_with_both_figures(name, share, more):
    watch = DriftWatch(MACHINE)
    assert reports(watch, name, [share] * (WARM_UP + WINDOW - 1)) == []
    (drift,) = reports(watch, name, [share] * (1 + more))
    assert drift.name == name
    assert drift.share == pytest.approx(share)
    assert drift.sentence.count("\n") == 0
    assert drift.sentence.endswith("measured at.")
    assert ("faster" in drift.sentence) == (share > 1)


@settings(deadline=None)
@given(names, st.lists(st.booleans(), max_size=80), off)
def test_fewer_bad_steps_than_counted_as_lasting_are_noise(name, bad, share):
    shares = [share if one else 1.0 for one in bad]
    counted = bad[WARM_UP:]
    windows = [counted[start : start + WINDOW] for start in range(len(counted) - WINDOW + 1)]
    lasting = any(sum(window) >= LASTING for window in windows)
    assert bool(reports(DriftWatch(MACHINE), name, shares)) == lasting


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.5, 2.0]), min_size=WINDOW, max_size=WINDOW))
def test_steps_off_to_different_sides_do_not_add_up(shares):
    assert is_lasting(shares) == (max(shares.count(0.5), shares.count(2.0)) >= LASTING)


def test_the_sentence_has_both_figures():
    (drift,) = reports(DriftWatch(MACHINE), "read", [0.5] * (WARM_UP + WINDOW))
    assert drift.sentence == (
        "The drives read 1.5 GB/s over the last 10 steps, 50% slower than the 3 GB/s this machine was measured at."
    )


def test_another_profile_is_compared_with_afresh():
    watch = DriftWatch(MACHINE)
    drifts = reports(watch, "compute", [0.5] * (WARM_UP + WINDOW))
    machine = corrected(MACHINE, drifts)
    assert machine.gpu_flops_per_second == pytest.approx(5e11)
    watch.rebase(machine)
    assert reports(watch, "compute", [0.5] * 2 * WINDOW) == []
    assert len(reports(watch, "compute", [0.2] * 2 * WINDOW)) == 1


@settings(deadline=None)
@given(st.dictionaries(names, st.floats(0.1, 10)))
def test_a_corrected_profile_promises_what_was_observed(shares):
    if "mixed" in shares:  # what both reach is never more than each alone
        shares["mixed"] = min(shares.values())
        shares["read"] = shares["write"] = shares["mixed"]
    watch = DriftWatch(MACHINE)
    observed = {name: EXPECTED[name] * share for name, share in shares.items()}
    drifts = [drift for _ in range(WARM_UP + WINDOW) for drift in watch.see(observed)]
    found = expected_rates(corrected(MACHINE, drifts))
    for drift in drifts:
        if drift.name != "mixed":
            assert found[drift.name] == pytest.approx(drift.observed)


@settings(deadline=None)
@given(names, st.floats(0.3, 1.0), st.floats(0.0, 1.0), off)
def test_what_cores_and_drives_leave_each_other_is_no_drift(name, kept, between, beyond):
    machine = replace(
        MACHINE, separate_memory=False, compute_beside_drives=kept, drives_beside_compute=kept,
        update_beside_drives=kept, drives_beside_update=kept,
    )  # fmt: skip
    share = kept + between * (1 - kept)
    assert reports(DriftWatch(machine), name, [share] * 2 * WINDOW) == []
    (drift,) = reports(DriftWatch(machine), name, [beyond * (kept if beyond < 1 else 1)] * (WARM_UP + WINDOW))
    assert drift.share == pytest.approx(beyond)


def test_rates_that_a_step_says_nothing_about_are_left_out():
    watch = DriftWatch(replace(MACHINE, drives=()))
    assert "read" not in expected_rates(replace(MACHINE, drives=()))
    assert [watch.see({"read": 1.0}) for _ in range(2 * WINDOW)] == [[]] * 2 * WINDOW


# -- what a step showed -------------------------------------------------------------------------------------------


def test_a_step_s_rates_are_work_over_busy_time_without_what_is_counted_apart():
    work = StepWork(flops=2e12, parameters=10**9, installed=5 * 10**8)
    found = observed_step(MACHINE, work, {"compute": 2.5, "update": 1.25})
    assert found == {"compute": pytest.approx(1e12), "update": pytest.approx(1e9)}
    assert observed_step(MACHINE, work, {}) == {}


def test_a_step_of_the_plan_counts_forward_backward_and_what_is_computed_again():
    def unit(kind: str, flops: float) -> UnitSize:
        return UnitSize(kind, 200, (200,), (1000,), 100, forward_flops=flops)

    model = ModelSize((unit("embedding", 0.0), unit("block", 10.0), unit("block", 10.0), unit("head", 5.0)))
    work = step_work(model, Plan(), micro_batches=2)
    assert work == StepWork(flops=2 * 4 * 10.0 + 3 * 5.0, parameters=400, installed=800)


def overlapping(kind: str, rate: float, *, depth: int, seconds: float = 1.0, start: float = 0.0) -> list[Request]:
    """`depth` equal requests at a time that together move at this rate."""
    count = 10
    step = seconds / count
    size = round(rate * step / depth)
    return [
        Request(kind, size, start + step * turn, start + step * (turn + 1))
        for turn in range(count)
        for _ in range(depth)
    ]


@settings(deadline=None)
@given(st.floats(1e8, 1e10), st.integers(4, 32), st.sampled_from(["read", "write"]))
def test_busy_drives_show_their_rate(rate, depth, kind):
    assert busy_drive_rates(overlapping(kind, rate, depth=depth), num_drives=1) == {kind: pytest.approx(rate, rel=1e-4)}


@settings(deadline=None)
@given(st.floats(1e8, 1e10), st.integers(1, 3))
def test_drives_that_wait_for_their_caller_show_nothing(rate, depth):
    assert busy_drive_rates(overlapping("read", rate, depth=depth), num_drives=1) == {}
    assert busy_drive_rates(overlapping("read", rate, depth=2 * depth), num_drives=2) == {}


@settings(deadline=None)
@given(st.floats(1e8, 1e10), st.floats(1e8, 1e10))
def test_reads_and_writes_at_once_are_added_and_kept_apart_from_each_alone(reading, writing):
    requests = overlapping("read", reading, depth=8, seconds=2.0)
    requests += overlapping("write", writing, depth=8, start=1.0, seconds=2.0)
    found = busy_drive_rates(requests, num_drives=1)
    assert found == {
        "read": pytest.approx(reading, rel=1e-4),
        "mixed": pytest.approx(reading + writing, rel=1e-4),
        "write": pytest.approx(writing, rel=1e-4),
    }


def test_a_moment_of_busy_drives_is_too_little_to_conclude_from():
    assert busy_drive_rates(overlapping("read", 1e9, depth=8, seconds=0.01), num_drives=1) == {}
