"""Strategies: how a system would run a step, as a Schedule on a Plan, for comparison on equal terms.

`lohan` is this project. `lohan-paper` is LoHan as published: the whole batch as one micro-batch, activations chosen by
its time model, a barrier between steps, and one block's state in host memory at a time, so that reading it, updating
it and writing it follow each other. That last rule is an assumption: the publication describes an overlap, but its
measured times are those of the sum. Its two ablations differ in one rule each. `zero-infinity` and `zero-offload` run
the Schedule of a separate optimizer stage with their tiers. `flashneuron` and `g10` have schedules of their own.

What the engine cannot run says so (`simulated_only`), and so does any machine with several devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lohan.errors import ConfigError
from lohan.plan.plan import ModelSize, Plan
from lohan.plan.schedule import Scheduler
from lohan.plan.strategies import RULES
from lohan.profiles import DriveProfile, MachineProfile, ModelProfile, OperatorProfile, UnitProfile
from lohan.sim.baselines import flashneuron_step, g10_step
from lohan.sim.memory import Needs, memory_needs, paper_free_host_bytes
from lohan.sim.op import AnyOp
from lohan.sim.paper import choose_activations
from lohan.sim.rewrite import with_several_devices
from lohan.sim.run import NORM_SHARE, simulate
from lohan.sim.sizes import size_model
from lohan.sim.timeline import Timeline

SIMULATED_ONLY = {
    "lohan": False,
    "lohan-paper": False,
    "lohan-paper-naive": False,
    "separate-stage": False,
    "zero-infinity": True,
    "zero-offload": True,
    "flashneuron": True,
    "g10": True,
    "in-memory": False,
}
STRATEGIES = tuple(SIMULATED_ONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """What a system makes of a machine: of its rates, the share it reaches."""

    gpu_share: float = 1.0
    """Of the machine's FLOP/s."""

    drive_share: float = 1.0
    """Of the drives' rates, alone and together."""

    update_parameters_per_second: float | None = None
    """All host work on a parameter: its update, and copies and casts around it. None: the machine's update rate."""

    exchange_bytes_per_second: float = 1.4e9
    """Summing gradients of several devices in host memory. Calibrated: benchmarks/results/2026-11-16_published.md"""

    blocks_in_flight: int = 1
    """Blocks whose state is in host memory at once: as Plan.blocks_in_flight, where a strategy limits it."""

    def apply(self, machine: MachineProfile) -> MachineProfile:
        array = machine.array_bytes_per_second
        return replace(
            machine,
            gpu_flops_per_second=machine.gpu_flops_per_second * self.gpu_share,
            drives=tuple(_slower(drive, self.drive_share) for drive in machine.drives),
            array_bytes_per_second=None if array is None else array * self.drive_share,
            update_parameters_per_second=self.update_parameters_per_second or machine.update_parameters_per_second,
        )


