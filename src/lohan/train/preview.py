"""What a run will take, told before its store is made: memory, SSD space, SSD traffic and wear.

The numbers are those of the plan the engine will make for the largest micro-batches of the run, and the bytes of the
schedule it will walk. What cannot fit is refused here, by the planner, with the value that would fit. Time is predicted
where the machine has been measured (`machine` in the config): the same plan and schedule on the simulator's clock.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lohan.doctor.mounts import kind_of, mount_of, parse_mountinfo
from lohan.engine.create import build_model, may_clip, num_versions
from lohan.engine.devices import open_device
from lohan.engine.layout import records_of
from lohan.engine.planning import Planned, Planning
from lohan.engine.settings import Settings
from lohan.errors import ConfigError, StoreFull
from lohan.estimate.costs import REFERENCE_ENDURANCE_BYTES, costs_of
from lohan.plan.fit import Wishes, staging_bytes
from lohan.plan.plan import ModelSize, Plan
from lohan.plan.schedule import Scheduler
from lohan.profiles import MachineProfile
from lohan.sim.run import simulate_steps
from lohan.sim.sizes import with_fewer_pieces
from lohan.sizes import format_bytes, parse_size
from lohan.train.config_example import all_ram
from lohan.train.data.batches import TokenData
from lohan.train.data.splits import Splits
from lohan.train.display import clock

_LIMITS = {
    "gpu": "computing",
    "cpu_update": "updating on the CPU",
    "ssd": "the drives",
    "to_gpu": "the link to the device",
    "to_host": "the link from the device",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """A run that has not begun, or that will go on."""

    num_parameters: int
    steps: int
    """Still to be taken."""

    tokens_per_step: int
    """The most of any step, filling included."""

    host_bytes: int
    """The budget."""

    staging_bytes: int
    """Of it, what lies between SSD and device, with all that stays in memory."""

    compute_bytes: int
    device_bytes: int | None
    """On a device of its own; None where computing shares host memory or nothing is known."""

    resident_units: int
    """Whose weights stay in memory, and maybe their state."""

    num_units: int
    ssd_bytes: int
    """Space the store takes on all drives."""

    free_bytes: int
    """On all of them, before it is made."""

    read_bytes_per_step: int
    write_bytes_per_step: int
    new: bool
    """The store has still to be made."""

    seconds_per_step: float | None = None
    """Predicted; None without a measured machine."""

    bottleneck: str = ""
    endurance_share: float | None = None
    """Of the rated life of the drive that is written most; None where the rating is not known."""

    def wear_of(self, written_bytes: float) -> float:
        """The share of a drive's rated life that so many bytes take; of a usual one's where the rating is not known."""
        planned = self.write_bytes_per_step * self.steps
        if self.endurance_share is None or not planned:
            return written_bytes / REFERENCE_ENDURANCE_BYTES
        return self.endurance_share * written_bytes / planned

    def lines(self) -> list[str]:
        """For people."""
        written = self.write_bytes_per_step * self.steps
        lines = [
            f"model    {self.num_parameters / 1e6:,.1f} million parameters, {self.steps:,} steps of up to "
            f"{self.tokens_per_step:,} tokens",
            f"RAM      {format_bytes(self.staging_bytes + self.compute_bytes)} of {format_bytes(self.host_bytes)}: "
            f"{format_bytes(self.staging_bytes)} between SSD and device, {format_bytes(self.compute_bytes)} to compute "
            f"and {self.resident_units} of {self.num_units} parts of the model stay there",
        ]
        if self.device_bytes is not None:
            lines.append(f"device   {format_bytes(self.device_bytes)} at its peak")
        if self.new:
            lines.append(f"space    {format_bytes(self.ssd_bytes)} of {format_bytes(self.free_bytes)} free on SSD")
        lines.append(
            f"traffic  {format_bytes(self.read_bytes_per_step)} read and {format_bytes(self.write_bytes_per_step)} "
            "written per step"
        )
        rating = f"what a drive rated for {REFERENCE_ENDURANCE_BYTES / 1e12:,.0f} TB may take"
        if self.endurance_share is not None:
            rating = "the drives' rated endurance"
        lines.append(f"wear     {format_bytes(written)} written in all, {_percent(self.wear_of(written))} of {rating}")
        if self.seconds_per_step is None:
            lines.append("time     not known: `lohan profile --out machine.yaml`, then machine: machine.yaml")
        else:
            lines.append(
                f"time     {self.seconds_per_step:.3g} s per step, {clock(self.seconds_per_step * self.steps)} in all; "
                f"the limit is {self.bottleneck}"
            )
        return lines


def preview(
    arguments: dict[str, Any], model: Path, data: Splits, *, total_steps: int, done_steps: int | None
) -> Preview:
    """What open_run(model, **arguments) will take for this data. `done_steps`: of the run that is there, if one is.

    Raises PlanInfeasible or StoreFull with what would fit. Nothing is written.
    """
    asked = dict(arguments)
    directories = [Path(directory) for directory in asked.pop("ssd")]
    host_bytes = parse_size(asked.pop("host_memory"), name="host_memory")
    gpu_memory = asked.pop("gpu_memory")
    gpu_bytes = None if gpu_memory is None else parse_size(gpu_memory, name="gpu_memory")
    device = asked.pop("device")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    commit_every, clip, strategy = asked.pop("commit_every"), asked.pop("clip"), asked.pop("strategy")
    trust = asked.pop("trust_remote_code")
    machine: MachineProfile | None = asked.pop("machine")
    settings = Settings(**asked)
    versions = num_versions(settings, clip=clip, commit_every=commit_every)
    with ExitStack() as owned:
        opened = owned.enter_context(open_device(device, memory_bytes=gpu_bytes))
        built = build_model(
            model, settings, directories, device=opened.name, blocks=None, piece_elements=None,
            trust_remote_code=trust,
        )  # fmt: skip
        wishes = Wishes(
            separate_memory=device != "cpu", clip=clip if may_clip(settings) else "none", versions=versions,
            commit_every=commit_every, strategy=strategy,
        )  # fmt: skip
        planning = Planning(
            model=built.module, units=built.units, layouts=built.layouts, device=opened, settings=settings,
            wishes=wishes, host_bytes=host_bytes, machine=machine, head_chunks=None,
        )  # fmt: skip
        if done_steps is None:
            with built.open_weights():
                pass  # what is wrong with them is told before anybody is asked to begin
        shapes = largest_batches(data, total_steps)
        planned = planning.plan(shapes)
    gradients = may_clip(settings) or strategy == "separate-stage"
    records = records_of(built.layouts, gradients=gradients)
    space = sum(record.num_bytes * (1 if record.scratch else versions) for record in records)
    free = _free_bytes(directories)
    if done_steps is None and space > free:
        raise StoreFull(
            f"The store needs {format_bytes(space)} and {format_bytes(free)} are free in "
            f"{', '.join(map(str, directories))}. Free {format_bytes(space - free)}, or add a drive to `ssd`."
        )
    if done_steps is None:
        _refuse_ram_drives(directories, space, host_bytes)
    plans = [planned.plan]
    if clip == "auto" and planned.plan.clip == "speculative":  # steps that clip will change it
        plans.append(replace(planned.plan, clip="deferred"))
    read, written = max((step_traffic(planned.size, plan, micro_batches=len(shapes)) for plan in plans), key=sum)
    plan, budget, steps = planned.plan, planned.budget, total_steps - (done_steps or 0)
    told = Preview(
        num_parameters=sum(param.num_elements for param in built.units.params),
        steps=steps,
        tokens_per_step=sum(int(shape["labels"].numel()) for shape in shapes),
        host_bytes=budget.total,
        staging_bytes=staging_bytes(planned.size, plan),
        compute_bytes=budget.compute,
        device_bytes=None if planned.needs is None else planned.needs.total_bytes,
        resident_units=sum(planned.size.units[unit].weights_bytes > 0 for unit in plan.resident_weights),
        num_units=len(planned.size.units),
        ssd_bytes=space,
        free_bytes=free,
        read_bytes_per_step=read,
        write_bytes_per_step=written,
        new=done_steps is None,
    )
    return told if machine is None else _with_time(told, planned, machine, len(shapes), commit_every == 1)


def _with_time(told: Preview, planned: Planned, machine: MachineProfile, micro_batches: int, commit: bool) -> Preview:
    size, plan = with_fewer_pieces(planned.size, planned.plan)
    timeline = simulate_steps(size, plan, machine, micro_batches=micro_batches, commit=commit)
    seconds = timeline.seconds_per_step
    costs = costs_of(
        machine, seconds_per_step=seconds, tokens_per_step=told.tokens_per_step, steps=told.steps,
        written_bytes=told.write_bytes_per_step,
    )  # fmt: skip
    return replace(
        told, seconds_per_step=seconds, bottleneck=_LIMITS.get(timeline.bottleneck, timeline.bottleneck),
        endurance_share=costs.endurance_share,
    )  # fmt: skip


def largest_batches(data: Splits, total_steps: int) -> list[dict[str, torch.Tensor]]:
    """Micro-batches without content, as large as any that a run of so many steps or an evaluation will meet."""
    train = data.train
    micro, whole = train.largest_shape(total_steps)
    count = min(train.settings.num_micro_batches, -(-train.num_rows // train.settings.batch_rows))
    if data.held_out is not None:
        held_micro, held_whole = largest_in_order(data.held_out, train.settings.num_micro_batches)
        micro, whole = max(micro, held_micro), max(whole, held_whole)
        count = max(count, min(train.settings.num_micro_batches, _num_batches(data.held_out)))
    rows = train.settings.batch_rows
    sizes = [micro] + [-(-max(whole - micro, 0) // max(count - 1, 1))] * (count - 1)
    return [{"labels": torch.empty(rows, max(1, -(-size // rows)), dtype=torch.int64, device="meta")} for size in sizes]


def largest_in_order(data: TokenData, at_once: int) -> tuple[int, int]:
    """The most tokens of a micro-batch, and of `at_once` of them, in an evaluation."""
    sizes = data.sizes_in_order()
    groups = [sum(sizes[start : start + at_once]) for start in range(0, len(sizes), at_once)]
    return max(sizes), max(groups)


def _num_batches(data: TokenData) -> int:
    return -(-data.num_rows // data.settings.batch_rows)


def step_traffic(size: ModelSize, plan: Plan, *, micro_batches: int) -> tuple[int, int]:
    """Bytes read and written by a step that commits, counted on its schedule. The second step: it has the first's
    left updates to do, like all that follow."""
    scheduler = Scheduler(size, plan)
    ops = []
    for step in (1, 2):
        ops = list(scheduler.step(step, commit=True, micro_batches=micro_batches))
        if plan.clip == "speculative":
            ops += scheduler.settle(step, redo=False, skip=False)
    read = sum(op.num_bytes for op in ops if op.lane in ("ssd_read", "swap_in"))
    return read, sum(op.num_bytes for op in ops if op.lane in ("ssd_write", "swap_out"))


def _free_bytes(directories: Sequence[Path]) -> int:
    """Free space of all filesystems these directories are or will be on, each counted once."""
    found: dict[int, int] = {}
    for directory in directories:
        place = directory.absolute()
        while not place.exists():
            place = place.parent
        numbers = os.statvfs(place)
        found[os.stat(place).st_dev] = numbers.f_bavail * numbers.f_frsize
    return sum(found.values())


def _refuse_ram_drives(directories: Sequence[Path], space: int, host_bytes: int) -> None:
    """What lies on a tmpfs takes RAM: it must fit beside host_memory."""
    mounts = parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    found = [(directory, mount_of(os.path.realpath(directory), mounts)) for directory in directories]
    in_ram = [directory for directory, mount in found if mount is not None and kind_of(mount.filesystem) == "ram"]
    taken, there = space * len(in_ram) // len(directories), all_ram()
    if in_ram and taken + host_bytes > there:
        raise ConfigError(
            f"{', '.join(map(str, in_ram))} is in RAM, not on a drive: the store takes {format_bytes(taken)} there "
            f"beside host_memory, {format_bytes(host_bytes)}, and this machine has {format_bytes(there)}. Name a "
            "directory on a drive in `ssd`, or lower host_memory."
        )


def _percent(share: float) -> str:
    return f"{share:.2%}" if share >= 0.0001 else "less than 0.01%"
