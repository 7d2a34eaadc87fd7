"""How much of a step is hidden behind its busiest resource?

    python benchmarks/step_overlap.py [--directory DIR] [--rounds 5] [--quick]

A Llama-shaped model (about 60M parameters) trains with all weights and state on SSD, on `virtual` with compute paced
to three points: compute three times, as long as, and a third as long as the drive's work; and on `cpu` with three
numbers of tokens. For `virtual` the drive is held to 1.2 GB/s, reads and writes together, so that what a step waits for
is the drive and not this machine's cores, which do the device's real arithmetic as well; for `cpu` it runs free. The
limit is the largest of each resource's work done alone, in this same run: the drive reads and writes the step's records
with nothing else going on; compute, update and checksums are timed by themselves; links are paced. On `virtual` compute
is the device's and cores only update and checksum; on `cpu` cores do all three.

All runs are open at once and take turns, round by round; a turn is three steps back to back and counts the last two.
Ratios are medians over rounds. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from against_ram import batches
from alone import checksum_rate, drive_alone
from lohan.engine.devices import VirtualOptions
from lohan.engine.run import Run, open_run
from lohan.plan.schedule import Scheduler
from lohan.testing.paced_files import PacedFiles

SHAPES = {
    "60M": {
        "hidden_size": 640, "intermediate_size": 1728, "num_hidden_layers": 10, "num_attention_heads": 10,
        "num_key_value_heads": 10, "vocab_size": 4096,
    },
    "8M": {
        "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 1024,
    },
}  # fmt: skip
LINK_BYTES_PER_SECOND = 8e9
DRIVE_BYTES_PER_SECOND = 1.2e9


@dataclass(slots=True)
class Case:
    """One setting: an open run, its data, and what was measured."""

    name: str
    run: Run
    tokens: int
    vocabulary: int
    seconds: list[float] = field(default_factory=list)
    bytes_per_step: int = 0
    number: int = 0

    def step(self) -> None:
        self.number += 1
        self.run.step(batches(self.number, self.tokens, self.vocabulary))

    def turn(self) -> None:
        """Three steps back to back; the time of the last two, from one return to the next."""
        self.step()
        before = self.run.ssd_bytes
        started = time.perf_counter()
        self.step()
        self.step()
        self.seconds.append((time.perf_counter() - started) / 2)
        self.bytes_per_step = (self.run.ssd_bytes - before) // 2
        self.run.commit()  # what is left of the last step must not run into another case's turn

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def make_model(shape: str, folder: Path) -> int:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=2048, tie_word_embeddings=False, **SHAPES[shape])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def in_memory(folder: Path, directory: Path, tokens: int, vocabulary: int) -> dict[str, float]:
    """What computing and updating take with everything in RAM, turn by turn."""
    with open_run(
        model=folder, ssd=[directory / f"ram-{tokens}"], host_memory="8GB", device="cpu", max_grad_norm=None,
        commit_every=1000,
    ) as run:  # fmt: skip
        taken = []
        for number in range(1, 5):
            before = dict(run.busy_seconds)
            run.step(batches(number, tokens, vocabulary))
            run.drain()
            taken.append({name: seconds - before.get(name, 0.0) for name, seconds in run.busy_seconds.items()})
    return {name: statistics.median(one[name] for one in taken[1:]) for name in taken[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where the stores go; a drive's, not RAM's")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="a tiny model, for trying the benchmark itself")
    options = parser.parse_args()
    shape = "8M" if options.quick else "60M"
    vocabulary = int(SHAPES[shape]["vocab_size"])
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="lohan-bench-") as name, ExitStack() as owned:
        measure(Path(name), shape, vocabulary, options.rounds, owned)


def measure(directory: Path, shape: str, vocabulary: int, rounds: int, owned: ExitStack) -> None:
    folder = directory / "model"
    parameters = make_model(shape, folder)
    host = "1GB"

    def case(name: str, tokens: int, pace: float | None, **choices: Any) -> Case:
        virtual, files = None, None
        if pace is not None:
            files = PacedFiles(rate=DRIVE_BYTES_PER_SECOND)
            virtual = VirtualOptions(
                flops_per_second=pace, to_gpu_bytes_per_second=LINK_BYTES_PER_SECOND,
                to_host_bytes_per_second=LINK_BYTES_PER_SECOND, poison=False,
            )  # fmt: skip
        run = owned.enter_context(
            open_run(
                model=folder, ssd=[directory / name], host_memory=host, keep_nothing_in_memory=True, commit_every=1000,
                versions=3, device="cpu" if pace is None else "virtual", virtual=virtual,
                gpu_memory=None if pace is None else "4GB", learning_rate=1e-6, store_files=files, **choices,
            )
        )  # fmt: skip
        made = Case(name, run, tokens, vocabulary)
        made.step()  # the first step plans and faults its memory in
        made.step()
        run.commit()
        print(f"  {name} is ready", flush=True)
        return made

    few = 32
    probe = case("probe", few, None, max_grad_norm=None)
    layouts = probe.run.layouts
    flops = step_flops(probe.run)
    paced = PacedFiles(rate=DRIVE_BYTES_PER_SECOND)
    drive = statistics.median(drive_alone(layouts, directory / "paced", paced) for _ in range(3))
    print(f"{parameters / 1e6:.1f}M parameters; the paced drive alone takes {drive:.2f} s for a step", flush=True)
    paces = {"compute": flops / (3 * drive), "balanced": flops / drive, "ssd": flops / (drive / 3)}
    never, always = 1e9, 1e-3  # a norm no gradient reaches, and one that all exceed
    cases = {f"virtual {point}": case(f"v-{point}", few, pace, max_grad_norm=None) for point, pace in paces.items()}
    balanced, slow = paces["balanced"], paces["compute"]
    cases["separate stage"] = case("separate", few, balanced, max_grad_norm=None, strategy="separate-stage")
    cases["compute, every step clips"] = case("v-compute-clip", few, slow, max_grad_norm=always)
    cases["balanced, no step clips"] = case("v-balanced-free", few, balanced, max_grad_norm=never)
    cases["balanced, every step clips"] = case("v-balanced-clip", few, balanced, max_grad_norm=always)
    tokens = {"compute": 4096, "balanced": 512, "ssd": 64}
    for point, count in tokens.items():
        cases[f"cpu {point}"] = case(f"c-{point}", count, None, max_grad_norm=None)
    alone: dict[str, list[float]] = {"drive": [], "paced": []}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", flush=True)
        alone["drive"].append(drive_alone(layouts, directory / "drive"))
        alone["paced"].append(drive_alone(layouts, directory / "paced", paced))
        for one in cases.values():
            one.turn()
    for case_name, one in cases.items():
        spread = (max(one.seconds) - min(one.seconds)) / one.median
        print(f"{case_name:28} {one.median:7.3f} s   spread {spread:.0%}")
    drive, free = statistics.median(alone["paced"]), statistics.median(alone["drive"])
    bytes_per_step = cases["virtual balanced"].bytes_per_step
    hashing = bytes_per_step / checksum_rate()
    ram = {count: in_memory(folder, directory, count, vocabulary) for count in tokens.values()}
    link = 2.0 * sum(layout.pieces.weights_bytes for layout in layouts) / LINK_BYTES_PER_SECOND
    update = min(one["update"] for one in ram.values())
    print(f"alone: drive {drive:.3f} s paced, {free:.3f} s free, a link {link:.3f} s")
    print(f"alone: update {update:.3f} s, checksums {hashing:.3f} s")
    over, cpu_over = {}, {}
    for point, pace in paces.items():
        limit = max(flops / pace, drive, update + hashing, link)
        over[point] = cases[f"virtual {point}"].median / limit
        print(f"virtual {point:9} step {cases[f'virtual {point}'].median:.3f} s   limit {limit:.3f} s")
    for point, count in tokens.items():
        cores = ram[count]["compute"] + ram[count]["update"] + hashing
        limit = max(cores, free)
        cpu_over[point] = cases[f"cpu {point}"].median / limit
        print(f"cpu {point:9} step {cases[f'cpu {point}'].median:.3f} s   cores {cores:.3f} s   drive {free:.3f} s")
    plain = {point: cases[f"virtual {point}"].median for point in paces}
    result = {
        "step_over_busiest_lane": {point: round(value, 3) for point, value in over.items()},
        "cpu_step_over_limit": {point: round(value, 3) for point, value in cpu_over.items()},
        "speedup_over_separate_stage": round(cases["separate stage"].median / plain["balanced"], 3),
        "clip_cost": {
            "compute_every_step": round(cases["compute, every step clips"].median / plain["compute"] - 1, 3),
            "balanced_no_step": round(cases["balanced, no step clips"].median / plain["balanced"] - 1, 3),
            "balanced_every_step": round(cases["balanced, every step clips"].median / plain["balanced"] - 1, 3),
        },
        "ssd_bytes_per_step": bytes_per_step,
    }
    print(json.dumps(result))


def step_flops(run: Run) -> float:
    """What the schedule counts for a step: the work that `virtual` paces."""
    assert run.planned is not None
    ops = Scheduler(run.planned.size, run.planned.plan).step(1, commit=False)
    return sum(op.flops for op in ops)


if __name__ == "__main__":
    main()
