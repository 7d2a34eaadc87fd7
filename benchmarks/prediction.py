"""How close is a predicted step to a measured one, on this machine?

    python benchmarks/prediction.py [--directory DIR] [--rounds 3] [--only TEXT] [--quick]

Settings differ in model, tokens, budget, strategy, state format and device: `cpu` with the drive as it is, and
`virtual` with compute and drive held to a pace, where a shared machine's noise is not what is measured. A setting is
opened, takes two steps to warm up, and then the machine is profiled and steps are timed by turns, twice: this machine's
speed moves by a fifth within seconds, and both should meet the same moments. The profile is of the code that runs: the
model's own block at the micro-batch in use, the update in the format in use, records through a store, and what these
leave each other. A prediction is the simulator's step for the Plan the run has, on those rates; nothing is fitted to
what steps take. Plans are made once, with a profile taken before the first round. Rounds go over all settings.

An error is predicted over measured, of the medians over rounds; their medians are also printed by device. Lanes:
seconds that computing, updating and the drives work in a step, predicted and measured. The last line is JSON:
median_error, worst_error, settings.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from lohan.engine.devices import VirtualOptions, open_device
from lohan.engine.memory import bound_allocator
from lohan.engine.run import Run, open_run
from lohan.engine.settings import Settings
from lohan.measure.block_rate import BlockRate, BlockShape, measure_block
from lohan.measure.lane_overhead import measure_op_seconds
from lohan.measure.machine import NEVER_THE_LIMIT, num_cores
from lohan.measure.store_rate import STORE_BYTES, measure_store
from lohan.measure.traffic import Traffic, open_traffic
from lohan.measure.update_rate import measure_update
from lohan.optim import Updater
from lohan.plan.pieces import PIECE_ELEMENTS
from lohan.profiles import DriveProfile, MachineProfile
from lohan.sim.run import simulate_steps
from lohan.store.files import Files
from lohan.testing.paced_files import PacedFiles

SEQUENCE = 256
LINK_BYTES_PER_SECOND = 4e9
PACED_BYTES_PER_SECOND = 0.5e9
"""Of the drive beside a `virtual` device: half of the least that this machine's own was seen to read."""

WARM_UP, GROUPS, TIMED = 2, 2, 4
MODELS = {"28M": (512, 8, 2048), "53M": (1024, 4, 1024), "94M": (1024, 7, 2048)}
"""Hidden size, blocks, vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One run."""

    model: str
    tokens: int
    """Of a micro-batch."""

    micro_batches: int = 1
    memory: str = "400MB"
    strategy: str = "lohan"
    state_format: str = "split"
    flops: float | None = None
    """The pace of a `virtual` device; None: `cpu`."""

    max_grad_norm: float | None = None
    commit_every: int = 1

    @property
    def name(self) -> str:
        device = "cpu" if self.flops is None else f"virtual {self.flops / 1e9:g} GFLOP/s, paced drive"
        clip = "" if self.max_grad_norm is None else ", clipped"
        return (
            f"{self.model} {self.strategy} {self.state_format}, {self.micro_batches} x {self.tokens} tokens, "
            f"{self.memory}, {device}{clip}"
        )

    @property
    def files(self) -> Files | None:
        """A paced device has a paced drive: what is judged there is the prediction, not the machine's calm."""
        return None if self.flops is None else PacedFiles(rate=PACED_BYTES_PER_SECOND)

    @property
    def shape(self) -> BlockShape:
        return BlockShape(hidden_size=MODELS[self.model][0], tokens=self.tokens, sequence_length=SEQUENCE)


