"""Strategies the engine runs for comparison: the same bits, in the order each is named for. And the planner's plans."""

from dataclasses import replace
from itertools import pairwise

import pytest

from lohan.engine.devices import VirtualOptions
from lohan.engine.run import open_run
from lohan.errors import ConfigError, PlanInfeasible
from lohan.plan.strategies import ENGINE_STRATEGIES, ONE_MICRO_BATCH
from lohan.profiles import DriveProfile, MachineProfile
from lohan.testing import parity, zoo
from lohan.testing.late_files import LateFiles, QuickFiles

MACHINE = MachineProfile(
    name="small", gpu_flops_per_second=2e9, gpu_memory_bytes=10**9, to_gpu_bytes_per_second=1e9,
    to_host_bytes_per_second=1e9, host_memory_bytes=10**9, update_parameters_per_second=1e8,
    drives=(DriveProfile(read_bytes_per_second=2e8, write_bytes_per_second=1e8),),
)  # fmt: skip


@pytest.fixture
def folder(models):
    folder = models / "llama"
    return folder if folder.exists() else zoo.tiny_model_folder("llama", folder)


def options(folder, directory, **changes):
    directory.mkdir(exist_ok=True)
    return {
        "model": folder, "ssd": [directory], "host_memory": 112 << 20, "weights": [1.0], "device": "cpu",
        "piece_elements": 4096, "store_files": QuickFiles(), "learning_rate": 1e-3, "max_grad_norm": None, **changes,
    }  # fmt: skip


@pytest.mark.parametrize("machine", [None, MACHINE], ids=["unmeasured", "measured"])
@pytest.mark.parametrize("device", ["cpu", "virtual"])
@pytest.mark.parametrize("strategy", ENGINE_STRATEGIES)
def test_every_strategy_gives_the_same_bits(strategy, device, machine, folder, folder_in_memory):
    plans = []
    given = None if machine is None else replace(machine, separate_memory=device == "virtual")
    difference = parity.compare(
        folder, parity.batches(3, 1 if strategy in ONE_MICRO_BATCH else 2), directory=folder_in_memory,
        run={"strategy": strategy, "device": device, "machine": given},
        watch=lambda run: plans.append(run.plan),
    )  # fmt: skip
    assert difference is None
    plan = plans[-1]
    assert plan.strategy == strategy
    assert plan.barrier == (strategy != "lohan")
    assert plan.device_waits == (strategy == "lohan-paper-naive")
    assert plan.separate_stage == (strategy == "separate-stage")
    streams = strategy in ("lohan-paper", "lohan-paper-naive", "separate-stage")
    assert bool(plan.resident_state) != streams


def spans_of(folder, directory, **changes):
    """What the lanes of two steps did: (kind, unit, start, end), in the order of their ends, for each step."""
    slow = VirtualOptions(flops_per_second=5e8, to_gpu_bytes_per_second=2e8, to_host_bytes_per_second=2e8, poison=False)
    with open_run(**options(folder, directory, device="virtual", virtual=slow, **changes)) as run:
        steps = []
        for data in parity.batches(2, 1):
            before = len(run._engine.lanes.spans) if run._engine is not None else 0
            run.step(data)
            run._engine.wait_all()
            spans = [(*label.split(), start, end) for _, label, start, end in list(run._engine.lanes.spans)[before:]]
            steps.append([(one[0], int(one[1]) if len(one) == 4 else -1, one[-2], one[-1]) for one in spans])
    return steps


def test_behind_a_barrier_no_step_begins_before_the_last_write_and_without_one_it_does(folder, folder_in_memory):
    def waits(strategy):
        late = LateFiles(1, 0.02)  # writes end long after they are issued
        opened = options(folder, folder_in_memory / strategy, strategy=strategy, store_files=late, commit_every=9)
        with open_run(**opened, keep_nothing_in_memory=True) as run:
            for data in parity.batches(4, 1):
                run.step(data)
            run._engine.wait_all()
            spans = list(run._engine.lanes.spans)
        begun = [start for _, label, start, _ in spans if label == "begin"]
        writes = [end for _, label, _, end in spans if label.startswith("write")]
        per_step = len(writes) // 4
        return all(sorted(writes)[per_step * step - 1] <= begun[step] for step in (1, 2, 3))

    assert waits("lohan-paper")
    assert waits("separate-stage")
    assert not waits("lohan")


def test_as_published_a_unit_s_state_is_read_when_the_one_before_is_written_and_naively_the_device_waits(
    folder, folder_in_memory
):
    for strategy in ONE_MICRO_BATCH:
        spans = spans_of(folder, folder_in_memory / strategy, strategy=strategy)[1]
        units = sorted({unit for kind, unit, _, _ in spans if kind == "update"}, reverse=True)
        for above, unit in pairwise(units):
            written = max(end for kind, which, _, end in spans if kind == "write" and which == above)
            read = min(start for kind, which, start, _ in spans if kind == "read_state" and which == unit)
            assert read >= written
        if strategy == "lohan-paper-naive":
            for unit in units[1:]:
                updated = max(end for kind, which, _, end in spans if kind == "update" and which == unit + 1)
                assert min(s for kind, which, s, _ in spans if kind == "backward" and which == unit) >= updated


def test_an_unknown_strategy_and_several_micro_batches_as_published_are_refused(folder, folder_in_memory):
    for name in ("zero-infinity", "fastest"):
        with pytest.raises(ConfigError, match=f"{name}.*lohan-paper-naive"):
            open_run(**options(folder, folder_in_memory / "run", strategy=name)).__enter__()
    with open_run(**options(folder, folder_in_memory / "run", strategy="lohan-paper")) as run:
        with pytest.raises(ConfigError, match="one micro-batch"):
            run.step(parity.batches(1, 2)[0])
        run.step(parity.batches(1, 1)[0])  # and it goes on


def test_in_memory_is_refused_with_the_memory_it_needs(folder, folder_in_memory):
    short = options(folder, folder_in_memory / "run", strategy="in-memory", host_memory="68MB")
    with open_run(**short) as run, pytest.raises(PlanInfeasible, match="Set host_memory to"):
        run.step(parity.batches(1, 1)[0])


def test_with_a_measured_machine_the_planner_makes_the_plan(folder, folder_in_memory, monkeypatch):
    from lohan.engine import planning

    results = []
    make_plan = planning.make_plan

    def watched(*given, **more):
        results.append(make_plan(*given, **more))
        return results[-1]

    monkeypatch.setattr(planning, "make_plan", watched)
    # Little memory and slow compute: what is kept and what stays is worth a thought.
    with open_run(**options(folder, folder_in_memory / "run", device="virtual", machine=MACHINE)) as run:
        run.step(parity.batches(1, 2)[0])
        assert run.plan == results[0].plan
        assert run.planning.predict(run.planned) == pytest.approx(results[0].seconds_per_step, rel=0.02)
        assert results[0].plan.kept != ()


def test_with_a_measured_machine_nothing_stays_if_so_wished_and_activations_are_still_kept(folder, folder_in_memory):
    plans = []
    difference = parity.compare(
        folder, parity.batches(3, 2), directory=folder_in_memory,
        run={"machine": replace(MACHINE, separate_memory=False), "device": "cpu", "keep_nothing_in_memory": True},
        watch=lambda run: plans.append(run.plan),
    )  # fmt: skip
    assert difference is None
    plan = plans[-1]
    assert not plan.resident_state
    assert not plan.resident_weights
    assert plan.kept != ()
