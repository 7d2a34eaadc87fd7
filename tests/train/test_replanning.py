"""A machine that is not what it was measured as: told, planned for again, and trained on to the same bits."""

from __future__ import annotations

import torch

from lohan.engine.devices import VirtualOptions
from lohan.engine.run import open_run
from lohan.profiles import DriveProfile, MachineProfile
from lohan.testing import parity
from lohan.testing.late_files import QuickFiles
from lohan.testing.zoo import tiny_model_folder
from lohan.train.replanning import Replanning

PACE = 4e8
CLAIMED = MachineProfile(
    name="claimed", gpu_flops_per_second=1e12, gpu_memory_bytes=10**9, to_gpu_bytes_per_second=1e9,
    to_host_bytes_per_second=1e9, host_memory_bytes=10**9, update_parameters_per_second=2e6,
    drives=(DriveProfile(read_bytes_per_second=1e9, write_bytes_per_second=1e9),),
)  # fmt: skip
"""Computes as if recomputing cost nothing."""


def train(folder, directory, steps, *, watched):
    directory.mkdir()
    virtual = VirtualOptions(
        flops_per_second=PACE, to_gpu_bytes_per_second=1e9, to_host_bytes_per_second=1e9, poison=False
    )
    said, plans = [], []
    with open_run(
        model=folder, ssd=[directory], host_memory=112 << 20, device="virtual", virtual=virtual, machine=CLAIMED,
        piece_elements=4096, weights=[1.0], store_files=QuickFiles(), learning_rate=1e-3,
    ) as run:  # fmt: skip
        replanning = Replanning(run, CLAIMED)
        for data in parity.batches(steps, 1):
            out = run.step(data)
            if watched:
                said += replanning.after_step(out)
            plans.append(run.plan)
        state = {name: master.clone() for name, master, _ in run.read_state()}
    return said, plans, state


def test_a_lasting_drift_is_told_and_the_plan_made_again_where_it_pays_with_the_same_bits(tmp_path):
    torch.set_num_threads(1)
    folder = tiny_model_folder("llama", tmp_path / "model")
    said, plans, state = train(folder, tmp_path / "watched", 16, watched=True)
    assert any(sentence.startswith("Computing runs at") and "slower" in sentence for sentence in said)
    assert any(sentence.startswith("The plan is made again") for sentence in said)
    assert plans[0] != plans[-1]
    kept = [sum(len(unit) for unit in plan.kept) for plan in (plans[0], plans[-1])]
    assert kept[0] < kept[1]  # computing again is not as cheap as it was said to be
    quiet, same, expected = train(folder, tmp_path / "unwatched", 16, watched=False)
    assert not quiet
    assert same[0] == same[-1]
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in state)


def test_a_plan_that_would_not_be_clearly_faster_is_left_alone(tmp_path):
    folder = tiny_model_folder("llama", tmp_path / "model")
    with open_run(
        model=folder, ssd=[tmp_path / "run"], host_memory=112 << 20, device="cpu", weights=[1.0], machine=CLAIMED
    ) as run:  # fmt: skip
        assert run.plan_again(CLAIMED, least_gain=0.03) is None  # nothing is planned yet
        run.step(parity.batches(1, 1)[0])
        planned = run.planned
        assert run.plan_again(CLAIMED, least_gain=0.03) is None
        assert run.planned is planned