SETTINGS = (
    Setting(model="28M", tokens=256, micro_batches=2),
    Setting(model="53M", tokens=128, micro_batches=4, memory="600MB", max_grad_norm=1e9),
    Setting(model="53M", tokens=256, memory="900MB", strategy="lohan-paper"),
    Setting(model="28M", tokens=512, memory="2GB", strategy="in-memory", commit_every=1000),
    Setting(model="94M", tokens=128, memory="600MB"),
    Setting(model="53M", tokens=256, memory="700MB", state_format="fp32"),
    Setting(model="53M", tokens=128, memory="900MB", strategy="separate-stage"),
    Setting(model="28M", tokens=64, flops=8e9),
    Setting(model="28M", tokens=64, flops=8e9, memory="600MB", strategy="lohan-paper"),
    Setting(model="28M", tokens=64, flops=8e9, strategy="lohan-paper-naive"),
    Setting(model="53M", tokens=32, flops=8e9, memory="500MB", strategy="separate-stage"),
    Setting(model="53M", tokens=16, micro_batches=2, flops=8e9, memory="600MB", state_format="fp32"),
    Setting(model="53M", tokens=32, flops=8e9, memory="900MB", max_grad_norm=1e9),
)


@dataclass(slots=True)
class Found:
    """What one setting took, and was said to take, round by round."""

    setting: Setting
    predicted: list[float] = field(default_factory=list)
    measured: list[float] = field(default_factory=list)
    lanes: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    """By name, predicted and measured."""

    machine: MachineProfile | None = None
    """Of the first round, which the plan is made with."""

    late: float = 0.0
    """Of the time timed on `virtual`, by how much its real arithmetic missed its pace."""

    @property
    def error(self) -> float:
        return statistics.median(self.predicted) / statistics.median(self.measured) - 1


