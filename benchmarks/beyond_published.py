"""What does each idea beyond the published system give, on the published testbed?

    python benchmarks/beyond_published.py

Simulated, with the machine calibrated on the published results (lohan-testbed). The ladder starts at `lohan-paper` and
adds one idea at a time: state in many small pieces, so that reading, updating and writing overlap (and the embedding,
whose update is the last and whose fetch is the first, in RAM); updates that flow into the next forward instead of a
barrier; the lossless split master (12 instead of 14 bytes written per parameter); part of the updates left for the
next forward; vertical micro-batches, that part chosen again, with the smallest number of tokens per step that is within
3 % of the best up to 524,288. Up to there activations are chosen by the published time model, where updates are left by
its variant for that (lohan.sim.paper), and only the embedding stays in RAM. The last rung is the planner's
(lohan.plan.planner): activations, units that stay, left updates, micro-batches and tokens per step chosen together,
within 24 GiB of device memory as the engine counts it, which the rungs before it do not check. Without clipping, as
published. Micro-batches are taken to compute at the FLOP/s of the published batch, which is why none is smaller than
4096 tokens. The last table holds the batch of every published row and compares the planner's `lohan`, with full masters
as the published system has them, with `lohan-paper`. The last line is JSON.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from lohan.hardware import load_machine, resize
from lohan.plan.fit import staging_bytes
from lohan.plan.plan import ModelSize, Plan
from lohan.plan.planner import make_plan
from lohan.presets import preset_profile
from lohan.profiles import MachineProfile, ModelProfile
from lohan.sim.paper import choose_activations
from lohan.sim.run import simulate_steps
from lohan.sim.sizes import size_model
from lohan.sim.strategies import build_scenario, scale_batch

DATA = Path(__file__).parent / "data" / "published_throughput.csv"
SEQUENCE = 1024
MAX_SEQUENCES = 512
MICRO_BATCH = 4
"""Sequences; 4096 tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A published run to go beyond."""

    title: str
    model: str
    batch: int
    machine: MachineProfile
    published_tokens_per_second: float
    wanted: float


@dataclass(frozen=True, slots=True)
class Rung:
    """One row of a ladder."""

    idea: str
    sequences: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.sequences * SEQUENCE / self.seconds


def published_plan(
    profile: ModelProfile, model: ModelSize, machine: MachineProfile, micro_batches: int, left_share: float
) -> Plan | None:
    """Slabs that keep the drives busy, the embedding in RAM, activations where the published time model wants them.

    None if RAM cannot hold the slabs.
    """
    pieces = max(len(unit.state_bytes) for unit in model.units)
    blocks = [number for number, unit in enumerate(model.units) if unit.kind == "block"]
    count = round(len(blocks) * left_share)
    left = frozenset(blocks[(2 * i + 1) * len(blocks) // (2 * count)] for i in range(count))
    plan = Plan(
        separate_memory=True, weights_slabs=5, state_slabs=2 * pieces, gradient_slabs=3 + count, left_units=left,
        resident_weights=frozenset({0}), resident_state=frozenset({0}),
    )  # fmt: skip
    free = machine.host_memory_bytes - staging_bytes(model, plan)
    if free < 0:
        return None
    flowing = bool(left)
    choice = choose_activations(scale_batch(profile, micro_batches), machine, free_host_bytes=free, flowing=flowing)
    # Slabs for activations on their way to SSD are small beside the rest: one micro-batch of one block each.
    return replace(plan, inputs=choice.inputs, kept=choice.kept, transit_slabs=4)


def lohan_seconds(
    profile: ModelProfile,
    machine: MachineProfile,
    *,
    micro_batches: int = 1,
    barrier: bool = False,
    state_bytes: float = 12.0,
    left_share: float = 0.0,
) -> float:
    """Seconds per step of `lohan`; infinite if it does not fit."""
    model = size_model(profile, num_micro_batches=micro_batches, state_bytes_per_parameter=state_bytes)
    plan = published_plan(profile, model, machine, micro_batches, left_share)
    if plan is None:
        return float("inf")
    plan = replace(plan, barrier=barrier)
    timeline = simulate_steps(model, plan, machine, micro_batches=micro_batches, steps=3)
    return timeline.seconds_per_step


def ladder(case: Case) -> Iterator[Rung]:
    whole = preset_profile(case.model, micro_batch_size=case.batch)
    paper = build_scenario("lohan-paper", whole, case.machine, steps=2).run().seconds_per_step
    yield Rung("lohan-paper", case.batch, paper)
    yield Rung("+ state in pieces, overlapped", case.batch, lohan_seconds(whole, case.machine, barrier=True))
    yield Rung("+ updates flow into forward", case.batch, lohan_seconds(whole, case.machine))
    yield Rung("+ split master", case.batch, lohan_seconds(whole, case.machine, state_bytes=10.0))
    yield best_left(whole, case.machine, case.batch, 1, "")
    part = preset_profile(case.model, micro_batch_size=MICRO_BATCH)
    free = []
    sequences = case.batch
    while sequences <= MAX_SEQUENCES:
        free.append(best_left(part, case.machine, sequences, sequences // MICRO_BATCH, "+ vertical, "))
        sequences *= 2
    best = max(rung.tokens_per_second for rung in free)
    yield next(rung for rung in free if rung.tokens_per_second >= 0.97 * best)
    planned = make_plan(preset_profile(case.model), case.machine, clip="none")
    yield Rung("+ planned", planned.tokens_per_step // SEQUENCE, planned.seconds_per_step)


def best_left(profile: ModelProfile, machine: MachineProfile, sequences: int, micro_batches: int, idea: str) -> Rung:
    """With the best of a few shares of the updates left for the next forward."""
    rungs = []
    for eighths in (0, 1, 2, 3, 4):
        share = eighths / 8
        seconds = lohan_seconds(profile, machine, micro_batches=micro_batches, state_bytes=10.0, left_share=share)
        rungs.append(Rung(f"{idea or '+ '}{eighths}/8 of updates left", sequences, seconds))
    return min(rungs, key=lambda rung: rung.seconds)


def same_batch(testbed: MachineProfile) -> float:
    """Prints `lohan` beside `lohan-paper` for every published batch; the smallest ratio of their speeds."""
    print(f"\n{'model':<10}{'gpus':>5}{'ssds':>5}{'batch':>6}{'lohan-paper s':>15}{'lohan s':>9}{'ratio':>7}")
    worst = float("inf")
    seen = set()
    with DATA.open() as file:
        rows = [row for row in csv.DictReader(file) if row["system"] == "lohan"]
    for row in rows:
        key = (f"gpt-{row['model'].lower()}", int(row["gpus"]), int(row["ssds"]), int(row["batch"]))
        if key in seen:
            continue
        seen.add(key)
        name, gpus, ssds, batch = key
        machine = resize(testbed, gpus=gpus, ssds=ssds)
        whole = preset_profile(name, micro_batch_size=batch // gpus)
        paper = build_scenario("lohan-paper", whole, machine, steps=2).run().seconds_per_step
        ours = make_plan(
            preset_profile(name), machine, tokens_per_step=batch * SEQUENCE, clip="none", state_bytes_per_parameter=12.0
        ).seconds_per_step
        worst = min(worst, paper / ours)
        print(f"{name:<10}{gpus:>5}{ssds:>5}{batch:>6}{paper:>15.2f}{ours:>9.2f}{paper / ours:>6.2f}x")
    return worst


def main() -> None:
    testbed = load_machine("lohan-testbed")
    cases = [
        Case(
            title="175B, one RTX 4090, 256 GB, 12 drives", model="gpt-175b", batch=16,
            machine=resize(testbed, host_memory_bytes=256 * 10**9), published_tokens_per_second=62.1, wanted=1.6,
        ),
        Case(
            title="13B, one RTX 4090, 768 GB, one drive", model="gpt-13b", batch=64, machine=resize(testbed, ssds=1),
            published_tokens_per_second=676.0, wanted=1.8,
        ),
    ]  # fmt: skip
    result: dict[str, float] = {}
    for case in cases:
        print(f"\n{case.title}; published: {case.published_tokens_per_second} tokens/s at batch {case.batch}")
        print(f"{'':<32}{'tokens/step':>12}{'s/step':>9}{'tokens/s':>10}{'x published':>13}")
        gain = 0.0
        for rung in ladder(case):
            gain = rung.tokens_per_second / case.published_tokens_per_second
            print(
                f"{rung.idea:<32}{rung.sequences * SEQUENCE:>12}{rung.seconds:>9.1f}{rung.tokens_per_second:>10.1f}"
                f"{gain:>12.2f}x"
            )
        print(f"{'wanted':<54}{'':>9}{case.wanted:>12.2f}x")
        result[f"{case.model.removeprefix('gpt-')}_times_published"] = round(gain, 3)
    result["same_batch_smallest_ratio"] = round(same_batch(testbed), 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
