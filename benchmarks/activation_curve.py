"""How long is a step when more and more activations are swapped, and does the planner find the best amount?

    python benchmarks/activation_curve.py [--directory DIR] [--rounds 3] [--quick] [--save FILE.json]

A Llama-shaped model on `virtual` with a set pace of computing and set links, on a real SSD. From block inputs only to
everything worth keeping, in the planner's own order of offloading benefit, at three batch sizes: measured seconds,
those the simulator predicts for the same Schedule, those of the closed time model, and the planner's choice. All points
of a batch size take turns, round by round; a turn is two steps and counts the last. Then the choice against simple
rules at the same memory: compute everything again, swap everything, keep only block inputs.

The last line is JSON: choice_over_best (worst over batch sizes), worst_prediction_error, and the ratios of the simple
rules' seconds to the choice's.
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

from lohan.engine.devices import VirtualOptions
from lohan.engine.run import Run, open_run
from lohan.plan.activations import Activations, Point, Room, choose, points
from lohan.plan.fit import with_activations
from lohan.profiles import DriveProfile, MachineProfile
from lohan.sim import simulate_steps
from lohan.store.files import Files
from lohan.store.rates import measure_drive

SHAPE = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 1024,
}  # fmt: skip
TOKENS = (512, 1024, 2048)
MICRO_BATCH = 512
FLOPS_PER_SECOND = 30e9
LINK_BYTES_PER_SECOND = 120e6
HOST_SHARE = 0.5
"""Of all activations of the largest batch, what host memory can hold; the rest overflows to SSD."""


@dataclass(slots=True)
class Case:
    """One setting and what was measured of it."""

    name: str
    run: Run
    tokens: int
    predicted: float = 0.0
    moved_bytes: int = 0
    model_seconds: float = 0.0
    seconds: list[float] = field(default_factory=list)
    number: int = 0

    def step(self) -> None:
        self.number += 1
        generator = torch.Generator().manual_seed(self.number)
        made = []
        for _ in range(num_micro_batches(self.tokens)):
            ids = torch.randint(0, int(SHAPE["vocab_size"]), (1, MICRO_BATCH), generator=generator)
            made.append({"input_ids": ids, "labels": ids})
        self.run.step(made)

    def turn(self) -> None:
        self.step()
        started = time.perf_counter()
        self.step()
        self.seconds.append(time.perf_counter() - started)
        self.run.drain()

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def make_model(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(max_position_embeddings=2048, tie_word_embeddings=False, **SHAPE)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


class Bench:
    def __init__(self, directory: Path, rounds: int):
        self.directory, self.rounds = directory, rounds
        self.model = directory / "model"
        make_model(self.model)
        self.machine = self._machine()

    def open(self, owned: ExitStack, name: str, tokens: int, activations: Activations | None) -> Case:
        options: dict[str, Any] = {} if activations is None else {"activations": activations}
        run = owned.enter_context(
            open_run(
                model=self.model, ssd=[self.directory / f"{name}-{tokens}".replace(" ", "-")], host_memory="2500MB",
                gpu_memory="1GB", device="virtual", max_grad_norm=None, commit_every=1000, learning_rate=1e-6,
                virtual=VirtualOptions(
                    flops_per_second=FLOPS_PER_SECOND, to_gpu_bytes_per_second=LINK_BYTES_PER_SECOND,
                    to_host_bytes_per_second=LINK_BYTES_PER_SECOND, poison=False,
                ), **options,
            )
        )  # fmt: skip
        case = Case(name, run, tokens)
        case.step()  # plans, and watches the blocks
        if run.planned is not None and hasattr(self, "machine"):
            plan, size = run.planned.plan, run.planned.size
            line = simulate_steps(size, plan, self.machine, micro_batches=num_micro_batches(tokens), commit=False)
            case.predicted = line.seconds_per_step
        return case

    def _machine(self) -> MachineProfile:
        """Set rates as set; the drive and the update as measured here."""
        drive = measure_drive(Files(), self.directory)
        return MachineProfile(
            name="virtual", gpu_flops_per_second=FLOPS_PER_SECOND, gpu_memory_bytes=10**9,
            to_gpu_bytes_per_second=LINK_BYTES_PER_SECOND, to_host_bytes_per_second=LINK_BYTES_PER_SECOND,
            host_memory_bytes=2500 * 10**6, update_parameters_per_second=2e8,
            drives=(DriveProfile(read_bytes_per_second=drive.read, write_bytes_per_second=drive.write),),
        )  # fmt: skip

    def sweep(self, tokens: int, num_points: int) -> tuple[list[Case], Case, list[Case]]:
        """Cases along the order of benefit, the planner's choice, and the simple rules."""
        num = num_micro_batches(tokens)
        with ExitStack() as probe:
            planned = self.open(probe, "probe", tokens, None).run.planned
        assert planned is not None
        room = self.room(planned)
        along = points(planned.size, planned.plan, self.machine, room, micro_batches=num)
        picked = [along[round(i * (len(along) - 1) / (num_points - 1))] for i in range(num_points)]

        def predict(activations: Activations) -> float:
            plan = with_activations(planned.size, planned.plan, activations, num)
            return simulate_steps(
                planned.size, plan, self.machine, micro_batches=num, steps=3, commit=False
            ).seconds_per_step

        best = choose(planned.size, planned.plan, self.machine, room, micro_batches=num, predict=predict)
        blocks = [unit.kind == "block" for unit in planned.size.units]
        simple = {
            "recompute all": Activations(inputs=("device",) * len(blocks), kept=((),) * len(blocks), host_bytes=0),
            "inter-block only": picked[0].activations,
            "swap all": along[-1].activations,
        }
        with ExitStack() as owned:
            cases = [self.case(owned, f"point {i}", tokens, point) for i, point in enumerate(picked)]
            choice = self.case(owned, "choice", tokens, best)
            rules = [self.open(owned, name, tokens, one) for name, one in simple.items()]
            for number in range(self.rounds):
                for case in (*cases, choice, *rules):
                    case.turn()
                print(f"  {tokens} tokens, round {number + 1} of {self.rounds}", flush=True)
        return cases, choice, rules

    def room(self, planned: Any) -> Room:
        """The same memory for every batch size: half of what the largest could keep, and the drive for the rest."""
        size = planned.size
        whole = sum(u.input_bytes + sum(o.output_bytes for o in u.operators if o.needed) for u in size.units)
        largest = whole * num_micro_batches(max(TOKENS))
        return Room(host=round(HOST_SHARE * largest), ssd=1 << 40)

    def case(self, owned: ExitStack, name: str, tokens: int, point: Point) -> Case:
        made = self.open(owned, name, tokens, point.activations)
        made.moved_bytes, made.model_seconds = point.moved_bytes, point.seconds
        return made