def profile(setting: Setting, directory: Path, seconds: float) -> MachineProfile:
    """This machine as it is now, for this setting's code; about thirty times `seconds`, most of it for the block.

    The speed of a shared machine moves by 15 % within seconds: a mean over four seconds is good to 7 %.
    """
    settings = Settings(state_format=setting.state_format)
    updater = Updater(settings.make_optimizer(), settings.make_format(), settings.wire)
    drive: dict[str, Any] = {"files": setting.files, "num_bytes": STORE_BYTES // (2 if setting.files else 1)}
    store = measure_store([directory], seconds=2 * seconds, **drive)
    with open_traffic([directory], seconds=seconds / 2, **drive) as traffic:
        block = _block(setting, 24 * seconds, traffic)
        elements, count = block_pieces(setting.shape)
        update = measure_update(
            updater, seconds=4 * seconds, piece_elements=elements, traffic=traffic, computing=setting.flops is None,
            block_pieces=count,
        )  # fmt: skip
    virtual = setting.flops is not None
    link = LINK_BYTES_PER_SECOND if virtual else NEVER_THE_LIMIT
    return MachineProfile(
        name="this machine",
        gpu_flops_per_second=block.flops_per_second,
        gpu_memory_bytes=4 << 30,
        separate_memory=virtual,
        to_gpu_bytes_per_second=link,
        to_host_bytes_per_second=link,
        host_memory_bytes=4 << 30,
        drives=(
            DriveProfile(
                read_bytes_per_second=store.read, write_bytes_per_second=store.write,
                mixed_bytes_per_second=store.mixed,
            ),
        ),
        update_parameters_per_second=update.parameters_per_second,
        norm_share=update.norm_share,
        weights_seconds_per_parameter=block.weights_seconds_per_parameter,
        saved_by_keeping=block.saved_by_keeping,
        checksum_bytes_per_second=num_cores() / store.cpu_seconds_per_byte,
        compute_beside_drives=None if block.shares is None else block.shares.work,
        drives_beside_compute=None if block.shares is None else block.shares.drives,
        update_beside_drives=None if update.shares is None else update.shares.work,
        drives_beside_update=None if update.shares is None else update.shares.drives,
        single_read_bytes_per_second=(block.singles or store.singles)[0],
        single_write_bytes_per_second=(block.singles or store.singles)[1],
        single_mixed_bytes_per_second=(block.singles or store.singles)[2],
        commit_seconds=store.commit_seconds,
        op_seconds=measure_op_seconds(0.2),
    )  # fmt: skip


def block_pieces(shape: BlockShape) -> tuple[int, int]:
    """How large the pieces of a block's update are, and how many there are."""
    square, wide = shape.hidden_size**2, shape.hidden_size * shape.intermediate_size
    total = 4 * square + 3 * wide
    count = -(-total // PIECE_ELEMENTS)
    return total // count // 64 * 64, count


def _block(setting: Setting, seconds: float, traffic: Traffic) -> BlockRate:
    if setting.flops is not None:  # what `virtual` is told it waits out
        return BlockRate(
            flops_per_second=setting.flops, weights_seconds_per_parameter=0.0, saved_by_keeping=1.0, shape=setting.shape
        )  # fmt: skip
    with open_device("cpu", memory_bytes=None) as device:
        return measure_block(device, setting.shape, dtype=torch.float32, seconds=seconds, traffic=traffic)


def make_model(name: str, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    hidden, blocks, vocabulary = MODELS[name]
    shape = BlockShape(hidden_size=hidden, tokens=SEQUENCE)
    torch.manual_seed(0)
    config = LlamaConfig(
        max_position_embeddings=2048, tie_word_embeddings=False, hidden_size=hidden, num_hidden_layers=blocks,
        intermediate_size=shape.intermediate_size, vocab_size=vocabulary, num_attention_heads=hidden // shape.head_size,
        num_key_value_heads=hidden // shape.head_size,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def batches(setting: Setting, step: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(step)
    rows, columns = max(1, setting.tokens // SEQUENCE), min(setting.tokens, SEQUENCE)
    made = []
    for _ in range(setting.micro_batches):
        ids = torch.randint(MODELS[setting.model][2], (rows, columns), generator=generator)
        made.append({"input_ids": ids, "labels": ids})
    return made


def turn(found: Found, directory: Path, seconds: float) -> None:
    """Open, warm up, then profile and steps by turns, close; predicted and measured are added."""
    setting = found.setting
    virtual = None
    if setting.flops is not None:
        virtual = VirtualOptions(
            flops_per_second=setting.flops, to_gpu_bytes_per_second=LINK_BYTES_PER_SECOND,
            to_host_bytes_per_second=LINK_BYTES_PER_SECOND, poison=False,
        )  # fmt: skip
    found.machine = found.machine or profile(setting, directory, seconds)
    machines: list[MachineProfile] = []
    elapsed, late, busy = 0.0, 0.0, dict.fromkeys(("compute", "update", "drives"), 0.0)
    with open_run(
        model=directory / "models" / setting.model, ssd=[directory / "stores" / str(hash(setting))],
        device="cpu" if virtual is None else "virtual", virtual=virtual, machine=found.machine,
        host_memory=setting.memory, strategy=setting.strategy, state_format=setting.state_format,
        max_grad_norm=setting.max_grad_norm, commit_every=setting.commit_every, learning_rate=1e-6,
        store_files=setting.files,
    ) as run:  # fmt: skip
        for number in range(WARM_UP):
            run.step(batches(setting, number))
        for _ in range(GROUPS):
            run.drain()
            machines.append(profile(setting, directory, seconds))
            run.step(batches(setting, 0))  # not timed: it starts with nothing under way
            data = [batches(setting, number) for number in range(TIMED)]
            before, late_before, started = dict(run.busy_seconds), _late(run), time.perf_counter()
            for one in data:
                run.step(one)
            ended = time.perf_counter()
            elapsed, late = elapsed + ended - started, late + _late(run) - late_before
            busy["drives"] += union_seconds(run, started, ended)
            for name, total in run.busy_seconds.items():
                busy[name] += total - before[name]
        assert run.planned is not None
        size, plan = run.planned.size, run.planned.plan
    timeline = simulate_steps(
        size, plan, typical(machines), micro_batches=setting.micro_batches, steps=WARM_UP + 1 + TIMED,
        commit=setting.commit_every == 1,
    )  # fmt: skip
    ends, lanes = timeline.step_ends, timeline.busy_seconds()
    found.late = late / elapsed
    found.measured.append(elapsed / TIMED / GROUPS)
    found.predicted.append((ends[-1] - ends[WARM_UP]) / TIMED)
    said = {"compute": lanes["gpu"], "update": lanes["cpu_update"], "drives": timeline.drive_seconds()}
    for name, predicted in said.items():
        both = found.lanes.setdefault(name, ([], []))
        both[0].append(predicted)
        both[1].append(busy[name] / TIMED / GROUPS)


def typical(machines: Sequence[MachineProfile]) -> MachineProfile:
    """Of every time the mean, which is how steps add up; of a rate that of what a unit of work takes."""

    def mean(of: Sequence[Any], **more: Any) -> Any:
        means = {}
        for one in fields(of[0]):
            values = [getattr(each, one.name) for each in of]
            if not isinstance(values[0], float):
                continue
            if "_seconds" in one.name or one.name == "saved_by_keeping":
                means[one.name] = statistics.mean(values)
            else:
                means[one.name] = statistics.harmonic_mean(values)
        return replace(of[0], **means, **more)

    made: MachineProfile = mean(machines, drives=(mean([machine.drives[0] for machine in machines]),))
    return made


def _late(run: Run) -> float:
    return float(run.device.describe().get("late_seconds", {}).get("compute", 0.0))


def union_seconds(run: Run, started: float, ended: float) -> float:
    """How long the drives had anything to do."""
    total, reached = 0.0, started
    for start, end in sorted((span.start, span.end) for span in run.drive_requests(started)):
        if min(end, ended) > max(start, reached):
            total += min(end, ended) - max(start, reached)
            reached = min(end, ended)
    return total


def report(found: Sequence[Found]) -> None:
    print(f"\n{'setting':<74}{'predicted':>10}{'measured':>10}{'error':>8}   lanes predicted / measured, s")
    for one in found:
        lanes = "  ".join(
            f"{name} {statistics.median(said):.3f}/{statistics.median(took):.3f}"
            for name, (said, took) in one.lanes.items()
        )
        late = f"  {one.late:.0%} late" if one.late > 0.01 else ""
        print(
            f"{one.setting.name:<74}{statistics.median(one.predicted):>10.3f}{statistics.median(one.measured):>10.3f}"
            f"{one.error:>+8.1%}   {lanes}{late}"
        )
    for device, some in (("cpu", True), ("virtual", False)):
        own = [abs(one.error) for one in found if (one.setting.flops is None) is some]
        if own:
            print(f"{device}: {len(own)} settings, median error {statistics.median(own):.1%}, worst {max(own):.1%}")
    errors = sorted(abs(one.error) for one in found)
    summary = {
        "median_error": round(statistics.median(errors), 4),
        "worst_error": round(errors[-1], 4),
        "settings": len(found),
    }
    print(json.dumps(summary))


def measure(settings: Iterable[Setting], rounds: int, directory: Path, seconds: float) -> list[Found]:
    found = [Found(setting) for setting in settings]
    for name in {one.setting.model for one in found}:
        make_model(name, directory / "models" / name)
    (directory / "stores").mkdir()
    for number in range(rounds):
        started = time.perf_counter()
        for one in found:
            turn(one, directory, seconds)
            said, took = one.predicted[-1], one.measured[-1]
            lanes = "  ".join(f"{name} {a[-1]:.3f}/{b[-1]:.3f}" for name, (a, b) in one.lanes.items())
            print(f"  {one.setting.name:<72}{said:>8.3f}{took:>8.3f}{said / took - 1:>+8.1%}   {lanes}", flush=True)
        print(f"round {number + 1} of {rounds}: {time.perf_counter() - started:.0f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where the stores go; a drive's, not RAM's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="settings whose name contains this")
    parser.add_argument("--quick", action="store_true", help="one round of every third setting, briefly profiled")
    options = parser.parse_args()
    settings = [one for one in SETTINGS if not options.only or options.only in one.name]
    bound_allocator()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="lohan-bench-") as name:
        report(
            measure(settings[::3], 1, Path(name), 0.1)
            if options.quick
            else measure(settings, options.rounds, Path(name), 0.25)
        )


if __name__ == "__main__":
    main()
