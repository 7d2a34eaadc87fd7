"""`lohan estimate` and `lohan simulate`: what a run would be like. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from lohan.estimate import Question
    from lohan.profiles import MachineProfile, ModelProfile

Model = Annotated[str, typer.Option(metavar="DIR|PRESET", help="A folder with a config.json, or a preset's name.")]
Machine = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="A machine of the package or a YAML file. Left out: this one, profiled."),
]
Gpus = Annotated[int | None, typer.Option(min=1, help="How many GPUs. Above 1 is simulated only.")]
GpuMemory = Annotated[str | None, typer.Option(metavar="24GB", help="Memory of each GPU.")]
HostMemory = Annotated[str | None, typer.Option(metavar="256GB", help="RAM.")]
Ssds = Annotated[int | None, typer.Option(min=0, help="How many drives, like the machine's last one.")]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Sequences per step over all GPUs. Left out, the planner chooses.")
]
SeqLen = Annotated[int | None, typer.Option(min=1, help="Tokens of a sequence.")]
MicroBatchSize = Annotated[int | None, typer.Option(min=1, help="Sequences at once. Left out, the planner chooses.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps of the whole run.")]
Strategy = Annotated[str, typer.Option(metavar="NAME", help="lohan, or another to compare with.")]
SsdPath = Annotated[
    list[Path] | None,
    typer.Option("--ssd", metavar="PATH", help="Without --machine: a directory on each SSD. By default this one."),
]


def register(app: typer.Typer) -> None:
    app.command()(estimate)
    app.command()(simulate)


def estimate(
    model: Model,
    machine: Machine = None,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    ssds: Ssds = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    micro_batch_size: MicroBatchSize = None,
    steps: Steps = 1000,
    strategy: Strategy = "lohan",
    compare: Annotated[bool, typer.Option("--compare", help="A table over all strategies.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    ssd: SsdPath = None,
) -> None:
    """Will it fit, how fast, what holds it back? Without a GPU and without weights. Exit code 1 if it does not fit."""
    from lohan.estimate.estimate import answer
    from lohan.estimate.estimate import compare as compare_all

    described = _machine(machine, gpus, gpu_memory, host_memory, ssds, ssd)
    question = _question(model, described, batch_size, seq_len, micro_batch_size, steps, strategy)
    estimates = compare_all(question) if compare else [answer(question)]
    if as_json:
        print(json.dumps([one.to_dict() for one in estimates] if compare else estimates[0].to_dict(), indent=2))
    else:
        from rich.console import Console

        from lohan.estimate.report import print_comparison, print_estimate

        if compare:
            print_comparison(Console(), estimates)
        else:
            print_estimate(Console(), estimates[0])
    if not any(one.fits for one in estimates):
        raise typer.Exit(1)


def simulate(
    model: Model,
    machine: Machine = None,
    gpus: Gpus = None,
    gpu_memory: GpuMemory = None,
    host_memory: HostMemory = None,
    ssds: Ssds = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    micro_batch_size: MicroBatchSize = None,
    strategy: Strategy = "lohan",
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace that opens in Perfetto.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page that draws a step's lanes.")] = None,
    ssd: SsdPath = None,
) -> None:
    """Run some steps on a virtual clock and draw them. Exit code 1 if the run does not fit."""
    from lohan.estimate.estimate import simulate_question
    from lohan.estimate.page import lanes_page

    described = _machine(machine, gpus, gpu_memory, host_memory, ssds, ssd)
    question = _question(model, described, batch_size, seq_len, micro_batch_size, 1000, strategy)
    simulated = simulate_question(question, detailed=True)
    one, timeline = simulated.estimate, simulated.timeline
    if timeline is None:
        print(f"lohan: {one.reason}", file=sys.stderr)
        raise typer.Exit(1)
    remark = ", simulated only" if one.simulated_only else ""
    print(
        f"{one.model} on {one.machine}, {one.strategy}{remark}: {timeline.seconds_per_step:.4g} s per step of "
        f"{one.tokens_per_step:,} tokens; bottleneck {timeline.bottleneck}."
    )
    if trace is not None:
        trace.write_text(json.dumps(timeline.to_chrome()))
        print(f"{trace}: {len(timeline.ops):,} operations of {len(timeline.step_ends)} steps.")
    if html is not None:
        html.write_text(lanes_page(one, timeline))
        print(f"{html}: the lanes of the last step.")


def _machine(
    name: str | None, gpus: int | None, gpu_memory: str | None, host_memory: str | None, ssds: int | None, ssd: Any
) -> MachineProfile:
    from lohan.hardware import load_machine, resize
    from lohan.sizes import parse_size

    if name is not None:
        machine = load_machine(name)
    else:
        from lohan.measure.machine import profile_machine

        print("lohan: measuring this machine, about 20 s (name another with --machine)", file=sys.stderr)
        machine = profile_machine(ssd or [Path.cwd()])
    return resize(
        machine,
        gpus=gpus,
        ssds=ssds,
        gpu_memory_bytes=None if gpu_memory is None else parse_size(gpu_memory, name="--gpu-memory"),
        host_memory_bytes=None if host_memory is None else parse_size(host_memory, name="--host-memory"),
    )


def _question(
    model: str,
    machine: MachineProfile,
    batch_size: int | None,
    seq_len: int | None,
    micro_batch_size: int | None,
    steps: int,
    strategy: str,
) -> Question:
    from lohan.estimate import Question

    # Where nothing is copied it is the CPU that computes, and it does so in fp32.
    profile = _profile(model, seq_len, compute_bytes=2 if machine.separate_memory else 4)
    return Question(
        profile=profile, machine=machine, batch_size=batch_size, micro_batch_size=micro_batch_size, steps=steps,
        strategy=strategy,
    )  # fmt: skip


def _profile(model: str, seq_len: int | None, *, compute_bytes: int) -> ModelProfile:
    from lohan.preset_shapes import SHAPES
    from lohan.presets import preset_profile

    if model.lower() in SHAPES and not Path(model).is_dir():  # without torch, at once
        return preset_profile(model, sequence_length=seq_len, compute_bytes=compute_bytes)
    from lohan.measure.model import profile_model

    return profile_model(model, sequence_length=seq_len, dtype="bf16" if compute_bytes == 2 else "fp32")