def num_micro_batches(tokens: int) -> int:
    return max(1, tokens // MICRO_BATCH)


def described(cases: list[Case], choice: Case, rules: list[Case]) -> dict[str, Any]:
    """Plain values of one batch size."""
    return {
        "points": [[case.moved_bytes, case.median, case.predicted, case.model_seconds] for case in cases],
        "choice": [choice.moved_bytes, choice.median, choice.predicted, choice.model_seconds],
        "rules": {rule.name: [rule.median, rule.predicted] for rule in rules},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", type=Path, help="where the stores go; a drive's, not RAM's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer points, one round: for trying the benchmark")
    parser.add_argument("--save", type=Path, help="write all points as JSON, for draw_curve.py")
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="lohan-bench-") as name:
        bench = Bench(Path(name), 1 if options.quick else options.rounds)
        for tokens in TOKENS:
            results[tokens] = bench.sweep(tokens, 3 if options.quick else 7)
    over_best, error, ratios = 0.0, 0.0, {}
    for tokens, (cases, choice, rules) in results.items():
        print(f"\n{tokens} tokens per step")
        for case in (*cases, choice, *rules):
            off = case.predicted / case.median - 1
            error = max(error, abs(off))
            spread = (max(case.seconds) - min(case.seconds)) / case.median
            print(
                f"  {case.name:18} {case.moved_bytes / 1e6:8.1f} MB   measured {case.median:6.3f} s   predicted "
                f"{case.predicted:6.3f} s ({off:+.1%})   time model {case.model_seconds:6.3f} s   spread {spread:.0%}"
            )
        best = min(case.median for case in (*cases, choice))
        over_best = max(over_best, choice.median / best)
        ratios[str(tokens)] = {rule.name: round(rule.median / choice.median, 3) for rule in rules}
    if options.save:
        options.save.write_text(json.dumps({str(tokens): described(*one) for tokens, one in results.items()}, indent=1))
    print(
        json.dumps(
            {
                "choice_over_best": round(over_best, 4),
                "worst_prediction_error": round(error, 4),
                "rules_over_choice": ratios,
            }
        )
    )


if __name__ == "__main__":
    main()
