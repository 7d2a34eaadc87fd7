"""A real run, watched: every step gives rates, also when its plan is made again."""

from __future__ import annotations

from pathlib import Path

from lohan.engine.run import open_run
from lohan.engine.trace import Span
from lohan.measure.drift import RATES, DriftWatch, Request
from lohan.measure.run_rates import RunRates, as_request
from lohan.profiles import DriveProfile, MachineProfile
from lohan.testing.zoo import random_batches, tiny_model_folder

FAST = MachineProfile(
    name="fast", gpu_flops_per_second=1e18, gpu_memory_bytes=10**9, separate_memory=False, to_gpu_bytes_per_second=1e12,
    to_host_bytes_per_second=1e12, host_memory_bytes=10**10, update_parameters_per_second=1e15,
    drives=(DriveProfile(read_bytes_per_second=1e15, write_bytes_per_second=1e15),),
)  # fmt: skip


def batches(step: int, seq: int) -> list:
    return random_batches(257, num_micro_batches=2, batch=1, seq=seq, seed=0, step=step)


def test_every_step_of_a_run_gives_rates_and_a_wrong_profile_is_found_out(tmp_path: Path):
    folder = tiny_model_folder("llama", tmp_path / "model")
    with open_run(model=folder, ssd=[tmp_path / "run"], host_memory="1GB", device="cpu") as run:
        rates, watch = RunRates(run, FAST), DriftWatch(FAST)
        drifts = []
        for step in range(1, 14):
            out = run.step(batches(step, seq=16))
            found = rates.after_step(out)
            assert {"compute", "update"} <= set(found) <= set(RATES)
            assert all(rate > 0 for rate in found.values())
            drifts += watch.see(found)
        assert {"compute", "update"} <= {drift.name for drift in drifts}
        assert all("slower" in drift.sentence for drift in drifts)
        planned = run.planned
        found = rates.after_step(run.step(batches(14, seq=32)))  # longer rows: a new plan, a new engine
        assert run.planned is not planned
        assert found["compute"] > 0


def test_a_drive_s_span_says_what_was_asked_of_it():
    assert as_request(Span("drive 12 write", "name", 1.0, 2.0, {"bytes": 5})) == Request("write", 5, 1.0, 2.0)