PUBLISHED = {
    "zero-infinity": Calibration(gpu_share=0.6, drive_share=0.45),
    "zero-offload": Calibration(gpu_share=0.65),
}
"""What the baselines make of a machine: benchmarks/results/2026-11-16_published.md. The others take what it gives."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """A strategy, ready to run on a virtual clock."""

    strategy: str
    simulated_only: bool
    machine: MachineProfile
    model: ModelSize
    plan: Plan
    puts: Sequence[Sequence[AnyOp]]
    barrier: bool
    norm_share: float
    tokens_per_step: int
    needs: Needs
    notes: tuple[str, ...] = field(default=())

    def run(self) -> Timeline:
        return simulate(
            self.puts, self.machine, model=self.model, plan=self.plan, barrier=self.barrier, norm_share=self.norm_share
        )


def build_scenario(
    strategy: str,
    profile: ModelProfile,
    machine: MachineProfile,
    *,
    num_micro_batches: int = 1,
    calibration: Calibration | None = None,
    plan: Plan | None = None,
    steps: int = 3,
) -> Scenario:
    """A strategy's step of `num_micro_batches` of the profile's size on each device of the machine.

    `plan` is for `lohan` only; the other strategies have theirs. What does not fit can be built all the same: see
    `needs` and `fits`.
    """
    if strategy not in SIMULATED_ONLY:
        raise ConfigError(f"There is no strategy {strategy!r}. Known are: {', '.join(STRATEGIES)}.")
    calibration = calibration or PUBLISHED.get(strategy, Calibration())
    machine = calibration.apply(machine)
    tokens = profile.tokens * num_micro_batches * machine.gpus
    needs = memory_needs(strategy, profile, machine, num_micro_batches)
    simulated_only = SIMULATED_ONLY[strategy] or machine.gpus > 1
    if strategy == "lohan":
        model = size_model(profile, num_micro_batches=num_micro_batches)
        plan = plan or lohan_plan(model)
        puts = _steps(Scheduler(model, plan), steps, micro_batches=num_micro_batches)
        whole, barrier, norm_share = profile, False, NORM_SHARE
    else:
        # Everybody else takes a step's batch as one.
        whole = scale_batch(profile, num_micro_batches)
        model = size_model(whole, max_pieces=1)
        plan = _plan_of(strategy, model, whole, machine, needs, calibration.blocks_in_flight)
        # Those of the Schedule have their barrier from the Plan.
        barrier, norm_share = strategy in ("flashneuron", "g10"), 0.0
        if barrier:
            build = flashneuron_step if strategy == "flashneuron" else g10_step
            puts = [build(whole, model, step) for step in range(1, steps + 1)]
        else:
            # A step is not a checkpoint there, where nothing lives on SSD.
            commit = strategy not in ("zero-offload", "in-memory")
            puts = _steps(Scheduler(model, plan), steps, commit=commit)
    if machine.gpus > 1:
        rate = calibration.exchange_bytes_per_second
        puts = [with_several_devices(put, gpus=machine.gpus, bytes_per_second=rate) for put in puts]
    return Scenario(
        strategy=strategy, simulated_only=simulated_only, machine=machine, model=model, plan=plan, puts=puts,
        barrier=barrier, norm_share=norm_share, tokens_per_step=tokens, needs=needs, notes=profile.notes,
    )  # fmt: skip


def lohan_plan(model: ModelSize) -> Plan:
    """Nothing resident, and slabs enough to keep the drives busy, where no planner has made a better one."""
    pieces = max(len(unit.state_bytes) for unit in model.units)
    return Plan(separate_memory=True, inputs=_inputs(model), weights_slabs=5, state_slabs=3 * pieces, gradient_slabs=3)


def _inputs(model: ModelSize) -> tuple[str, ...]:
    return tuple("host" if unit.kind == "block" else "device" for unit in model.units)


def scale_batch(profile: ModelProfile, times: int) -> ModelProfile:
    """The same model with micro-batches `times` as large: all is proportional to tokens."""
    if times == 1:
        return profile
    made: dict[int, UnitProfile] = {}

    def scale(unit: UnitProfile) -> UnitProfile:
        if id(unit) not in made:
            made[id(unit)] = replace(
                unit,
                forward_flops=unit.forward_flops * times,
                input_bytes=unit.input_bytes * times,
                saved_bytes=unit.saved_bytes * times,
                working_bytes=unit.working_bytes * times,
                shared_bytes=unit.shared_bytes * times,
                operators=tuple(_scale_operator(operator, times) for operator in unit.operators),
            )
        return made[id(unit)]

    units = tuple(scale(unit) for unit in profile.units)
    return replace(profile, units=units, micro_batch_size=profile.micro_batch_size * times)


def _scale_operator(operator: OperatorProfile, times: int) -> OperatorProfile:
    return replace(operator, flops=operator.flops * times, output_bytes=operator.output_bytes * times)


def _steps(scheduler: Scheduler, steps: int, *, micro_batches: int = 1, commit: bool = True) -> list[Sequence[AnyOp]]:
    puts: list[Sequence[AnyOp]] = []
    for step in range(1, steps + 1):
        puts.append(scheduler.step(step, commit=commit, micro_batches=micro_batches))
        if scheduler.plan.clip == "speculative":
            puts.append(scheduler.settle(step, redo=False, skip=False))
    return puts


def _plan_of(
    strategy: str, model: ModelSize, profile: ModelProfile, machine: MachineProfile, needs: Needs, in_flight: int
) -> Plan:
    units = frozenset(range(len(model.units)))
    rules = RULES.get(strategy, {"barrier": True, "blocks_in_flight": 1})
    if rules.get("blocks_in_flight"):
        rules = rules | {"blocks_in_flight": in_flight}
    # What lies between blocks waits in RAM and everything inside is recomputed, unless LoHan's time model says better.
    base = Plan(
        strategy=strategy, separate_memory=True, inputs=_inputs(model), weights_slabs=3, state_slabs=in_flight,
        gradient_slabs=2, **rules,
    )  # fmt: skip
    if strategy in ("lohan-paper", "lohan-paper-naive", "separate-stage"):
        choice = choose_activations(profile, machine, free_host_bytes=paper_free_host_bytes(needs, machine))
        base = replace(base, inputs=choice.inputs, kept=choice.kept)
    if strategy == "separate-stage":
        return replace(base, gradient_slabs=len(units) + 1)
    if strategy == "zero-infinity":
        return replace(base, separate_stage=True, gradients_on_ssd=True, gradient_slabs=3)
    if strategy == "zero-offload":
        return replace(
            base, separate_stage=True, resident_weights=units, resident_state=units, gradient_slabs=len(units) + 1
        )
    if strategy == "in-memory":
        return replace(base, resident_weights=units, resident_state=units)
    return base


def _slower(drive: DriveProfile, share: float) -> DriveProfile:
    mixed = drive.mixed_bytes_per_second
    return replace(
        drive,
        read_bytes_per_second=drive.read_bytes_per_second * share,
        write_bytes_per_second=drive.write_bytes_per_second * share,
        mixed_bytes_per_second=None if mixed is None else mixed * share,
    )
